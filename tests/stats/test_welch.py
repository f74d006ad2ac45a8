import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from bitsperbyte.stats.welch import MAX_RUNS, behrens_fisher, power, runs_needed, satterthwaite, welch

runs = st.lists(st.floats(0, 10).map(lambda v: round(v, 6)), min_size=2, max_size=7)
ALPHA = 0.01


@pytest.mark.filterwarnings("ignore:Precision loss:RuntimeWarning")  # scipy's, of values that are nearly equal
@given(runs, runs, st.floats(0, 2), st.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_every_number_is_scipys(a: list[float], b: list[float], margin: float, confidence: float) -> None:
    made = welch(a, b, margin, confidence)
    assert (made.num_a, made.num_b, made.margin) == (len(a), len(b), margin)
    assert made.difference == pytest.approx(np.mean(a) - np.mean(b), abs=1e-12)
    assert (made.sd_a, made.sd_b) == (pytest.approx(np.std(a, ddof=1)), pytest.approx(np.std(b, ddof=1)))
    if np.std(a) < 1e-9 and np.std(b) < 1e-9:
        return
    two_sided = scipy_stats.ttest_ind(a, b, equal_var=False)
    assert (made.t, made.df) == (pytest.approx(two_sided.statistic, rel=1e-9, abs=1e-9), pytest.approx(two_sided.df, rel=1e-9))
    assert made.p_two_sided == pytest.approx(two_sided.pvalue, rel=1e-8)
    interval = two_sided.confidence_interval(confidence)
    assert (made.interval.low, made.interval.high) == (pytest.approx(interval.low, abs=1e-8), pytest.approx(interval.high, abs=1e-8))
    above = scipy_stats.ttest_ind(np.array(a) - margin, b, equal_var=False, alternative="greater")
    assert made.p_margin == pytest.approx(above.pvalue, rel=1e-7, abs=1e-12)
    assert min(len(a), len(b)) - 1 <= made.df * (1 + 1e-12) and made.df <= (len(a) + len(b) - 2) * (1 + 1e-12)


def test_welch_worked_by_hand() -> None:
    # a: mean 4, variance 4, so 4/3 of the mean; b: mean 1, variance 2, so 2/2 = 1. t = 3 / sqrt(7/3); df = (7/3)^2 / ((16/9)/2 + 1/1)
    made = welch([2.0, 4.0, 6.0], [0.0, 2.0], margin=1.0)
    assert made.standard_error == pytest.approx(math.sqrt(7 / 3)) and made.df == pytest.approx((49 / 9) / (17 / 9))
    assert made.t == pytest.approx(3 / math.sqrt(7 / 3)) and made.t_margin == pytest.approx(2 / math.sqrt(7 / 3))


def test_with_one_degree_of_freedom_the_tail_is_cauchys() -> None:
    # the second side has no spread, so all rests on two values: sd sqrt(2), standard error 1, one degree of freedom
    made = welch([4.0, 6.0], [2.0, 2.0, 2.0], margin=1.0)
    assert made.df == pytest.approx(1.0) and made.t_margin == pytest.approx(2.0)
    assert made.p_margin == pytest.approx(0.5 - math.atan(2.0) / math.pi, rel=1e-12)
    assert made.p_guard == pytest.approx(made.p_margin, rel=1e-6)


def test_the_sides_may_be_swapped_and_scaled() -> None:
    a, b = [1.0, 1.5, 1.2], [0.4, 0.9, 0.1, 0.6]
    made, swapped, tiny = welch(a, b, 0.2), welch(b, a), welch([v * 1e-100 for v in a], [v * 1e-100 for v in b], 0.2e-100)
    assert swapped.difference == -made.difference and swapped.p_two_sided == pytest.approx(made.p_two_sided)
    assert (tiny.t, tiny.df, tiny.p_guard) == (pytest.approx(made.t), pytest.approx(made.df), pytest.approx(made.p_guard))


def test_without_any_spread_there_is_no_test() -> None:
    made = welch([1.0, 1.0], [0.5, 0.5], 0.1)
    assert made.difference == 0.5 and {made.t, made.p_two_sided, made.p_margin, made.p_guard, made.interval, made.df} == {None}
    assert not made.exceeds_margin(ALPHA) and runs_needed(made, ALPHA) is None and satterthwaite(0.0, 2, 0.0, 2) is None


@pytest.mark.parametrize(("a", "b", "margin", "expected"), [
    ([1.0], [1.0, 2.0], 0.0, "at least 2 values"), ([1.0, 2.0], [1.0], 0.0, "at least 2 values"),
    ([1.0, math.nan], [1.0, 2.0], 0.0, "not a finite"), ([1.0, 2.0], [1.0, 3.0], -0.1, "margin"),
    ([1.0, 2.0], [1.0, 3.0], math.inf, "margin")])
def test_what_cannot_be_tested_is_refused(a: list[float], b: list[float], margin: float, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        welch(a, b, margin)


@pytest.mark.parametrize(("num_a", "num_b", "sd_a", "excess"), [(2, 2, 1.0, 3.0), (3, 5, 0.25, 1.5), (5, 2, 4.0, 8.0), (4, 4, 1.0, -0.5)])
def test_behrens_fisher_is_the_tail_of_two_weighted_t_variables(num_a: int, num_b: int, sd_a: float, excess: float) -> None:
    rng, num = np.random.default_rng(5), 400_000
    drawn = rng.standard_t(num_a - 1, num) * sd_a / math.sqrt(num_a) - rng.standard_t(num_b - 1, num) / math.sqrt(num_b)
    share = float((drawn >= excess).mean())
    assert behrens_fisher(excess, sd_a, num_a, 1.0, num_b) == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / num))


@pytest.mark.parametrize("sd_a", [0.25, 1.0, 4.0])
@pytest.mark.parametrize("num_b", [2, 3, 4, 5])
@pytest.mark.parametrize("num_a", [2, 3, 4, 5])
def test_the_margin_test_fires_about_as_often_as_it_promises(num_a: int, num_b: int, sd_a: float) -> None:
    """2,000 pairs whose true difference is the margin exactly. The bound is what a rate of alpha exceeds once in 1,000 such tests, for a
    rate that may be a third above alpha, which is where Satterthwaite's approximation lies for equal numbers (docs/records.md)."""
    rng, num = np.random.default_rng(1000 * num_a + 10 * num_b + int(4 * sd_a)), 2000
    a, b = rng.normal(3.0 + 0.005, 0.002 * sd_a, (num, num_a)), rng.normal(3.0, 0.002, (num, num_b))
    fired = sum(welch(x, y, 0.005).exceeds_margin(ALPHA) for x, y in zip(a.tolist(), b.tolist(), strict=True))
    assert fired <= scipy_stats.binom.ppf(0.999, num, ALPHA * 4 / 3)
    if num_a == num_b >= 3:
        assert fired >= scipy_stats.binom.ppf(0.001, num, ALPHA / 2)  # nor does it sleep


def test_welch_alone_would_fire_too_often_with_unequal_numbers_and_the_guard_stops_it() -> None:
    rng, num = np.random.default_rng(7), 2000
    a, b = rng.normal(3.005, 0.0005, (num, 5)), rng.normal(3.0, 0.002, (num, 2))
    tests = [welch(x, y, 0.005) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    alone, guarded = (sum(test.p_margin < ALPHA for test in tests), sum(test.exceeds_margin(ALPHA) for test in tests))
    assert alone > scipy_stats.binom.ppf(0.9999, num, 1.5 * ALPHA) and guarded <= scipy_stats.binom.ppf(0.999, num, ALPHA)


def test_the_interval_covers_as_often_as_it_promises() -> None:
    rng, num = np.random.default_rng(11), 2000
    a, b = rng.normal(2.0, 1.0, (num, 3)), rng.normal(1.5, 2.0, (num, 4))
    tests = [welch(x, y) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    covered = sum(test.interval.low <= 0.5 <= test.interval.high for test in tests)
    assert scipy_stats.binom.ppf(0.001, num, 0.93) <= covered <= scipy_stats.binom.ppf(0.999, num, 0.97)


@pytest.mark.parametrize(("num", "sd_a", "excess"), [(3, 1.0, 2.5), (4, 0.5, 1.5), (8, 2.0, 2.0), (20, 1.0, 0.9)])
def test_power_is_how_often_the_test_fires(num: int, sd_a: float, excess: float) -> None:
    rng, num_pairs = np.random.default_rng(num), 20_000
    a, b = rng.normal(excess, sd_a, (num_pairs, num)), rng.normal(0.0, 1.0, (num_pairs, num))
    fired = (scipy_stats.ttest_ind(a, b, axis=1, equal_var=False, alternative="greater").pvalue < ALPHA).mean()
    assert power(excess, sd_a, num, 1.0, num, ALPHA) == pytest.approx(fired, abs=0.015)


def test_the_runs_needed_are_the_fewest_with_that_power() -> None:
    made = welch([3.010, 3.014, 3.006], [3.0, 3.003, 2.997], 0.005)
    assert not made.exceeds_margin(ALPHA)
    needed = runs_needed(made, ALPHA)
    excess = made.difference - made.margin
    assert needed > 3 and power(excess, made.sd_a, needed, made.sd_b, needed, ALPHA) >= 0.8
    assert power(excess, made.sd_a, needed - 1, made.sd_b, needed - 1, ALPHA) < 0.8
    assert runs_needed(welch([3.010, 3.014, 3.006], [3.0, 3.003, 2.997, 3.0, 3.001, 2.999, 3.0, 3.0, 3.0, 3.0, 3.0], 0.005), ALPHA) >= 11
    assert runs_needed(welch([3.004, 3.005], [3.0, 3.001], 0.005), ALPHA) is None  # below the margin: more runs do not decide it
    assert runs_needed(welch([1.0, 3.0], [0.9, 2.9], 0.0999), ALPHA) is None and MAX_RUNS == 1000
