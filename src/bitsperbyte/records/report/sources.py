"""Figures with their sources: every value that a report shows knows where in record.json, metrics.jsonl or journal.jsonl it stands.

A source is a path or an operation on sources, read by tests with code of their own (docs/reports.md, "Where a number comes from"):

    0:record.json#/training/num_steps        a JSON pointer; 0 is the run's place on the command line
    0:record.json#/artifact/tensors/2|5/compressed_bytes   a list: the elements 2 and 5, `*` for all
    0:metrics.jsonl#L12/loss                  a key of line 12
    0:journal.jsonl#phase=search/reward       a list: that key of all rows of a phase
    sub(A, B)  sum(A)  max(A)  min(A)  num(A)  only(A, B)   `only`: where string A has a 1 and B a 0
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bitsperbyte.records.schema import Record
from bitsperbyte.records.store import JOURNAL, RECORD, read_record
from bitsperbyte.run.folder import read_jsonl
from bitsperbyte.run.metrics import MetricsFold

METRICS = "metrics.jsonl"
MISSING = object()


@dataclass(frozen=True)
class Value:
    """A value and where it stands; `value` is None where the file states none."""

    value: Any
    source: str

    @property
    def known(self) -> bool:
        """Whether there is a value, and for a number whether it is finite."""
        return self.value is not None and not (isinstance(self.value, float) and not math.isfinite(self.value))


@dataclass
class Run:
    """A run's record as its file has it, and the rows beside it.

    `steps` and `validations` of a golf run, `journal` (rows of a phase) of a randopt run: JSON objects that `line` can look up.
    `gaps`: what is missing or unreadable beside the record, in sentences.
    """

    number: int
    folder: Path
    record: Record
    raw: dict[str, Any]
    steps: list[dict[str, Any]] = field(default_factory=list)
    validations: list[dict[str, Any]] = field(default_factory=list)
    num_lost_steps: int = 0
    journal: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    gaps: list[str] = field(default_factory=list)
    _line_of: dict[int, int] = field(default_factory=dict)

    @property
    def rows_file(self) -> str:
        return METRICS if self.record.track == "golf" else JOURNAL

    def at(self, pointer: str) -> Value:
        """What stands at a JSON pointer of record.json: None where nothing does, a list for a pointer with `*` or `2|5`."""
        found = look_up(self.raw, pointer.split("/")[1:])
        return Value(None if found is MISSING else found, f"{self.number}:{RECORD}#{pointer}")

    def line(self, row: dict[str, Any], key: str) -> Value:
        """A key of one of the rows that this run holds."""
        return Value(row.get(key), f"{self.number}:{self.rows_file}#L{self._line_of[id(row)]}/{key}")

    def phase(self, phase: str, key: str) -> Value:
        """That key of all the journal's rows of a phase, in the file's order."""
        return Value([row.get(key) for row in self.journal.get(phase, [])], f"{self.number}:{JOURNAL}#phase={phase}/{key}")


def look_up(node: Any, path: Sequence[str]) -> Any:
    """What stands under `path` in a JSON value; MISSING where nothing does. `*` and `2|5` give lists."""
    for depth, name in enumerate(path):
        if isinstance(node, list) and (name == "*" or "|" in name):
            indices = range(len(node)) if name == "*" else [int(part) for part in name.split("|")]
            return [look_up(node[i], path[depth + 1 :]) for i in indices]
        if isinstance(node, dict):
            node = node.get(name.replace("~1", "/").replace("~0", "~"), MISSING)
        elif isinstance(node, list):
            node = node[int(name)] if name.isdigit() and int(name) < len(node) else MISSING
        else:
            return MISSING
    return node


def escape(name: str) -> str:
    """A key as a part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def sub(a: Value, b: Value) -> Value:
    """a - b; None where one of them is not known."""
    return Value(a.value - b.value if a.known and b.known else None, f"sub({a.source}, {b.source})")


def only(a: Value, b: Value) -> Value:
    """In how many places the marks of `a` have a 1 and those of `b` a 0."""
    return Value(sum(pair == ("1", "0") for pair in zip(a.value, b.value, strict=True)), f"only({a.source}, {b.source})")


def _fold(name: str, apply: Callable[[list[Any]], Any]) -> Callable[[Value], Value]:
    def made(values: Value) -> Value:
        of = values.value if isinstance(values.value, list) else [values.value]
        some = [value for value in of if value is not MISSING and value is not None]
        return Value(apply(some) if some else None, f"{name}({values.source})")

    return made


total, largest, smallest = _fold("sum", sum), _fold("max", max), _fold("min", min)
num = _fold("num", len)


def read_run(path: Path, number: int) -> Run:
    """The run in `path`: its record, which must be whole (ValueError says what is wrong), and what there is beside it."""
    record = read_record(path)
    folder = path if path.is_dir() else path.parent
    file = path / RECORD if path.is_dir() else path
    run = Run(number, folder, record, json.loads(file.read_text(encoding="utf-8")))
    rows_path = folder / run.rows_file
    if not rows_path.is_file():
        run.gaps.append(f"There is no {run.rows_file} beside the record, so nothing can be drawn of the course of this run.")
        return run
    try:
        rows, torn = read_jsonl(rows_path)
        if record.track == "golf":
            _take_metrics(run, rows)
        else:
            _take_journal(run, rows)
    except ValueError as error:
        run.steps, run.validations, run.journal = [], [], {}
        run.gaps.append(f"{run.rows_file} cannot be read, so nothing is drawn of it: {error}")
        return run
    run._line_of = {id(row): place for place, row in enumerate(rows, 1)}
    if torn:
        run.gaps.append(f"The last line of {run.rows_file} was cut short (its writer died) and is left out.")
    return run


def _take_metrics(run: Run, rows: list[dict[str, Any]]) -> None:
    fold = MetricsFold()
    for place, row in enumerate(rows, 1):
        fold.add(row, f"line {place}")
    made = fold.metrics()
    run.steps, run.validations, run.num_lost_steps = made.steps, made.validations, made.num_lost_steps


def _take_journal(run: Run, rows: list[dict[str, Any]]) -> None:
    for place, row in enumerate(rows, 1):
        if "journal" in row:
            continue
        if not isinstance(row.get("phase"), str) or not all(_is_number(row.get(key)) for key in ("index", "reward", "seconds")):
            raise ValueError(f"line {place} lacks its phase, index, reward or seconds; restore the file from a copy")
        run.journal.setdefault(row["phase"], []).append(row)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
