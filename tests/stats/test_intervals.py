import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from bitsperbyte.stats.intervals import (
    mean,
    paired_bootstrap,
    standard_deviation,
    standard_error,
    summarize,
    t_interval,
)

values = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=20)


@given(values)
def test_moments_agree_with_the_standard_library(xs: list[float]) -> None:
    assert mean(xs) == pytest.approx(statistics.fmean(xs), rel=1e-12, abs=1e-9)
    assert standard_deviation(xs) == pytest.approx(statistics.stdev(xs), rel=1e-9, abs=1e-9)
    assert standard_error(xs) == pytest.approx(statistics.stdev(xs) / math.sqrt(len(xs)), rel=1e-9, abs=1e-9)


@given(values, st.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_t_interval_agrees_with_scipy(xs: list[float], confidence: float) -> None:
    made = t_interval(xs, confidence)
    if standard_error(xs) > 1e-6:
        low, high = scipy_stats.t.interval(confidence, len(xs) - 1, loc=np.mean(xs), scale=scipy_stats.sem(xs))
        assert (made.low, made.high) == (
            pytest.approx(low, rel=1e-6, abs=1e-6),
            pytest.approx(high, rel=1e-6, abs=1e-6),
        )
    assert made.low <= made.estimate <= made.high and made.num == len(xs)


def test_t_interval_of_three_known_runs() -> None:
    made = t_interval([1.0, 2.0, 3.0])  # t(2, 0.975) = 4.302653, sd 1
    assert made.high - made.estimate == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)


def test_summary_gathers_the_single_figures() -> None:
    made = summarize([1.0, 2.0, 4.0])
    assert (made.num, made.mean, made.sd) == (3, pytest.approx(7 / 3), pytest.approx(statistics.stdev([1, 2, 4])))
    assert made.standard_error == pytest.approx(made.sd / math.sqrt(3)) and made.interval == t_interval([1.0, 2.0, 4.0])


@pytest.mark.parametrize("xs", [[], [1.0], [1.0, math.nan], [1.0, math.inf]])
def test_too_few_or_not_finite_values_are_refused(xs: list[float]) -> None:
    for function in (t_interval, summarize):
        with pytest.raises(ValueError):
            function(xs)


def corpus(num: int, gap: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    num_bytes = rng.integers(200, 5000, num)
    difficulty = rng.normal(0.8, 0.2, num).clip(0.1)
    a = num_bytes * difficulty
    return a, num_bytes * (difficulty + gap + rng.normal(0, 0.01, num)).clip(0.01), num_bytes


def test_estimate_is_the_difference_of_the_two_corpus_scores() -> None:
    a, b, num_bytes = corpus(50, 0.02)
    made = paired_bootstrap(a, num_bytes, b, num_bytes, num_resamples=500)
    assert made.estimate == pytest.approx((a.sum() - b.sum()) / num_bytes.sum() * math.log2(math.e), rel=1e-12)
    assert made.low < made.estimate < made.high < 0 and made.num == 50


def test_pairing_removes_what_documents_share() -> None:
    a, b, num_bytes = corpus(100, 0.02)
    paired = paired_bootstrap(a, num_bytes, b, num_bytes, num_resamples=2000)
    order = np.random.default_rng(1).permutation(100)
    unpaired = paired_bootstrap(a, num_bytes, b[order], num_bytes[order], num_resamples=2000)
    assert unpaired.estimate == pytest.approx(paired.estimate)
    assert (unpaired.high - unpaired.low) > 4 * (paired.high - paired.low)


def test_interval_agrees_with_scipys_bootstrap() -> None:
    a, b, num_bytes = corpus(60, 0.01, seed=3)

    def difference(i: np.ndarray, axis: int = -1) -> np.ndarray:
        i = i.astype(int)
        return (a[i].sum(axis) / num_bytes[i].sum(axis) - b[i].sum(axis) / num_bytes[i].sum(axis)) * math.log2(math.e)

    theirs = scipy_stats.bootstrap(
        (np.arange(60),), difference, n_resamples=5000, method="percentile", rng=np.random.default_rng(5)
    ).confidence_interval
    ours = paired_bootstrap(a, num_bytes, b, num_bytes, num_resamples=5000, seed=9)
    width = theirs.high - theirs.low
    assert abs(ours.low - theirs.low) < 0.1 * width and abs(ours.high - theirs.high) < 0.1 * width


def test_coverage_under_no_difference() -> None:
    covered = 0
    for seed in range(60):
        a, b, num_bytes = corpus(40, 0.0, seed)
        made = paired_bootstrap(a, num_bytes, b, num_bytes, num_resamples=400, seed=seed)
        covered += made.low <= 0 <= made.high
    assert 49 <= covered <= 60  # 57 expected of 60; below 49 has a chance of about 1 in 10,000


@given(st.integers(2, 30), st.integers(0, 5))
def test_a_model_against_itself_differs_by_exactly_nothing(num: int, seed: int) -> None:
    a, _, num_bytes = corpus(num, 0.0, seed)
    made = paired_bootstrap(a, num_bytes, a, num_bytes, num_resamples=100)
    assert (made.estimate, made.low, made.high) == (0.0, 0.0, 0.0)


def test_the_seed_decides_and_swapping_sides_mirrors() -> None:
    a, b, num_bytes = corpus(30, 0.02)
    first = paired_bootstrap(a, num_bytes, b, num_bytes, num_resamples=300, seed=4)
    assert first == paired_bootstrap(a, num_bytes, b, num_bytes, num_resamples=300, seed=4)
    assert first != paired_bootstrap(a, num_bytes, b, num_bytes, num_resamples=300, seed=5)
    mirrored = paired_bootstrap(b, num_bytes, a, num_bytes, num_resamples=300, seed=4)
    assert (mirrored.low, mirrored.high) == (pytest.approx(-first.high), pytest.approx(-first.low))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nats_a": [1.0]}, "one entry for each document"),
        ({"nats_b": [1.0, math.nan]}, r"nats_b\[1\] is nan"),
        ({"nats_a": [-1.0, 2.0]}, r"nats_a\[0\] is -1.0"),
        ({"bytes_b": [0, 3]}, r"bytes_b\[0\] is 0.0"),
        ({"bytes_a": [[1, 2]]}, "2 dimensions"),
        ({"confidence": 95}, "between 0 and 1"),
        ({"num_resamples": 10}, "fewer than 100"),
        ({"nats_a": [1.0], "nats_b": [1.0], "bytes_a": [1], "bytes_b": [1]}, "at least two"),
    ],
)
def test_arrays_that_cannot_be_compared_are_refused(change: dict, message: str) -> None:
    inputs = {"nats_a": [1.0, 2.0], "bytes_a": [2, 3], "nats_b": [1.0, 2.0], "bytes_b": [2, 3], **change}
    with pytest.raises(ValueError, match=message):
        paired_bootstrap(**inputs)
