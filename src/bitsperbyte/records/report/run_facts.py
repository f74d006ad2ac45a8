"""What a report says of every run, whatever its track: name, status, seed, machine, commit; what is missing."""

from collections.abc import Callable, Sequence

from bitsperbyte.records.report.drawing import letter
from bitsperbyte.records.report.markup import Cell, escaped, number, shown, text
from bitsperbyte.records.report.sources import Run

STATUS = {
    "running": "The record says that this run is under way, or that it was killed: what follows is what it had written so far.",
    "interrupted": "The run was interrupted; it can be resumed. What follows is what it had written so far.",
    "crashed": "The run crashed. What follows is what it had written before.",
    "diverged": "The loss stopped being finite, which ended the run.",
    "over_cap": "The artifact is over the cap: this run does not count.",
    "imported": "The run was made elsewhere and imported: its figures are those that its files state, and were not measured here.",
}


def heads(runs: Sequence[Run]) -> list[str]:
    """Column heads: the run's name, behind its letter where there are several."""
    return [f"{letter(i)} {text(run.at('/name'))}" if len(runs) > 1 else text(run.at("/name")) for i, run in enumerate(runs)]


def columns(runs: Sequence[Run], of: Callable[[Run], str]) -> list[Cell]:
    return [Cell(of(run)) for run in runs]


def common_rows(runs: Sequence[Run]) -> list[list[Cell | str]]:
    """Rows of the summary table that both tracks have."""
    return [
        ["status", *columns(runs, lambda run: text(run.at("/status")))],
        ["begun", *columns(runs, lambda run: text(run.at("/created_utc"), length=16))],
        ["seed", *(number(run.at("/seed")) for run in runs)],
        ["machine", *columns(runs, machine)],
        ["commit", *columns(runs, commit)],
    ]


def machine(run: Run) -> str:
    """Device and their number, or the processor and its cores."""
    device, count = run.at("/provenance/device"), run.at("/provenance/num_devices")
    if device.value and device.value != "cpu":
        return (f"{shown(count)} × " if count.value and count.value > 1 else "") + text(device)
    cores, model = run.at("/provenance/num_cores"), run.at("/provenance/cpu_model")
    return text(model if model.value else device) + (f", {shown(cores)} cores" if cores.known else "")


def commit(run: Run) -> str:
    """The commit; where there is none, the hash of the sources."""
    found, sources = run.at("/provenance/commit"), run.at("/provenance/source_sha256")
    if found.value:
        return f"<code>{text(found, length=10)}</code>{', with changes' if run.at('/provenance/dirty').value else ''}"
    return f"none; sources <code>{text(sources, length=10)}</code>" if sources.value else text(found)


def remarks(run: Run) -> list[str]:
    """What a reader must know before the figures (HTML): how the run ended, what is missing."""
    said = []
    if run.record.status in STATUS:
        said.append(STATUS[run.record.status])
    if run.record.error:
        said.append(f"Its error: {text(run.at('/error'))}")
    said += [escaped_with_source(run, gap) for gap in run.gaps]
    if run.num_lost_steps:
        said.append("Steps that a kill lost were trained again; their first rows are left out of the figures.")
    if run.record.imported:
        said += [f"Could not be read, or contradicts itself: {text(run.at(f'/imported/unread/{i}'))}"
                 for i in range(len(run.record.imported.unread))]
    if run.record.notes:
        said.append(f"Notes: {text(run.at('/notes'))}")
    return said


def escaped_with_source(run: Run, sentence: str) -> str:
    """A sentence about a file, which may name a line."""
    return f"<span data-about={run.number}>{escaped(sentence)}</span>"
