"""bpb records compare: two sides, a test, and what it rests on."""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

PIPE_WIDTH = 100  # columns where the output is no terminal


def compare(
    runs: Annotated[list[Path] | None, typer.Argument(
        metavar="A B A2 B2", help="sides in turn: A, B, A, B, ...; each a record.json, a folder that holds one, or a folder of "
                                        "seed_* runs, all of which are then of that side")] = None,
    a: Annotated[list[Path] | None, typer.Option("--a", help="a further run of side A; repeat it for unequal numbers of runs")] = None,
    b: Annotated[list[Path] | None, typer.Option("--b", help="a further run of side B")] = None,
    label: Annotated[str | None, typer.Option(help="which score or result of both sides; default: golf artifact, randopt ensemble")] = None,
    label_a: Annotated[str | None, typer.Option(help="of side A, if another than B's")] = None,
    label_b: Annotated[str | None, typer.Option(help="of side B, if another than A's")] = None,
    margin_nats: Annotated[float, typer.Option(help="golf: nats a token by which B must be better than A")] = 0.005,
    alpha: Annotated[float, typer.Option(help="golf: how often the margin test may fire where the gain is the margin exactly")] = 0.01,
    confidence: Annotated[float, typer.Option(help="of the intervals")] = 0.95,
    explain: Annotated[bool, typer.Option("--explain", help="say what makes the two evaluations equal, and test nothing")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print everything as one JSON object instead of tables")] = False,
) -> None:
    """Test whether B is better than A: golf runs over seeds, with the challenge's margin; randopt runs question by question."""
    from bitsperbyte.records.sides import read_sides

    side_a, side_b = read_sides(runs or [], a or [], b or [])
    if side_a.runs[0].record.track == "golf":
        from bitsperbyte.records.compare import LABEL, compare_golf
        from bitsperbyte.records.equalise import explain as explain_golf

        labels = (label_a or label or LABEL, label_b or label or LABEL)
        if explain:
            made, show = explain_golf(side_a, side_b, labels), _show_explanation
        else:
            made, show = compare_golf(side_a, side_b, labels, margin_nats=margin_nats, alpha=alpha, confidence=confidence), _show_golf
    else:
        from bitsperbyte.records.compare_answers import LABEL, compare_randopt

        if explain:
            raise ValueError("--explain is for golf runs: results of randopt runs compare on one test set, asked alike, or not at all")
        labels = (label_a or label or LABEL, label_b or label or LABEL)
        made, show = compare_randopt(side_a, side_b, labels, confidence=confidence), _show_randopt
    if as_json:
        print(json.dumps(made.to_dict(), indent=2, ensure_ascii=False))
    else:
        console = Console()
        show(made, console if console.is_terminal else Console(width=PIPE_WIDTH))


def _show_golf(made: Any, console: Console) -> None:
    names = _names(made.rows, console)
    table = _table(["side", "run", "seed", "nats/token", "bpb", "bytes/token", "steps", "total bytes"], text=("side", "run"))
    for row, name in zip(made.rows, names, strict=True):
        table.add_row(row["side"], name, _count(row["seed"], grouped=False), _number(row["nats_per_token"], 6), _number(row["bpb"], 6),
                      _number(row["bytes_per_token"], 4), _count(row["num_steps"]), _count(row["total_bytes"]))
    console.print(table, highlight=False)
    evaluation = made.evaluation
    windows = f"stride {evaluation['stride']} of {evaluation['window']}" if evaluation["stride"] else f"non-overlapping {evaluation['window']}"
    tail = ", tail dropped" if evaluation["drop_tail"] else ""
    names = made.labels[0] if made.labels[0] == made.labels[1] else f"A {made.labels[0]}, B {made.labels[1]}"
    _say(console, f"score: {names}; {made.text}, sha256 {evaluation['split_sha256'][:12]}; {windows}, {evaluation['documents']}{tail}")
    _say(console, "B against A: a gain above 0 means that B is better")
    table = _table(["figure", *made.units], text=("figure",))
    for name, cell in _golf_figures(made).items():
        table.add_row(name, *(cell(unit) for unit in made.units))
    console.print(table, highlight=False)
    _say(console, f"margin in bpb: {made.margin_how}")
    for line in made.verdict:
        _say(console, line, "bold")
    _show_rest(made, console)


def _golf_figures(made: Any) -> dict[str, Any]:
    def of_test(name: str, digits: int = 6) -> Any:
        return lambda unit: _number(getattr(made.tests[unit], name), digits)

    def interval(unit: str) -> str:
        found = made.tests[unit].interval
        return f"{found.low:.6f} to {found.high:.6f}"

    rows: dict[str, Any] = {"gain, A - B": lambda unit: f"{made.gain[unit]:.6f}", "margin": lambda unit: _number(made.margin[unit], 6)}
    if not made.tests:
        return rows
    rows |= {"mean of A": of_test("mean_a"), "mean of B": of_test("mean_b"), "sd of A": of_test("sd_a"), "sd of B": of_test("sd_b"),
             f"{made.confidence:.0%} interval of the gain": interval,
             "t / degrees of freedom": lambda unit: f"{made.tests[unit].t:.3f} / {made.tests[unit].df:.2f}",
             "p, two-sided: no difference": lambda unit: _p(made.tests[unit].p_two_sided)}
    if any(value is not None for value in made.margin.values()):
        rows["p, one-sided: gain not above the margin"] = lambda unit: _p(made.tests[unit].p_margin) if made.margin[unit] is not None else ""
    if any(test.p_guard is not None for test in made.tests.values()):
        rows["the same after Behrens and Fisher"] = lambda unit: _p(made.tests[unit].p_guard) if made.margin[unit] is not None else ""
    return rows


def _show_randopt(made: Any, console: Console) -> None:
    names = _names(made.rows, console)
    of_answers = made.rows[0]["accuracy"] is not None
    results = ["right", "accuracy", "95% interval"] if of_answers else ["bpb"]
    table = _table(["side", "run", "seed", "population", "K", *results], text=("side", "run"))
    for row, name in zip(made.rows, names, strict=True):
        result = ([f"{row['num_correct']} of {row['num']}", f"{row['accuracy']:.2%}", f"{100 * row['low']:.1f} to {100 * row['high']:.1f}"]
                  if of_answers else [_number(row["bpb"], 6)])
        table.add_row(row["side"], name, _count(row["seed"], grouped=False), _count(row["population"]), _count(row["k"]), *result)
    console.print(table, highlight=False)
    digest, size = str(made.task.get("test_sha256"))[:12], made.task.get("num_test")
    labels = made.labels[0] if made.labels[0] == made.labels[1] else f"A {made.labels[0]}, B {made.labels[1]}"
    _say(console, f"result: {labels}; {made.task.get('name')} version {made.task.get('version')}, {size} test items, sha256 {digest}")
    _say(console, "B against A: a gain above 0 means that B is better")
    table = _table(["figure", *(test.what for test in made.tests)], text=("figure",))
    for name, cell in _paired_figures(made).items():
        table.add_row(name, *(cell(test) for test in made.tests))
    console.print(table, highlight=False)
    for line in made.verdict:
        _say(console, line, "bold")
    for line in made.notes:
        _say(console, f"note: {line}")
    _show_rest(made, console)


def _paired_figures(made: Any) -> dict[str, Any]:
    def signed(test: Any, value: float) -> str:
        return f"{100 * value:+.2f}" if test.unit == "accuracy" else f"{value:+.6f}"

    rows: dict[str, Any] = {
        "unit": lambda test: "points" if test.unit == "accuracy" else test.unit,
        "A": lambda test: f"{100 * test.value_a:.2f}" if test.unit == "accuracy" else f"{test.value_a:.6f}",
        "B": lambda test: f"{100 * test.value_b:.2f}" if test.unit == "accuracy" else f"{test.value_b:.6f}",
        "gain": lambda test: signed(test, test.gain),
        f"{made.confidence:.0%} interval of the gain": lambda test: f"{signed(test, test.interval.low)} to {signed(test, test.interval.high)}",
        "items": lambda test: f"{test.num_items:,}"}
    if any(test.p_mcnemar is not None for test in made.tests):
        rows |= {"right in A only / B only": lambda test: "" if test.only_a is None else f"{test.only_a} / {test.only_b}",
                 "right in both / neither": lambda test: "" if test.both is None else f"{test.both} / {test.neither}",
                 "exact McNemar p": lambda test: "" if test.p_mcnemar is None else _p(test.p_mcnemar)}
    return rows


def _names(rows: list[dict[str, Any]], console: Console) -> list[str]:
    """The runs' folders from the one that holds them all, which is said."""
    folders = [str(Path(row["run"]).absolute()) for row in rows]
    parent = os.path.commonpath([str(Path(folder).parent) for folder in folders])
    _say(console, f"runs in {os.path.relpath(parent)}")
    return [os.path.relpath(folder, parent) for folder in folders]


def _show_explanation(made: Any, console: Console) -> None:
    from bitsperbyte.records.compare import label_options

    _say(console, f"The evaluations differ: {made.differs}." if made.differs else "The evaluations are equal: nothing needs to be scored.")
    if made.differs and made.labels:
        _say(console, "Scored alike on both sides already: " + "; ".join(label_options(tuple(pair)) for pair in made.labels))
    if made.commands:
        _say(console, "To score what is missing:")
        for command in made.commands:
            _say(console, f"  {command}")
    if made.differs is None or made.commands:
        _say(console, "Then:" if made.commands else "So:")
        _say(console, f"  {made.compare}")
    for note in made.notes:
        _say(console, f"note: {note}", "yellow")


def _show_rest(made: Any, console: Console) -> None:
    if made.differences:
        _say(console, "settings, A -> B:")
        for line in made.differences:
            _say(console, f"  {line}")
    for line in made.warnings:
        _say(console, f"warning: {line}", "yellow")


def _say(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)


def _table(columns: list[str], text: tuple[str, ...]) -> Table:
    table = Table()
    for name in columns:
        words = {"nats_per_token": "nats/token"}.get(name, name)
        table.add_column(words, justify="left" if name in text else "right", overflow="fold", no_wrap=name not in ("run", "figure"))
    return table


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _count(value: int | None, grouped: bool = True) -> str:
    return "" if value is None else f"{value:,}" if grouped else str(value)


def _p(value: float) -> str:
    return f"{value:.3g}"
