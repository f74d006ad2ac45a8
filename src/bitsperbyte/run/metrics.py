"""metrics.jsonl of a golf run: its rows, those that a resume superseded left out.

The file only grows. A step row holds `step` and `loss`, a validation row `step` and `val_loss`; a resume row holds `event: resume` and
`from_step`, and supersedes the step rows after that step. `step_ms` is null where it is not known (imported logs print a few steps only).
"""

from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

from bitsperbyte.run.folder import read_jsonl


@dataclass(frozen=True)
class Metrics:
    """metrics.jsonl with superseded rows left out."""

    steps: list[dict[str, Any]]  # one row for each step that counts, in order
    validations: list[dict[str, Any]]
    num_lost_steps: int  # trained, then lost to a kill and trained again
    num_resumes: int
    last_elapsed_s: float  # budget used when the last row was written, whether that row counts or not
    last_step: int  # the step that the last attempt had reached


def read_metrics(path: Path) -> Metrics:
    """Read metrics.jsonl; an absent file is an empty run. A torn last line (the process died writing it) is left out."""
    rows = _read_rows(path) if path.exists() else []
    steps: list[dict[str, Any]] = []
    validations: list[dict[str, Any]] = []
    num_lost, num_resumes, last_elapsed_s = 0, 0, 0.0
    for row in rows:
        last_elapsed_s = max(last_elapsed_s, float(row.get("elapsed_s", 0.0)))
        if row.get("event") == "resume":
            num_resumes += 1
            num_lost += sum(r["step"] > row["from_step"] for r in steps)
            steps = [r for r in steps if r["step"] <= row["from_step"]]
            validations = [r for r in validations if r["step"] < row["from_step"]]  # the one at that step is made again
        elif "val_loss" in row:
            validations.append(row)
        elif "loss" in row:
            steps.append(row)
    return Metrics(steps, validations, num_lost, num_resumes, last_elapsed_s, steps[-1]["step"] if steps else 0)


def _read_rows(path: Path) -> list[dict[str, Any]]:
    advice = "restore the file from a copy, or start a new run"
    try:
        rows = read_jsonl(path)[0]
    except ValueError as error:
        raise ValueError(f"{error}; {advice}") from error
    for number, row in enumerate(rows, 1):
        if row.get("event") == "resume":
            needed = ("from_step", "elapsed_s")
        else:
            needed = ("step", "elapsed_s", "val_loss") if "val_loss" in row else ("step", "elapsed_s", "loss")
        for key in needed:
            if isinstance(row.get(key), bool) or not isinstance(row.get(key), (int, float)):
                raise ValueError(f"{path}:{number}: the row has no number {key!r}, so it is damaged; {advice}")
        if not isinstance(row.get("step_ms", 0), (int, float, NoneType)):
            raise ValueError(f"{path}:{number}: step_ms is {row['step_ms']!r}, so the row is damaged; {advice}")
    return rows
