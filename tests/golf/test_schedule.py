"""The schedule's properties, and the challenge's rule derived a second time."""

from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bitsperbyte.golf.schedule import Schedule, describe_warmdown, is_finished, lr_scale, momentum_at

budgets = st.floats(1.0, 20_000.0)
steps = st.integers(1, 50_000)
warmdowns = st.one_of(
    st.builds(lambda n: {"warmdown_steps": n}, st.integers(0, 5_000)),
    st.builds(lambda f: {"warmdown_fraction": f}, st.floats(0.0, 1.0)),
)


def challenge_rule(budget_s: float, warmdown_iters: int, step: int, elapsed_s: float) -> Fraction:
    """The rule of the challenge's trainer under a wallclock cap, in milliseconds and exact arithmetic.

    With the mean step time so far, the warmdown takes `warmdown_iters` steps; inside it the rate is the share that
    remains.
    """
    cap_ms, elapsed_ms = Fraction(budget_s) * 1000, Fraction(elapsed_s) * 1000
    warmdown_ms = warmdown_iters * (elapsed_ms / max(step, 1))
    remaining_ms = max(cap_ms - elapsed_ms, Fraction(0))
    if warmdown_iters == 0 or remaining_ms > warmdown_ms:
        return Fraction(1)
    return remaining_ms / max(warmdown_ms, Fraction(1, 10**9))


@given(budget=budgets, iters=st.integers(0, 5_000), step=steps, share=st.floats(1e-6, 1.2))
def test_equals_the_challenges_rule(budget: float, iters: int, step: int, share: float) -> None:
    schedule = Schedule(wallclock_s=budget, max_steps=None, warmdown_steps=iters)
    elapsed = share * budget
    expected = float(challenge_rule(budget, iters, step, elapsed))
    assert lr_scale(schedule, step=step, elapsed_s=elapsed) == pytest.approx(expected, abs=1e-9)


@given(
    budget=budgets,
    warmdown=warmdowns,
    max_steps=st.none() | steps,
    step=st.integers(0, 50_000),
    shares=st.tuples(st.floats(0, 1.2), st.floats(0, 1.2)),
)
def test_never_rises_with_the_clock_and_stays_within_0_and_1(
    budget: float, warmdown: dict, max_steps: int | None, step: int, shares: tuple[float, float]
) -> None:
    schedule = Schedule(wallclock_s=budget, max_steps=max_steps, **warmdown)
    early, late = (lr_scale(schedule, step=step, elapsed_s=share * budget) for share in sorted(shares))
    assert 0.0 <= late <= early <= 1.0


@given(budget=budgets, fraction=st.floats(0.01, 0.99), share=st.floats(0.0, 1.0), step=steps)
def test_fraction_is_full_before_the_warmdown_and_linear_in_it(
    budget: float, fraction: float, share: float, step: int
) -> None:
    schedule = Schedule(wallclock_s=budget, max_steps=None, warmdown_fraction=fraction)

    def scale(left_share: float) -> float:
        return lr_scale(schedule, step=step, elapsed_s=budget * (1 - left_share))

    assert scale(fraction + (1 - fraction) * share) == pytest.approx(1.0)
    assert scale(fraction * share) == pytest.approx(share, abs=1e-9)
    assert scale(0.0) == 0.0


@given(budget=budgets, iters=st.integers(1, 5_000), step=steps)
def test_challenge_rule_ends_at_zero_and_starts_full(budget: float, iters: int, step: int) -> None:
    schedule = Schedule(wallclock_s=budget, max_steps=None, warmdown_steps=iters)
    assert lr_scale(schedule, step=step, elapsed_s=budget) == 0.0
    assert lr_scale(schedule, step=0, elapsed_s=0.0) == 1.0


def test_challenge_rule_decays_from_the_first_step_when_steps_are_slow() -> None:
    """600 s over 1,200 steps: half a second is the border."""
    schedule = Schedule(wallclock_s=600, max_steps=None, warmdown_steps=1200)
    assert lr_scale(schedule, step=1, elapsed_s=0.49) == 1.0
    assert lr_scale(schedule, step=1, elapsed_s=1.0) == pytest.approx(599 / 1200)


@given(
    max_steps=steps,
    warmdown=warmdowns,
    step=st.integers(0, 50_000),
    clocks=st.tuples(st.floats(0, 1e9), st.floats(0, 1e9)),
)
def test_without_a_clock_time_does_not_matter(
    max_steps: int, warmdown: dict, step: int, clocks: tuple[float, float]
) -> None:
    schedule = Schedule(wallclock_s=None, max_steps=max_steps, **warmdown)
    first, second = (lr_scale(schedule, step=step, elapsed_s=elapsed) for elapsed in clocks)
    assert first == second
    assert first >= lr_scale(schedule, step=step + 1, elapsed_s=0.0)
    assert is_finished(schedule, step, 1e12) == ("max_steps" if step >= max_steps else None)


def test_without_a_clock_the_last_steps_are_linear() -> None:
    for warmdown in ({"warmdown_steps": 4}, {"warmdown_fraction": 0.4}):
        schedule = Schedule(wallclock_s=None, max_steps=10, **warmdown)
        scales = [lr_scale(schedule, step=step, elapsed_s=0.0) for step in range(11)]
        assert scales == pytest.approx([1, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0])


@given(budget=budgets, warmdown=warmdowns, max_steps=steps, step=steps, share=st.floats(0, 1.2))
def test_with_both_limits_the_smaller_scale_holds(
    budget: float, warmdown: dict, max_steps: int, step: int, share: float
) -> None:
    at = {"step": step, "elapsed_s": share * budget}
    both = lr_scale(Schedule(wallclock_s=budget, max_steps=max_steps, **warmdown), **at)
    alone = [
        lr_scale(Schedule(wallclock_s=clock, max_steps=limit, **warmdown), **at)
        for clock, limit in ((budget, None), (None, max_steps))
    ]
    assert both == min(alone)


def test_no_warmdown_is_full_to_the_end() -> None:
    for warmdown in ({"warmdown_steps": 0}, {"warmdown_fraction": 0.0}):
        schedule = Schedule(wallclock_s=10, max_steps=10, **warmdown)
        assert {lr_scale(schedule, step=step, elapsed_s=float(step)) for step in range(11)} == {1.0}


def test_end_of_the_run() -> None:
    schedule = Schedule(wallclock_s=600, max_steps=100, warmdown_steps=0)
    assert is_finished(schedule, 99, 599.9) is None
    assert is_finished(schedule, 99, 600.0) == "wallclock_cap"
    assert is_finished(schedule, 100, 10.0) == is_finished(schedule, 100, 700.0) == "max_steps"


@pytest.mark.parametrize(
    "settings, word",
    [
        ({"wallclock_s": None, "max_steps": None, "warmdown_steps": 0}, "never end"),
        ({"wallclock_s": 0.0, "warmdown_steps": 0}, "wallclock_s"),
        ({"wallclock_s": float("nan"), "warmdown_steps": 0}, "wallclock_s"),
        ({"wallclock_s": float("inf"), "warmdown_steps": 0}, "wallclock_s"),
        ({"max_steps": 0, "warmdown_steps": 0}, "max_steps"),
        ({}, "exactly one"),
        ({"warmdown_steps": 1, "warmdown_fraction": 0.1}, "exactly one"),
        ({"warmdown_steps": -1}, "warmdown_steps"),
        ({"warmdown_fraction": 1.1}, "warmdown_fraction"),
        ({"warmdown_fraction": float("nan")}, "warmdown_fraction"),
        ({"warmdown_steps": 1, "warmup_steps": -1}, "warmup_steps"),
    ],
)
def test_refuses_settings_that_do_not_fit(settings: dict, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        Schedule(**settings)


def test_momentum_warms_up_linearly() -> None:
    assert momentum_at(0, 0.85, 0.95, 500) == 0.85
    assert momentum_at(250, 0.85, 0.95, 500) == pytest.approx(0.9)
    assert momentum_at(500, 0.85, 0.95, 500) == momentum_at(10_000, 0.85, 0.95, 500) == 0.95
    assert momentum_at(0, 0.85, 0.95, 0) == 0.95


@pytest.mark.parametrize(
    "settings, step_s, parts",
    [
        ({"warmdown_steps": 1200}, 0.0435, ["the last 52.2 s (8.7%) of 600 s"]),
        ({"warmdown_fraction": 0.087}, 3.0, ["the last 52.2 s (8.7%) of 600 s"]),
        ({"warmdown_steps": 1200}, 0.6, ["decays from the first step", "over 0.5 s"]),
        ({"warmdown_fraction": 1.0}, 0.6, ["decays from the first step", "whole budget"]),
        ({"wallclock_s": None, "max_steps": 2000, "warmdown_steps": 500}, 0.1, ["the last 500 (25.0%) of 2,000 steps"]),
        ({"max_steps": 400, "warmdown_fraction": 0.5}, 0.1, ["the last 200 (50.0%) of 400 steps, 20.0 s"]),
        ({"max_steps": 400, "warmdown_steps": 800}, 0.1, ["decays from the first step", "starting at 50%"]),
        ({"warmdown_steps": 0}, 0.1, ["none"]),
        ({"wallclock_s": None, "warmdown_fraction": 0.0}, 0.1, ["none"]),
    ],
)
def test_description_of_the_warmdown(settings: dict, step_s: float, parts: list[str]) -> None:
    text = describe_warmdown(Schedule(**settings), step_s)
    assert all(part in text for part in parts), text


@given(
    budget=st.floats(10, 1000),
    warmdown=warmdowns,
    max_steps=st.none() | st.integers(10, 5000),
    step_s=st.floats(0.01, 2.0),
)
def test_description_agrees_with_a_run_of_steady_steps(
    budget: float, warmdown: dict, max_steps: int | None, step_s: float
) -> None:
    schedule = Schedule(wallclock_s=budget, max_steps=max_steps, **warmdown)
    num_steps = int(min(budget / step_s, max_steps or 10**9))
    assume(num_steps >= 3)
    decays_at_once = lr_scale(schedule, step=1, elapsed_s=step_s) < 1
    text = describe_warmdown(schedule, step_s)
    ever_decays = any(lr_scale(schedule, step=step, elapsed_s=step * step_s) < 1 for step in (num_steps - 1, num_steps))
    if text.startswith("none"):
        assert not ever_decays
    if text.startswith("decays"):
        assert decays_at_once
