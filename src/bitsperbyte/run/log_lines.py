"""The lines of a train log as data, and which of them cannot all be true. Standard library only; train_log.py reads the text."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal

SAME_SCORE = 3e-3  # share by which bytes a token of two lines of one log may differ: strided scores leave out other tokens
_INTERIM = {"step", "iter", "iteration", "epoch", "chunk", "batch", "progress", "running", "best", "target", "previous", "prev", "expected",
            "vs", "mean", "avg", "std", "sota", "delta", "improvement", "window"}  # a score under such a name is not the run's
_FINAL_WINDOW = re.compile(r"sliding.?window|window.?eval")
_BEFORE_PACKING = re.compile(r"pre.?quant|post.?ema|trained_validation|unquantized|^raw\b|pre.?roundtrip", re.IGNORECASE)


@dataclass(frozen=True)
class Step:
    """`coarse`: the time was printed in minutes, so that it is right to 3 s at best."""

    step: int
    iterations: int
    train_loss: Decimal
    train_time_ms: float | None
    step_avg_ms: float | None
    coarse: bool = False


@dataclass(frozen=True)
class Validation:
    step: int
    iterations: int
    val_loss: Decimal
    val_bpb: Decimal | None
    train_time_ms: float | None
    step_avg_ms: float | None
    coarse: bool = False


@dataclass(frozen=True)
class Stop:
    """An early end of training."""

    reason: str
    step: int
    train_time_ms: float


@dataclass(frozen=True)
class Size:
    """Bytes under the name that the log gives them: int8+zlib."""

    num_bytes: int
    packing: str | None = None
    payload_bytes: int | None = None  # of integers and scales before the codec

    @property
    def scheme(self) -> str | None:
        return re.split(r"[+_](?=[^+_]*$)", self.packing)[0] if self.packing else None

    @property
    def codec(self) -> str | None:
        parts = re.split(r"[+_](?=[^+_]*$)", self.packing) if self.packing else []
        return parts[1] if len(parts) == 2 else None


@dataclass(frozen=True)
class Final:
    """A score after training under the log's own name for it. `settings`: what else its line, or one that announces it, says
    (stride, seq_len), as text."""

    name: str
    val_loss: Decimal | None
    val_bpb: Decimal | None
    eval_time_ms: float | None = None
    settings: dict[str, str] = field(default_factory=dict)


def is_before_packing(name: str) -> bool:
    return _BEFORE_PACKING.search(name) is not None


def label_of(text: str) -> tuple[str, dict[str, str]] | None:
    """The name before a score and the numbers beside it (`final_sliding stride:64`); None where it names no score of the whole run."""
    settings: dict[str, str] = {}
    words = text.split()
    while words and (match := re.fullmatch(r"([A-Za-z_]\w*)[:=](\d+(?:\.\d+)?)", words[-1])):
        settings[match[1]] = match[2]
        words.pop()
    name = " ".join(words).rstrip(":")
    if not re.fullmatch(r"[A-Za-z][\w.+-]*(?:[ :][A-Za-z][\w.+-]*)*", name):
        return None
    parts = {re.sub(r"\d+$", "", part) for part in re.split(r"[\W_]+", _FINAL_WINDOW.sub("", name.lower()))}
    return None if parts & _INTERIM or set(settings) & {"step", "epoch", "chunk"} else (name, settings)


def half_unit(value: Decimal) -> Decimal:
    """Half a unit of the last digit: what rounding leaves open."""
    exponent = value.as_tuple().exponent
    return Decimal(1).scaleb(exponent if isinstance(exponent, int) else 0) / 2


def contradictions_of(steps: Sequence[Step], validations: Sequence[Validation], scores: Sequence[Final], stop: Stop | None,
                      num_runs: int) -> Iterator[str]:
    """Sentences on lines that cannot all be true."""
    if num_runs == 1:
        yield from _times(steps, validations)
        last = max((row.step for row in (*steps, *validations)), default=0)
        if stop and stop.step < last:
            yield f"training stopped early at step {stop.step:,}, and step {last:,} is logged"
    yield from ratio_contradictions(validations, scores)
    for rounded in scores:
        for exact in scores:
            if exact.name == rounded.name + "_exact":
                for what, a, b in (("val_loss", rounded.val_loss, exact.val_loss), ("val_bpb", rounded.val_bpb, exact.val_bpb)):
                    if a is not None and b is not None and abs(a - b) > 2 * half_unit(a):
                        yield f"{exact.name} has {what} {b}, and {rounded.name} has {a}"


def _times(steps: Sequence[Step], validations: Sequence[Validation]) -> Iterator[str]:
    rows = sorted((row.step, row.train_time_ms) for row in (*steps, *validations) if row.train_time_ms is not None)
    latest, before = (0, 0.0), (0, 0.0)  # the latest time so far, and that of the steps before this one
    for step, ms in rows:
        if step > latest[0]:
            before = max(before, latest, key=lambda row: row[1])
        if ms < before[1]:
            yield f"the training time falls from {before[1]:.0f} ms at step {before[0]:,} to {ms:.0f} ms at step {step:,}"
            latest = before = (step, ms)  # one wrong time is named once
        else:
            latest = (step, ms)


def ratio_contradictions(validations: Sequence[Validation], scores: Sequence[Final]) -> Iterator[str]:
    """Bits per byte over nats per token is one number for one tokenizer and text: the scores of a log must share it."""
    named = [(f"step {v.step:,}", v.val_loss, v.val_bpb) for v in validations] + [(s.name, s.val_loss, s.val_bpb) for s in scores]
    pairs = [(name, loss, bpb) for name, loss, bpb in named if loss is not None and bpb is not None and loss > 0 and bpb > 0]
    if len(pairs) < 2:
        return
    ratios = sorted(bpb / loss for _, loss, bpb in pairs)
    usual = ratios[len(ratios) // 2]
    for name, loss, bpb in pairs:
        rounding = half_unit(loss) / loss + half_unit(bpb) / bpb
        if abs(bpb / loss / usual - 1) > Decimal(SAME_SCORE) + rounding:
            yield f"val_bpb {bpb} of {name} does not follow from its val_loss {loss} as those of the other lines do"
