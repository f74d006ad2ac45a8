"""The figures of golf runs. Each function gives a Plot, or the sentence that says why there is nothing to draw."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bitsperbyte.records.leaderboard import BEFORE
from bitsperbyte.records.report.drawing import Canvas, Plot, letter
from bitsperbyte.records.report.markup import constant, escaped, number, shown
from bitsperbyte.records.report.sources import Run, Value, sub, total
from bitsperbyte.records.report.thin import limits
from bitsperbyte.records.schema import ScoreRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STEPS, SECONDS = "training step", "training time (s)"
MILLION = 1_000_000
# what a tensor belongs to by its name; the first that fits
PARTS = (("embedding", ("tok_emb",)), ("output head", ("lm_head",)), ("attention matrices", (".attn.c_", ".attn.proj")),
         ("MLP matrices", (".mlp.fc", ".mlp.proj")), ("scales, gains and skips", ("",)))
CODE, REST = "code", "header and joint compression"
HATCHES = ("", "///", "...", "\\\\\\", "xxx", "---", "+++")


def names_of(runs: Sequence[Run]) -> list[Value]:
    return [run.at("/name") for run in runs]


def _columns(rows: Sequence[dict[str, Any]], *keys: str) -> list[list[float]]:
    """The columns of the rows that have a number in all of them."""
    some = [row for row in rows if all(isinstance(row.get(key), int | float) and math.isfinite(row[key]) for key in keys)]
    return [[float(row[key]) for row in some] for key in keys]


def _label(axis: "Axes", x: str, y: str) -> None:
    axis.set_xlabel(x)
    axis.set_ylabel(y)


def _beyond(runs: Sequence[Run], rows: Sequence[Sequence[dict[str, Any]]], key: str, top: float, what: str, unit: str) -> str:
    """A sentence on what lies above the axis, the highest by run; empty where nothing does."""
    said = []
    for place, (run, own) in enumerate(zip(runs, rows, strict=True)):
        over = [row for row in own if isinstance(row.get(key), int | float) and row[key] > top]
        if over:
            high = max(over, key=lambda row: row[key])
            name = f"{letter(place)}: " if len(runs) > 1 else ""
            said.append(f"{name}highest {shown(run.line(high, key), '.4g')} {unit} at step {shown(run.line(high, 'step'), ',')}")
    return f" Triangles at the upper edge are {what} above the axis ({'; '.join(said)})." if said else ""


def loss_plot(runs: Sequence[Run]) -> Plot | str:
    """Training loss against steps and seconds."""
    if not any(run.steps for run in runs):
        return "There are no rows of training steps, so the training loss is not drawn."
    series = [_columns(run.steps, "step", "elapsed_s", "loss") for run in runs]
    top = limits([(step, loss) for step, _, loss in series])
    if top is None:
        return "No training step states a finite loss, so the training loss is not drawn."

    def draw(canvas: Canvas) -> None:
        left, right = canvas.panels(2, sharey=canvas.sheet.is_wide)
        for place, (step, elapsed, loss) in enumerate(series):
            canvas.line(left, step, loss, place, top=top)
            canvas.line(right, elapsed, loss, place, top=top)
        _label(left, STEPS, "training loss (nats per token)")
        _label(right, SECONDS, "" if canvas.sheet.is_wide else "training loss (nats per token)")
        canvas.legend(names_of(runs))

    last = [(run, run.steps[-1]) for run in runs if run.steps]
    ends = "; ".join(f"{_called(runs, run)}{shown(run.line(row, 'loss'), '.4f')} at step {shown(run.line(row, 'step'), ',')}"
                     for run, row in last)
    beyond = _beyond(runs, [run.steps for run in runs], "loss", top.high, "losses", "nats")
    return Plot("loss", "Training loss", "Training loss against steps and against seconds",
                f"The loss of each step's own batch, before that step changed the weights; a line as wide as a pixel shows its lowest and "
                f"highest step. It ends at {ends}.{beyond}", (330, 640), draw)


def _called(runs: Sequence[Run], run: Run) -> str:
    return f"{letter(list(runs).index(run))}: " if len(runs) > 1 else ""


def validation_rows(run: Run) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """(the rows of validation during training, the last row where it is the final score under other windows than these)."""
    before = run.record.score(BEFORE)
    rows = run.validations
    if rows and before and rows[-1].get("val_bpb") == before.bpb and (before.stride or before.documents != "across" or before.drop_tail):
        return rows[:-1], rows[-1]
    return rows, None


def curve_key(run: Run) -> tuple[Any, ...] | None:
    """What two validation curves must share to be compared: text, tokens of it, window. None where the record does not say."""
    config = run.record.config
    try:
        window = config["eval"]["window"] or config["train"]["seq_len"]
        return run.record.data.val_sha256, config["eval"]["max_tokens"], window
    except (KeyError, TypeError):
        return None


def bpb_plot(runs: Sequence[Run]) -> Plot | str:
    """Validation bpb against steps and seconds."""
    rows = [validation_rows(run)[0] for run in runs]
    series = [_columns(own, "step", "elapsed_s", "val_bpb") for own in rows]
    top = limits([(step, bpb) for step, _, bpb in series])
    if top is None:
        return "There are no rows of validation during training, so bits per byte against steps is not drawn."

    def draw(canvas: Canvas) -> None:
        left, right = canvas.panels(2, sharey=canvas.sheet.is_wide)
        for place, (step, elapsed, bpb) in enumerate(series):
            canvas.line(left, step, bpb, place, top=top, marked=True)
            canvas.line(right, elapsed, bpb, place, top=top, marked=True)
        _label(left, STEPS, "validation (bits per byte)")
        _label(right, SECONDS, "" if canvas.sheet.is_wide else "validation (bits per byte)")
        canvas.legend(names_of(runs), marked=True)

    others = [_called(runs, run).rstrip(": ") for run in runs if validation_rows(run)[1] is not None]
    which = f" of {' and '.join(others)}" if others and others[0] else ""
    left_out = (f" The final validation{which} is left out here: it was scored under other windows than those during training, "
                "and stands in the table of scores.") if others else ""
    keys = {curve_key(run) for run, own in zip(runs, rows, strict=True) if own}
    unequal = " The curves are of unequal evaluations: do not compare them." if len(keys) > 1 else ""
    beyond = _beyond(runs, rows, "val_bpb", top.high, "values", "bits per byte")
    return Plot("bpb", "Validation in training", "Bits per byte of the validation text against steps and against seconds",
                f"Bits per byte of the validation text in non-overlapping windows, of the weights before quantisation."
                f"{left_out}{unequal}{beyond}", (330, 640), draw)


def gap_plot(runs: Sequence[Run]) -> Plot | str:
    """Validation bpb less that of the first run, where the evaluations are equal."""
    first, *others = runs
    rows = {run.number: validation_rows(run)[0] for run in runs}
    if not rows[first.number]:
        return f"The gap to {letter(0)} is not drawn: {letter(0)} has no validation in training."
    curves, refused = [], []
    a_step, a_seconds, a_bpb = _columns(rows[first.number], "step", "elapsed_s", "val_bpb")
    at_step = dict(zip(a_step, a_bpb, strict=True))
    for place, run in enumerate(others, 1):
        if curve_key(run) is None or curve_key(run) != curve_key(first):
            refused.append(f"{letter(place)} was validated on another text, part of it or window than {letter(0)}, or does not say which")
            continue
        step, seconds, bpb = _columns(rows[run.number], "step", "elapsed_s", "val_bpb")
        common = [(s, value - at_step[s]) for s, value in zip(step, bpb, strict=True) if s in at_step and s > 0]
        within = [(s, value - float(np.interp(s, a_seconds, a_bpb))) for s, value in zip(seconds, bpb, strict=True)
                  if 0 < s <= a_seconds[-1]]
        if common or within:
            curves.append((place, common, within))
        else:
            refused.append(f"{letter(place)} has no validation in common with {letter(0)}")
    if not curves:
        return f"The gap to {letter(0)} is not drawn: {'; '.join(refused)}."
    zero = ([0.0], [0.0])  # the line of the first run belongs to the picture
    top_step = limits([zero, *(tuple(zip(*common, strict=True)) for _, common, _ in curves if common)])
    top_seconds = limits([zero, *(tuple(zip(*within, strict=True)) for _, _, within in curves if within)])

    def draw(canvas: Canvas) -> None:
        left, right = canvas.panels(2)
        for place, common, within in curves:
            for axis, points, top in ((left, common, top_step), (right, within, top_seconds)):
                if points:
                    canvas.line(axis, *zip(*points, strict=True), place, top=top, marked=True)
        for axis, x in ((left, STEPS), (right, SECONDS)):
            axis.axhline(0, color=canvas.colour("soft"), linewidth=1)
            _label(axis, x, f"gap to {letter(0)} (bits per byte)")
        if len(others) > 1:
            canvas.legend(names_of(runs), marked=True)

    said = f" Not drawn: {'; '.join(refused)}." if refused else ""
    return Plot("gap", f"Gap to {letter(0)}", f"Validation bits per byte less those of run {letter(0)}, against steps and seconds",
                f"Validation in training less that of {letter(0)}; below zero is better than {letter(0)}. Left at equal steps, where both were "
                f"validated; right at equal seconds, {letter(0)} taken between its two nearest validations on a straight line.{said}", (300, 560),
                draw)


def pace_plot(runs: Sequence[Run]) -> Plot | str:
    """Learning rate and step time against steps."""
    rates = [_columns(run.steps, "step", "lr_scale") for run in runs]
    times = [_columns(run.steps, "step", "step_ms") for run in runs]
    top = limits(times)
    if not any(step for step, _ in rates) and top is None:
        return "The rows state neither learning rate nor step time, so they are not drawn."

    def draw(canvas: Canvas) -> None:
        left, right = canvas.panels(2)
        for place, (rate, ms) in enumerate(zip(rates, times, strict=True)):
            if rate[0]:
                canvas.line(left, *rate, place)
            if ms[0]:
                canvas.line(right, *ms, place, top=top)
        left.set_ylim(-0.04, 1.08)
        _label(left, STEPS, "learning rate (share of full)")
        _label(right, STEPS, "step time (ms)")
        canvas.legend(names_of(runs))

    pace = "; ".join(f"{_called(runs, run)}{shown(run.at('/training/step_ms_p50'), '.1f')} ms and "
                     f"{shown(run.at('/training/step_ms_p95'), '.1f')} ms" for run in runs)
    beyond = _beyond(runs, [run.steps for run in runs], "step_ms", top.high, "steps", "ms") if top else ""
    return Plot("pace", "Learning rate and step time", "Learning rate and milliseconds of a step against steps",
                f"Left: the learning rate as a share of the full one; where it falls is the warmdown. Right: the time of each step; "
                f"median and {constant('95th')} percentile: {pace}.{beyond}", (300, 560), draw)


def ledger_parts(run: Run) -> list[tuple[str, Value]]:
    """(part, bytes) of the artifact, in the order of the bar; empty where the record does not state its bytes."""
    code, weights = run.at("/artifact/code_bytes"), run.at("/artifact/weight_bytes")
    if not code.known or not weights.known:
        return []
    tensors = run.raw["artifact"].get("tensors") or []
    places: dict[str, list[int]] = {}
    for place, tensor in enumerate(tensors):
        if not isinstance(tensor, dict) or not isinstance(tensor.get("compressed_bytes"), int):
            return [(CODE, code), ("weights", weights)]
        part = next(name for name, marks in PARTS if any(mark in str(tensor.get("name")) for mark in marks))
        places.setdefault(part, []).append(place)
    if not places:
        return [(CODE, code), ("weights", weights)]
    parts = [(name, total(run.at(f"/artifact/tensors/{'|'.join(map(str, places[name]))}/compressed_bytes")))
             for name, _ in PARTS if name in places]
    everything = total(run.at("/artifact/tensors/*/compressed_bytes"))
    return [(CODE, code), *parts, (REST, sub(weights, everything))]


def ledger_plot(runs: Sequence[Run]) -> Plot | str:
    """Bytes of code and weights against the cap."""
    bars = [(place, run, ledger_parts(run)) for place, run in enumerate(runs)]
    bars = [bar for bar in bars if bar[2]]
    if not bars:
        return "No artifact was written, so there is no byte ledger."
    kinds = list(dict.fromkeys(name for name in (CODE, "weights", *(part for part, _ in PARTS), REST)
                               if any(name == part for _, _, parts in bars for part, _ in parts)))
    caps = [run.record.artifact.cap_bytes for _, run, _ in bars if run.record.artifact and run.record.artifact.cap_bytes]

    def draw(canvas: Canvas) -> None:
        from matplotlib.patches import Patch

        [axis] = canvas.panels(1)
        faces = {name: {"facecolor": canvas.colour(i), "hatch": HATCHES[i % len(HATCHES)], "edgecolor": canvas.colour("paper"), "linewidth": 0.8}
                 for i, name in enumerate(kinds)}
        for height, (_, run, parts) in enumerate(bars):
            left = 0.0
            for name, value in parts:
                axis.barh(height, max(value.value, 0) / MILLION, left=left, height=0.62, **faces[name])
                left += max(value.value, 0) / MILLION
            if (cap := run.record.artifact.cap_bytes) and cap / MILLION > left:
                axis.barh(height, cap / MILLION - left, left=left, height=0.62, facecolor="none", edgecolor=canvas.colour("soft"), linewidth=0.8)
        for cap in sorted(set(caps)):
            axis.axvline(cap / MILLION, color=canvas.colour("ink"), linewidth=1.8)
        axis.set_yticks(range(len(bars)), [letter(place) for place, _, _ in bars] if len(runs) > 1 else [""] * len(bars))
        axis.set_ylim(len(bars) - 0.5, -0.5)
        axis.tick_params(axis="y", length=0)
        axis.grid(False, axis="y")
        axis.grid(True, axis="x")
        axis.set_xlabel("size (million bytes)")
        handles = [Patch(**faces[name]) for name in kinds] + [Patch(facecolor="none", edgecolor=canvas.colour("soft"), linewidth=0.8)] * bool(caps)
        canvas.key(handles, [*kinds, *["margin to the cap"] * bool(caps)])

    height = 120 + 46 * len(bars)
    alone = (" The weights are split by what each tensor takes if compressed by itself; header and joint compression is what the file takes "
             "beyond their sum, below zero where compressing them together saved more than the header costs.") if REST in kinds else ""
    return Plot("ledger", "Byte ledger", "Bytes of code and of the compressed weights by part, and the margin to the cap",
                f"What ships, by part; the upright line is the cap.{alone}", (height, height + 110), draw)


def position_row(run: Run) -> tuple[int, ScoreRow] | None:
    """(place in scores, row) of the score whose loss by position is drawn: the artifact's, else the first that has one."""
    some = [(place, row) for place, row in enumerate(run.record.scores) if row.per_position]
    return min(some, key=lambda pair: (pair[1].label != "artifact", pair[0]), default=None)


def position_plot(runs: Sequence[Run]) -> Plot | str:
    """Loss by how many tokens of context a target had."""
    found = [(place, run, row) for place, run in enumerate(runs) if (row := position_row(run))]
    if not found:
        return ("No score states its loss by position, so it is not drawn: older runs did not measure it."
                if any(run.record.scores for run in runs) else "Nothing was scored, so the loss by position is not drawn.")
    key = found[0][2][1].evaluation_key
    drawn = [(place, run, row) for place, run, (_, row) in found if row.evaluation_key == key]
    windows = {row.window for _, _, row in drawn}
    missing = [place for place, run in enumerate(runs) if place not in {place for place, _, _ in drawn}]

    def draw(canvas: Canvas) -> None:
        from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

        [axis] = canvas.panels(1)
        for place, _, row in drawn:
            part = row.per_position
            last = [*(edge - 1 for edge in part.edges[1:]), max(row.window, part.edges[-1])]
            middle = [math.sqrt(a * b) for a, b in zip(part.edges, last, strict=True)]
            some = [(x, y) for x, y in zip(middle, part.nats_per_token, strict=True) if y is not None]
            axis.plot(*zip(*some, strict=True), **canvas.style(place, marked=True))
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_locator(FixedLocator([2**i for i in range(max(windows).bit_length())]))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        _label(axis, "tokens of context before the target", "loss (nats per token)")
        if len(runs) > 1:
            canvas.legend(names_of(runs), marked=True)

    place, _ = position_row(found[0][1])
    said = f" Not drawn, since no such score under equal evaluation states it: {', '.join(map(letter, missing))}." if missing else ""
    label = found[0][1].at(f"/scores/{place}/label")
    return Plot("positions", "Loss by position", "Loss against the number of context tokens that a target had",
                f"The loss of the targets of one score (<span data-source=\"{escaped(label.source)}\">{escaped(label.value)}</span>) by how much "
                f"context stood before them in their window, in bins that double; each mark stands in the middle of its bin.{said}",
                (300, 300), draw)


def ledger_rows(runs: Sequence[Run]) -> list[list[Any]]:
    """Rows of the table beside the bar: part, bytes of each run."""
    parts = [dict(ledger_parts(run)) for run in runs]
    names = [name for name in (CODE, "weights", *(part for part, _ in PARTS), REST) if any(name in own for own in parts)]
    rows = [[name, *(number(own[name], ",") if name in own else "" for own in parts)] for name in names]
    for name, key in (("total", "total_bytes"), ("cap", "cap_bytes"), ("margin to the cap", "margin_bytes")):
        rows.append([name, *(number(run.at(f"/artifact/{key}"), ",") for run in runs)])
    return rows

