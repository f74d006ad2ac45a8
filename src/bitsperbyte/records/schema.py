"""What a run leaves behind: record.json, version 1.

Units stand in the keys. A part that was not measured is None (null), never 0; a crashed run stays a record. Fields that
this version does not know are kept when a record is read and written again.
"""

import math
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from bitsperbyte.metric.bpb import Score
from bitsperbyte.stats.paired import mcnemar_exact, wilson

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
        _check_score(self, f"the score {self.label!r}")
        return self

    @property
    def evaluation_key(self) -> tuple[str | None, int, int | None, str, bool]:
        """(split_sha256, window, stride, documents, drop_tail): what two scores must share to be compared."""
        return self.split_sha256, self.window, self.stride, self.documents, self.drop_tail


def _check_score(part: Any, what: str) -> None:
    score = Score(part.nats, part.num_bytes, part.num_tokens)
    for name in ("bpb", "nats_per_token", "bytes_per_token"):
        stated, true = getattr(part, name), getattr(score, name)
        if abs(stated - true) > _RELATIVE_TOLERANCE * abs(true):
            raise ValueError(
                f"{what} states {name} {stated!r}, and its {part.nats!r} nats over "
                f"{part.num_bytes} bytes and {part.num_tokens} tokens give {true!r}: it was edited or damaged"
            )


# -- randopt ----------------------------------------------------------------------------------------------------------


def _require(stated: float, true: float, what: str) -> None:
    """ValueError unless a figure is what the figures beside it give."""
    if not math.isclose(stated, true, rel_tol=_RELATIVE_TOLERANCE, abs_tol=1e-12):
        raise ValueError(f"{what} is stated as {stated!r}, and the figures beside it give {true!r}: it was edited or damaged")


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
            _require(getattr(self, name), value, f"the {name} of {self.num_correct} right answers to {self.num} questions")
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


def _kind_of_result(value: Any) -> str:
    if isinstance(value, AccuracyPart | LossPart):
        return "accuracy" if isinstance(value, AccuracyPart) else "loss"
    return "loss" if isinstance(value, dict) and "nats" in value else "accuracy"


# of the test set: right answers, or for the likelihood task a loss
Result = Annotated[Annotated[AccuracyPart, Tag("accuracy")] | Annotated[LossPart, Tag("loss")], Discriminator(_kind_of_result)]


class SigmaPart(Part):
    """Train rewards of the members of one sigma; sd and standard error are None for a single one."""

    sigma: float = Field(gt=0)
    num: int = Field(ge=1)
    mean: float
    sd: float | None = Field(None, ge=0)
    standard_error: float | None = Field(None, ge=0)
    share_above_base: float = Field(ge=0, le=1)

    @model_validator(mode="after")
    def figures_agree(self) -> "SigmaPart":
        if self.sd is not None and self.standard_error is not None:
            _require(self.standard_error, self.sd / math.sqrt(self.num), f"the standard error at sigma {self.sigma:g}")
        above = self.share_above_base * self.num
        _require(above, round(above), f"the number of members above the base at sigma {self.sigma:g}")
        return self


class PopulationPart(Part):
    size: int = Field(ge=1)
    sigmas: list[float] = Field(min_length=1)
    seed: int
    per_sigma: list[SigmaPart]
    best_sigma: float

    @model_validator(mode="after")
    def figures_agree(self) -> "PopulationPart":
        _require(sum(part.num for part in self.per_sigma), self.size, "the size of the population")
        best = max(part.mean for part in self.per_sigma)
        stated = [part.mean for part in self.per_sigma if part.sigma == self.best_sigma]
        _require(stated[0] if stated else math.nan, best, f"the mean reward at the best sigma, {self.best_sigma:g},")
        return self


class MemberPart(Part):
    """A member by its rank (1 is the best by train reward); its own result on the test set where it was run there."""

    rank: int = Field(ge=1)
    index: int = Field(ge=0)
    seed: int = Field(ge=0)
    sigma: float = Field(gt=0)
    train_reward: float
    test_accuracy: float | None = None
    test_correct: int | None = None
    num_test: int | None = None

    @model_validator(mode="after")
    def figures_agree(self) -> "MemberPart":
        if None not in (self.test_accuracy, self.test_correct, self.num_test):
            _require(self.test_accuracy, self.test_correct / self.num_test, f"the test accuracy of the member of rank {self.rank}")
        return self


class SelectionPart(Part):
    top_k: int = Field(ge=1)
    members: list[MemberPart]

    @model_validator(mode="after")
    def ranked(self) -> "SelectionPart":
        if [member.rank for member in self.members] != list(range(1, len(self.members) + 1)) or len(self.members) < self.top_k:
            raise ValueError(f"the selected members must be ranked from 1 to {self.top_k} or more, each once")
        rewards = [member.train_reward for member in self.members]
        if rewards != sorted(rewards, reverse=True):
            raise ValueError("the members' ranks do not follow their train rewards: one of them was edited or damaged")
        if len({member.index for member in self.members}) < len(self.members):
            raise ValueError("a member is selected twice")
        return self


class BasePart(Part):
    """The unperturbed model."""

    train_reward: float
    test: Result


class EnsemblePart(Part):
    """The best `k` by train reward: their majority vote, for the likelihood task their mixture."""

    k: int = Field(ge=1)
    test: Result


class ControlPart(Part):
    """A control that ran has its figures, one that did not says why."""

    enabled: bool
    why: str | None = None

    @model_validator(mode="after")
    def says_why(self) -> "ControlPart":
        if not self.enabled and not self.why:
            raise ValueError("a control that is off must say why")
        return self


class RandomPart(ControlPart):
    """Ensembles of `k` members drawn without regard to reward, with mean and range: accuracies of their votes (num_subsets, mean), or
    bpb of their mixtures (num_mixtures, mean_bpb)."""

    enabled: bool = True
    k: int | None = Field(None, ge=1)
    num_subsets: int | None = None
    num_mixtures: int | None = None
    accuracies: list[Annotated[float, Field(ge=0, le=1)]] | None = None
    scores: list[LossPart] | None = None
    mean: float | None = None
    mean_bpb: float | None = None
    low: float | None = None
    high: float | None = None

    @model_validator(mode="after")
    def figures_agree(self) -> "RandomPart":
        if not self.enabled:
            return self
        of_text = self.scores is not None
        draws = [score.bpb for score in self.scores] if of_text else self.accuracies
        num, mean = (self.num_mixtures, self.mean_bpb) if of_text else (self.num_subsets, self.mean)
        if not draws or None in (self.k, num, mean, self.low, self.high):
            raise ValueError("random ensembles must state k, each draw, and their number, mean and range")
        for what, stated, true in (("number", num, len(draws)), ("mean", mean, math.fsum(draws) / len(draws)),
                                   ("lowest", self.low, min(draws)), ("highest", self.high, max(draws))):
            _require(stated, true, f"the {what} of the random ensembles")
        return self


class TestedPart(ControlPart):
    """A control with one result on the test set."""

    test: Result | None = None

    @model_validator(mode="after")
    def has_result(self) -> "TestedPart":
        if self.enabled and self.test is None:
            raise ValueError("a control that ran must state its result on the test set")
        return self


class ControlsPart(Part):
    random_k: RandomPart
    base_majority: TestedPart
    best_single: TestedPart


class ComparisonPart(Part):
    """A minus B over the same questions (difference, of accuracies) or text (difference_bpb), with a paired bootstrap interval (95%).
    Of answers also the questions that only one of the two got right, and the exact McNemar p."""

    a: str
    b: str
    difference: float | None = None
    difference_bpb: float | None = None
    low: float
    high: float
    only_a: int | None = Field(None, ge=0)
    only_b: int | None = Field(None, ge=0)
    p_mcnemar: float | None = Field(None, ge=0, le=1)

    @model_validator(mode="after")
    def figures_agree(self) -> "ComparisonPart":
        if (self.difference is None) == (self.difference_bpb is None) or self.low > self.high:
            raise ValueError(f"{self.a} - {self.b} must state one difference and an interval that ends after it begins")
        if None not in (self.only_a, self.only_b, self.p_mcnemar):
            _require(self.p_mcnemar, mcnemar_exact(self.only_a, self.only_b), f"p of {self.a} - {self.b}")
        return self


def _check_comparisons(comparisons: Sequence[ComparisonPart], results: dict[str, Any]) -> None:
    """Differences must be those of the results that they name; what else they name is not looked at."""
    for row in comparisons:
        sides = [results.get(row.a), results.get(row.b)]
        if None not in sides:
            values = [side.accuracy if isinstance(side, AccuracyPart) else side.bpb for side in sides]
            stated = row.difference_bpb if row.difference is None else row.difference
            _require(stated, values[0] - values[1], f"the difference {row.a} - {row.b}")


class HeldoutPart(Part):
    """Bits per byte of a text that no reward saw: the base, the mixture of the best K, and what a mixture must be held against."""

    enabled: bool = True
    slice_sha256: str | None = None
    context: int | None = None
    base: LossPart | None = None
    mixture: LossPart | None = None
    mean_member: LossPart | None = None
    best_single: LossPart | None = None
    random_mixture: RandomPart | None = None
    differences: list[ComparisonPart] = []

    @model_validator(mode="after")
    def figures_agree(self) -> "HeldoutPart":
        scores = {name: getattr(self, name) for name in ("base", "mixture", "mean_member", "best_single")}
        if len({(score.num_bytes, score.num_tokens) for score in scores.values() if score}) > 1:
            raise ValueError("the held-out scores are of different text: their bytes or tokens differ")
        if self.mixture and self.mean_member and self.mixture.nats > self.mean_member.nats * (1 + _RELATIVE_TOLERANCE):
            raise ValueError("the held-out mixture is worse than its mean member, which no mixture can be: it was edited or damaged")
        _check_comparisons(self.differences, scores)
        return self


class RandOptPart(Part):
    """What a search and its evaluation found. Parts that this version does not check (noise, engine, probes, throughput and others) are
    kept as they are."""

    noise: dict[str, Any] = {}
    task: dict[str, Any]
    engine: dict[str, Any] = {}
    population: PopulationPart
    selection: SelectionPart
    base: BasePart
    ensemble: EnsemblePart
    secondary: list[EnsemblePart] = []
    controls: ControlsPart
    tests: list[ComparisonPart] = []
    spearman: dict[str, Any] | None = None
    verifier: dict[str, Any] | None = None
    truncation: dict[str, Any] = {}
    throughput: dict[str, dict[str, Any]] = {}
    switch: dict[str, Any] = {}
    probes: list[dict[str, Any]] = []
    heldout: HeldoutPart | None = None

    @model_validator(mode="after")
    def figures_agree(self) -> "RandOptPart":
        _require(self.ensemble.k, self.selection.top_k, "the size of the ensemble")
        results = self.results()
        sizes = {(r.num,) if isinstance(r, AccuracyPart) else (r.num_bytes, r.num_tokens) for r in results.values()}
        if len(sizes) > 1:
            raise ValueError("the results on the test set are of different questions or text: their sizes differ")
        _check_comparisons(self.tests, results | {"mixture": self.ensemble.test})
        return self

    def results(self) -> dict[str, AccuracyPart | LossPart]:
        """What was run on the whole test set, by the names that `tests` use."""
        found = {"base": self.base.test, "ensemble": self.ensemble.test, "base_majority": self.controls.base_majority.test,
                 "best_single": self.controls.best_single.test}
        return {name: result for name, result in found.items() if result is not None}


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
    randopt: RandOptPart | None = None
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
