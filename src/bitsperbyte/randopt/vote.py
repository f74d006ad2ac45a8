"""The majority vote: which answer an ensemble gives, from its members' answers in rank order.

Answers are classes, integers that are equal exactly where two answers mean the same; None (-1 in arrays) is an answer that could not be
read, and does not vote.

Shapes: M members, N items.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Ballots:
    """What M members answered to N items: `classes` int64 (M, N), -1 for no vote, comparable within an item; `correct` bool (M, N),
    each answer as it was graded by itself."""

    classes: np.ndarray
    correct: np.ndarray

    def __post_init__(self) -> None:
        assert self.classes.shape == self.correct.shape and self.classes.ndim == 2, (self.classes.shape, self.correct.shape)


@dataclass(frozen=True, eq=False)
class Outcome:
    """The answers of one ensemble: `correct` bool (N,). `num_unanswered` items got no vote, and count as wrong. `num_inconsistent`
    items have a winning class in which some answers were graded right and others wrong."""

    correct: np.ndarray
    num_unanswered: int
    num_inconsistent: int

    @property
    def accuracy(self) -> float:
        return int(self.correct.sum()) / len(self.correct)


def elect(classes: Sequence[int | None]) -> int | None:
    """The position of the voter whose answer wins: the first of those in the winning class; None where nobody voted.

    The class of most votes wins; among classes of equally many, the one whose first vote has the best rank (stands first).
    """
    votes: dict[int, int] = {}
    first: dict[int, int] = {}
    for position, vote in enumerate(classes):
        if vote is not None:
            votes[vote] = votes.get(vote, 0) + 1
            first.setdefault(vote, position)
    if not votes:
        return None
    return first[max(votes, key=lambda vote: (votes[vote], -first[vote]))]


def majority(classes: Sequence[int | None]) -> int | None:
    """The winning class of `elect`; None where nobody voted."""
    position = elect(classes)
    return None if position is None else classes[position]


def ensemble(ballots: Ballots, voters: Sequence[int]) -> Outcome:
    """The votes of the members `voters` (rows of the ballots, in rank order) on every item.

    An item is right where the winning class's first voter, whose answer the ensemble gives, was graded right. Where equivalence and
    grading disagree within the winning class, the item is counted in `num_inconsistent` and the first voter still decides.
    """
    assert len(voters) and len(set(voters)) == len(voters), voters
    rows = list(voters)
    classes, graded = ballots.classes[rows], ballots.correct[rows]
    correct = np.zeros(classes.shape[1], bool)
    num_unanswered = num_inconsistent = 0
    for item, votes in enumerate(classes.T.tolist()):
        winner = elect([None if vote < 0 else vote for vote in votes])
        if winner is None:
            num_unanswered += 1
            continue
        correct[item] = graded[winner, item]
        alike = graded[classes[:, item] == votes[winner], item]
        num_inconsistent += bool(alike.any() and not alike.all())
    return Outcome(correct, num_unanswered, num_inconsistent)
