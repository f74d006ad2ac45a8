"""Held-out bits per byte of a base model, of its best members, and of their mixture.

An ensemble has no single likelihood, so three are named (docs/metric.md, rule 8): `mixture`, in which a token's probability is the
mean of the members' (nats: log K - logsumexp of the members' log-probabilities of the tokens that came); `mean_member`, the mean of the
members' nats; `random_mixture`, mixtures of as many members drawn at random. By Jensen's inequality a mixture is never worse than its
mean member, whoever is in it, so a gain means something only against the random mixtures.

Shapes: D documents, T scored tokens of all documents together.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bitsperbyte.metric.bpb import Score
from bitsperbyte.randopt.engines.base import DocumentNats
from bitsperbyte.stats.intervals import paired_bootstrap


@dataclass(frozen=True, eq=False)
class Likelihood:
    """What a model makes of D documents: `nats` float64 (D,) and `num_bytes` int64 (D,) of their scored tokens."""

    nats: np.ndarray
    num_bytes: np.ndarray
    num_tokens: int

    @property
    def score(self) -> Score:
        return Score(math.fsum(self.nats), int(self.num_bytes.sum()), self.num_tokens)

    def minus(self, other: "Likelihood") -> dict[str, float]:
        """bpb of this less that of `other` over the same documents, with a paired bootstrap interval (95%) over those with bytes."""
        assert np.array_equal(self.num_bytes, other.num_bytes), "two likelihoods of different documents"
        some = self.num_bytes > 0
        made = paired_bootstrap(self.nats[some], self.num_bytes[some], other.nats[some], other.num_bytes[some])
        return {"difference_bpb": made.estimate, "low": made.low, "high": made.high}


def mean_likelihood(likelihoods: Sequence[Likelihood]) -> Likelihood:
    """The mean of several models' nats, by document."""
    first = likelihoods[0]
    assert all(np.array_equal(first.num_bytes, other.num_bytes) for other in likelihoods), "likelihoods of different documents"
    return Likelihood(np.mean([other.nats for other in likelihoods], axis=0), first.num_bytes, first.num_tokens)


class Mixture:
    """The nats of a mixture, member by member: K members' arrays need not be held at once.

    Exact in the sense that K equal members give that member's nats to the last bit: the sum is kept relative to the largest
    log-probability so far, and log K is taken inside the logarithm.
    """

    def __init__(self) -> None:
        self._num = 0
        self._largest = np.zeros(0)  # float64 (T,): log-probability
        self._sum = np.zeros(0)  # float64 (T,): of exp(log-probability - largest)

    def add(self, nats: np.ndarray) -> None:
        """Take in one member's float64 (T,) nats."""
        assert nats.dtype == np.float64 and nats.ndim == 1, (nats.dtype, nats.shape)
        log_p = -nats
        if self._num == 0:
            self._largest, self._sum = log_p, np.ones_like(log_p)
        else:
            assert log_p.shape == self._largest.shape, "members scored different tokens"
            largest = np.maximum(self._largest, log_p)
            self._sum = self._sum * np.exp(self._largest - largest) + np.exp(log_p - largest)
            self._largest = largest
        self._num += 1

    def nats(self) -> np.ndarray:
        """float64 (T,): log K - logsumexp over the K members taken in, not below 0."""
        assert self._num > 0
        return np.maximum(-self._largest - np.log(self._sum / self._num), 0.0)


def likelihoods(
    load: Callable[[int], Sequence[DocumentNats]], members: Sequence[int], groups: Mapping[Any, Sequence[int]]
) -> tuple[dict[int, Likelihood], dict[Any, Likelihood]]:
    """(the likelihood of each of `members`, that of the mixture of each of `groups`).

    `load(index)` gives a member's scored tokens; each member is loaded once, in the order of their indices, so that a group's mixture
    does not depend on the order its members are named in. AssertionError where two members scored different tokens.
    """
    of_member: dict[int, Likelihood] = {}
    mixtures = {name: Mixture() for name in groups}
    num_bytes = ends = np.zeros(0, np.int64)
    for count, member in enumerate(sorted({*members, *(m for group in groups.values() for m in group)})):
        documents = load(member)
        own_bytes = np.concatenate([document.num_bytes for document in documents])
        own_ends = np.cumsum([len(document.nats) for document in documents])
        if count == 0:
            num_bytes, ends = own_bytes, own_ends
        assert np.array_equal(own_bytes, num_bytes) and np.array_equal(own_ends, ends), f"member {member} scored other tokens"
        tokens = np.concatenate([document.nats for document in documents]).astype(np.float64)
        if member in members:
            of_member[member] = _by_document(tokens, num_bytes, ends)
        for name, group in groups.items():
            if member in group:
                mixtures[name].add(tokens)
    return of_member, {name: _by_document(mixture.nats(), num_bytes, ends) for name, mixture in mixtures.items()}


def _by_document(nats: np.ndarray, num_bytes: np.ndarray, ends: np.ndarray) -> Likelihood:
    cuts = ends[:-1]
    return Likelihood(np.array([part.sum() for part in np.split(nats, cuts)]),
                      np.array([part.sum() for part in np.split(num_bytes, cuts)], np.int64), len(nats))


def compare(
    load: Callable[[int], Sequence[DocumentNats]], base: int, ensembles: Mapping[int, Sequence[int]], headline: int,
    random_subsets: Sequence[Sequence[int]], what: str,
) -> tuple[dict[str, Any], dict[str, Likelihood]]:
    """The figures of one text: base, mixture, mean member, random mixtures and the differences that matter, as a record keeps them; and
    the sides of these differences by document (`random_mixture` is the mean of the draws' nats).

    `load` knows members by index: `base`, those of `ensembles` (size -> so many of the best, in rank order; `headline` is the size that
    counts, the others are secondary) and those of `random_subsets`. `what` names the text in an error. ValueError for bytes per token
    that no text has.
    """
    selected = ensembles[headline]
    groups = {**{("best", k): members for k, members in ensembles.items()},
              **{("random", i): members for i, members in enumerate(random_subsets)}}
    alone, mixed = likelihoods(load, [base, *selected], groups)
    alone[base].score.check(what)  # the members scored the same tokens
    sides = {"mixture": mixed["best", headline], "mean_member": mean_likelihood([alone[member] for member in selected]),
             "best_single": alone[selected[0]], "base": alone[base]}
    draws = [mixed["random", i] for i in range(len(random_subsets))]
    part: dict[str, Any] = {name: side.score.to_dict() for name, side in sides.items()}
    part["secondary"] = [{"k": k, "mixture": mixed["best", k].score.to_dict()} for k in ensembles if k != headline]
    if draws:
        sides["random_mixture"] = mean_likelihood(draws)  # equal bytes: its bpb is the mean of the draws' bpb
        bpb = [draw.score.bpb for draw in draws]
        part["random_mixture"] = {"k": headline, "num_mixtures": len(draws), "scores": [draw.score.to_dict() for draw in draws],
                                  "mean_bpb": sides["random_mixture"].score.bpb, "low": min(bpb), "high": max(bpb)}
    pairs = [("mixture", "base"), ("mixture", "mean_member"), ("mixture", "best_single"), ("mixture", "random_mixture"),
             ("mean_member", "base"), ("random_mixture", "base")]
    part["differences"] = [{"a": a, "b": b, **sides[a].minus(sides[b])} for a, b in pairs if a in sides and b in sides]
    return part, sides
