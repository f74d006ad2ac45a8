"""journal.jsonl: one synced line for each model that was run over one set of questions or documents.

The first line says what the rows belong to (model, task, noise); each other line is one row, and (phase, index) is its key. A run
that was killed at any moment finds here what is done: no row is evaluated twice, none is lost, and a last line that was cut short is
dropped. Each row carries a hash of what the record is made of, so that a row which was changed on the disk is named and not counted.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from bitsperbyte.metric.bpb import Score
from bitsperbyte.run.folder import JsonlWriter, check_same_config, read_jsonl, sync_directory

SCHEMA_VERSION = 1
PHASES = ("base_train", "search", "base_test", "test", "base_sample", "heldout")


@dataclass(frozen=True)
class Row:
    """One model over one set of items, in the items' order.

    index: the member's place in the population, -1 for the base, the sample's number in base_sample; seed and sigma None for the base.
    reward: mean of `rewards`. `correct`, `votes`: by question (None did not vote). `nats`, `num_bytes`: by document, of tasks and texts
    that are scored; `num_tokens` counts generated or scored tokens. Seconds: `switch_s` of the weights, `generate_s` of generating or
    scoring, `grade_s` of grading, `seconds` what the row added to its phase's wall time.
    """

    phase: str
    index: int
    seed: int | None
    sigma: float | None
    reward: float
    rewards: list[float]
    correct: list[bool]
    votes: list[str | None]
    nats: list[float]
    num_bytes: list[int]
    num_prompts: int
    num_prompt_tokens: int
    num_tokens: int
    num_truncated: int
    switch_s: float
    generate_s: float
    grade_s: float
    seconds: float


_TYPES = {field.name: field.type for field in dataclasses.fields(Row)}
_TIMES = ("switch_s", "generate_s", "grade_s", "seconds")
HASH = "sha256"  # of a row's line, but for its times: two equal runs have equal lines but for those


class Journal:
    """The rows so far, and the file they go to. Use `Journal.open(...)`, as a context manager."""

    def __init__(self, path: Path, writer: JsonlWriter, rows: dict[tuple[str, int], Row], dropped_torn_bytes: int) -> None:
        self.path, self.dropped_torn_bytes = path, dropped_torn_bytes
        self._writer, self._rows = writer, rows
        self.on_append: Callable[[Row], None] = lambda row: None  # sees each new row when the disk has it

    @classmethod
    def open(cls, path: Path | str, identity: dict[str, Any]) -> "Journal":
        """Read what there is, or begin a journal of `identity`.

        Raises ValueError, naming the line, for a journal that was damaged, holds a row twice, or belongs to another model, task or
        noise than `identity`.
        """
        path = Path(path)
        writer = JsonlWriter(path)
        try:
            lines, _ = read_jsonl(path)
            if not lines:
                writer.append({"journal": SCHEMA_VERSION, "identity": identity})
                sync_directory(path.parent)  # the file's name survives a power cut, as its rows do
                return cls(path, writer, {}, writer.dropped_torn_bytes)
            _check_header(path, lines[0], identity)
            rows: dict[tuple[str, int], Row] = {}
            for number, line in enumerate(lines[1:], 2):
                row = _read_row(path, number, line)
                key = row.phase, row.index
                if key in rows:
                    raise ValueError(f"{path} line {number} holds {row.phase} {row.index} a second time: the file was changed after it "
                                     "was written; restore it, or start a new run in another --run-dir")
                rows[key] = row
            return cls(path, writer, rows, writer.dropped_torn_bytes)
        except BaseException:
            writer.close()
            raise

    def get(self, phase: str, index: int) -> Row | None:
        return self._rows.get((phase, index))

    def rows(self, phase: str) -> list[Row]:
        """The phase's rows by index."""
        return [self._rows[key] for key in sorted(self._rows) if key[0] == phase]

    def append(self, row: Row) -> None:
        """Add one row; return when the disk has it. OSError with a sentence where the disk refuses: nothing of the row is then left."""
        key = row.phase, row.index
        assert row.phase in PHASES and key not in self._rows, key
        line = dataclasses.asdict(row)
        self._writer.append({**line, HASH: row_hash(line)})
        self._rows[key] = row
        self.on_append(row)

    def close(self) -> None:
        self._writer.close()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def row_hash(line: dict[str, Any]) -> str:
    """16 hex digits over everything of a row but its times."""
    text = json.dumps({key: value for key, value in line.items() if key not in (*_TIMES, HASH)}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _check_header(path: Path, line: dict[str, Any], identity: dict[str, Any]) -> None:
    if line.get("journal") != SCHEMA_VERSION or not isinstance(line.get("identity"), dict):
        raise ValueError(f"{path} does not begin with the header of a journal of version {SCHEMA_VERSION}: it was damaged, or another "
                         "version of bitsperbyte wrote it")
    check_same_config(line["identity"], identity)


def _read_row(path: Path, number: int, line: dict[str, Any]) -> Row:
    stated = line.get(HASH)
    try:
        row = Row(**{key: value for key, value in line.items() if key != HASH})
    except TypeError as error:
        raise ValueError(_damaged(path, number, "its keys are not those of a row")) from error
    for name, kind in _TYPES.items():
        if not _fits(getattr(row, name), kind):
            raise ValueError(_damaged(path, number, f"{name} is {str(getattr(row, name))[:40]!r}"))
    if row.phase not in PHASES:
        raise ValueError(_damaged(path, number, f"there is no phase {row.phase!r}"))
    if what := _contradiction(row):
        raise ValueError(_damaged(path, number, what))
    if HASH in line and stated != row_hash(line):  # journals of before it was kept lack it
        raise ValueError(_damaged(path, number, f"its content does not have the {HASH} that it states"))
    return row


def _contradiction(row: Row) -> str | None:
    """What cannot be in a row of right types."""
    answered, scored = (row.rewards, row.correct, row.votes), (row.nats, row.num_bytes)
    full, empty = (scored, answered) if row.nats else (answered, scored)
    if any(empty) or any(len(values) != row.num_prompts for values in full) or row.num_prompts < 1:
        return f"its lists are not each of {row.num_prompts} items"
    for name in ("num_prompt_tokens", "num_tokens", "num_truncated", *_TIMES):
        if getattr(row, name) < 0:
            return f"{name} is {getattr(row, name)}"
    if min(*row.nats, *row.num_bytes, 0, 0) < 0:
        return "it holds less than no nats or bytes"
    if row.num_truncated > row.num_prompts:
        return f"{row.num_truncated} of {row.num_prompts} answers are cut short"
    if (row.seed is None) != (row.sigma is None) or row.index < -1 or (row.index == -1 and row.seed is not None):
        return f"index {row.index} cannot have seed {row.seed} and sigma {row.sigma}"
    if row.rewards and not math.isclose(row.reward, math.fsum(row.rewards) / len(row.rewards), rel_tol=1e-9, abs_tol=1e-12):
        return f"the reward {row.reward} is not the mean of its {len(row.rewards)} rewards"
    if row.nats and not (sum(row.num_bytes) and math.isclose(
            -row.reward, Score(math.fsum(row.nats), sum(row.num_bytes), row.num_tokens).bpb, rel_tol=1e-9, abs_tol=1e-12)):
        return f"the reward {row.reward} is not minus the bits per byte of its {len(row.nats)} documents"
    return None


def _damaged(path: Path, number: int, what: str) -> str:
    return f"{path} line {number}: {what}, so it was damaged after it was written; restore the file, or delete the line: what it " \
           "held is then evaluated again"


def _fits(value: Any, kind: Any) -> bool:
    """Whether a JSON value is of a field's type."""
    checks = {"str": lambda v: isinstance(v, str), "int": lambda v: isinstance(v, int) and not isinstance(v, bool) and abs(v) < 2**64,
              "bool": lambda v: isinstance(v, bool), "None": lambda v: v is None,
              "float": lambda v: isinstance(v, float | int) and not isinstance(v, bool) and abs(v) < math.inf}
    name = kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))
    name = str(kind) if "[" in str(kind) or "|" in str(kind) else name
    if name.startswith("list["):
        parts = name[5:-1].split(" | ")
        return isinstance(value, list) and all(any(checks[p](v) for p in parts) for v in value)
    return any(checks[p](value) for p in name.split(" | "))
