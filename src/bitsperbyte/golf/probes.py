"""What a legality check changes in a text, where it cuts, and how it measures what changed in the answers.

Shapes: S streams of an evaluation, n tokens of one, N targets scored, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from bitsperbyte.golf.evaluate import Protocol
from bitsperbyte.golf.scorers import NetworkScorer, Scored, Scorer


class Text:
    """Tokens, int64, handed out stretch by stretch, so that no check scores what another has shown. They begin again at their end, one
    token on, so that short texts suffice."""

    def __init__(self, tokens: np.ndarray, vocab_size: int, bos_id: int | None, *, keep_bos: bool, seed: int) -> None:
        self.tokens, self.vocab_size, self.bos_id, self.keep_bos = np.asarray(tokens, np.int64), vocab_size, bos_id, keep_bos
        self.rng, self._at = np.random.default_rng(seed), 0
        if len(self.tokens) < 16:
            raise ValueError(f"a text of {len(self.tokens)} tokens is too short to check a scorer on: give at least 16, better some thousands")
        if int(self.tokens.min()) < 0 or int(self.tokens.max()) >= vocab_size:
            raise ValueError(f"token ids {self.tokens.min()}..{self.tokens.max()} reach outside the vocabulary of {vocab_size}: the text was "
                             "made with another tokenizer")
        if vocab_size < 2:
            raise ValueError("with a vocabulary of one token there is nothing to predict")

    def stream(self, num_tokens: int) -> np.ndarray:
        """The next `num_tokens` tokens, the first of them a BOS if one is known."""
        taken = np.take(self.tokens, np.arange(self._at, self._at + num_tokens), mode="wrap")
        self._at += num_tokens + (1 if self._at + num_tokens >= len(self.tokens) else 0)
        if self.bos_id is not None:
            taken[0] = self.bos_id
        return taken

    def changed(self, stream: np.ndarray, where: np.ndarray, from_text: bool) -> np.ndarray:
        """`stream` with every token at `where` (bool (n,)) replaced by another: drawn evenly from the vocabulary, or from the text."""
        out, where = stream.copy(), where.copy()
        if self.keep_bos:
            where &= stream != self.bos_id  # documents stay where they are
        count = int(where.sum())
        if from_text:
            drawn = self.rng.choice(self.tokens, count)
        else:
            drawn = self.rng.integers(0, self.vocab_size, count)
        barred = stream[where]
        for _ in range(64):
            again = drawn == barred
            if self.keep_bos:
                again |= drawn == self.bos_id
            if not again.any():
                break
            drawn[again] = self.rng.integers(0, self.vocab_size, int(again.sum()))
        out[where] = drawn
        return out


def made_up_tokens(vocab_size: int, num_tokens: int = 20_000, seed: int = 0) -> np.ndarray:
    """A text for checks that are given none: phrases, some frequent and some rare, so that contexts come back as they do in language."""
    rng = np.random.default_rng(seed)
    phrases = [rng.integers(0, vocab_size, rng.integers(1, 7)) for _ in range(200)]
    weights = 1 / np.arange(1, 201)
    chosen = rng.choice(200, num_tokens, p=weights / weights.sum())
    return np.concatenate([phrases[i] for i in chosen])[:num_tokens]


@dataclass(frozen=True)
class Case:
    """One way of scoring under which causality is asked for: `cuts` None tries every cut of streams of `num_tokens`."""

    name: str
    scorer: Scorer
    num_tokens: int
    num_cuts: int | None


def cases(scorer: Scorer, window: int, stride: int | None, short: int, num_cuts: int, exhaustive: bool) -> list[Case]:
    """Short streams at every cut, and one longer than the window; for a network also short windows of either kind."""
    step = stride or window
    full = Case("the windows asked for", scorer, window + min(window + window // 2, 3 * step + step // 2) + 1, None if exhaustive else num_cuts)
    if not isinstance(scorer, NetworkScorer):
        return [Case("short streams", scorer, short, None), full]
    small, documents = max(2, short * 2 // 5), scorer.protocol.documents
    return [Case(f"non-overlapping windows of {small}", scorer.under(Protocol(small, None, documents)), short, None),
            Case(f"windows of {small}, stride {max(1, small // 3)}", scorer.under(Protocol(small, max(1, small // 3), documents)), short, None),
            full]


def later_tokens(base: Sequence[Scored], streams: Sequence[np.ndarray], s: int, p: int) -> Iterator[np.ndarray]:
    """Which tokens of each stream a prediction of target `p` of stream `s` may not know: those from p on, and in other streams those
    that are scored later. bool (n,) each."""
    step = base[s].steps[base[s].positions == p][0]
    for i, (scored, stream) in enumerate(zip(base, streams, strict=True)):
        if i == s:
            yield np.arange(len(stream)) >= p
        else:
            where = np.zeros(len(stream), bool)
            where[scored.positions[scored.steps > step]] = True
            yield where


def unaffected(base: Sequence[Scored], i: int, s: int, p: int) -> tuple[np.ndarray, np.ndarray]:
    """The targets of stream i whose nats, and those whose distributions, may not follow from the tokens of later_tokens."""
    scored = base[i]
    if i == s:
        return scored.positions < p, scored.positions <= p
    early = scored.steps <= base[s].steps[base[s].positions == p][0]
    return early, early


def choose_cuts(case: Case, streams: Sequence[np.ndarray], base: Sequence[Scored], rng: np.random.Generator) -> list[tuple[int, int]]:
    """(stream, target) pairs: all of them, or num_cuts: half of these at the borders of windows, where they are known, the rest anywhere."""
    every = [(s, int(p)) for s, scored in enumerate(base) for p in np.unique(scored.positions)]
    if case.num_cuts is None or case.num_cuts >= len(every):
        return every
    near: set[tuple[int, int]] = set()
    if isinstance(case.scorer, NetworkScorer):
        for s, stream in enumerate(streams):
            plan = case.scorer.plan(stream)
            borders = np.unique(np.concatenate([plan.starts, plan.firsts, plan.ends]))
            near |= {(s, int(b + d)) for b in borders for d in (-1, 0, 1, 2)}
    chosen = sorted(near.intersection(every)) or every[:2] + every[-2:]
    if len(chosen) > (most := max(1, case.num_cuts // 2)):
        chosen = [chosen[i] for i in sorted(rng.choice(len(chosen), most, replace=False))]
    rest = sorted(set(every).difference(chosen))
    return sorted(chosen + [rest[i] for i in rng.choice(len(rest), case.num_cuts - len(chosen), replace=False)])


class Changes:
    """The changes between answers: the largest, and at which targets they lie."""

    def __init__(self) -> None:
        self.worst = 0.0
        self._at: list[tuple[int, float]] = []

    def compare(self, one: Scored, two: Scored, nats_at: np.ndarray | None = None, rows_at: np.ndarray | None = None) -> None:
        """Take in two answers, at those scored targets (bool (N,)) where nats, and where distributions, must not differ."""
        if not np.array_equal(one.positions, two.positions):
            self._add(1, np.inf)  # other targets are scored
            return
        change = differences(one.nats, two.nats)
        if nats_at is not None:
            change = np.where(nats_at, change, 0.0)
        if one.log_probs is not None and two.log_probs is not None:
            rows_at = np.ones(len(change), bool) if rows_at is None else rows_at
            change[rows_at] = np.maximum(change[rows_at], differences(one.log_probs[rows_at], two.log_probs[rows_at]).max(axis=1))
        for at in np.flatnonzero(change):
            self._add(int(one.positions[at]), float(change[at]))

    def _add(self, position: int, change: float) -> None:
        self.worst = max(self.worst, change)
        self._at.append((position, change))

    def first(self, limit: float) -> int:
        return min((position for position, change in self._at if change > limit), default=0)


def differences(one: np.ndarray, two: np.ndarray) -> np.ndarray:
    """Absolute differences in float64: 0 for equal infinities, infinite where one is not a number."""
    with np.errstate(invalid="ignore"):
        change = np.abs(one.astype(np.float64) - two)
    return np.where(one == two, 0.0, np.where(np.isnan(change), np.inf, change))
