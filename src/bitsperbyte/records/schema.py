"""What a run leaves behind: record.json, version 1.

Units stand in the keys. A part that was not measured is None (null), never 0; a crashed run stays a record. Fields that
this version does not know are kept when a record is read and written again.
"""

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from bitsperbyte.metric.bpb import Score

SCHEMA_VERSION = 1
_RELATIVE_TOLERANCE = 1e-9  # float64 sums printed in full differ by less; an edited figure by more

Status = Literal["finished", "running", "interrupted", "crashed", "diverged", "over_cap"]


class Part(BaseModel):
    model_config = ConfigDict(extra="allow", validate_assignment=True)


class DataPart(Part):
    """Where the text came from, and the hashes that say which text it was."""

    source: str | None = None
    train_sha256: str | None = None
    val_sha256: str | None = None
    tokenizer_sha256: str | None = None
    tokenizer_name: str | None = None
    vocab_size: int | None = None


class TrainingPart(Part):
    """What training did and took. `charged_lost_s`: budget seconds of steps that a kill lost, trained again since."""

    num_steps: int | None = None
    num_tokens: int | None = None
    batch_tokens: int | None = None
    num_parameters: int | None = None
    step_ms_p50: float | None = None
    step_ms_p95: float | None = None
    train_s: float | None = None
    budget_s: float | None = None
    charged_lost_s: float | None = None
    lost_steps: int | None = None
    num_resumes: int | None = None
    peak_memory_bytes: int | None = None
    final_train_loss: float | None = None
    warmdown: str | None = None


class ArtifactPart(Part):
    """The file that ships. total = code + weights; margin = cap - total, negative when the artifact is over the cap."""

    file: str | None = None
    sha256: str | None = None
    scheme: str | None = None
    codec: str | None = None
    code_bytes: int | None = None
    weight_bytes: int | None = None
    total_bytes: int | None = None
    cap_bytes: int | None = None
    margin_bytes: int | None = None
    payload_bytes: int | None = None
    bits_per_weight: float | None = None

    @model_validator(mode="after")
    def sums_agree(self) -> "ArtifactPart":
        if (
            None not in (self.code_bytes, self.weight_bytes, self.total_bytes)
            and self.code_bytes + self.weight_bytes != self.total_bytes
        ):
            raise ValueError(
                f"total_bytes {self.total_bytes} is not code_bytes {self.code_bytes} + weight_bytes {self.weight_bytes}"
            )
        if (
            None not in (self.cap_bytes, self.total_bytes, self.margin_bytes)
            and self.cap_bytes - self.total_bytes != self.margin_bytes
        ):
            raise ValueError(
                f"margin_bytes {self.margin_bytes} is not cap_bytes {self.cap_bytes} - total_bytes {self.total_bytes}"
            )
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

    @model_validator(mode="after")
    def figures_agree(self) -> "ScoreRow":
        """The derived figures must follow from nats, bytes and tokens: an edited score is refused."""
        score = Score(self.nats, self.num_bytes, self.num_tokens)
        for name in ("bpb", "nats_per_token", "bytes_per_token"):
            stated, true = getattr(self, name), getattr(score, name)
            if abs(stated - true) > _RELATIVE_TOLERANCE * abs(true):
                raise ValueError(
                    f"the score {self.label!r} states {name} {stated!r}, and its {self.nats!r} nats over "
                    f"{self.num_bytes} bytes and {self.num_tokens} tokens give {true!r}: it was edited or damaged"
                )
        return self

    @property
    def evaluation_key(self) -> tuple[str | None, int, int | None, str, bool]:
        """(split_sha256, window, stride, documents, drop_tail): what two scores must share to be compared."""
        return self.split_sha256, self.window, self.stride, self.documents, self.drop_tail


class Record(Part):
    """Everything about one run. Build it with keyword arguments; assigning to a field validates it."""

    schema_version: Literal[1] = SCHEMA_VERSION
    track: Literal["golf", "randopt"]
    name: str = Field(min_length=1)
    status: Status
    created_utc: str
    command: str | None = None
    config: dict[str, Any] = {}
    config_sha256: str | None = None
    provenance: dict[str, Any] = {}
    seed: int | None = None
    data: DataPart = Field(default_factory=DataPart)
    training: TrainingPart = Field(default_factory=TrainingPart)
    artifact: ArtifactPart | None = None
    scores: list[ScoreRow] = []
    phases_s: dict[str, float | None] = {}
    error: str | None = None
    notes: str | None = None

    @field_validator("created_utc")
    @classmethod
    def is_a_time(cls, text: str) -> str:
        if datetime.fromisoformat(text).tzinfo is None:
            raise ValueError(f"created_utc {text!r} needs its zone, e.g. 2026-01-31T12:00:00+00:00")
        return text

    @property
    def date(self) -> str:
        """The day (UTC, YYYY-MM-DD) on which the run began."""
        return self.created_utc[:10]

    def score(self, label: str) -> ScoreRow | None:
        """The first score of that label, if there is one."""
        return next((row for row in self.scores if row.label == label), None)
