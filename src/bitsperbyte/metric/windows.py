"""Which window of context scores which token: every target exactly once.

A stream of n tokens has the targets 1..n-1 (positions in the stream). A window feeds the tokens start..end-1 to the
model, whose outputs predict start+1..end, and scores the targets first..end of these. Plans are arrays: 62 million
tokens at stride 64 make a million windows.

Shapes: W windows of a plan, S documents (or one stream).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

DOCUMENT_MODES = ("across", "isolated")


@dataclass(frozen=True)
class Window:
    """Inputs start..end-1, targets start+1..end, of which first..end are scored (first > start)."""

    start: int
    end: int
    first: int

    @property
    def num_inputs(self) -> int:
        return self.end - self.start

    @property
    def num_scored(self) -> int:
        return self.end - self.first + 1


@dataclass(frozen=True, eq=False)
class WindowPlan:
    """Windows in the order of the stream: int64 arrays (W,) of their starts, ends and firsts, as in Window."""

    starts: np.ndarray
    ends: np.ndarray
    firsts: np.ndarray

    def __len__(self) -> int:
        return len(self.starts)

    def __iter__(self) -> Iterator[Window]:
        for start, end, first in zip(self.starts, self.ends, self.firsts, strict=True):
            yield Window(int(start), int(end), int(first))

    @property
    def num_scored(self) -> int:
        """Targets scored by all windows together."""
        return int((self.ends - self.firsts).sum()) + len(self)


def non_overlapping(num_tokens: int, length: int, drop_tail: bool = False) -> WindowPlan:
    """Chunks of `length` inputs that score all their targets. The last is shorter; `drop_tail` drops it."""
    _check_length(length)
    starts, num_targets = _whole_stream(num_tokens)
    if drop_tail:
        num_targets = num_targets // length * length
    return _cut(starts, num_targets, length, length, anchored=False)


def sliding(num_tokens: int, length: int, stride: int) -> WindowPlan:
    """Windows of `length` inputs: the first scores all its targets, each later one its last `stride`.

    The last window ends with the stream and scores only what is left, so that it too has its full length of context.
    Every target is predicted from at least length - stride + 1 inputs, or from all that come before it.
    """
    _check_length(length)
    _check_stride(stride, length)
    return _cut(*_whole_stream(num_tokens), length, stride, anchored=True)


def plan_windows(tokens: np.ndarray | int, *, length: int, stride: int | None = None, documents: str = "across",
                 bos_id: int | None = None, drop_tail: bool = False) -> WindowPlan:
    """The windows that score a stream. `tokens` is the stream, or (mode `across` only) its number of tokens.

    stride None: non-overlapping. documents `across`: one stream in which a BOS is a target like any other. `isolated`:
    windows start anew at each BOS, which is context only; so is the first token of a text that comes before the first
    BOS. `drop_tail` is the challenge's protocol and therefore needs `across` without a stride. ValueError for anything
    else, and where no target is left to score.
    """
    _check_length(length)
    if stride is not None:
        _check_stride(stride, length)
    if documents not in DOCUMENT_MODES:
        raise ValueError(f"document mode {documents!r} is unknown; choose one of {', '.join(DOCUMENT_MODES)}")
    if drop_tail and (stride is not None or documents != "across"):
        raise ValueError("drop_tail reproduces the challenge, whose windows do not overlap and run across documents; "
                         "leave stride out and use documents 'across', or set drop_tail to false")
    if documents == "isolated":
        starts, num_targets = _documents(tokens, bos_id)
    else:
        num_tokens = int(tokens) if np.ndim(tokens) == 0 else len(tokens)
        starts, num_targets = _whole_stream(num_tokens)
        if drop_tail:
            num_targets = num_targets // length * length
    plan = _cut(starts, num_targets, length, stride or length, anchored=stride is not None)
    if len(plan) == 0:
        raise ValueError(f"nothing to score: windows of {length} ({documents}{', tail dropped' if drop_tail else ''}) "
                         "find no target in this stream; give a longer text or shorter windows")
    return plan


def _check_length(length: int) -> None:
    if length < 1:
        raise ValueError(f"window length {length} is too short; it must be at least 1 token")


def _check_stride(stride: int, length: int) -> None:
    if not 1 <= stride <= length:
        raise ValueError(f"stride {stride} does not fit windows of {length}: choose 1..{length}, since a longer stride "
                         "would leave tokens unscored")


def _whole_stream(num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros(1, np.int64), np.array([max(0, num_tokens - 1)], np.int64)


def _documents(tokens: np.ndarray | int, bos_id: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Start and number of targets of each document, int64 (S,): a BOS and what follows it up to the next."""
    if np.ndim(tokens) != 1 or bos_id is None:
        raise ValueError("isolated documents need the tokens themselves (one dimension) and the id of BOS, to find "
                         "where each starts")
    starts = np.flatnonzero(np.asarray(tokens) == bos_id).astype(np.int64)
    if len(tokens) and (len(starts) == 0 or starts[0] != 0):
        starts = np.concatenate([np.zeros(1, np.int64), starts])
    return starts, np.diff(starts, append=len(tokens)) - 1


def _cut(starts: np.ndarray, num_targets: np.ndarray, length: int, stride: int, *, anchored: bool) -> WindowPlan:
    """Windows over documents at `starts` (S,) with `num_targets` (S,) each. Window k of a document scores up to its
    target length + k * stride. `anchored`: the last window reaches back to its full length; otherwise it starts where
    the one before ended.
    """
    beyond_first = np.maximum(num_targets - length, 0)
    counts = (num_targets > 0) + -(-beyond_first // stride)
    document = np.repeat(np.arange(len(starts)), counts)
    k = np.arange(len(document)) - (np.cumsum(counts) - counts)[document]  # which window of its document
    origin, last = starts[document], num_targets[document]
    ends = np.minimum(length + k * stride, last)
    scored_before = np.where(k > 0, length + (k - 1) * stride, 0)
    offsets = np.maximum(ends - length, 0) if anchored else scored_before
    return WindowPlan(origin + offsets, origin + ends, origin + scored_before + 1)
