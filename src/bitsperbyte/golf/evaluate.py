"""Score a model on a stream of tokens: nats per token from the network, bytes from the tokenizer's table, a Score from both.

Shapes: B windows in a batch, T input tokens of the longest of them, D width, N scored positions.

Windows run batched, longest first, padded on the right, which a causal model cannot see. Logits are computed for the scored
positions only: at stride 64 of 1,024 that is one sixteenth of the head's work.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bitsperbyte.golf.model import GolfModel
from bitsperbyte.golf.ranks import all_gather
from bitsperbyte.metric.bpb import Score
from bitsperbyte.metric.windows import WindowPlan, plan_windows
from bitsperbyte.text.tokenizers import ByteTable

# Uncompiled scoring put 1.3 (recurrent_v7) and 2.1 (baseline) million tokens a second through one H200: this many take about a minute.
# Compiling costs some tens of seconds, so it is worth it only above; how much faster it then is was not measured.
COMPILE_ABOVE_TOKENS = 100_000_000
MAX_LOGIT_ROWS = 16_384  # scored positions put through the head at once: bounds the float32 logits to 0.5 GiB at 8,192 pieces


@dataclass(frozen=True)
class Protocol:
    """How a text is cut for scoring. Two scores compare only if their protocols and texts are equal."""

    window: int
    stride: int | None = None
    documents: str = "across"
    drop_tail: bool = False

    def describe(self) -> str:
        windows = f"stride {self.stride} of {self.window}" if self.stride else f"non-overlapping {self.window}"
        return f"{windows}, {self.documents}" + (", tail dropped" if self.drop_tail else "")


@dataclass(frozen=True)
class PositionLoss:
    """The same score by how much context a target had: bin i holds those with edges[i] to edges[i + 1] - 1 tokens before them in their
    window, the last bin those with edges[-1] and more. Arrays (bins,): int64 edges, float64 nats, int64 num_tokens."""

    edges: np.ndarray
    nats: np.ndarray
    num_tokens: np.ndarray

    def to_dict(self) -> dict[str, list]:
        """Means, as a record keeps them: None where a bin is empty."""
        means = [float(nats / num) if num else None for nats, num in zip(self.nats, self.num_tokens, strict=True)]
        return {"edges": self.edges.tolist(), "nats_per_token": means, "num_tokens": self.num_tokens.tolist()}


@dataclass(frozen=True)
class Evaluation:
    """A score, the same by document (for paired bootstraps) and by position, the protocol and the seconds it took."""

    score: Score
    protocol: Protocol
    document_nats: np.ndarray
    document_bytes: np.ndarray
    by_position: PositionLoss
    seconds: float


def evaluate(model: GolfModel, tokens: np.ndarray, table: ByteTable, bos_id: int, protocol: Protocol, *,
             batch_tokens: int = 65_536, rank: int = 0, world_size: int = 1,
             progress: Callable[[int, int], None] | None = None) -> Evaluation:
    """Score the targets tokens[1:] of a uint16 stream under `protocol`.

    `progress` is called with (windows done, windows in all). With several ranks each takes its share of the batches, and all
    return, bit for bit, what one rank would: batches are the same, and their nats are summed in the same order. Raises ValueError for
    a stream without a target, for token ids beyond the model's vocabulary, and where bytes per token say that the denominator belongs
    to another text.
    """
    begin = time.perf_counter()
    tokens = np.asarray(tokens)
    if len(tokens) < 2:
        raise ValueError(f"nothing to score: {len(tokens)} tokens have no target; give a longer text")
    if int(tokens.max()) >= model.config.vocab_size:
        raise ValueError(f"token id {int(tokens.max())} is beyond the model's vocabulary of {model.config.vocab_size}: "
                         "the text was prepared with another tokenizer")
    plan = plan_windows(tokens, length=protocol.window, stride=protocol.stride, documents=protocol.documents, bos_id=bos_id,
                        drop_tail=protocol.drop_tail)
    document_of = np.cumsum(tokens == bos_id, dtype=np.int64)  # 0 is text before the first BOS
    num_documents = int(document_of[-1]) + 1
    nats, num_bytes = np.zeros(num_documents), np.zeros(num_documents, np.int64)
    edges = position_edges(protocol.window)
    position_nats, position_tokens = np.zeros(len(edges)), np.zeros(len(edges), np.int64)
    device = model.tok_emb.weight.device
    hidden = model.hidden
    full_batch = max(1, batch_tokens // protocol.window)
    if device.type == "cuda" and len(plan) * protocol.window > COMPILE_ABOVE_TOKENS:
        model.prepare(protocol.window, device)
        hidden = torch.compile(model.hidden, dynamic=False)
    batches = list(_batches(plan, full_batch, batch_tokens))
    done = 0
    for begun in range(0, len(batches), world_size):
        together = batches[begun : begun + world_size]
        at = [_positions(plan.firsts[rows], plan.ends[rows]) for rows in together]
        losses = None
        if rank < len(together):
            rows = together[rank]
            starts, ends, firsts = plan.starts[rows], plan.ends[rows], plan.firsts[rows]
            full = len(rows) == full_batch and bool((ends - starts == protocol.window).all())
            with torch.no_grad():
                losses = _window_nats(model, hidden if full else model.hidden, tokens, starts, ends, firsts, tokens[at[rank]], device)
        of_batches = [losses] if world_size == 1 else _of_all_ranks(losses, [len(places) for places in at], world_size, device)
        for rows, places, nats_N in zip(together, at, of_batches, strict=True):
            target = tokens[places]
            nats += np.bincount(document_of[places], weights=nats_N, minlength=num_documents)
            counted = table.target_bytes(tokens[places - 1], target)
            num_bytes += np.bincount(document_of[places], weights=counted, minlength=num_documents).astype(np.int64)
            bins = np.searchsorted(edges, places - np.repeat(plan.starts[rows], plan.ends[rows] - plan.firsts[rows] + 1), side="right") - 1
            position_nats += np.bincount(bins, weights=nats_N, minlength=len(edges))
            position_tokens += np.bincount(bins, minlength=len(edges))
            done += len(rows)
            if progress:
                progress(done, len(plan))
    num_tokens = int(position_tokens.sum())
    assert num_tokens == plan.num_scored, "every target of the plan is scored once"
    score = Score(float(nats.sum()), int(num_bytes.sum()), num_tokens).check("the evaluation")
    by_position = PositionLoss(edges, position_nats, position_tokens)
    return Evaluation(score, protocol, nats, num_bytes, by_position, time.perf_counter() - begin)


def position_edges(window: int) -> np.ndarray:
    """1, 2, 4, ... below `window`: a target has 1 to `window` tokens before it, and the last bin is as wide as all before it together."""
    return 2 ** np.arange(max(1, (window - 1).bit_length()), dtype=np.int64)


def _batches(plan: WindowPlan, full_batch: int, batch_tokens: int) -> Iterator[np.ndarray]:
    """Indices of windows that run together: equal or nearly equal lengths, at most `batch_tokens` inputs after padding."""
    lengths = plan.ends - plan.starts
    order = np.argsort(-lengths, kind="stable")
    at = 0
    while at < len(order):
        longest = int(lengths[order[at]])
        count = max(full_batch, batch_tokens // longest)
        yield order[at : at + count]
        at += count


def _positions(firsts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """All target positions first..end of each window, one after the other."""
    counts = ends - firsts + 1
    offsets = np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(firsts, counts) + np.arange(int(counts.sum())) - offsets


def _window_nats(model: GolfModel, hidden: Callable[[Tensor], Tensor], tokens: np.ndarray, starts: np.ndarray, ends: np.ndarray,
                 firsts: np.ndarray, target: np.ndarray, device: torch.device) -> np.ndarray:
    """float64 nats of each scored target, in the order of _positions."""
    T = int((ends - starts).max())
    columns = starts[:, None] + np.arange(T)[None, :]
    inputs = tokens[np.minimum(columns, ends[:, None] - 1)].astype(np.int64)  # past a window's end: any token, never scored
    x_BTD = hidden(torch.from_numpy(inputs).to(device))
    rows = np.repeat(np.arange(len(starts)), ends - firsts + 1)
    flat = rows * T + _positions(firsts - 1 - starts, ends - 1 - starts)
    x_ND = x_BTD.flatten(0, 1)[torch.from_numpy(flat).to(device)]
    targets = torch.from_numpy(target.astype(np.int64)).to(device)
    losses = [F.cross_entropy(model.logits(x), y, reduction="none").double()
              for x, y in zip(x_ND.split(MAX_LOGIT_ROWS), targets.split(MAX_LOGIT_ROWS), strict=True)]
    return torch.cat(losses).cpu().numpy()


def _of_all_ranks(losses: np.ndarray | None, counts: list[int], world_size: int, device: torch.device) -> list[np.ndarray]:
    """The float64 nats of the batches that the ranks scored at once, in the batches' order; `losses` are this rank's, if it had one."""
    sent = torch.zeros(max(counts), dtype=torch.float64, device=device)
    if losses is not None:
        sent[: len(losses)] = torch.from_numpy(losses).to(device)
    got = torch.empty(world_size * len(sent), dtype=torch.float64, device=device)
    all_gather(got, sent)
    rows = got.view(world_size, -1).cpu().numpy()
    return [row[:count] for row, count in zip(rows, counts, strict=False)]
