"""What a run leaves behind: record.json, version 2 (migrations.py reads the versions before). The parts of results stand in
score_parts.py and randopt_parts.py; everything that others use of them is importable from here.

Units stand in the keys. A part that was not measured is None (null), never 0; a crashed run stays a record. Fields that
this version does not know are kept when a record is read and written again.
"""

from datetime import datetime
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from bitsperbyte.records.randopt_parts import ItemsPart, RandomPart, RandOptPart
from bitsperbyte.records.score_parts import AccuracyPart, LossPart, Part, PositionPart, PublishedScore, ScoreRow

__all__ = ["SCHEMA_VERSION", "AccuracyPart", "ArtifactPart", "DataPart", "ImportedPart", "ItemsPart", "LossPart", "PositionPart",
           "PublishedScore", "RandOptPart", "RandomPart", "Record", "ScoreRow", "Status", "TrainingPart"]

SCHEMA_VERSION = 2

Status = Literal["finished", "running", "interrupted", "crashed", "diverged", "over_cap", "imported"]


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
    step_ms_mean: float | None = None  # of imported runs, whose logs print no other
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
    """The file that ships. total = code + weights; margin = cap - total, negative when the artifact is over the cap. `code_form` and
    `code_sha256` name the script whose bytes are the code (null in records from before there was one: then a sum over modules)."""

    file: str | None = None
    sha256: str | None = None
    scheme: str | None = None
    codec: str | None = None
    code_bytes: int | None = None
    code_form: str | None = None
    code_sha256: str | None = None
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


class ImportedPart(Part):
    """A run that was not made here: what its files state (`scores`, other `figures`), what the person who imported them said about it
    (`stated`), and what could not be read or contradicts itself (`unread`)."""

    source: str
    files: list[dict[str, Any]] = []
    scores: list[PublishedScore] = []
    figures: dict[str, Any] = {}
    stated: dict[str, Any] = {}
    unread: list[str] = []


class Record(Part):
    """Everything about one run. Build it with keyword arguments; assigning to a field validates it."""

    schema_version: Literal[2] = SCHEMA_VERSION
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
    randopt: RandOptPart | None = None
    imported: ImportedPart | None = None
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
