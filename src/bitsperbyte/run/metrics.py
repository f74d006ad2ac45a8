"""metrics.jsonl of a golf run: its rows, those that a resume superseded left out.

The file only grows. A step row holds `step` and `loss`, a validation row `step` and `val_loss`; a resume row holds `event: resume` and
`from_step`, and supersedes the step rows after that step. `step_ms` is null where it is not known (imported logs print a few steps only).
"""

from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

from bitsperbyte.run.folder import read_jsonl

_ADVICE = "restore the file from a copy, or start a new run"


@dataclass(frozen=True)
class Metrics:
    """metrics.jsonl with superseded rows left out."""

    steps: list[dict[str, Any]]  # one row for each step that counts, in order
    validations: list[dict[str, Any]]
    num_lost_steps: int  # trained, then lost to a kill and trained again
    num_resumes: int
    last_elapsed_s: float  # budget used when the last row was written, whether that row counts or not
    last_step: int  # the step that the last attempt had reached


class MetricsFold:
    """The rows that count after each row of the file, in the file's order."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.validations: list[dict[str, Any]] = []
        self.num_lost_steps = self.num_resumes = 0
        self.last_elapsed_s = 0.0

    def add(self, row: dict[str, Any], where: str) -> None:
        """Take one more row; ValueError, naming `where` it stands, for one that lacks its numbers."""
        _check(row, where)
        self.last_elapsed_s = max(self.last_elapsed_s, float(row.get("elapsed_s", 0.0)))
        if row.get("event") == "resume":
            self.num_resumes += 1
            num_before = len(self.steps)
            self.steps = [r for r in self.steps if r["step"] <= row["from_step"]]
            self.num_lost_steps += num_before - len(self.steps)
            self.validations = [r for r in self.validations if r["step"] < row["from_step"]]  # the one at that step is made again
        elif "val_loss" in row:
            self.validations.append(row)
        else:
            self.steps.append(row)

    def metrics(self) -> Metrics:
        return Metrics(self.steps, self.validations, self.num_lost_steps, self.num_resumes, self.last_elapsed_s,
                       self.steps[-1]["step"] if self.steps else 0)


def read_metrics(path: Path) -> Metrics:
    """Read metrics.jsonl; an absent file is an empty run. A torn last line (the process died writing it) is left out."""
    fold = MetricsFold()
    try:
        rows = read_jsonl(path)[0] if path.exists() else []
    except ValueError as error:
        raise ValueError(f"{error}; {_ADVICE}") from error
    for number, row in enumerate(rows, 1):
        fold.add(row, f"{path}:{number}")
    return fold.metrics()


def _check(row: dict[str, Any], where: str) -> None:
    if row.get("event") == "resume":
        needed = ("from_step", "elapsed_s")
    else:
        needed = ("step", "elapsed_s", "val_loss") if "val_loss" in row else ("step", "elapsed_s", "loss")
    for key in needed:
        if isinstance(row.get(key), bool) or not isinstance(row.get(key), (int, float)):
            raise ValueError(f"{where}: the row has no number {key!r}, so it is damaged; {_ADVICE}")
    if needed[-1] == "loss" and not isinstance(row.get("step_ms", "absent"), (int, float, NoneType)):
        raise ValueError(f"{where}: step_ms is {row.get('step_ms', 'absent')!r}, so the row is damaged; {_ADVICE}")
