"""Results in a record, each checked against the figures that it follows from: an edited one is refused."""

import math
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from bitsperbyte.metric.bpb import Score
from bitsperbyte.stats.paired import wilson

RELATIVE_TOLERANCE = 1e-9  # float64 sums printed in full differ by less; an edited figure by more


class Part(BaseModel):
    model_config = ConfigDict(extra="allow", validate_assignment=True)


def require(stated: float, true: float, what: str) -> None:
    """ValueError unless a figure is what the figures beside it give."""
    if not math.isclose(stated, true, rel_tol=RELATIVE_TOLERANCE, abs_tol=1e-12):
        raise ValueError(f"{what} is stated as {stated!r}, and the figures beside it give {true!r}: it was edited or damaged")


class PositionPart(Part):
    """Mean loss of a score's targets by how much context they had: bin i holds those with edges[i] to edges[i + 1] - 1 tokens before them
    in their window, the last bin those with edges[-1] and more. None where a bin is empty."""

    edges: list[int] = Field(min_length=1)
    nats_per_token: list[float | None]
    num_tokens: list[int]

    @model_validator(mode="after")
    def figures_agree(self) -> "PositionPart":
        if not len(self.edges) == len(self.nats_per_token) == len(self.num_tokens) or self.edges != sorted(set(self.edges)):
            raise ValueError("the loss by position needs growing edges, and one loss and one number of tokens for each")
        if any((loss is None) != (num == 0) for loss, num in zip(self.nats_per_token, self.num_tokens, strict=True)):
            raise ValueError("the loss by position must be null exactly where no token was scored")
        return self


class ScoreRow(Part):
    """One score of one text under stated windows. Two rows compare only where `evaluation_key` is equal."""

    label: str
    text: str
    split_sha256: str | None = None
    window: int = Field(ge=1)
    stride: int | None = Field(None, ge=1)
    documents: Literal["across", "isolated"]
    drop_tail: bool = False
    nats: float = Field(ge=0, allow_inf_nan=False)
    num_bytes: int = Field(ge=1)
    num_tokens: int = Field(ge=1)
    bpb: float = Field(allow_inf_nan=False)
    nats_per_token: float = Field(allow_inf_nan=False)
    bytes_per_token: float = Field(allow_inf_nan=False)
    seconds: float | None = None
    per_position: PositionPart | None = None

    @model_validator(mode="after")
    def figures_agree(self) -> "ScoreRow":
        """The derived figures must follow from nats, bytes and tokens: an edited score is refused."""
        _check_score(self, f"the score {self.label!r}")
        if self.per_position:
            bins = [(loss or 0.0, num) for loss, num in zip(self.per_position.nats_per_token, self.per_position.num_tokens, strict=True)]
            require(sum(num for _, num in bins), self.num_tokens, f"the number of tokens by position of the score {self.label!r}")
            require(math.fsum(loss * num for loss, num in bins), self.nats, f"the sum of losses by position of the score {self.label!r}")
        return self

    @property
    def evaluation_key(self) -> tuple[str | None, int, int | None, str, bool]:
        """(split_sha256, window, stride, documents, drop_tail): what two scores must share to be compared."""
        return self.split_sha256, self.window, self.stride, self.documents, self.drop_tail


class PublishedScore(Part):
    """A score as someone else published it, in the digits printed. What its source does not state is None: without a window and a text it
    compares with nothing."""

    label: str
    nats_per_token: float | None = Field(None, ge=0, allow_inf_nan=False)
    bpb: float | None = Field(None, ge=0, allow_inf_nan=False)
    digits: int | None = Field(None, ge=0)
    text: str | None = None
    split_sha256: str | None = None
    window: int | None = Field(None, ge=1)
    stride: int | None = Field(None, ge=1)
    documents: Literal["across", "isolated"] | None = None
    drop_tail: bool | None = None
    num_tokens: int | None = Field(None, ge=1)
    seconds: float | None = None


def _check_score(part: Any, what: str) -> None:
    score = Score(part.nats, part.num_bytes, part.num_tokens)
    for name in ("bpb", "nats_per_token", "bytes_per_token"):
        stated, true = getattr(part, name), getattr(score, name)
        if abs(stated - true) > RELATIVE_TOLERANCE * abs(true):
            raise ValueError(
                f"{what} states {name} {stated!r}, and its {part.nats!r} nats over "
                f"{part.num_bytes} bytes and {part.num_tokens} tokens give {true!r}: it was edited or damaged"
            )


class AccuracyPart(Part):
    """How many of `num` questions were answered right, with Wilson's 95% interval."""

    num_correct: int = Field(ge=0)
    num: int = Field(ge=1)
    accuracy: float
    low: float
    high: float

    @model_validator(mode="after")
    def figures_agree(self) -> "AccuracyPart":
        true = wilson(self.num_correct, self.num)
        for name, value in (("accuracy", true.estimate), ("low", true.low), ("high", true.high)):
            require(getattr(self, name), value, f"the {name} of {self.num_correct} right answers to {self.num} questions")
        return self


class LossPart(Part):
    """The loss of a text: `metric.bpb.Score` with what follows from it."""

    nats: float = Field(ge=0, allow_inf_nan=False)
    num_bytes: int = Field(ge=1)
    num_tokens: int = Field(ge=1)
    bpb: float = Field(allow_inf_nan=False)
    nats_per_token: float = Field(allow_inf_nan=False)
    bytes_per_token: float = Field(allow_inf_nan=False)

    @model_validator(mode="after")
    def figures_agree(self) -> "LossPart":
        _check_score(self, "a score")
        return self
