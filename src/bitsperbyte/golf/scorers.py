"""What golf/legality.py asks of a scorer, and any network as one, under the windows of golf/evaluate.py.

Shapes: S streams of an evaluation, n tokens of one, N targets scored in it, V vocabulary, B windows of a batch, T inputs of the longest
of them, D width.

A stream is an array of token ids, int64 (n,), whose first token is context only (a BOS); its targets are the positions 1..n-1. One call
of `score` is one evaluation: what a scorer learns during it must be gone at the next.
"""

import hashlib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitsperbyte.golf.evaluate import Protocol as EvaluationProtocol
from bitsperbyte.metric.windows import WindowPlan, plan_windows

OUTPUTS = ("logits", "log_probs")
MAX_ROW_BYTES = 2**30  # distributions of one evaluation that are kept in memory; beyond, only the nats of the targets are


@dataclass(frozen=True, eq=False)
class Scored:
    """What one stream adds to an evaluation, target by target, in the order in which it was scored.

    positions: int64 (N,), each target's place in the stream. nats: float64 (N,), what goes into the sum. log_probs: float (N, V), the
    distributions that the nats were read from; a scorer that cannot show them leaves them out, and its normalisation is then measured
    from outside. num_bytes: int64 (N,), the bytes it counts for each target, where it counts them itself. steps: int64 (N,), for a
    scorer that adapts and does not score one target after the other: when each was scored, counted through the evaluation; equal numbers
    mean that none of them had taught the scorer anything when the others were scored.
    """

    positions: np.ndarray
    nats: np.ndarray
    log_probs: np.ndarray | None = None
    num_bytes: np.ndarray | None = None
    steps: np.ndarray | None = None


class Scorer(Protocol):
    """A scorer that owns its evaluation loop: state, adaptation and caches are its own business."""

    vocab_size: int

    def score(self, streams: Sequence[np.ndarray]) -> Sequence[Scored | np.ndarray]:
        """One evaluation from a fresh state: a Scored of each stream, or just the float nats (n-1,) of its targets in order."""


def evaluation(scorer: Scorer, streams: Sequence[np.ndarray]) -> list[Scored]:
    """One call of `score`, its answer brought into one form: steps count on from stream to stream where the scorer gave none.
    ValueError for an answer whose shapes do not fit the streams."""
    answers = scorer.score([stream.copy() for stream in streams])
    if len(answers) != len(streams):
        raise ValueError(f"the scorer answered {len(answers)} streams when asked for {len(streams)}: return one Scored, or one array of "
                         "nats, for each")
    given = [isinstance(answer, Scored) and answer.steps is not None for answer in answers]
    if any(given) and not all(given):
        raise ValueError("the scorer gives steps for some streams and not for others: give them for all or for none")
    made, begin = [], 0
    for stream, answer in zip(streams, answers, strict=True):
        made.append(_one_form(answer, stream, scorer.vocab_size, begin))
        begin += len(made[-1].positions)
    return made


def _one_form(answer: Scored | np.ndarray, stream: np.ndarray, vocab_size: int, begin: int) -> Scored:
    if not isinstance(answer, Scored):
        nats = _host(answer, np.float64)
        if nats.shape != (len(stream) - 1,):
            raise ValueError(f"the scorer returned nats of shape {nats.shape} for a stream of {len(stream)} tokens, which has "
                             f"{len(stream) - 1} targets; say in Scored.positions which ones were scored")
        answer = Scored(np.arange(1, len(stream)), nats)
    positions, nats = _host(answer.positions, np.int64), _host(answer.nats, np.float64)
    N = len(positions)
    shown = answer.log_probs
    rows = None if shown is None else _host(shown, np.float64 if _itemsize(shown) > 4 else np.float32)
    num_bytes = None if answer.num_bytes is None else _host(answer.num_bytes, np.int64)
    steps = np.arange(begin, begin + N) if answer.steps is None else _host(answer.steps, np.int64)
    for name, array, shape in (("nats", nats, (N,)), ("log_probs", rows, (N, vocab_size)), ("num_bytes", num_bytes, (N,)),
                               ("steps", steps, (N,))):
        if array is not None and array.shape != shape:
            raise ValueError(f"Scored.{name} has shape {array.shape} where {N} positions and {vocab_size} tokens ask for {shape}")
    if N and not (positions.min() >= 1 and positions.max() < len(stream)):
        raise ValueError(f"the scorer scored position {int(positions.min())}..{int(positions.max())} of a stream whose targets are "
                         f"1..{len(stream) - 1}")
    return Scored(positions, nats, rows, num_bytes, steps)


def _host(values: Any, dtype: type) -> np.ndarray:
    if isinstance(values, Tensor):
        values = values.detach().to("cpu", torch.float64 if values.is_floating_point() else torch.int64).numpy()
    return np.asarray(values, dtype)


def _itemsize(values: Any) -> int:
    return values.element_size() if isinstance(values, Tensor) else np.asarray(values).dtype.itemsize


class NetworkScorer:
    """A network under the windows of golf/evaluate.py: batched, longest first, padded on the right with the window's last token.

    The network is either one with `hidden` (tokens (B, T) to (B, T, D)) and `logits` ((N, D) to (N, V)), as evaluate.py asks, or any
    callable from tokens, int64 (B, T), to (B, T, V): logits, or with `outputs` "log_probs" log-probabilities, which are taken as they are.
    It is called in the mode in which it is given, train or eval. ValueError where the vocabulary is not known or the answer has
    another shape.
    """

    def __init__(self, network: Any, protocol: EvaluationProtocol, *, vocab_size: int | None = None, bos_id: int | None = None,
                 outputs: str = "logits", batch_tokens: int = 65_536, device: torch.device | None = None) -> None:
        if outputs not in OUTPUTS:
            raise ValueError(f"outputs {outputs!r} is unknown: choose one of {', '.join(OUTPUTS)}")
        found = vocab_size or getattr(network, "vocab_size", None) or getattr(getattr(network, "config", None), "vocab_size", None)
        if not isinstance(found, int):
            raise ValueError("the network does not say how many tokens it knows (no config.vocab_size): give vocab_size")
        self.network, self.protocol, self.vocab_size, self.bos_id, self.outputs = network, protocol, found, bos_id, outputs
        self.batch_tokens, self.device = batch_tokens, device or _device_of(network)
        self._split = hasattr(network, "hidden") and hasattr(network, "logits")

    def under(self, protocol: EvaluationProtocol, batch_tokens: int | None = None) -> "NetworkScorer":
        """The same network under another protocol, or in other batches."""
        return NetworkScorer(self.network, protocol, vocab_size=self.vocab_size, bos_id=self.bos_id, outputs=self.outputs,
                             batch_tokens=batch_tokens or self.batch_tokens, device=self.device)

    def plan(self, stream: np.ndarray) -> WindowPlan:
        """The windows that score `stream`. The tail is always scored here: dropping it is no question of legality."""
        protocol = replace(self.protocol, drop_tail=False)
        return plan_windows(stream, length=protocol.window, stride=protocol.stride, documents=protocol.documents, bos_id=self.bos_id)

    def score(self, streams: Sequence[np.ndarray]) -> list[Scored]:
        plans = [self.plan(stream) for stream in streams]
        windows = [(int(start), int(end), int(first), s) for s, plan in enumerate(plans)
                   for start, end, first in zip(plan.starts, plan.ends, plan.firsts, strict=True)]
        windows.sort(key=lambda window: window[0] - window[1])  # stable, longest first
        keep_rows = 4 * self.vocab_size * sum(plan.num_scored for plan in plans) <= MAX_ROW_BYTES
        parts: list[list[tuple[np.ndarray, np.ndarray, np.ndarray | None]]] = [[] for _ in streams]
        at = 0
        with torch.no_grad():
            while at < len(windows):
                count = max(1, self.batch_tokens // self.protocol.window, self.batch_tokens // (windows[at][1] - windows[at][0]))
                for s, part in self._batch(streams, windows[at : at + count], keep_rows):
                    parts[s].append(part)
                at += count
        return [_joined(part) for part in parts]

    def _batch(self, streams: Sequence[np.ndarray], windows: list[tuple[int, int, int, int]],
               keep_rows: bool) -> Iterator[tuple[int, tuple[np.ndarray, np.ndarray, np.ndarray | None]]]:
        """For each window its stream and the positions, nats and distributions of its targets."""
        T = max(end - start for start, end, _, _ in windows)
        inputs = np.stack([streams[s][np.minimum(np.arange(start, start + T), end - 1)] for start, end, _, s in windows]).astype(np.int64)
        spans = [np.arange(first, end + 1) for _, end, first, _ in windows]
        flat = np.concatenate([row * T + span - 1 - start for row, (span, (start, *_)) in enumerate(zip(spans, windows, strict=True))])
        targets = np.concatenate([streams[s][span] for span, (*_, s) in zip(spans, windows, strict=True)]).astype(np.int64)
        out_NV = self._outputs(torch.from_numpy(inputs).to(self.device), torch.from_numpy(flat).to(self.device))
        y_N = torch.from_numpy(targets).to(self.device)
        if self.outputs == "logits":
            nats = F.cross_entropy(out_NV, y_N, reduction="none")
        else:
            nats = -out_NV.gather(1, y_N[:, None])[:, 0]
        nats = nats.double().cpu().numpy()
        rows = None
        if keep_rows:
            rows = (out_NV.log_softmax(-1) if self.outputs == "logits" else out_NV).cpu().numpy()
        begin = 0
        for span, (*_, s) in zip(spans, windows, strict=True):
            end = begin + len(span)
            yield s, (span, nats[begin:end], None if rows is None else rows[begin:end])
            begin = end

    def _outputs(self, tokens_BT: Tensor, flat_N: Tensor) -> Tensor:
        """float32 or float64 outputs (N, V) at the given places of the flattened batch."""
        if self._split:
            out = self.network.logits(self.network.hidden(tokens_BT).flatten(0, 1)[flat_N])
            shape: tuple[int, ...] = (len(flat_N), self.vocab_size)
        else:
            out, shape = self.network(tokens_BT), (*tokens_BT.shape, self.vocab_size)
        if not isinstance(out, Tensor) or tuple(out.shape) != shape:
            answer = f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else f"a {type(out).__name__}"
            raise ValueError(f"for tokens of shape {tuple(tokens_BT.shape)} the network returned {answer}, not {shape}: wrap it in a function "
                             "from tokens (B, T) to logits (B, T, V)")
        out = out if self._split else out.flatten(0, 1)[flat_N]
        return out if out.dtype == torch.float64 else out.float()


def _joined(parts: list[tuple[np.ndarray, np.ndarray, np.ndarray | None]]) -> Scored:
    parts.sort(key=lambda part: int(part[0][0]))
    rows = [part[2] for part in parts if part[2] is not None]
    return Scored(np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts]),
                  np.concatenate(rows) if len(rows) == len(parts) else None)


def _device_of(network: Any) -> torch.device:
    tensors = list(network.parameters())[:1] or list(network.buffers())[:1] if isinstance(network, nn.Module) else []
    return tensors[0].device if tensors else torch.device("cpu")


def as_scorer(model: Any, protocol: EvaluationProtocol, **settings: Any) -> Scorer:
    """`model` itself if it has a `score` of its own, else a NetworkScorer with `settings` around it."""
    if callable(getattr(model, "score", None)):
        if not isinstance(getattr(model, "vocab_size", None), int):
            raise ValueError("the scorer does not say how many tokens it knows: give it an attribute vocab_size")
        return model
    if not callable(model) and not (hasattr(model, "hidden") and hasattr(model, "logits")):
        raise ValueError(f"a {type(model).__name__} cannot be scored: give a network (a callable from tokens (B, T) to logits (B, T, V)) or an "
                         "object with score(streams)")
    return NetworkScorer(model, protocol, **settings)


def state_digests(owner: Any) -> dict[str, str]:
    """sha256 of every parameter, buffer, tensor and array that `owner` holds: in itself, in its attributes, in a function's closure, and
    in what those hold, three levels deep. Names say where; other state (a dict, a file) is not seen."""
    digests: dict[str, str] = {}

    def visit(name: str, value: Any, depth: int) -> None:
        if isinstance(value, nn.Module):
            for part, tensor in (*value.named_parameters(), *value.named_buffers()):
                digests[f"{name}.{part}".lstrip(".")] = _tensor_digest(tensor)
        if isinstance(value, Tensor | np.ndarray):
            digests[name.lstrip(".")] = _tensor_digest(value)
        elif depth:
            for part, held in _attributes(value):
                visit(f"{name}.{part}", held, depth - 1)

    visit("", owner, 3)
    return digests


def _attributes(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, nn.Module):  # its tensors are named already; plain attributes may hold more
        return [(name, held) for name, held in vars(value).items() if not name.startswith("_")]
    if inspect.isfunction(value):
        return list(inspect.getclosurevars(value).nonlocals.items())
    if hasattr(value, "__self__") and hasattr(value, "__func__"):
        return [("self", value.__self__)]
    if isinstance(value, list | tuple):
        return [(str(i), held) for i, held in enumerate(value)]
    if isinstance(value, dict):
        return [(str(key), held) for key, held in value.items()]
    return list(vars(value).items()) if hasattr(value, "__dict__") and not isinstance(value, type) else []


def _tensor_digest(value: Tensor | np.ndarray) -> str:
    if isinstance(value, Tensor):
        value = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy() if value.numel() else np.zeros(0, np.uint8)
    return hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
