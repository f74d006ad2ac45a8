import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bitsperbyte.randopt.controls import RandomEnsembles, random_ensembles, sample_seed, too_few_subsets
from bitsperbyte.randopt.vote import Ballots, Outcome


def outcomes(rows: np.ndarray) -> RandomEnsembles:
    return RandomEnsembles([Outcome(row, 0, 0) for row in rows])


answers = hnp.arrays(bool, st.tuples(st.integers(1, 25), st.integers(1, 12)))


@given(answers)
def test_figures_are_those_of_the_accuracies(rows: np.ndarray) -> None:
    made = outcomes(rows)
    figures = made.describe()
    accuracies = rows.mean(axis=1)
    assert figures["accuracies"] == pytest.approx(list(accuracies))
    assert figures["mean"] == pytest.approx(accuracies.mean()) == pytest.approx(made.mean_correct.mean())
    assert figures["sd"] == (pytest.approx(np.std(accuracies, ddof=1), abs=1e-9) if len(rows) > 1 else None)
    assert (figures["low"], figures["high"]) == (accuracies.min(), accuracies.max())


@given(answers)
def test_who_beats_the_median_subset_beats_more_than_half(rows: np.ndarray) -> None:
    made = outcomes(rows)
    not_better = sum(a <= made.median.accuracy for a in made.accuracies)
    at_least = sum(a >= made.median.accuracy for a in made.accuracies)
    assert not_better > len(rows) / 2 and at_least >= len(rows) / 2
    assert made.share_at_least(made.median.accuracy) == at_least / len(rows)


def test_random_ensembles_vote_with_their_own_members_only() -> None:
    classes = np.array([[0, 0], [1, 1], [1, 0], [2, -1]])
    correct = classes == np.array([[1, 0]])
    made = random_ensembles(Ballots(classes, correct), [(0, 1, 2), (3, 0, 1), (3, 2)])
    assert [o.correct.tolist() for o in made.outcomes] == [[True, True], [False, True], [False, True]]
    # the tie of (3, 0, 1) on item 0 goes to member 3, drawn first; on item 1 member 3 does not vote
    assert [o.num_unanswered for o in made.outcomes] == [0, 0, 0]


def test_a_pool_too_small_for_its_draws_is_said() -> None:
    assert "no spread" in too_few_subsets(8, 8, 20)
    assert "only 8 different" in too_few_subsets(8, 7, 20)
    assert too_few_subsets(32, 8, 20) is None


def test_sample_seeds_differ_between_samples_and_runs_and_fit_in_63_bits() -> None:
    seeds = [sample_seed(run, i) for run in range(20) for i in range(50)]
    assert len(set(seeds)) == 1000 and all(0 <= s < 2**63 for s in seeds) and max(seeds) > 2**62
    assert sample_seed(42, 0) == sample_seed(42, 0)
