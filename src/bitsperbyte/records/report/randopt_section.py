"""What a report says of RandOpt runs: what they are, what the tests show, the figures, who got which question."""

from collections.abc import Sequence
from typing import Any

from bitsperbyte.records.report import randopt_figures as figures
from bitsperbyte.records.report.drawing import Plot, letter
from bitsperbyte.records.report.markup import Cell, constant, escaped, interval, number, paragraphs, shown, table, text
from bitsperbyte.records.report.run_facts import columns, common_rows, heads
from bitsperbyte.records.report.sources import Run, Value, only, sub
from bitsperbyte.records.report.verdict import PERTURBING, SELECTION, Interval, Verdict, judge

Block = Plot | str
NAMES = {"base": "base model", "ensemble": "ensemble", "mixture": "mixture of the best K", "random_k": "ensembles of K at random, their mean",
         "base_majority": "vote of K samples of the base", "best_single": "best single member", "mean_member": "mean of the best K, unmixed",
         "random_mixture": "mixtures of K at random, their mean", "base_samples": "samples of the base"}


def blocks(runs: Sequence[Run]) -> list[Block]:
    """HTML and figures, in the order of the page: all runs in one table, then each by itself."""
    made: list[Block] = ["<h2>RandOpt</h2>", _summary(runs)]
    for place, run in enumerate(runs):
        if len(runs) > 1:
            made.append(f"<h2>{letter(place)} {text(run.at('/name'))}</h2>")
        if run.record.randopt:
            made.append(_verdict(run) + _results(run) + _tests(run))
        made += [_or_absent(draw(run)) for draw in (figures.ensemble_plot, figures.reward_plot)]
        made.append(_sigmas(run))
        made += [_or_absent(draw(run)) for draw in (figures.transfer_plot, figures.progress_plot)]
        made += [_items(run), _held_out(run)]
    return made


def _or_absent(plot: Plot | str) -> Block:
    return plot if isinstance(plot, Plot) else paragraphs([escaped(plot)], "absent")


def _summary(runs: Sequence[Run]) -> str:
    rows = [
        *common_rows(runs),
        ["task", *columns(runs, _task)],
        ["test set", *columns(runs, _test_set)],
        ["model", *columns(runs, lambda run: text(_first(run, "/randopt/engine/model", "/config/model/path")))],
        ["population", *(number(_first(run, "/randopt/population/size", "/config/search/population"), ",", unit="members") for run in runs)],
        ["members that vote (K)", *(number(_first(run, "/randopt/ensemble/k", "/config/search/top_k")) for run in runs)],
        ["base model", *columns(runs, lambda run: _result(run, "/randopt/base/test"))],
        ["ensemble", *columns(runs, lambda run: _result(run, "/randopt/ensemble/test"))],
        *([[f"ensemble less that of {letter(0)}", "", *(_gap(runs[0], run) for run in runs[1:])]] if len(runs) > 1 else []),
        ["search", *(number(run.at("/randopt/throughput/search/seconds"), ",.1f", unit="s") for run in runs)],
        ["in all", *(number(run.at("/phases_s/total"), ",.1f", unit="s") for run in runs)],
    ]
    return table(["", *heads(runs)], rows)


def _first(run: Run, *pointers: str) -> Value:
    """The first of these that the record states; a run without a result still says in its config what it was to be."""
    found = [run.at(pointer) for pointer in pointers]
    return next((value for value in found if value.known), found[0])


def _task(run: Run) -> str:
    version = run.at("/randopt/task/version")
    return text(_first(run, "/randopt/task/name", "/config/task/name")) + (f", version {text(version)}" if version.known else "")


def _test_set(run: Run) -> str:
    kind = "documents" if figures.is_likelihood(run) else "questions"
    digest, size = run.at("/randopt/task/test_sha256"), _first(run, "/randopt/task/num_test", "/config/task/num_test")
    return (f"{shown(size, ',')} {kind}" if size.known else shown(size)) + (f", <code>{text(digest, length=12)}</code>" if digest.known else "")


def _result(run: Run, pointer: str) -> str:
    """An accuracy with its interval, or bits per byte."""
    if run.at(f"{pointer}/bpb").known:
        return f"{shown(run.at(f'{pointer}/bpb'), '.4f')} bits per byte"
    ends = interval(run.at(f"{pointer}/low"), run.at(f"{pointer}/high"), ".1%")
    return f"{shown(run.at(f'{pointer}/accuracy'), '.1%')} {ends}".strip()


def _gap(first: Run, run: Run) -> Cell | str:
    """The difference of two ensembles' results, where task and test set are equal."""
    def key(of: Run) -> tuple[Any, ...] | None:
        part = of.record.randopt
        return part and tuple(part.task.get(name) for name in ("name", "version", "test_sha256", "context", "num_test"))

    if key(first) is None or key(run) is None:
        return "no result"
    if key(first) != key(run):
        return "another task or test set: not compared"
    name, form, scale, unit = ("bpb", "+.4f", 1, "bits per byte") if figures.is_likelihood(run) else ("accuracy", "+.1f", 100, "points")
    a, b = (of.at(f"/randopt/ensemble/test/{name}") for of in (run, first))
    return number(sub(a, b), form, scale=scale, unit=unit)


def verdict_of(run: Run) -> Verdict:
    """The verdict on the run's own tests."""
    part = run.record.randopt
    assert part is not None
    is_loss = figures.is_likelihood(run)
    gains: dict[str, Interval] = {}
    for row in part.tests:
        if row.a in ("ensemble", "mixture"):
            gains[row.b] = (-row.high, -row.low) if is_loss else (row.low, row.high)
    controls = ("random_mixture",) if is_loss else (SELECTION, PERTURBING)
    drawn = part.controls.random_k.model_extra or {}
    share = drawn.get("share_at_most_ensemble" if is_loss else "share_at_least_ensemble")
    return judge(gains.get("base"), {name: gains.get(name) for name in controls}, share if isinstance(share, int | float) else None,
                 gains.get("best_single"))


def _verdict(run: Run) -> str:
    made = verdict_of(run)
    return f'<div class="verdict {made.kind}"><p><strong>{escaped(made.headline)}</strong></p>{paragraphs([escaped(r) for r in made.reasons])}</div>'


def _results(run: Run) -> str:
    """Every result on the test set: the ensembles and each control, or why it is missing."""
    part = run.record.randopt
    rows: list[list[Cell | str]] = [["base model", "", _result(run, "/randopt/base/test")]]
    for _, pointer in figures.ensembles_of(run):
        counts = " <em>the one that counts</em>" if pointer == "/randopt/ensemble" else ""
        rows.append([f"best K by reward{counts}", number(run.at(f"{pointer}/k")), _result(run, f"{pointer}/test")])
    drawn = "/randopt/controls/random_k"
    if part.controls.random_k.enabled:
        form = ".4f" if figures.is_likelihood(run) else ".1%"
        mean = run.at(f"{drawn}/{'mean_bpb' if figures.is_likelihood(run) else 'mean'}")
        times = run.at(f"{drawn}/{'num_mixtures' if figures.is_likelihood(run) else 'num_subsets'}")
        share = run.at(f"{drawn}/{'share_at_most_ensemble' if figures.is_likelihood(run) else 'share_at_least_ensemble'}")
        as_good = f"; {shown(share, '.0%')} of them as good as the ensemble" if share.known else ""
        rows.append(["K at random, mean and range", number(run.at(f"{drawn}/k")),
                     f"{shown(mean, form)} {interval(run.at(f'{drawn}/low'), run.at(f'{drawn}/high'), form)} of {shown(times)} draws{as_good}"])
    else:
        rows.append(["K at random", "", f"not run: {text(run.at(f'{drawn}/why'))}"])
    for name in ("base_majority", "best_single"):
        pointer = f"/randopt/controls/{name}"
        control = getattr(part.controls, name)
        size = number(run.at(f"{pointer}/k")) if run.at(f"{pointer}/k").known else ""
        rows.append([NAMES[name], size, _result(run, f"{pointer}/test") if control.enabled else f"not run: {text(run.at(f'{pointer}/why'))}"])
    warning = run.at("/randopt/controls/random_k/warning")
    what = "bits per byte" if figures.is_likelihood(run) else f"accuracy and {constant('95%')} interval"
    return "<h3>Results on the test set</h3>" + table(["", "K", what], rows) + (paragraphs([text(warning)]) if warning.value else "")


def _tests(run: Run) -> str:
    if not run.record.randopt.tests:
        return paragraphs(["The record states no tests."], "absent")
    return f"<h3>Differences on the test set</h3>{_differences(run, '/randopt/tests', run.record.randopt.tests)}"


def _differences(run: Run, pointer: str, rows: Sequence[Any]) -> str:
    """A table of comparisons, with what each interval says in words."""
    made = []
    of_text = any(row.difference is None for row in rows)
    for place, row in enumerate(rows):
        def at(name: str, place: int = place) -> Value:
            return run.at(f"{pointer}/{place}/{name}")

        difference = at("difference") if row.difference is not None else at("difference_bpb")
        form, scale = ("+.1f", 100) if row.difference is not None else ("+.4f", 1)
        better = row.high < 0 if row.difference is None else row.low > 0
        worse = row.low > 0 if row.difference is None else row.high < 0
        says = "better" if better else "worse" if worse else "no difference shown"
        cells: list[Cell | str] = [f"{escaped(NAMES.get(row.a, row.a))} against {escaped(NAMES.get(row.b, row.b))}",
                                   number(difference, form, scale=scale), interval(at("low"), at("high"), form, scale=scale), says]
        if not of_text:
            cells += [number(at("only_a")), number(at("only_b")), number(at("p_mcnemar"), ".3g")]
        made.append(cells)
    unit = "bits per byte" if of_text else "points"
    header = ["first against second", f"difference ({unit})", f"{constant('95%')} interval", "in words"]
    return table([*header, *([] if of_text else ["only the first right", "only the second right", "McNemar p"])], made)


def _sigmas(run: Run) -> str:
    part = run.record.randopt
    if part is None:
        return ""
    rows: list[list[Cell | str]] = []
    for place in range(len(part.population.per_sigma)):
        def at(name: str, place: int = place) -> Value:
            return run.at(f"/randopt/population/per_sigma/{place}/{name}")

        rows.append([shown(at("sigma"), "g"), number(at("num")), number(at("mean"), ".5f"), number(at("sd"), ".5f"),
                     number(at("standard_error"), ".5f"), number(at("share_above_base"), ".1%")])
    return table(["sigma", "members", "mean reward", "standard deviation", "standard error of the mean", "above the base"], rows)


def _items(run: Run) -> str:
    """What the ensemble got right that the base did not, and the other way round."""
    part = run.record.randopt
    if part is None:
        return ""
    title = "<h3>What the vote fixed and broke</h3>" if not figures.is_likelihood(run) else "<h3>Documents, one by one</h3>"
    if part.items is None:
        test = next((i for i, row in enumerate(part.tests) if (row.a, row.b) == ("ensemble", "base")), None)
        counts = "" if test is None else (f"The ensemble answered {shown(run.at(f'/randopt/tests/{test}/only_a'))} questions that the base did not, "
                                          f"and the base {shown(run.at(f'/randopt/tests/{test}/only_b'))} that the ensemble did not. ")
        kind = "document" if figures.is_likelihood(run) else "question"
        return title + paragraphs([f"{counts}Results {kind} by {kind} are not in this record: earlier versions did not keep them."], "absent")
    return title + (_documents(run) if figures.is_likelihood(run) else _questions(run))


def _questions(run: Run) -> str:
    correct = run.record.randopt.items.correct
    if not {"base", "ensemble"} <= set(correct):
        return paragraphs(["The record does not keep base and ensemble by question."], "absent")
    marks = {name: run.at(f"/randopt/items/correct/{name}") for name in ("base", "ensemble")}
    made = []
    for words, a, b in (("fixed: the ensemble is right and the base was not", "ensemble", "base"),
                        ("broke: the base was right and the ensemble is not", "base", "ensemble")):
        places = [i for i, pair in enumerate(zip(correct[a], correct[b], strict=True)) if pair == ("1", "0")]
        named = " ".join(f"<code>{text(_id(run, i))}</code>" for i in places)
        made.append(f"<details{' open' if len(places) <= 40 else ''}><summary>{shown(only(marks[a], marks[b]))} {words}</summary>"
                    f'<p class="ids">{named}</p></details>')
    return "".join(made)


def _id(run: Run, place: int) -> Value:
    """The item's name; where the record has none its place, counted from 0, which is its source too."""
    found = run.at(f"/randopt/items/ids/{place}")
    return found if found.known else Value(f"#{place}", f"place({place})")


def _documents(run: Run) -> str:
    """How many documents the mixture predicts better than the base, and those that changed most."""
    items = run.record.randopt.items
    if not {"base", "mixture"} <= set(items.nats):
        return paragraphs(["The record does not keep base and mixture by document."], "absent")
    gaps = []
    for place in range(len(items.num_bytes)):
        a, b = (run.at(f"/randopt/items/nats/{name}/{place}") for name in ("mixture", "base"))
        gaps.append((place, sub(a, b)))
    order = sorted(gaps, key=lambda pair: pair[1].value)
    shown_rows = order if len(order) <= 10 else [*order[:5], *order[-5:]]
    rows = [[f"<code>{text(_id(run, place))}</code>", number(gap, "+.2f"), number(run.at(f"/randopt/items/num_bytes/{place}"), ",")]
            for place, gap in shown_rows]
    said = "Those that the mixture predicts better by the most, and worse by the most (or better by the least):" if len(order) > 10 else ""
    return (paragraphs([said]) if said else "") + table(["document", "nats less than the base's, if negative", "bytes"], rows)


def _held_out(run: Run) -> str:
    part = run.record.randopt
    if part is None:
        return ""
    title = "<h3>Held-out text</h3>"
    held = part.heldout
    if held is None or not held.enabled or held.base is None:
        why = run.at("/randopt/heldout/why")
        return title + paragraphs([f"Not measured{': ' + text(why) if why.value else ''}."], "absent")
    rows: list[list[Cell | str]] = []
    for name in ("base", "mixture", "mean_member", "best_single"):
        if getattr(held, name):
            rows.append([NAMES[name], number(run.at(f"/randopt/heldout/{name}/bpb"), ".4f"), ""])
    drawn = "/randopt/heldout/random_mixture"
    if held.random_mixture and held.random_mixture.enabled:
        rows.append([NAMES["random_mixture"], number(run.at(f"{drawn}/mean_bpb"), ".4f"),
                     interval(run.at(f"{drawn}/low"), run.at(f"{drawn}/high"), ".4f") + f" of {shown(run.at(f'{drawn}/num_mixtures'))} draws"])
    digest = run.at("/randopt/heldout/slice_sha256")
    named = (f"{text(run.at('/randopt/heldout/slice'))}{f', <code>{text(digest, length=12)}</code>' if digest.known else ''}: windows of "
             f"{shown(run.at('/randopt/heldout/context'))}, {shown(run.at('/randopt/heldout/base/bytes_per_token'), '.3f')} bytes a token. No "
             "reward saw this text. A mixture is never worse than its mean member, whoever is in it: hold it against the random mixtures.")
    differences = _differences(run, "/randopt/heldout/differences", held.differences) if held.differences else ""
    return f"{title}<p>{named}</p>{table(['', 'bits per byte', 'range'], rows)}{differences}"

