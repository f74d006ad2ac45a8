import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats
from scipy.optimize import brentq

from bitsperbyte.stats.paired import (
    mcnemar_exact,
    paired_bootstrap_accuracy,
    spearman,
    standard_error_of_difference,
    wilson,
)

counts = st.integers(1, 400).flatmap(lambda num: st.tuples(st.integers(0, num), st.just(num)))


# -- wilson -----------------------------------------------------------------------------------------------------------


@given(counts, st.sampled_from([0.8, 0.95, 0.99]))
def test_wilson_agrees_with_scipy(count: tuple[int, int], confidence: float) -> None:
    made = wilson(*count, confidence)
    theirs = scipy_stats.binomtest(*count).proportion_ci(confidence, method="wilson")
    assert (made.low, made.high) == (pytest.approx(theirs.low, abs=1e-12), pytest.approx(theirs.high, abs=1e-12))
    assert 0 <= made.low <= made.estimate <= made.high <= 1 and made.estimate == count[0] / count[1]


@pytest.mark.parametrize("count", [(81, 263), (3, 20), (19, 20)])
def test_wilson_ends_are_where_the_score_test_just_rejects(count: tuple[int, int]) -> None:
    """The definition, not the formula: p0 is in the interval where |share - p0| <= z sqrt(p0 (1 - p0) / n)."""
    share, num, z = count[0] / count[1], count[1], 1.959963984540054

    def test(p0: float) -> float:
        return abs(share - p0) - z * math.sqrt(p0 * (1 - p0) / num)

    made = wilson(*count)
    assert made.low == pytest.approx(brentq(test, 1e-9, share), abs=1e-9)
    assert made.high == pytest.approx(brentq(test, share, 1 - 1e-9), abs=1e-9)


def test_wilson_of_published_examples() -> None:
    """Newcombe 1998, Statistics in Medicine 17, 857, table I, method 3."""
    published = {(81, 263): (0.2553, 0.3662), (15, 148): (0.0624, 0.1605), (0, 20): (0.0, 0.1611), (1, 29): (0.0061, 0.1718)}
    for count, ends in published.items():
        made = wilson(*count)
        assert (round(made.low, 4), round(made.high, 4)) == ends


@given(counts)
def test_wilson_mirrors_when_right_and_wrong_change_places(count: tuple[int, int]) -> None:
    made, mirrored = wilson(*count), wilson(count[1] - count[0], count[1])
    assert made.low == pytest.approx(1 - mirrored.high, abs=1e-12) and made.high == pytest.approx(1 - mirrored.low, abs=1e-12)


@pytest.mark.parametrize("count", [(0, 0), (3, 2), (-1, 2)])
def test_wilson_refuses_what_is_no_proportion(count: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="no proportion"):
        wilson(*count)


# -- mcnemar ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("only_a", "only_b"), list(product(range(9), range(9))))
def test_mcnemar_counts_all_outcomes_at_least_as_unequal(only_a: int, only_b: int) -> None:
    num = only_a + only_b
    as_unequal = sum(math.comb(num, k) for k in range(num + 1) if abs(2 * k - num) >= abs(only_a - only_b))
    assert mcnemar_exact(only_a, only_b) == pytest.approx(as_unequal / 2**num, rel=1e-12)
    assert mcnemar_exact(only_a, only_b) == mcnemar_exact(only_b, only_a)


def test_mcnemar_falls_as_the_sides_part() -> None:
    values = [mcnemar_exact(10 + k, 10 - k) for k in range(11)]
    assert values[0] == 1.0 and all(a > b for a, b in zip(values, values[1:], strict=False))
    assert values[10] == pytest.approx(2 * 0.5**20)


def test_mcnemar_refuses_negative_counts() -> None:
    with pytest.raises(ValueError, match="below 0"):
        mcnemar_exact(-1, 2)


# -- paired bootstrap -------------------------------------------------------------------------------------------------


def test_bootstrap_of_right_and_wrong_has_the_paired_standard_error() -> None:
    """Against the normal interval of the mean difference: d +- 1.96 sd(d) / sqrt(n)."""
    rng = np.random.default_rng(5)
    a = rng.random(600) < 0.6
    b = np.where(rng.random(600) < 0.8, a, rng.random(600) < 0.5)
    made = paired_bootstrap_accuracy(a, b)
    difference = a.astype(float) - b
    half = 1.96 * difference.std(ddof=1) / math.sqrt(600)
    assert made.estimate == pytest.approx(a.mean() - b.mean(), abs=1e-12) and made.num == 600
    assert made.high - made.low == pytest.approx(2 * half, rel=0.05)
    unpaired = paired_bootstrap_accuracy(a, rng.permutation(b))
    assert unpaired.high - unpaired.low > 1.3 * (made.high - made.low)


def test_bootstrap_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for trial in range(200):
        a, b = rng.random((2, 200)) < np.array([[0.7], [0.6]])
        made = paired_bootstrap_accuracy(a, b, num_resamples=400, seed=trial)
        hits += made.low <= 0.1 <= made.high
    assert 178 <= hits <= 199  # 190 expected, sd 3


@settings(max_examples=30)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=40))
def test_bootstrap_changes_sign_with_the_sides_and_repeats(pairs: list[tuple[bool, bool]]) -> None:
    a, b = zip(*pairs, strict=True)
    made, swapped = paired_bootstrap_accuracy(a, b, num_resamples=200), paired_bootstrap_accuracy(b, a, num_resamples=200)
    assert (made.estimate, made.low, made.high) == pytest.approx((-swapped.estimate, -swapped.high, -swapped.low), abs=1e-12)
    assert made == paired_bootstrap_accuracy(a, b, num_resamples=200)
    assert -1 <= made.low <= made.high <= 1


def test_bootstrap_takes_shares_of_several() -> None:
    made = paired_bootstrap_accuracy([1, 0, 1, 1], [0.5, 0.25, 0.75, 1.0])
    assert made.estimate == pytest.approx(0.75 - 0.625)


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [([1, 0], [1], "same ones"), ([1], [1], "at least two"), ([1, 2], [0, 1], r"a\[1\] is 2.0"),
     ([1, 0], [math.nan, 1], r"b\[0\] is nan"), ([[1, 0]], [[1, 0]], "dimensions")],
)
def test_bootstrap_refuses_what_is_not_answers_to_the_same_items(a: list, b: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        paired_bootstrap_accuracy(a, b)


# -- spearman ---------------------------------------------------------------------------------------------------------

pairs = st.lists(st.tuples(st.integers(-5, 5), st.integers(-5, 5)), min_size=5, max_size=30)  # many ties


@given(pairs)
def test_rho_agrees_with_scipy_with_ties(points: list[tuple[int, int]]) -> None:
    x, y = zip(*points, strict=True)
    made = spearman(x, y)
    if len(set(x)) == 1 or len(set(y)) == 1:
        assert made.rho is made.low is made.high is None and "constant" in made.why
        return
    assert made.rho == pytest.approx(scipy_stats.spearmanr(x, y).statistic, abs=1e-12)
    if made.low is not None:
        assert -1 <= made.low < made.rho < made.high <= 1


@given(st.lists(st.floats(-10, 10), min_size=5, max_size=20, unique=True), st.randoms())
def test_rho_without_ties_is_the_textbook_formula_and_only_ranks_count(x: list[float], random) -> None:
    y = list(range(len(x)))
    random.shuffle(y)
    order = sorted(x)
    num = len(x)
    squares = sum((order.index(a) - b) ** 2 for a, b in zip(x, y, strict=True))
    made = spearman(x, y)
    assert made.rho == pytest.approx(1 - 6 * squares / (num * (num * num - 1)), abs=1e-12)
    cubed = spearman(np.arange(num)[np.argsort(np.argsort(x))] ** 3, y)
    assert cubed.rho == pytest.approx(made.rho, abs=1e-12)


def test_interval_covers_independence_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    intervals = [spearman(*rng.normal(size=(2, 32))) for _ in range(1000)]
    assert 925 <= sum(c.low <= 0 <= c.high for c in intervals) <= 972  # 950 expected, sd 7


def test_interval_of_a_known_case() -> None:
    """z half-width 1.959964 sqrt(1.06 / 29) = 0.374716 at 32 pairs."""
    rng = np.random.default_rng(2)
    made = spearman(*rng.normal(size=(2, 32)))
    assert math.atanh(made.high) - math.atanh(made.rho) == pytest.approx(0.374716, abs=1e-6)
    assert math.atanh(made.rho) - math.atanh(made.low) == pytest.approx(0.374716, abs=1e-6)


@pytest.mark.parametrize(
    ("x", "y", "why"),
    [([1.0], [2.0], "at least 2 pairs"), ([1, 1, 1, 1, 1], [1, 2, 3, 4, 5], "constant"), ([1, 2, 3], [1, 3, 2], "from 3 pairs"),
     ([1, 2, 3, 4, 5, 6], [2, 3, 5, 7, 8, 9], "perfect agreement")],
)
def test_what_cannot_be_said_is_none_with_a_reason(x: list, y: list, why: str) -> None:
    made = spearman(x, y)
    assert made.low is None and made.high is None and why in made.why and made.num == len(x)


@pytest.mark.parametrize(("x", "y"), [([1, 2], [1, 2, 3]), ([1, math.nan, 2], [1, 2, 3])])
def test_spearman_refuses_what_is_not_pairs_of_numbers(x: list, y: list) -> None:
    with pytest.raises(ValueError, match="a correlation"):
        spearman(x, y)


# -- difference of independent means ----------------------------------------------------------------------------------


def test_standard_error_of_difference_is_welchs() -> None:
    rng = np.random.default_rng(3)
    a, b = rng.normal(0, 1, 12), rng.normal(1, 3, 30)
    statistic = scipy_stats.ttest_ind(a, b, equal_var=False).statistic
    assert (a.mean() - b.mean()) / standard_error_of_difference(list(a), list(b)) == pytest.approx(statistic, rel=1e-12)
    with pytest.raises(ValueError, match="at least 2"):
        standard_error_of_difference([1.0], [1.0, 2.0])
