"""What intervals show, in words: a gain only where no control explains it."""

import itertools

import pytest

from bitsperbyte.records.report.verdict import MIXING, PERTURBING, SELECTION, judge

ABOVE, ACROSS, BELOW = (0.01, 0.05), (-0.01, 0.05), (-0.05, -0.01)


def test_a_gain_needs_every_control_beaten() -> None:
    """All combinations of base and two controls, against the definition."""
    for base, one, two in itertools.product([ABOVE, ACROSS, BELOW, None], [ABOVE, ACROSS, BELOW, None], [ABOVE, ACROSS, BELOW, None]):
        kind = judge(base, {SELECTION: one, PERTURBING: two}).kind
        if base is None:
            expected = "unknown"
        elif base is BELOW:
            expected = "worse"
        elif base is ACROSS:
            expected = "none"
        elif {one, two} & {ACROSS, BELOW}:
            expected = "explained"
        elif None in (one, two):
            expected = "uncontrolled"
        else:
            expected = "gain"
        assert kind == expected, (base, one, two)


@pytest.mark.parametrize("edge", [(0.0, 0.1), (-0.1, 0.0)])
def test_an_interval_that_touches_zero_shows_nothing(edge: tuple[float, float]) -> None:
    assert judge(edge, {}).kind == "none"
    assert judge(ABOVE, {SELECTION: (0.0, 0.1)}).kind == "explained"


def test_reasons_name_each_control_once() -> None:
    made = judge(ABOVE, {SELECTION: ACROSS, PERTURBING: None, "random_mixture": ABOVE})
    assert len(made.reasons) == len(set(made.reasons)) == 3
    assert all(reason[0].isupper() and reason.endswith(".") for reason in made.reasons)


@pytest.mark.parametrize(("share", "kind"), [(None, "gain"), (0.0, "gain"), (0.04, "gain"), (0.05, "explained"), (1.0, "explained")])
@pytest.mark.parametrize("control", [SELECTION, MIXING])
def test_a_gain_that_random_draws_reach_is_not_the_selections(control: str, share: float | None, kind: str) -> None:
    made = judge(ABOVE, {control: ABOVE}, share)
    assert made.kind == kind and len(made.reasons) == 1
    assert ("might have given this result too" in made.reasons[0]) == (kind == "explained")
    assert judge(ACROSS, {control: ABOVE}, share).kind == "none", "where no gain is shown, nothing is explained"


def test_the_best_member_alone_takes_the_gain_from_the_vote_and_not_from_the_search() -> None:
    for single, is_said in ((ABOVE, False), (ACROSS, True), (BELOW, True), (None, False)):
        made = judge(ABOVE, {SELECTION: ABOVE, PERTURBING: ABOVE}, 0.0, single)
        assert made.kind == "gain" and any("best single member" in reason for reason in made.reasons) == is_said
