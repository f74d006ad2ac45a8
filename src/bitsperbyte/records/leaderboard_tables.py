"""Cells and tables of RECORDS.md, rows over several seeds, and the tables of runs that others published."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from bitsperbyte.records.schema import PublishedScore, Record
from bitsperbyte.stats.intervals import summarize

_PUBLISHED_NOTE = (
    "Figures as their authors published them, read from logs and tables and checked by no one here; they stand in no table above, and do not "
    "compare with those. Two of them compare only where text, window, stride and documents are known and equal: what a source does not say is "
    "blank, and what the person who imported it said is in italics. `unread` counts what in the files was not understood or contradicts itself."
)
_PUBLISHED_COLUMNS = {"date": False, "run": False, "seed": True, "params": True, "steps": True, "step ms": True, "score": False, "bpb": True,
                      "nats/token": True, "text": False, "window": True, "stride": True, "documents": False, "packing": False, "code bytes": True,
                      "total bytes": True, "unread": True}
_PUBLISHED_RANDOPT_COLUMNS = {"date": False, "run": False, "seed": True, "model": False, "task": False, "base": True, "ensembles": False,
                              "unread": True}
_SEEDS_COLUMNS = {"run": False, "score": False, "seeds": False, "n": True, "mean bpb": True, "sd": True, "95% interval of the mean": False}
Entry = tuple[Path, Record]


def over_seeds(rows: Sequence[tuple[tuple, Record, float]]) -> list[str]:
    """A table with mean, sample standard deviation and t interval of the runs that share a key (name, label, ...) and have different seeds;
    nothing where there are none. Runs that repeat a seed are not independent of each other, so that a group with one gets no row."""
    groups: dict[tuple, list[tuple[Record, float]]] = defaultdict(list)
    for key, record, bpb in rows:
        if record.seed is not None:
            groups[key].append((record, bpb))
    cells = []
    for key, runs in sorted(groups.items(), key=lambda group: str(group[0])):
        seeds = sorted(record.seed for record, _ in runs if record.seed is not None)
        if len(seeds) < 2 or len(set(seeds)) < len(seeds):
            continue
        summary = summarize([bpb for _, bpb in runs])
        cells.append({"run": escaped(key[0]), "score": escaped(key[1].replace("_", " ")), "seeds": ", ".join(map(str, seeds)),
                      "n": str(summary.num), "mean bpb": decimal(summary.mean, 4), "sd": decimal(summary.sd, 5),
                      "95% interval of the mean": f"\\[{decimal(summary.interval.low, 4)}, {decimal(summary.interval.high, 4)}\\]"})
    return ["Over seeds:", "", *table(_SEEDS_COLUMNS, cells), ""] if cells else []


def published_tables(entries: Sequence[Entry], root: Path, track: str) -> list[str]:
    """Runs that others published: a row for each score of each run, and the rows over seeds."""
    lines = [_PUBLISHED_NOTE, ""]
    if track == "randopt":
        rows = [_base_cells(entry, root) | _randopt_cells(entry[1]) for entry in entries]
        return [*lines, *table(_PUBLISHED_RANDOPT_COLUMNS, rows)]
    rows, scored = [], []
    for entry in entries:
        part = entry[1].imported
        for score in part.scores:
            rows.append(_base_cells(entry, root) | _run_cells(entry[1]) | _published_cells(score, part.stated))
            if score.bpb is not None and not score.label.startswith("submission.json"):
                scored.append(((entry[1].name, score.label, str(sorted(part.stated.items())), entry[1].training.num_parameters), entry[1], score.bpb))
        if not part.scores:
            rows.append(_base_cells(entry, root) | _run_cells(entry[1]))
    lines += [*table(_PUBLISHED_COLUMNS, rows), "", *over_seeds(scored)]
    while not lines[-1]:
        lines.pop()
    return lines


def _base_cells(entry: Entry, root: Path) -> dict[str, str]:
    folder, record = entry
    link = (Path(root.name) / folder.relative_to(root)).as_posix()
    undated = record.notes is not None and record.provenance.get("imported_utc") == record.created_utc
    return {"date": "" if undated else record.date, "run": f"[{escaped(record.name)}]({link}/)", "seed": count(record.seed, grouped=False),
            "unread": str(len(record.imported.unread))}


def _run_cells(record: Record) -> dict[str, str]:
    training, artifact = record.training, record.artifact
    cells = {"params": count(training.num_parameters), "steps": count(training.num_steps), "step ms": decimal(training.step_ms_mean, 2)}
    if artifact:
        cells |= {"packing": escaped(" + ".join(part for part in (artifact.scheme, artifact.codec) if part)),
                  "code bytes": count(artifact.code_bytes), "total bytes": count(artifact.total_bytes)}
    return cells


def _published_cells(score: PublishedScore, stated: dict) -> dict[str, str]:
    def known(name: str) -> str:
        value = getattr(score, name)
        if value is not None:
            return escaped(str(value))
        if name not in stated:
            return ""
        return "*non-overlapping*" if stated[name] is None else f"*{escaped(str(stated[name]))}*"

    digits = score.digits or 0
    return {"score": escaped(score.label), "bpb": decimal(score.bpb, digits), "nats/token": decimal(score.nats_per_token, digits),
            **{name: known(name) for name in ("text", "window", "stride", "documents")}}


def _randopt_cells(record: Record) -> dict[str, str]:
    results = record.imported.figures.get("results", {})
    base = results.get("base_test_accuracy")
    found = results.get("ensemble_results") or results.get("ensemble_accuracy") or {}
    ensembles = [f"K = {k}: {row.get('accuracy') if isinstance(row, dict) else row}%" for k, row in found.items()] if isinstance(found, dict) else []
    return {"model": escaped(str(results.get("model") or results.get("base_model_path") or "")), "task": escaped(str(results.get("dataset") or "")),
            "base": "" if base is None else escaped(str(base)), "ensembles": escaped("; ".join(ensembles))}


def table(columns: dict[str, bool], rows: Iterable[dict[str, str]]) -> list[str]:
    """Markdown rows; a column whose flag is true holds numbers and is set flush right."""
    lines = [f"| {' | '.join(columns)} |", f"|{'|'.join('---:' if number else '---' for number in columns.values())}|"]
    return lines + [f"| {' | '.join(cells.get(name, '') for name in columns)} |" for cells in rows]


def count(value: int | None, grouped: bool = True) -> str:
    if value is None:
        return ""
    return f"{value:,}" if grouped else str(value)


def decimal(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def escaped(text: str) -> str:
    return (
        " ".join(text.split())
        .replace("\\", "\\\\")
        .replace("|", "\\|")
        .replace("[", "\\[")
        .replace("]", "\\]")
        .replace("<", "&lt;")
    )
