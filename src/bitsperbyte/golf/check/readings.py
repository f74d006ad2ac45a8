"""What the checks ask of a parsed train log: its scores, its times, its sizes."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal

from bitsperbyte.run.train_log import TrainLog

COARSE_MS = 3_000.0  # half of the tenth of a minute to which some logs round their times
WORK = re.compile(r"gptq|hessian|calibrat|self-?gen|quantiz\w* .*\bsearch|post_?qat|post_?train", re.IGNORECASE)
SECONDS = re.compile(r"\d+(?:\.\d+)?\s?(?:s|sec|seconds|ms)\b")


@dataclass(frozen=True)
class Scored:
    """One line's loss (nats a token) and bits per byte, with the digits of the log; None for the one that it lacks. `is_final`: of the
    packed model, as read back."""

    name: str
    loss: Decimal | None
    bpb: Decimal | None
    is_final: bool


@dataclass(frozen=True)
class Timed:
    """The training time after a step. `rounding_ms`: what the log's digits leave open."""

    step: int
    train_ms: float
    average_ms: float | None
    rounding_ms: float = 0.5


def scores_of(log: TrainLog) -> list[Scored]:
    """Every score, those of the packed model last, each kind in its order."""
    before = [Scored(f"step {v.step:,}", v.val_loss, v.val_bpb, False) for v in log.validations]
    before += [Scored(score.name, score.val_loss, score.val_bpb, False) for score in log.diagnostics]
    return before + [Scored(score.name, score.val_loss, score.val_bpb, True) for score in log.finals]


def last_step(log: TrainLog) -> int | None:
    """The step at which training ended; None where the log does not show that it did."""
    return log.num_steps


def timed_steps(log: TrainLog) -> list[Timed]:
    """Training times by step."""
    rows = [Timed(row.step, row.train_time_ms, row.step_avg_ms, COARSE_MS if row.coarse else 0.5)
            for row in (*log.steps, *log.validations) if row.train_time_ms is not None]
    return sorted(rows, key=lambda row: row.step)


def end_of_training(log: TrainLog) -> Timed | None:
    """The last training time that the log gives: the line of the clock's end, or else the latest of any step."""
    timed = timed_steps(log)
    average = next((row.average_ms for row in reversed(timed) if row.average_ms is not None), None)
    ends = [*timed, *([Timed(log.stopped.step, log.stopped.train_time_ms, average)] if log.stopped else [])]
    exact = [row for row in ends if row.rounding_ms < COARSE_MS] if log.stopped else ends
    return max(exact, key=lambda row: (row.train_ms, row.step), default=None)


def evaluation_s(log: TrainLog) -> float | None:
    """Seconds of the longest evaluation of the packed model; None where none is given."""
    return max((score.eval_time_ms / 1e3 for score in log.finals if score.eval_time_ms is not None), default=None)


def code_sizes(log: TrainLog) -> list[int]:
    """Bytes of code that the log counts: of one script, or of it plain and compressed."""
    return [size.num_bytes for size in log.code]


def weight_sizes(log: TrainLog) -> list[int]:
    return list(log.weight_bytes)


def total_sizes(log: TrainLog) -> list[int]:
    return list(log.total_bytes)


def work_after_training(text: str) -> Iterator[str]:
    """Lines after the clock's end that give seconds of work on the weights, such as a calibration; of those that differ in their numbers
    alone the last."""
    _, stopped, after = text.rpartition("stopping_early:")
    last: dict[str, str] = {}
    for line in after.splitlines()[1:] if stopped else ():
        if WORK.search(line) and SECONDS.search(line) and "val_bpb" not in line and len(line) < 200:
            last[re.sub(r"[\d.]+", "#", line.strip())] = line.strip()
    yield from last.values()
