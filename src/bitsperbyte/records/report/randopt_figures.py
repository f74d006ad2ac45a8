"""The figures of one RandOpt run. Each function gives a Plot, or the sentence that says why there is nothing to draw."""

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from bitsperbyte.records.report.drawing import Canvas, Plot
from bitsperbyte.records.report.markup import constant, shown
from bitsperbyte.records.report.sources import Run, Value, largest, num, total
from bitsperbyte.records.report.thin import thin
from bitsperbyte.records.schema import AccuracyPart, LossPart

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_BINS = 40
MAX_SIGMAS = 12  # panels of the histogram
NO_ROWS = "The journal holds no evaluated member, so {} is not drawn."
NO_RESULT = "The record holds no result on the test set, so {} is not drawn."


def reward_name(run: Run) -> str:
    """What the reward is, for an axis."""
    return "train reward (minus bits per byte)" if is_likelihood(run) else "train reward (mean of the questions)"


def is_likelihood(run: Run) -> bool:
    """Whether the task is predicting documents; from the record, or from the rows where it has no result."""
    if run.record.randopt:
        return isinstance(run.record.randopt.base.test, LossPart)
    return any(row.get("nats") for row in run.journal.get("search", []))


def base_reward(run: Run) -> Value:
    """The base model's reward on the train set."""
    found = run.at("/randopt/base/train_reward")
    rows = run.journal.get("base_train", [])
    return found if found.known or not rows else run.line(rows[0], "reward")


def bins_of(rewards: np.ndarray) -> np.ndarray:
    """Edges of histogram bins: one for each value where rewards take few, equal parts otherwise."""
    values = np.unique(np.round(rewards, 9))
    if len(values) == 1:
        half = 0.02 * abs(values[0]) or 0.02
        return np.array([values[0] - half, values[0] + half])
    step = float(np.diff(values).min())
    num_steps = (values[-1] - values[0]) / step
    if num_steps < MAX_BINS:
        return values[0] + step * (np.arange(round(num_steps) + 2) - 0.5)
    return np.linspace(values[0], values[-1], MAX_BINS + 1)


def reward_plot(run: Run) -> Plot | str:
    """Histogram of train rewards by sigma, the base's as a line."""
    rows = [row for row in run.journal.get("search", []) if isinstance(row.get("sigma"), int | float)]
    if not rows:
        return NO_ROWS.format("the distribution of rewards")
    by_sigma: dict[float, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["sigma"]):
        by_sigma.setdefault(row["sigma"], []).append(row)
    drawn = dict(list(by_sigma.items())[:MAX_SIGMAS])
    edges = bins_of(np.array([row["reward"] for own in drawn.values() for row in own], float))
    base = base_reward(run)

    def draw(canvas: Canvas) -> None:
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch
        from matplotlib.ticker import MaxNLocator

        axes = canvas.panels(len(drawn), stacked=True, sharex=True, sharey=True)
        for axis, (sigma, own) in zip(axes, drawn.items(), strict=True):
            axis.hist([row["reward"] for row in own], edges, color=canvas.colour(0), edgecolor=canvas.colour("paper"), linewidth=0.8)
            if base.known:
                axis.axvline(base.value, color=canvas.colour(1), linestyle=(0, (4, 2)), linewidth=1.8)
            title = axis.set_title(f"sigma {sigma:g}")
            canvas.sourced(title, run.line(own[0], "sigma"))
            axis.yaxis.set_major_locator(MaxNLocator(3, integer=True))
        axes[len(axes) // 2].set_ylabel("members")
        axes[-1].xaxis.set_major_locator(MaxNLocator(8 if canvas.sheet.is_wide else 4))
        axes[-1].set_xlabel(reward_name(run))
        handles: list[Any] = [Patch(color=canvas.colour(0))]
        if base.known:
            handles.append(Line2D([], [], color=canvas.colour(1), linestyle=(0, (4, 2)), linewidth=1.8))
        canvas.key(handles, ["members of the population", "base model"][: len(handles)])

    height = 90 + 105 * len(drawn)
    more = " Only the smallest sigmas are drawn." if len(by_sigma) > len(drawn) else ""
    return Plot(f"rewards{run.number}", "Rewards by sigma", "Histogram of train rewards for each sigma, with the reward of the base model",
                f"How many of the {shown(num(run.phase('search', 'reward')), ',')} members got which train reward. The base's is "
                f"{shown(base, '.5f')}.{more}", (height, height + 20), draw)


def ensembles_of(run: Run) -> list[tuple[int, str]]:
    """(K, pointer of its result) of every ensemble, smallest first."""
    part = run.record.randopt
    found = [(part.ensemble.k, "/randopt/ensemble"), *((row.k, f"/randopt/secondary/{i}") for i, row in enumerate(part.secondary))]
    return sorted(found)


def ensemble_plot(run: Run) -> Plot | str:
    """The result on the test set against K, with intervals and the controls."""
    part = run.record.randopt
    if part is None:
        return NO_RESULT.format("accuracy against the number of members")
    answers = not is_likelihood(run)
    points, random_k, majority, single = ensembles_of(run), part.controls.random_k, part.controls.base_majority, part.controls.best_single
    results = {part.ensemble.k: part.ensemble.test, **{row.k: row.test for row in part.secondary}}
    k = part.ensemble.k
    mean_member = (part.ensemble.model_extra or {}).get("mean_member")

    def figure(result: AccuracyPart | LossPart) -> float:
        return result.accuracy if isinstance(result, AccuracyPart) else result.bpb

    def mark(axis: "Axes", x: float, result: AccuracyPart | LossPart, style: dict[str, Any]) -> Any:
        if isinstance(result, LossPart):
            return axis.plot([x], [result.bpb], linestyle="none", **style)[0]
        errors = [[max(result.accuracy - result.low, 0)], [max(result.high - result.accuracy, 0)]]
        return axis.errorbar([x], [result.accuracy], errors, linestyle="none", capsize=3, elinewidth=1.4, **style)

    def draw(canvas: Canvas) -> None:
        from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter

        [axis] = canvas.panels(1)
        sizes = [size for size, _ in points]
        axis.set_xscale("log", base=2)
        apart = 1.0 + 0.022 * (4 if not canvas.sheet.is_wide else 1.6)  # controls stand beside their K, not on it
        handles, labels = [], []

        def add(handle: Any, label: str) -> None:
            handles.append(handle)
            labels.append(label)

        add(axis.axhline(figure(part.base.test), color=canvas.colour("soft"), linestyle=(0, (4, 2)), linewidth=1.5), "base model")
        axis.plot(sizes, [figure(results[size]) for size in sizes], color=canvas.colour(0), linewidth=1.4)
        for size in sizes:
            handle = mark(axis, size, results[size], {"marker": "o", "markersize": 6, "color": canvas.colour(0)})
        add(handle, "best K by reward: " + ("their vote" if answers else "their mixture"))
        if random_k.enabled:
            mean = random_k.mean if answers else random_k.mean_bpb
            errors = [[max(mean - random_k.low, 0)], [max(random_k.high - mean, 0)]]
            add(axis.errorbar([k * apart], [mean], errors, marker="s", markersize=6, color=canvas.colour(1), linestyle="none", capsize=5,
                              elinewidth=3), "K at random: mean and range")
        if majority.enabled and majority.test:
            add(mark(axis, k / apart, majority.test, {"marker": "D", "markersize": 6, "color": canvas.colour(2)}),
                "K samples of the base: their vote")
        if single.enabled and single.test:
            add(mark(axis, 1 / (apart if 1 in results else 1), single.test, {"marker": "^", "markersize": 7, "color": canvas.colour(3)}),
                "best single member")
        if mean_member and not answers:
            add(axis.plot([k], [mean_member["bpb"]], linestyle="none", marker="v", markersize=7, color=canvas.colour(4))[0],
                "mean of the best K, unmixed")
        ticks = sorted({1, k, *sizes})
        axis.xaxis.set_major_locator(FixedLocator(ticks))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_xticks(ticks, [f"{size:d}" for size in ticks])
        axis.set_xlim(min(ticks) / 1.25, max(ticks) * 1.25)
        axis.set_xlabel("number of members K")
        axis.set_ylabel("test accuracy" if answers else "test documents (bits per byte)")
        if answers:
            axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
            axis.set_ylim(bottom=0 if axis.get_ylim()[0] < 0 else None)
        canvas.key(handles, labels)

    what = (f"Bars are {constant('95%')} intervals (Wilson's), of random ensembles the range of the draws." if answers else
            "The bar of the random mixtures is the range of the draws. Lower is better.")
    return Plot(f"ensemble{run.number}", "Result against the number of members",
                "Result on the test set against the number of members K, with the controls",
                f"The result that counts is at K = {shown(run.at('/randopt/ensemble/k'))}, fixed before the run; other sizes were looked at "
                f"afterwards. {what} The controls are of that K.", (360, 400), draw)


def transfer_plot(run: Run) -> Plot | str:
    """Train reward against the result on the test set, member by member."""
    part = run.record.randopt
    if part is None:
        return NO_RESULT.format("train reward against test result")
    key = "test_bpb" if is_likelihood(run) else "test_accuracy"
    groups = {"control pool: drawn at random": (run.raw["randopt"]["controls"]["random_k"].get("pool") or [], "o", 0),
              "the best by reward": (run.raw["randopt"]["selection"]["members"], "^", 1)}
    groups = {name: ([(m["train_reward"], m[key]) for m in members if m.get(key) is not None], marker, colour)
              for name, (members, marker, colour) in groups.items()}
    groups = {name: group for name, group in groups.items() if group[0]}
    if not groups:
        return "No member was run alone on the test set, so train reward against test result is not drawn."
    base = part.base.test.bpb if is_likelihood(run) else part.base.test.accuracy

    def draw(canvas: Canvas) -> None:
        from matplotlib.ticker import MaxNLocator, PercentFormatter

        [axis] = canvas.panels(1)
        axis.grid(True)
        handles = []
        for points, marker, colour in groups.values():
            counts = Counter(points)
            x, y = zip(*counts, strict=True)
            handles.append(axis.scatter(x, y, s=[34 * count for count in counts.values()], marker=marker, facecolors="none",
                                        edgecolors=canvas.colour(colour), linewidths=1.5))
        handles += axis.plot([part.base.train_reward], [base], linestyle="none", marker="P", markersize=9, color=canvas.colour("ink"))
        axis.set_xlabel(reward_name(run))
        axis.set_ylabel("test documents (bits per byte)" if is_likelihood(run) else "test accuracy")
        if not is_likelihood(run):
            axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
        axis.xaxis.set_major_locator(MaxNLocator(8 if canvas.sheet.is_wide else 4))
        axis.margins(0.08)
        canvas.key(handles, [*groups, "base model"])

    rho = run.at("/randopt/spearman/rho")
    rank = ""
    if rho.known:
        ends = [run.at(f"/randopt/spearman/{name}") for name in ("low", "high")]
        between = f", {constant('95%')} interval [{shown(ends[0], '+.2f')}, {shown(ends[1], '+.2f')}]" if ends[0].known and ends[1].known else ""
        rank = (f" Over the {shown(run.at('/randopt/spearman/num'))} members of the control pool, which nobody selected, Spearman's rank "
                f"correlation of {text_of(run)} is {shown(rho, '+.2f')}{between}.")
    return Plot(f"transfer{run.number}", "Does the reward foretell the test set?",
                "Train reward against the result on the test set, member by member",
                f"Each mark is a member alone; a larger one stands for several at the same place.{rank} The best by reward lie right because "
                "they were chosen for it.", (360, 380), draw)


def text_of(run: Run) -> str:
    """What the rank correlation is of."""
    return "train reward and minus test bpb" if is_likelihood(run) else "train reward and test accuracy"


def progress_plot(run: Run) -> Plot | str:
    """The best reward so far against the seconds of the search."""
    rows = run.journal.get("search", [])
    if not rows:
        return NO_ROWS.format("the best reward against time")
    seconds, rewards = np.cumsum([row["seconds"] for row in rows]), np.array([row["reward"] for row in rows], float)
    best, base = np.maximum.accumulate(rewards), base_reward(run)
    top = max(rows, key=lambda row: row["reward"])

    def draw(canvas: Canvas) -> None:
        from matplotlib.lines import Line2D

        [axis] = canvas.panels(1)
        width = canvas.sheet.width // 2
        member = {"linestyle": "none", "marker": "o", "markersize": 3.5, "markerfacecolor": "none", "markeredgecolor": canvas.colour("soft")}
        axis.plot(*thin(seconds, rewards, width), **member)
        axis.plot(*thin(seconds, best, width), color=canvas.colour(0), linewidth=1.8, drawstyle="steps-post")
        handles = [Line2D([], [], **member), Line2D([], [], color=canvas.colour(0), linewidth=1.8)]
        if base.known:
            handles.append(axis.axhline(base.value, color=canvas.colour(1), linestyle=(0, (4, 2)), linewidth=1.5))
        axis.set_xlabel("time of the search (s)")
        axis.set_ylabel(reward_name(run) if canvas.sheet.is_wide else "train reward")
        canvas.key(handles, ["a member", "best so far", "base model"][: len(handles)])

    return Plot(f"progress{run.number}", "Best reward against time", "Reward of each member and the best so far against the seconds of the search",
                f"The search evaluated its members in {shown(total(run.phase('search', 'seconds')), ',.1f')} s. The best reward, "
                f"{shown(largest(run.phase('search', 'reward')), '.5f')}, was that of member {shown(run.line(top, 'index'))}. The best of many draws "
                "rises by chance alone: this curve is no evidence of a gain.", (320, 340), draw)

