"""Is one set of answers really better than another: accuracies, paired tests over the same items, rank correlation.

Numbers in, numbers out. Two systems that answer the same items share the items' difficulty, so every comparison here is paired except
`standard_error_of_difference`, which is of independent samples.
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bitsperbyte.stats.intervals import Interval, check_confidence, resampled_sums, standard_error

_FIELLER = 1.06  # variance of Fisher's z of a rank correlation times n - 3 (Fieller, Hartley and Pearson 1957, Biometrika 44, 470)


@dataclass(frozen=True)
class Correlation:
    """Spearman's rho over `num` pairs between `low` and `high` at `confidence`. What cannot be said is None, and `why` says why."""

    rho: float | None
    low: float | None
    high: float | None
    num: int
    confidence: float
    why: str | None = None


def wilson(num_correct: int, num: int, confidence: float = 0.95) -> Interval:
    """Wilson's score interval of a proportion (Wilson 1927, JASA 22, 209; no continuity correction).

    ValueError for no trials, or more successes than trials.
    """
    from scipy.special import ndtri

    check_confidence(confidence)
    num_correct, num = operator.index(num_correct), operator.index(num)
    if num < 1 or not 0 <= num_correct <= num:
        raise ValueError(f"{num_correct} of {num} is no proportion: give at least one item, and from 0 to all of them correct")
    z = float(ndtri((1 + confidence) / 2))
    share = num_correct / num
    scale = 1 + z * z / num
    centre = (share + z * z / (2 * num)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / num + z * z / (4 * num * num))
    # the ends are exactly 0 and 1 in theory where none or all are correct; rounding must not push the estimate out of its interval
    low = 0.0 if num_correct == 0 else max(0.0, centre - half)
    high = 1.0 if num_correct == num else min(1.0, centre + half)
    return Interval(share, low, high, confidence, num)


def mcnemar_exact(only_a: int, only_b: int) -> float:
    """Two-sided p of the hypothesis that A and B are right equally often, from the items that only one of them got right.

    Exact: under it, `only_a` is Binomial(only_a + only_b, 1/2) (McNemar 1947, Psychometrika 12, 153). 1.0 where they never differ.
    """
    from scipy.stats import binomtest

    only_a, only_b = operator.index(only_a), operator.index(only_b)
    if only_a < 0 or only_b < 0:
        raise ValueError(f"{only_a} and {only_b} are numbers of items, and neither can be below 0")
    if only_a + only_b == 0:
        return 1.0
    return float(binomtest(only_a, only_a + only_b).pvalue)


def paired_bootstrap_accuracy(
    a: Sequence[float] | np.ndarray,
    b: Sequence[float] | np.ndarray,
    *,
    num_resamples: int = 10_000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Accuracy of A minus accuracy of B over the same items, with a percentile bootstrap interval over items.

    One entry an item, in the same order: right or wrong (booleans), or a share in 0..1 where a side is the mean of several. Each
    resample draws as many items with replacement, the same for both. ValueError for unequal lengths or fewer than two items.
    """
    check_confidence(confidence)
    left, right = _shares("a", a), _shares("b", b)
    if len(left) != len(right):
        raise ValueError(f"a has {len(left)} items and b has {len(right)}: both sides must have answered the same ones")
    if len(left) < 2:
        raise ValueError(f"a bootstrap over items needs at least two of them, and there are {len(left)}")
    difference = left - right
    means = resampled_sums(difference[:, None], num_resamples, seed)[:, 0] / len(difference)
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Interval(math.fsum(difference) / len(difference), float(low), float(high), confidence, len(difference))


def spearman(x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray, confidence: float = 0.95) -> Correlation:
    """Spearman's rank correlation (Pearson's of the mid-ranks, so ties count as ties) with an interval by Fisher's z.

    z = atanh(rho) is taken as normal with standard error sqrt(1.06 / (n - 3)). No interval is given for fewer than 5 pairs or for
    perfect agreement, and no rho where a side is constant. ValueError for unequal lengths or a number that is not finite.
    """
    from scipy.special import ndtri
    from scipy.stats import rankdata

    check_confidence(confidence)
    left, right = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if left.ndim != 1 or left.shape != right.shape:
        raise ValueError(f"a correlation is over pairs, and the two sides have the shapes {left.shape} and {right.shape}")
    if not (np.isfinite(left).all() and np.isfinite(right).all()):
        raise ValueError("a correlation over values that are not finite means nothing: leave those pairs out and say so")
    num = len(left)
    if num < 2:
        return Correlation(None, None, None, num, confidence, f"a correlation needs at least 2 pairs, and there are {num}")
    if (left == left[0]).all() or (right == right[0]).all():
        return Correlation(None, None, None, num, confidence, "one side is constant, so its ranks say nothing")
    ranks = [rankdata(side) - (num + 1) / 2 for side in (left, right)]  # mean rank is (n + 1) / 2, with ties too
    rho = float(ranks[0] @ ranks[1] / math.sqrt((ranks[0] @ ranks[0]) * (ranks[1] @ ranks[1])))
    rho = max(-1.0, min(1.0, rho))
    if num < 5:
        return Correlation(rho, None, None, num, confidence, f"no interval from {num} pairs")
    if abs(rho) > 1 - 1e-12:
        return Correlation(rho, None, None, num, confidence, "Fisher's z gives no interval for perfect agreement")
    half = float(ndtri((1 + confidence) / 2)) * math.sqrt(_FIELLER / (num - 3))
    return Correlation(rho, math.tanh(math.atanh(rho) - half), math.tanh(math.atanh(rho) + half), num, confidence)


def standard_error_of_difference(a: Sequence[float], b: Sequence[float]) -> float:
    """Standard error of mean(a) - mean(b) for independent samples of their own variances; ValueError for fewer than two in either."""
    return math.hypot(standard_error(a), standard_error(b))


def _shares(name: str, values: Sequence[float] | np.ndarray) -> np.ndarray:
    column = np.asarray(values, np.float64)
    if column.ndim != 1:
        raise ValueError(f"{name} has {column.ndim} dimensions, and one number an item belongs there")
    wrong = np.flatnonzero(~((column >= 0) & (column <= 1)))
    if len(wrong):
        raise ValueError(f"{name}[{wrong[0]}] is {column[wrong[0]]}, and must lie in 0..1: the share of right answers to that item")
    return column
