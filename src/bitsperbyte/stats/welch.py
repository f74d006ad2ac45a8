"""Two sets of independent runs: Welch's test of their means, of a margin between them, and how many runs would decide it.

Numbers in, numbers out. Everything is about mean(a) - mean(b) of independent, roughly normal values whose variances may differ (Welch
1947, Biometrika 34, 28); the degrees of freedom are Satterthwaite's (1946, Biometrics Bulletin 2, 110). With unequal numbers of runs
Welch's p can be several times too small (2 and 5 runs, the two scattering four times as widely: 3.6% where 1% was promised), so then
the verdict also asks for the p of Behrens and Fisher (Fisher 1935, Annals of Eugenics 6, 391), which errs on the other side.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bitsperbyte.stats.intervals import Interval, check_confidence, mean, standard_deviation

MAX_RUNS = 1000  # a side; who needs more needs another question
_NUM_NODES, _NUM_QUANTILES = 400, 64


@dataclass(frozen=True)
class Welch:
    """mean(a) - mean(b) in figures. The test's fields are None where the values have no spread at all: then nothing can be tested.

    p_two_sided: of equal means. p_margin: of mean(a) - mean(b) <= margin, so that a small one says that a exceeds b by more than the
    margin. p_guard: the same after Behrens and Fisher, where the numbers of runs differ; None where they do not.
    """

    num_a: int
    num_b: int
    mean_a: float
    mean_b: float
    sd_a: float
    sd_b: float
    difference: float
    standard_error: float
    margin: float
    df: float | None = None
    interval: Interval | None = None
    t: float | None = None
    p_two_sided: float | None = None
    t_margin: float | None = None
    p_margin: float | None = None
    p_guard: float | None = None

    def exceeds_margin(self, alpha: float) -> bool:
        """Whether it is shown at `alpha` that a exceeds b by more than the margin: by p_margin, and by p_guard where there is one."""
        return self.p_margin is not None and max(self.p_margin, self.p_guard or 0.0) < alpha


def welch(a: Sequence[float], b: Sequence[float], margin: float = 0.0, confidence: float = 0.95) -> Welch:
    """Welch's tests of mean(a) - mean(b), against 0 and against the margin, with the difference's interval.

    ValueError for fewer than two values a side, a value that is not finite, or a margin below 0.
    """
    from scipy.special import stdtr, stdtrit

    check_confidence(confidence)
    if not (math.isfinite(margin) and margin >= 0):
        raise ValueError(f"the margin is {margin}, and must be a finite number of at least 0")
    num_a, num_b, sd_a, sd_b = len(a), len(b), standard_deviation(a), standard_deviation(b)
    difference, error = mean(a) - mean(b), standard_error(sd_a, num_a, sd_b, num_b)
    fixed = {"num_a": num_a, "num_b": num_b, "mean_a": mean(a), "mean_b": mean(b), "sd_a": sd_a, "sd_b": sd_b, "difference": difference,
             "standard_error": error, "margin": margin}
    df = satterthwaite(sd_a, num_a, sd_b, num_b)
    if df is None:
        return Welch(**fixed)
    half = error * float(stdtrit(df, (1 + confidence) / 2))
    t, t_margin = difference / error, (difference - margin) / error
    return Welch(**fixed, df=df, interval=Interval(difference, difference - half, difference + half, confidence, num_a + num_b), t=t,
                 p_two_sided=min(1.0, 2 * float(stdtr(df, -abs(t)))), t_margin=t_margin, p_margin=float(stdtr(df, -t_margin)),
                 p_guard=None if num_a == num_b else behrens_fisher(difference - margin, sd_a, num_a, sd_b, num_b))


def standard_error(sd_a: float, num_a: int, sd_b: float, num_b: int) -> float:
    """Standard error of the difference of two means."""
    return math.hypot(sd_a / math.sqrt(num_a), sd_b / math.sqrt(num_b))


def satterthwaite(sd_a: float, num_a: int, sd_b: float, num_b: int) -> float | None:
    """Degrees of freedom of that standard error, between min(num) - 1 and num_a + num_b - 2; None where neither side has any spread."""
    largest = max(sd_a, sd_b)
    if largest == 0.0:
        return None
    part_a, part_b = (sd_a / largest) ** 2 / num_a, (sd_b / largest) ** 2 / num_b  # scaled: squares of tiny sds would underflow
    return (part_a + part_b) ** 2 / (part_a**2 / (num_a - 1) + part_b**2 / (num_b - 1))


def behrens_fisher(excess: float, sd_a: float, num_a: int, sd_b: float, num_b: int) -> float:
    """One-sided p of a difference of means that is `excess` above its bound: the chance that a weighted difference of two independent t
    variables, of num - 1 degrees of freedom each, reaches it. As an integral over the Beta-distributed share of the first in the pooled
    squares (Tsui and Weerahandi 1989, JASA 84, 602), here over the angle whose squared sine it is. The sds must not both be 0."""
    from scipy.special import betaln, stdtr

    degrees_a, degrees_b = num_a - 1, num_b - 1
    largest = max(sd_a, sd_b)
    squares_a, squares_b = (sd_a / largest) ** 2 * degrees_a / num_a, (sd_b / largest) ** 2 * degrees_b / num_b
    nodes, weights = _gauss_legendre(_NUM_NODES)
    angle = (nodes + 1) * math.pi / 4
    sine, cosine = np.sin(angle), np.cos(angle)
    log_density = (degrees_a - 1) * np.log(sine) + (degrees_b - 1) * np.log(cosine) - betaln(degrees_a / 2, degrees_b / 2)
    pooled = degrees_a + degrees_b
    tails = stdtr(pooled, -excess / largest * np.sqrt(pooled / (squares_a / sine**2 + squares_b / cosine**2)))
    return min(1.0, math.pi / 2 * float((weights * np.exp(log_density)) @ tails))


def power(excess: float, sd_a: float, num_a: int, sd_b: float, num_b: int, alpha: float) -> float:
    """How often Welch's one-sided test at `alpha` fires where the true difference exceeds the margin by `excess` and the sds are the
    true ones. Given the sample's sds the difference is still normal, so this is a mean over their two chi-squared distributions, taken
    over a grid of equally likely values. The sds must not both be 0."""
    from scipy.special import gammaincinv, ndtr, stdtrit

    share = (np.arange(_NUM_QUANTILES) + 0.5) / _NUM_QUANTILES
    largest = max(sd_a, sd_b)

    def squares(sd: float, num: int) -> np.ndarray:  # of the standard error of one side's mean, at each quantile
        return (sd / largest) ** 2 / num * gammaincinv((num - 1) / 2, share) * 2 / (num - 1)

    of_a, of_b = squares(sd_a, num_a)[:, None], squares(sd_b, num_b)[None, :]
    df = (of_a + of_b) ** 2 / (of_a**2 / (num_a - 1) + of_b**2 / (num_b - 1))
    needed = stdtrit(df, 1 - alpha) * np.sqrt(of_a + of_b)
    return float(ndtr((excess / largest - needed) * largest / standard_error(sd_a, num_a, sd_b, num_b)).mean())


@functools.cache
def _gauss_legendre(num: int) -> tuple[np.ndarray, np.ndarray]:
    return np.polynomial.legendre.leggauss(num)


def runs_needed(test: Welch, alpha: float, wanted: float = 0.8) -> int | None:
    """Runs on each side, the present ones included, with which the test of the margin has the `wanted` power, if the observed difference
    and sds are the true ones. None where the observed difference is not above the margin, or MAX_RUNS a side are not enough."""
    excess = test.difference - test.margin
    if excess <= 0 or test.df is None:
        return None

    def enough(num: int) -> bool:
        return power(excess, test.sd_a, num, test.sd_b, num, alpha) >= wanted

    low, high = max(test.num_a, test.num_b), max(MAX_RUNS, test.num_a, test.num_b)  # power grows with the number of runs
    if not enough(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle + 1, high)
    return low
