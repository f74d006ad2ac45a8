from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitsperbyte.metric.windows import Window, WindowPlan, non_overlapping, plan_windows, sliding

BOS = 1
LENGTHS = st.integers(1, 12)


def scored_positions(plan: WindowPlan) -> list[int]:
    return [t for w in plan for t in range(w.first, w.end + 1)]


def reference_non_overlapping(start: int, stop: int, length: int) -> list[Window]:
    """Walks the targets start+1..stop-1 one by one, opening a window where the one before is full."""
    windows: list[list[int]] = []
    for target in range(start + 1, stop):
        if not windows or len(windows[-1]) == length:
            windows.append([])
        windows[-1].append(target)
    return [Window(w[0] - 1, w[-1], w[0]) for w in windows]


def reference_sliding(start: int, stop: int, length: int, stride: int) -> list[Window]:
    """Moves the end of the window on, by `stride` or to the end of the text, until no target is left."""
    last = stop - 1
    if last <= start:
        return []
    end = min(start + length, last)
    windows = [Window(start, end, start + 1)]
    while end < last:
        first, end = end + 1, min(end + stride, last)
        windows.append(Window(end - length, end, first))
    return windows


def reference_documents(tokens: list[int]) -> list[tuple[int, int]]:
    """(start, stop) of each document; text before the first BOS is one too."""
    cuts = [i for i, token in enumerate(tokens) if token == BOS or i == 0]
    return list(zip(cuts, [*cuts[1:], len(tokens)], strict=False))  # no token: no cut


@pytest.mark.parametrize(("num_tokens", "expected"), [
    (0, []), (1, []), (2, [(0, 1, 1)]), (4, [(0, 3, 1)]), (5, [(0, 4, 1)]), (6, [(0, 4, 1), (4, 5, 5)]),
    (9, [(0, 4, 1), (4, 8, 5)])])
def test_non_overlapping_by_hand(num_tokens: int, expected: list):
    assert list(non_overlapping(num_tokens, 4)) == [Window(*w) for w in expected]


@pytest.mark.parametrize(("num_tokens", "expected"), [
    (0, []), (1, []), (3, [(0, 2, 1)]), (5, [(0, 4, 1)]), (6, [(0, 4, 1), (1, 5, 5)]), (7, [(0, 4, 1), (2, 6, 5)]),
    (8, [(0, 4, 1), (2, 6, 5), (3, 7, 7)])])
def test_sliding_by_hand(num_tokens: int, expected: list):
    assert list(sliding(num_tokens, 4, 2)) == [Window(*w) for w in expected]


@given(st.integers(0, 80), LENGTHS, st.data())
@settings(max_examples=200, deadline=None)
def test_across_equals_the_references_and_scores_each_target_once(num_tokens: int, length: int, data: st.DataObject):
    stride = data.draw(st.integers(1, length))
    chunks, slid = non_overlapping(num_tokens, length), sliding(num_tokens, length, stride)
    assert list(chunks) == reference_non_overlapping(0, num_tokens, length)
    assert list(slid) == reference_sliding(0, num_tokens, length, stride)
    for plan in (chunks, slid):
        assert scored_positions(plan) == list(range(1, num_tokens))
        assert plan.num_scored == max(0, num_tokens - 1) == sum(w.num_scored for w in plan)
        assert all(1 <= w.num_inputs <= length and w.start >= 0 for w in plan)


@given(st.integers(2, 300), LENGTHS, st.data())
@settings(max_examples=200, deadline=None)
def test_sliding_context(num_tokens: int, length: int, data: st.DataObject):
    """Every target has at least length - stride inputs before its own window's share, or all that exist."""
    stride = data.draw(st.integers(1, length))
    plan = sliding(num_tokens, length, stride)
    for index, window in enumerate(plan):
        if index:
            assert window.num_inputs == length, "a later window has its full length of context"
        for target in range(window.first, window.end + 1):
            assert target - window.start >= min(target, length - stride + 1)


@given(st.integers(2, 100), LENGTHS)
@settings(deadline=None)
def test_stride_of_a_whole_window_differs_only_in_the_last_window(num_tokens: int, length: int):
    chunks, slid = list(non_overlapping(num_tokens, length)), list(sliding(num_tokens, length, length))
    assert slid[:-1] == chunks[:-1]
    assert (slid[-1].end, slid[-1].first) == (chunks[-1].end, chunks[-1].first)


@given(st.lists(st.sampled_from([BOS, 5, 6, 7, 8]), min_size=0, max_size=60), LENGTHS, st.data())
@settings(max_examples=300, deadline=None)
def test_isolated_equals_the_references(tokens: list[int], length: int, data: st.DataObject):
    stride = data.draw(st.none() | st.integers(1, length))
    expected = []
    for start, stop in reference_documents(tokens):
        expected += (reference_sliding(start, stop, length, stride) if stride
                     else reference_non_overlapping(start, stop, length))
    arguments = {"length": length, "stride": stride, "documents": "isolated", "bos_id": BOS}
    if not expected:
        with pytest.raises(ValueError, match="nothing to score"):
            plan_windows(np.array(tokens, np.uint16), **arguments)
        return
    plan = plan_windows(np.array(tokens, np.uint16), **arguments)
    assert list(plan) == expected
    counts = Counter(scored_positions(plan))
    assert counts == Counter(i for i, token in enumerate(tokens) if token != BOS and i > 0)
    for window in plan:
        assert BOS not in tokens[window.start + 1 : window.end + 1], "a window crosses into the next document"


def test_isolated_by_hand():
    #        0  1  2    3    4  5  6  7    8
    tokens = [7, 8, BOS, BOS, 5, 6, 7, BOS, 9]
    plan = plan_windows(np.array(tokens), length=2, documents="isolated", bos_id=BOS)
    assert list(plan) == [Window(0, 1, 1), Window(3, 5, 4), Window(5, 6, 6), Window(7, 8, 8)]
    slid = plan_windows(np.array(tokens), length=2, stride=1, documents="isolated", bos_id=BOS)
    assert list(slid) == [Window(0, 1, 1), Window(3, 5, 4), Window(4, 6, 6), Window(7, 8, 8)]


@given(st.integers(2, 80), LENGTHS)
@settings(deadline=None)
def test_drop_tail_scores_whole_windows_only(num_tokens: int, length: int):
    whole = [w for w in non_overlapping(num_tokens, length) if w.num_inputs == length]
    assert list(non_overlapping(num_tokens, length, drop_tail=True)) == whole
    if whole:
        assert list(plan_windows(num_tokens, length=length, drop_tail=True)) == whole
    else:
        with pytest.raises(ValueError, match="tail dropped"):
            plan_windows(num_tokens, length=length, drop_tail=True)


def test_across_takes_a_stream_or_its_size():
    tokens = np.full(23, BOS, np.uint16)
    assert list(plan_windows(tokens, length=5, stride=2, bos_id=BOS)) == list(sliding(23, 5, 2))
    assert list(plan_windows(23, length=5)) == list(non_overlapping(23, 5))


def test_a_long_stream_is_planned_as_arrays():
    plan = plan_windows(62_021_633, length=1024, stride=512)
    assert plan.num_scored == 62_021_632
    assert {column.dtype for column in (plan.starts, plan.ends, plan.firsts)} == {np.dtype(np.int64)}
    assert np.array_equal(plan.firsts[1:], plan.ends[:-1] + 1)


@pytest.mark.parametrize(("arguments", "reason"), [
    ({"length": 0}, "at least 1 token"),
    ({"length": 4, "stride": 5}, "choose 1..4"),
    ({"length": 4, "stride": 0}, "choose 1..4"),
    ({"length": 4, "documents": "islated"}, "'islated' is unknown"),
    ({"length": 4, "stride": 2, "drop_tail": True}, "drop_tail"),
    ({"length": 4, "documents": "isolated", "bos_id": 1, "drop_tail": True}, "drop_tail"),
    ({"length": 4, "documents": "isolated", "bos_id": 1}, "need the tokens themselves"),
])
def test_refusals(arguments: dict, reason: str):
    with pytest.raises(ValueError, match=reason):
        plan_windows(100, **arguments)


def test_isolated_needs_bos():
    with pytest.raises(ValueError, match="the id of BOS"):
        plan_windows(np.arange(9), length=4, documents="isolated")
