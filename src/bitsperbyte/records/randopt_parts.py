"""What a record says of a RandOpt run: population, selection, ensemble, controls, tests and held-out text, checked against each other."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag, model_validator

from bitsperbyte.records.score_parts import RELATIVE_TOLERANCE, AccuracyPart, LossPart, Part, require
from bitsperbyte.stats.paired import mcnemar_exact


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
            require(self.standard_error, self.sd / math.sqrt(self.num), f"the standard error at sigma {self.sigma:g}")
        above = self.share_above_base * self.num
        require(above, round(above), f"the number of members above the base at sigma {self.sigma:g}")
        return self


class PopulationPart(Part):
    size: int = Field(ge=1)
    sigmas: list[float] = Field(min_length=1)
    seed: int
    per_sigma: list[SigmaPart]
    best_sigma: float

    @model_validator(mode="after")
    def figures_agree(self) -> "PopulationPart":
        require(sum(part.num for part in self.per_sigma), self.size, "the size of the population")
        best = max(part.mean for part in self.per_sigma)
        stated = [part.mean for part in self.per_sigma if part.sigma == self.best_sigma]
        require(stated[0] if stated else math.nan, best, f"the mean reward at the best sigma, {self.best_sigma:g},")
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
            require(self.test_accuracy, self.test_correct / self.num_test, f"the test accuracy of the member of rank {self.rank}")
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
            require(stated, true, f"the {what} of the random ensembles")
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
            require(self.p_mcnemar, mcnemar_exact(self.only_a, self.only_b), f"p of {self.a} - {self.b}")
        return self


def _check_comparisons(comparisons: Sequence[ComparisonPart], results: dict[str, Any]) -> None:
    """Differences must be those of the results that they name; what else they name is not looked at."""
    for row in comparisons:
        sides = [results.get(row.a), results.get(row.b)]
        if None not in sides:
            values = [side.accuracy if isinstance(side, AccuracyPart) else side.bpb for side in sides]
            stated = row.difference_bpb if row.difference is None else row.difference
            require(stated, values[0] - values[1], f"the difference {row.a} - {row.b}")


class ItemsPart(Part):
    """Who got which item of the test set, by the names that `tests` use, in the items' order: of questions one character each, 1 where
    the answer was right; of documents the nats of each, and their bytes. `ids` names the items. Two runs compare question by question
    through it."""

    ids: list[str] | None = None
    correct: dict[str, str] = {}
    nats: dict[str, list[float]] = {}
    num_bytes: list[int] = []

    @model_validator(mode="after")
    def figures_agree(self) -> "ItemsPart":
        if any(set(marks) - {"0", "1"} for marks in self.correct.values()):
            raise ValueError("the answers by question must be strings of 0 and 1")
        if len({len(marks) for marks in self.correct.values()}) > 1 or {len(row) for row in self.nats.values()} - {len(self.num_bytes)}:
            raise ValueError("the results by item must have one entry for each item")
        if self.ids is not None and {len(row) for row in (*self.correct.values(), *self.nats.values())} - {len(self.ids)}:
            raise ValueError("the results by item must have one id for each item")
        return self


def _check_items(items: ItemsPart | None, results: Mapping[str, AccuracyPart | LossPart | None], what: str) -> None:
    """The results by item must add up to the results."""
    if items is None:
        return
    for name, marks in items.correct.items():
        if (result := results.get(name)) is not None:
            require(len(marks), result.num, f"the number of questions of {name}")
            require(marks.count("1"), result.num_correct, f"the number of right answers of {name}")
    for name, nats in items.nats.items():
        if (result := results.get(name)) is not None:
            require(sum(items.num_bytes), result.num_bytes, f"the bytes of the {what} documents")
            require(math.fsum(nats), result.nats, f"the sum of nats by document of {name}")


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
    items: ItemsPart | None = None

    @model_validator(mode="after")
    def figures_agree(self) -> "HeldoutPart":
        scores = {name: getattr(self, name) for name in ("base", "mixture", "mean_member", "best_single")}
        if len({(score.num_bytes, score.num_tokens) for score in scores.values() if score}) > 1:
            raise ValueError("the held-out scores are of different text: their bytes or tokens differ")
        if self.mixture and self.mean_member and self.mixture.nats > self.mean_member.nats * (1 + RELATIVE_TOLERANCE):
            raise ValueError("the held-out mixture is worse than its mean member, which no mixture can be: it was edited or damaged")
        _check_comparisons(self.differences, scores)
        _check_items(self.items, scores, "held-out")
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
    items: ItemsPart | None = None

    @model_validator(mode="after")
    def figures_agree(self) -> "RandOptPart":
        require(self.ensemble.k, self.selection.top_k, "the size of the ensemble")
        results = self.results()
        sizes = {(r.num,) if isinstance(r, AccuracyPart) else (r.num_bytes, r.num_tokens) for r in results.values()}
        if len(sizes) > 1:
            raise ValueError("the results on the test set are of different questions or text: their sizes differ")
        _check_comparisons(self.tests, results | {"mixture": self.ensemble.test})
        _check_items(self.items, results | {"mixture": self.ensemble.test}, "test")
        return self

    def results(self) -> dict[str, AccuracyPart | LossPart]:
        """What was run on the whole test set, by the names that `tests` use."""
        found = {"base": self.base.test, "ensemble": self.ensemble.test, "base_majority": self.controls.base_majority.test,
                 "best_single": self.controls.best_single.test}
        return {name: result for name, result in found.items() if result is not None}
