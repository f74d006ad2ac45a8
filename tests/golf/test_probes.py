"""What a legality check changes, where it cuts, and how it measures."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitsperbyte.golf.evaluate import Protocol
from bitsperbyte.golf.probes import Case, Changes, Text, cases, choose_cuts, differences, later_tokens, made_up_tokens, unaffected
from bitsperbyte.golf.scorers import NetworkScorer, Scored, evaluation

VOCAB, BOS = 9, 1


def text(keep_bos: bool = False, num_tokens: int = 50, bos_id: int | None = BOS) -> Text:
    return Text(np.arange(num_tokens) % VOCAB, VOCAB, bos_id, keep_bos=keep_bos, seed=0)


def uniform(window: int, stride: int | None = None) -> NetworkScorer:
    import torch

    return NetworkScorer(lambda tokens: torch.zeros(*tokens.shape, VOCAB), Protocol(window, stride), vocab_size=VOCAB)


@given(st.integers(2, 40), st.booleans(), st.booleans(), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_a_changed_stream_differs_exactly_where_asked(n: int, from_text: bool, keep_bos: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    made = text(keep_bos)
    stream, where = made.stream(n), rng.random(n) < 0.5
    asked, before = where.copy(), stream.copy()
    other = made.changed(stream, where, from_text)
    assert (stream == before).all() and (where == asked).all(), "the arguments stay as they are"
    expected = where & (stream != BOS) if keep_bos else where
    assert ((other != stream) == expected).all()
    assert other.min() >= 0 and other.max() < VOCAB
    if keep_bos:
        assert ((other == BOS) == (stream == BOS)).all(), "documents begin where they began"


def test_streams_follow_each_other_and_begin_again_one_token_on() -> None:
    made = text(num_tokens=20, bos_id=None)
    first, second, third = made.stream(12), made.stream(12), made.stream(12)
    assert (first == np.arange(12) % VOCAB).all() and second[0] == 12 % VOCAB
    assert not (first == third).all()
    assert text().stream(7)[0] == BOS


@pytest.mark.parametrize("tokens, vocab, words", [
    (np.arange(15), 99, "too short"), (np.arange(20), 19, "outside the vocabulary"), (np.arange(20) - 1, 99, "outside"),
    (np.zeros(20, int), 1, "nothing to predict")])
def test_a_text_that_cannot_serve_is_refused(tokens: np.ndarray, vocab: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Text(tokens, vocab, None, keep_bos=False, seed=0)


def test_a_made_up_text_repeats_itself_as_language_does() -> None:
    tokens = made_up_tokens(1000, 5_000, seed=1)
    assert len(tokens) == 5_000 and tokens.min() >= 0 and tokens.max() < 1000
    assert (tokens == made_up_tokens(1000, 5_000, seed=1)).all() and not (tokens == made_up_tokens(1000, 5_000, seed=2)).all()
    bigrams = set(zip(tokens[:-1].tolist(), tokens[1:].tolist(), strict=True))
    assert len(bigrams) < 2_500, "most bigrams come back"


def test_every_target_of_a_short_stream_is_a_cut_and_few_of_a_long_one() -> None:
    scorer = uniform(16, 5)
    tried = cases(scorer, 16, 5, 12, 10, False)
    for case in tried:
        streams = [text().stream(case.num_tokens)]
        base = evaluation(case.scorer, streams)
        cuts = choose_cuts(case, streams, base, np.random.default_rng(0))
        assert len(cuts) == len(set(cuts)) and all(1 <= p < case.num_tokens for _, p in cuts)
        assert len(cuts) == (case.num_tokens - 1 if case.num_cuts is None else 10)
    assert tried[-1].num_tokens > 16 and tried[-1].num_cuts == 10, "the windows asked for, and longer than one"
    assert all(case.num_cuts is None for case in cases(scorer, 16, 5, 12, 10, True))


@pytest.mark.parametrize("seed", range(5))
def test_half_of_the_cuts_lie_at_the_borders_of_windows(seed: int) -> None:
    scorer = uniform(32)
    streams = [text().stream(200)]
    case = Case("long", scorer, 200, 20)
    cuts = choose_cuts(case, streams, evaluation(scorer, streams), np.random.default_rng(seed))
    borders = {b + d for b in (0, 32, 64, 96, 128, 160, 192, 199) for d in (-1, 0, 1, 2, 3)}
    assert len(cuts) == 20 and sum(p in borders for _, p in cuts) >= 10


def test_what_is_scored_later_is_what_may_change() -> None:
    """Two streams scored in turn: 1..4 of the first at steps 0..3, then the second at 4..7."""
    base = [Scored(np.arange(1, 5), np.zeros(4), steps=np.arange(4)), Scored(np.arange(1, 5), np.zeros(4), steps=np.arange(4, 8))]
    streams = [np.arange(5), np.arange(5)]
    first, second = later_tokens(base, streams, 0, 3)
    assert first.tolist() == [False, False, False, True, True] and second.tolist() == [False, True, True, True, True]
    first, second = later_tokens(base, streams, 1, 2)
    assert not first.any() and second.tolist() == [False, False, True, True, True]
    nats_at, rows_at = unaffected(base, 1, 1, 2)
    assert nats_at.tolist() == [True, False, False, False] and rows_at.tolist() == [True, True, False, False]
    nats_at, rows_at = unaffected(base, 0, 1, 2)
    assert nats_at.all() and rows_at.all(), "all of the stream before"
    nats_at, _ = unaffected(base, 1, 0, 3)
    assert not nats_at.any(), "the stream after may depend on it"


def test_changes_are_measured_where_they_count() -> None:
    rows = np.log(np.full((3, 2), 0.5))
    one = Scored(np.array([1, 2, 3]), np.array([1.0, 1.0, 1.0]), rows)
    moved = rows.copy()
    moved[2, 0] += 0.25
    two = Scored(np.array([1, 2, 3]), np.array([1.0, 1.5, 1.0]), moved)
    seen = Changes()
    seen.compare(one, two)
    assert seen.worst == 0.5 and (seen.first(0.1), seen.first(0.3), seen.first(0.6)) == (2, 2, 0)
    seen = Changes()
    seen.compare(one, two, np.array([True, False, False]), np.array([True, True, True]))
    assert seen.worst == 0.25 and seen.first(0) == 3
    seen = Changes()
    seen.compare(one, two, np.array([True, False, True]), np.array([True, True, False]))
    assert seen.worst == 0 and seen.first(0) == 0
    seen.compare(one, Scored(np.array([1, 2]), np.ones(2)))
    assert seen.worst == np.inf, "other targets are a change of any size"


def test_not_a_number_is_a_change_and_equal_infinities_are_not() -> None:
    assert differences(np.array([np.inf, np.nan, 1.0]), np.array([np.inf, 1.0, 3.0])).tolist() == [0.0, np.inf, 2.0]
