"""The controls beside a RandOpt gain: ensembles of members that nobody selected, and samples of the base that nobody perturbed.

A vote gains by itself, and the best of many looks good by luck; an ensemble has shown something only where it beats both.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bitsperbyte.randopt.vote import Ballots, Outcome, ensemble
from bitsperbyte.stats.intervals import mean, standard_deviation


@dataclass(frozen=True, eq=False)
class RandomEnsembles:
    """Votes of S random subsets of the control pool: their outcomes over N items, in the order drawn."""

    outcomes: list[Outcome]

    @property
    def accuracies(self) -> list[float]:
        return [outcome.accuracy for outcome in self.outcomes]

    @property
    def mean_correct(self) -> np.ndarray:
        """Share of the subsets that got each item right, float64 (N,)."""
        return np.mean([outcome.correct for outcome in self.outcomes], axis=0, dtype=np.float64)

    @property
    def median(self) -> Outcome:
        """The first subset of median accuracy; of an even number the better of the two in the middle, so that whoever beats it beats
        more than half of them."""
        median = sorted(self.accuracies)[len(self.outcomes) // 2]
        return self.outcomes[self.accuracies.index(median)]

    def share_at_least(self, accuracy: float) -> float:
        """The share of subsets whose accuracy is at least `accuracy`."""
        return sum(a >= accuracy for a in self.accuracies) / len(self.outcomes)

    def describe(self) -> dict:
        """Mean, sample standard deviation (None for one subset) and range of the accuracies, for the record."""
        values = self.accuracies
        return {"accuracies": values, "mean": mean(values), "sd": standard_deviation(values) if len(values) > 1 else None,
                "low": min(values), "high": max(values)}


def random_ensembles(ballots: Ballots, subsets: Sequence[Sequence[int]]) -> RandomEnsembles:
    """Let each of `subsets` (rows of `ballots`) vote. Their members have no rank: ties go to the one named first in its subset."""
    assert subsets
    return RandomEnsembles([ensemble(ballots, subset) for subset in subsets])


def too_few_subsets(pool_size: int, k: int, num_wanted: int) -> str | None:
    """What to say where the pool is too small for `num_wanted` different K-subsets, so that their spread means less; else None."""
    different = math.comb(pool_size, k)
    if different == 1:
        return f"the pool has {pool_size} members and an ensemble takes {k}: only one can be drawn, so there is no spread"
    if different < num_wanted:
        return f"a pool of {pool_size} has only {different} different subsets of {k}, and each of them was taken"
    return None


def sample_seed(seed: int, sample: int) -> int:
    """The decoding seed of sample `sample` of the base model in a run of `seed`: 63 bits of SHA-256, prefix-stable in their number."""
    return int.from_bytes(hashlib.sha256(f"base sample {sample} of search seed {seed}".encode()).digest()[:8], "little") >> 1
