from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bitsperbyte.randopt.vote import Ballots, elect, ensemble, majority

ballots = st.lists(st.one_of(st.none(), st.integers(0, 4)), max_size=12)


def by_definition(classes: list[int | None]) -> int | None:
    counts = Counter(c for c in classes if c is not None)
    if not counts:
        return None
    most = max(counts.values())
    return next(c for c in classes if c is not None and counts[c] == most)


@given(ballots)
def test_the_class_of_most_votes_wins_and_ties_go_to_the_best_rank(classes: list[int | None]) -> None:
    assert majority(classes) == by_definition(classes)
    position = elect(classes)
    if position is not None:
        assert classes.index(majority(classes)) == position  # the first voter of the class speaks for it


@given(ballots, st.permutations(range(5)))
def test_names_of_the_classes_do_not_matter(classes: list[int | None], names: list[int]) -> None:
    renamed = [None if c is None else names[c] for c in classes]
    assert elect(renamed) == elect(classes)


@given(ballots)
def test_an_answer_that_could_not_be_read_never_wins_or_decides(classes: list[int | None]) -> None:
    assert majority(classes) == majority([c for c in classes if c is not None])
    assert (majority(classes) is None) == all(c is None for c in classes)


@given(ballots.filter(lambda c: majority(c) is not None), st.data())
def test_another_vote_for_the_winner_keeps_it(classes: list[int | None], data: st.DataObject) -> None:
    winner = majority(classes)
    where = data.draw(st.integers(0, len(classes)))
    assert majority([*classes[:where], winner, *classes[where:]]) == winner


@given(ballots)
def test_a_clear_majority_does_not_depend_on_rank(classes: list[int | None]) -> None:
    counts = Counter(c for c in classes if c is not None).most_common(2)
    if len(counts) == 1 or len(counts) == 2 and counts[0][1] > counts[1][1]:
        assert majority(classes[::-1]) == majority(classes) == counts[0][0]


def test_ties_by_hand() -> None:
    assert majority([3, 1, 1, 3]) == 3
    assert majority([None, 1, 3]) == 1
    assert majority([0, 1, 1]) == 1
    assert majority([]) is majority([None, None]) is None
    assert elect([None, 2, 0, 0]) == 2


# -- ensembles --------------------------------------------------------------------------------------------------------

tables = st.tuples(st.integers(1, 7), st.integers(1, 6)).flatmap(
    lambda shape: st.tuples(hnp.arrays(np.int64, shape, elements=st.integers(-1, 3)),
                            hnp.arrays(np.int64, shape[1:], elements=st.integers(0, 3)))
)


@given(tables, st.randoms())
def test_an_ensemble_is_right_where_the_majority_names_the_truth(table: tuple[np.ndarray, np.ndarray], random) -> None:
    classes, truth = table
    voters = list(range(len(classes)))
    random.shuffle(voters)
    voters = voters[: random.randint(1, len(voters))]
    made = ensemble(Ballots(classes, classes == truth), voters)
    for item in range(len(truth)):
        assert made.correct[item] == (majority([None if classes[v, item] < 0 else classes[v, item] for v in voters]) == truth[item])
    assert made.num_unanswered == (classes[voters] < 0).all(axis=0).sum()
    assert made.num_inconsistent == 0 and made.accuracy == made.correct.mean()


@given(tables)
def test_one_voter_is_itself_and_copies_of_it_change_nothing(table: tuple[np.ndarray, np.ndarray]) -> None:
    classes, truth = table
    correct = (classes == truth) & (classes >= 0)
    assert (ensemble(Ballots(classes, correct), [0]).correct == correct[0]).all()
    copies = Ballots(np.repeat(classes[:1], 4, axis=0), np.repeat(correct[:1], 4, axis=0))
    assert (ensemble(copies, range(4)).correct == correct[0]).all()


def test_where_grading_and_equivalence_disagree_the_first_voter_decides_and_it_is_counted() -> None:
    ballots = Ballots(np.array([[0, 0], [0, 0], [1, 0]]), np.array([[True, False], [False, True], [True, False]]))
    made = ensemble(ballots, [0, 1, 2])
    assert made.correct.tolist() == [True, False] and made.num_inconsistent == 2
    assert ensemble(ballots, [1, 0, 2]).correct.tolist() == [False, True]
    assert ensemble(ballots, [0, 2]).num_inconsistent == 0  # on item 1 both are wrong, on item 0 they are of two classes


def test_an_item_without_any_vote_is_wrong() -> None:
    made = ensemble(Ballots(np.array([[-1, 0], [-1, -1]]), np.array([[False, True], [False, False]])), [0, 1])
    assert made.correct.tolist() == [False, True] and made.num_unanswered == 1
