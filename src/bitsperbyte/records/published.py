"""What one published run says, before it becomes a record."""

from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from bitsperbyte.metric.bpb import MAX_BYTES_PER_TOKEN, MIN_BYTES_PER_TOKEN, bits


@dataclass
class Published:
    """Fields of a Record as plain data; `metrics` are rows of metrics.jsonl."""

    track: str
    created_utc: str | None = None
    seed: int | None = None
    provenance: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    artifact: dict[str, Any] | None = None
    scores: list[dict[str, Any]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)
    metrics: list[dict[str, Any]] = field(default_factory=list)

    @property
    def says_something(self) -> bool:
        """Whether there is a result or a curve in it: a text without any is no run's log."""
        return bool(self.scores or self.metrics or self.artifact or self.figures.get("results"))


def digits_of(value: Decimal) -> int:
    """Decimals that a number is printed with."""
    exponent = value.as_tuple().exponent
    return max(0, -exponent) if isinstance(exponent, int) else 0


def implausible(label: str, loss: Decimal | None, bpb: Decimal | None) -> str | None:
    """A sentence where loss and bits per byte together mean more or fewer bytes a token than any tokenizer has."""
    if not loss or not bpb:
        return None
    per_token = bits(float(loss)) / float(bpb)
    if MIN_BYTES_PER_TOKEN <= per_token <= MAX_BYTES_PER_TOKEN:
        return None
    return (f"{label} states {loss} nats a token and {bpb} bits per byte, which is {per_token:.4g} bytes a token: no tokenizer has so "
            f"{'many' if per_token > 1 else 'few'}, so the bytes are not those of the scored tokens")
