"""How sure a number is: intervals for the mean of several runs, and for a difference of two bits per byte.

Numbers in, numbers out. One training run's noise comes from its seed, one evaluation's from its documents; the two
functions below answer these two questions, and neither answers the other's.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bitsperbyte.metric.bpb import bits

_BLOCK_DRAWS = 500_000  # document draws held at once, 40 bytes each: an index and four columns


@dataclass(frozen=True)
class Interval:
    """An estimate between `low` and `high` at `confidence`, from `num` runs or documents."""

    estimate: float
    low: float
    high: float
    confidence: float
    num: int


@dataclass(frozen=True)
class Summary:
    """Several runs in figures: sample standard deviation, standard error of the mean, t interval at 95%."""

    num: int
    mean: float
    sd: float
    standard_error: float
    interval: Interval


def summarize(values: Sequence[float]) -> Summary:
    """Mean and spread of runs that differ in their seed alone; ValueError for fewer than two."""
    return Summary(len(values), mean(values), standard_deviation(values), standard_error(values), t_interval(values))


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean; ValueError for no values."""
    return math.fsum(_finite(values, 1)) / len(values)


def standard_deviation(values: Sequence[float]) -> float:
    """Sample standard deviation (divisor n - 1); ValueError for fewer than two values."""
    centre = mean(_finite(values, 2))
    return math.sqrt(math.fsum((v - centre) ** 2 for v in values) / (len(values) - 1))


def standard_error(values: Sequence[float]) -> float:
    """Standard error of the mean; ValueError for fewer than two values."""
    return standard_deviation(values) / math.sqrt(len(values))


def t_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Student's t interval of the mean of runs that differ in their seed alone; ValueError for fewer than two.

    It holds for means of independent, roughly normal values, as losses over seeds are.
    """
    from scipy.special import stdtrit

    check_confidence(confidence)
    half = standard_error(values) * float(stdtrit(len(values) - 1, (1 + confidence) / 2))
    centre = mean(values)
    return Interval(centre, centre - half, centre + half, confidence, len(values))


def paired_bootstrap(
    nats_a: Sequence[float] | np.ndarray,
    bytes_a: Sequence[int] | np.ndarray,
    nats_b: Sequence[float] | np.ndarray,
    bytes_b: Sequence[int] | np.ndarray,
    *,
    num_resamples: int = 10_000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Interval:
    """bpb of A minus bpb of B over the same documents, with a percentile bootstrap interval.

    The arrays have one entry a document, in the same order for A and B. Each resample draws as many documents with
    replacement, the same ones for both, and takes the bpb of their sums (Efron and Tibshirani, An Introduction to the
    Bootstrap, 1993, chapter 13, over pairs). The same seed gives the same interval.

    Raises ValueError for arrays of unequal length, fewer than two documents, negative or non-finite nats, or a document
    that has no bytes on either side (drop such documents from both).
    """
    check_confidence(confidence)
    column_nats_a, column_nats_b = _column("nats_a", nats_a, 0.0), _column("nats_b", nats_b, 0.0)
    column_bytes_a, column_bytes_b = _column("bytes_a", bytes_a, 1.0), _column("bytes_b", bytes_b, 1.0)
    lengths = {len(c) for c in (column_nats_a, column_bytes_a, column_nats_b, column_bytes_b)}
    if len(lengths) > 1:
        raise ValueError(
            f"the four arrays must have one entry for each document, and they have {sorted(lengths)} entries"
        )
    columns = np.stack([column_nats_a, column_bytes_a, column_nats_b, column_bytes_b], axis=1)
    num = len(columns)
    if num < 2:
        raise ValueError(f"a bootstrap over documents needs at least two of them, and there are {num}")
    sums = resampled_sums(columns, num_resamples, seed)
    differences = sums[:, 0] / sums[:, 1] - sums[:, 2] / sums[:, 3]  # nats per byte
    tail = (1 - confidence) / 2
    low, high = np.quantile(differences, [tail, 1 - tail])
    total = columns.sum(axis=0)
    estimate = bits(float(total[0] / total[1] - total[2] / total[3]))
    return Interval(estimate, bits(float(low)), bits(float(high)), confidence, num)


def resampled_sums(columns: np.ndarray, num_resamples: int, seed: int) -> np.ndarray:
    """Column sums (num_resamples, C) of bootstrap resamples of the rows of `columns` (N, C): each draws N rows with replacement.

    Equal seeds draw equal rows, so that several comparisons over the same items resample the same ones.
    """
    if num_resamples < 100:
        raise ValueError(f"num_resamples is {num_resamples}: a percentile of fewer than 100 resamples means nothing")
    num = len(columns)
    rng = np.random.default_rng(seed)
    block = max(1, _BLOCK_DRAWS // num)
    sums = []
    for begin in range(0, num_resamples, block):
        draws = rng.integers(num, size=(min(block, num_resamples - begin), num))
        sums.append(columns[draws].sum(axis=1))
    return np.concatenate(sums)


def check_confidence(confidence: float) -> None:
    """ValueError unless `confidence` lies between 0 and 1."""
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}, and must lie between 0 and 1, e.g. 0.95")


def _column(name: str, values: Sequence[float] | np.ndarray, least: float) -> np.ndarray:
    column = np.asarray(values, dtype=np.float64)
    if column.ndim != 1:
        raise ValueError(f"{name} has {column.ndim} dimensions, and one number a document belongs there")
    wrong = np.flatnonzero(~(np.isfinite(column) & (column >= least)))
    if len(wrong):
        raise ValueError(f"{name}[{wrong[0]}] is {column[wrong[0]]}, and must be a finite number of at least {least:g}")
    return column


def _finite(values: Sequence[float], least: int) -> Sequence[float]:
    if len(values) < least:
        raise ValueError(f"this needs at least {least} value{'s' if least > 1 else ''}, and there are {len(values)}")
    for value in values:
        if not math.isfinite(value):
            raise ValueError(f"{value} among the values is not a finite number: leave that run out and say so")
    return values
