"""Thinned lines keep their ends and their spikes; axes are not squashed by one of these."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitsperbyte.records.report.thin import limits, thin


@given(st.lists(st.floats(-1e6, 1e6) | st.just(float("nan")), min_size=1, max_size=400), st.integers(1, 20))
@settings(max_examples=80, deadline=None)
def test_every_part_keeps_its_ends_and_extremes(y: list[float], num_bins: int) -> None:
    x = np.arange(len(y), dtype=float)
    xs, ys = thin(x, y, num_bins)
    finite = np.isfinite(y)
    assert len(xs) <= max(4 * num_bins, 0) or finite.sum() <= 4 * num_bins
    assert (np.diff(xs) > 0).all() and all(np.asarray(y)[int(at)] == value for at, value in zip(xs, ys, strict=True))
    if finite.any():
        kept = np.asarray(y)[finite]
        assert (ys.min(), ys.max(), ys[0], ys[-1]) == (kept.min(), kept.max(), kept[0], kept[-1])


def test_a_spike_of_one_step_survives() -> None:
    y = np.ones(100_000)
    y[54_321] = 9.0
    xs, ys = thin(np.arange(100_000), y, 300)
    assert 54_321 in xs and ys.max() == 9.0 and len(xs) <= 1_200


def test_points_at_one_place_are_one_part() -> None:
    xs, ys = thin(np.zeros(50), np.arange(50.0), 2)
    assert ys.tolist() == [0.0, 49.0]


def test_the_axis_is_made_for_the_course_and_not_for_the_start() -> None:
    x = np.arange(1000)
    loss = 2 + 5 * np.exp(-x / 5.0) + 0.01 * np.sin(x)
    made = limits([(x, loss)])
    assert made is not None and made.low < loss.min() and made.high < 3.0
    assert made.above(loss)[0] and not made.above(loss)[200:].any()
    loss[600] = 50.0
    again = limits([(x, loss)])
    assert again is not None and again.high < 3.0 and again.above(loss)[600], "one spike does not squash the rest"


@pytest.mark.parametrize("y", [[], [float("nan")], [float("inf"), float("nan")]])
def test_nothing_finite_has_no_axis(y: list[float]) -> None:
    assert limits([(range(len(y)), y)]) is None


@pytest.mark.parametrize("y", [[3.0], [3.0, 3.0], [0.0, 0.0, 0.0]])
def test_a_flat_line_lies_inside_its_axis(y: list[float]) -> None:
    made = limits([(range(len(y)), y)])
    assert made is not None and made.low < y[0] < made.high
