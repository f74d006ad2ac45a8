"""The decode loop: batches of sequences through a model that takes one step at a time, greedy or sampled.

A model gives `StepModel`; this module decides which prompt sits in which row, when a row is free again, and what an answer is. Rows keep
their own lengths, so nothing is padded on the left and every token has its true position. Everything that a step changes (tokens,
lengths, counts, what was generated) lives on the device: on CUDA one step, from the embedding to the next token, is one captured graph,
and the host looks only every few steps which rows have ended.

Shapes: B rows of the running batch, R rows of the cache, V vocabulary, N prompts.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor

from bitsperbyte.randopt.engines.base import Generation, Sampling
from bitsperbyte.randopt.noise import uniforms

CHECK_EVERY = 16  # steps between two looks at what has ended, on CUDA, where a look waits for the device
PREFILL_TOKENS = {"cuda": 16_384, "cpu": 4_096}  # tokens of prompts, padding included, in one forward pass
WIDTH_STEP = 128  # positions and answer lengths are rounded up to this, so that calls of near lengths share buffers and graphs


class StepModel(Protocol):
    """A causal model with a cache of R rows by P positions. It owns its weights and the cache, nothing else.

    `step` on CUDA, where `can_capture` is true, is captured into a graph: it must not wait for the device, must read `tokens` and
    `lengths` where they lie (their addresses stay, their values change), and must use weights in place.
    """

    device: torch.device
    max_positions: int  # a sequence, its answer included, is never longer
    can_capture: bool  # whether `step` may be captured as a CUDA graph

    def row_bytes(self, num_positions: int) -> int:
        """Bytes of the cache of one row of `num_positions` positions."""
        ...

    def allocate(self, num_rows: int, num_positions: int) -> None:
        """Drop the cache and make one of `num_rows` rows of `num_positions` positions. Contents do not matter."""
        ...

    def prefill(self, ids: Sequence[Sequence[int]], rows: Sequence[int]) -> None:
        """Write tokens ids[i] (at least one each) to positions 0..len(ids[i])-1 of the cache's row rows[i], other rows untouched. Rows
        are distinct and in no order. What is left in a row at and after its length is never read."""
        ...

    def step(self, tokens: Tensor, lengths: Tensor, longest: int) -> Tensor:
        """One token more in rows 0..B-1. tokens int64 (B,): the next token of each; lengths int64 (B,): how many tokens the row's
        cache holds before it, so that it is written at position lengths[b] and attends to positions 0..lengths[b]. Returns logits (B, V) of
        the token after it, in a tensor of its own. Changes neither argument. `longest` is at least max(lengths) + 1 and at most P, known
        without asking the device: no position at or after it need be read (a captured step gets P)."""
        ...

    def keep(self, rows: Tensor) -> None:
        """rows int64 (M,), ascending, on the device: make old row rows[i] row i."""
        ...


def cache_budget(device: torch.device, share: float, reserve_bytes: int = 0) -> int:
    """Bytes that a cache may take: `share` of the memory that is free now (what torch holds unused counts as free), less `reserve_bytes`."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    else:
        import psutil

        free = psutil.virtual_memory().available
    return max(0, int(free * share) - reserve_bytes)


def draw(logits: Tensor, uniform: Tensor, temperature: Tensor, top_p: Tensor | None) -> Tensor:
    """Tokens (B,) drawn from softmax(logits / temperature), logits (B, V), by inversion of uniform float64 (B,) in (0, 1).

    With top_p, from the smallest set of most likely tokens whose probabilities reach it. Tokens count in the order of their ids, or with
    top_p from the most to the least likely (ties by id).
    """
    mass = torch.softmax(logits.float() / temperature, dim=-1).double()
    order = None
    if top_p is not None:
        mass, order = mass.sort(dim=-1, descending=True, stable=True)
        before = mass.cumsum(-1) - mass
        mass = mass.masked_fill((before >= top_p) & (before > 0), 0.0)  # the first stays, whatever is left of top_p in float32
    reached = mass.cumsum(-1)
    total = reached[:, -1:]
    target = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    index = (reached <= target).sum(-1, keepdim=True)  # the first token whose sum lies above; one without mass never is
    return (index if order is None else order.gather(-1, index)).squeeze(-1)


class Decoder:
    """Generates with a StepModel.

    budget_bytes: called when the cache is made, after the old one is gone: what it may take. max_sequences caps the rows further. graphs:
    capture steps on CUDA. One decoder serves every seed: weights change in place, and each `generate` starts with an empty cache.
    """

    def __init__(self, model: StepModel, *, eos_ids: Sequence[int], text_of: Callable[[Sequence[int]], str],
                 budget_bytes: Callable[[], int], max_sequences: int | None = None, graphs: bool = True) -> None:
        self.model = model
        self.text_of = text_of
        self.eos_ids = frozenset(eos_ids)
        self.graphs = graphs and model.can_capture and model.device.type == "cuda"
        self.num_captured = 0
        self._budget_bytes, self._max_sequences = budget_bytes, max_sequences
        self._eos = torch.tensor(sorted(self.eos_ids) or [-1], device=model.device)
        self._captured: dict[tuple[int, str], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool = None
        self._sizes: set[int] = set()
        self._rows = self._positions = self._width = 0
        self._wanted = 0

    def generate(self, prompt_ids: Sequence[Sequence[int]], sampling: Sampling) -> list[Generation]:
        """One Generation for each prompt (N of them, at least one token each), in their order. The draws of a sampled sequence depend
        on sampling.seed and its position in `prompt_ids` alone. ValueError for a prompt that leaves no room to generate in the model's
        context, or where not even one row fits the memory."""
        if not prompt_ids:
            return []
        limits = limits_of(prompt_ids, sampling.max_new_tokens, self.model.max_positions)
        self._make_room(len(prompt_ids), max(len(ids) + n for ids, n in zip(prompt_ids, limits, strict=True)), max(limits))
        run = _Run(self, prompt_ids, limits, sampling)
        with torch.inference_mode():
            while run.advance():
                pass
        return run.results()

    def trace(self, prompt_ids: Sequence[Sequence[int]], num_tokens: int, *, graphs: bool | None = None) -> tuple[Tensor, Tensor]:
        """Greedy tokens int64 (N, num_tokens) and the logits float32 (N, num_tokens, V) they were taken from, all prompts in one batch,
        end tokens ignored: what the start-up self-test compares; in several batches where one does not hold them. graphs None: as in `generate`."""
        self._make_room(len(prompt_ids), max(map(len, prompt_ids)) + num_tokens, num_tokens)
        if (rows := self._rows) < len(prompt_ids):
            parts = [self.trace(prompt_ids[at : at + rows], num_tokens, graphs=graphs) for at in range(0, len(prompt_ids), rows)]
            return torch.cat([tokens for tokens, _ in parts]), torch.cat([logits for _, logits in parts])
        with torch.inference_mode():
            run = _Run(self, prompt_ids, [num_tokens] * len(prompt_ids), Sampling(num_tokens))
            kept = []
            for ahead in range(num_tokens):
                logits = run.step(self.graphs if graphs is None else graphs, ahead + 1)
                self.finished.fill_(False)
                kept.append(logits[: len(prompt_ids)].float().clone())
            tokens = self.history[: len(prompt_ids), :num_tokens].clone()
        return tokens[run.row_of], torch.stack(kept, 1)[run.row_of]

    def size_for(self, num_active: int) -> int:
        """Rows that a step computes for `num_active` sequences: the next size that has a graph, or exactly these without graphs."""
        if not self.graphs:
            return num_active
        return min(s for s in self._sizes if s >= num_active)

    def _make_room(self, num_sequences: int, num_positions: int, width: int) -> None:
        """Buffers for these sequences, or as many of them as the memory holds; those of earlier calls are used where they suffice."""
        wanted = _rounded(num_sequences) if self.graphs else num_sequences
        wanted = min(wanted, self._max_sequences or wanted)
        if wanted > self._wanted or num_positions > self._positions or width > self._width:
            self._captured.clear()
            self._pool = None
            self._wanted = max(wanted, self._wanted)
            self._positions = max(self._positions, -(-num_positions // WIDTH_STEP) * WIDTH_STEP)
            self._width = max(self._width, -(-width // WIDTH_STEP) * WIDTH_STEP)
            self.model.allocate(0, 0)
            row = self.model.row_bytes(self._positions) + 24 * self._width
            self._rows = min(self._wanted, self._budget_bytes() // row)
            if self.graphs and self._rows > 8:
                self._rows -= self._rows % 8
            if self._rows < 1:
                raise ValueError(f"one sequence of {self._positions} positions needs {row / 2**20:,.0f} MiB of cache, which the free memory "
                                 "does not hold: free some, raise decode.memory_share, or generate fewer tokens")
            self._sizes = set(_halves(self._rows))
            self.model.allocate(self._rows, self._positions)
            self._allocate_state()
        self._sizes.add(min(self._rows, wanted))

    def _allocate_state(self) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.model.device)

        self.tokens, self.lengths, self.counts, self.limits = (zeros(self._rows) for _ in range(4))
        self.finished = torch.ones(self._rows, dtype=torch.bool, device=self.model.device)
        self.history = zeros(self._rows, self._width + 1)  # the last column takes what ended rows write
        self.uniform = zeros(self._rows, self._width + 1, dtype=torch.float64)
        self.temperature, self.top_p = (torch.ones((), device=self.model.device) for _ in range(2))

    def step(self, size: int, mode: str, longest: int, graphs: bool) -> Tensor:
        """Advance rows 0..size-1 by a token and return the logits (size, V) it came from; ended rows stay as they are."""
        if not graphs:
            return self._step(size, mode, longest)
        if (size, mode) not in self._captured:
            self._captured[size, mode] = self._capture(size, mode)
        graph, logits = self._captured[size, mode]
        graph.replay()
        return logits

    def _step(self, size: int, mode: str, longest: int) -> Tensor:
        tokens, lengths, counts, finished = (x[:size] for x in (self.tokens, self.lengths, self.counts, self.finished))
        logits = self.model.step(tokens, lengths, longest)
        if mode == "greedy":
            chosen = logits.argmax(-1)
        else:
            uniform = self.uniform[:size].gather(1, counts[:, None]).squeeze(1)
            chosen = draw(logits, uniform, self.temperature, self.top_p if mode == "nucleus" else None)
        chosen = torch.where(finished, tokens, chosen)
        self.history[:size].scatter_(1, counts[:, None], chosen[:, None])
        going = (~finished).long()
        counts += going
        lengths += going
        tokens.copy_(chosen)
        finished |= (chosen[:, None] == self._eos).any(1) | (counts >= self.limits[:size])
        return logits

    def _capture(self, size: int, mode: str) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Capture a step. Warm-up runs with every row ended, which leaves all state as it is: what it writes to the cache is what
        the step itself writes there next."""
        ended = self.finished.clone()
        self.finished.fill_(True)
        stream = torch.cuda.Stream(self.model.device)
        stream.wait_stream(torch.cuda.current_stream(self.model.device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._step(size, mode, self._positions)
        torch.cuda.current_stream(self.model.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = self._step(size, mode, self._positions)
        self._pool = self._pool or graph.pool()
        self.finished.copy_(ended)
        self.num_captured += 1
        return graph, logits


class _Run:
    """One call of `generate`: which prompt sits in which row, what waits, what is done."""

    def __init__(self, decoder: Decoder, prompt_ids: Sequence[Sequence[int]], limits: Sequence[int], sampling: Sampling) -> None:
        self.decoder, self.prompt_ids, self.limits, self.sampling = decoder, prompt_ids, limits, sampling
        self.mode = "greedy" if sampling.temperature == 0.0 else "sample" if sampling.top_p == 1.0 else "nucleus"
        decoder.temperature.fill_(sampling.temperature or 1.0)
        decoder.top_p.fill_(sampling.top_p)
        decoder.finished.fill_(True)
        decoder.lengths.zero_()
        decoder.counts.zero_()
        on_cuda = decoder.model.device.type == "cuda"
        self.check_every = CHECK_EVERY if on_cuda else 1
        self.prefill_tokens = PREFILL_TOKENS.get(decoder.model.device.type, PREFILL_TOKENS["cpu"])
        order = sorted(range(len(prompt_ids)), key=lambda i: len(prompt_ids[i]), reverse=True)  # long ones first, equal ones together
        num_rows = min(decoder._rows, len(prompt_ids))
        self.size = decoder.size_for(num_rows)
        self.owner: list[int | None] = [None] * self.size  # the prompt in each row
        self.held = [0] * self.size  # tokens in the row's cache, as of the last look
        self.ids: dict[int, list[int]] = {}  # what was generated, by prompt
        self.waiting = deque(order)
        self.row_of = [0] * len(prompt_ids)  # where a prompt sat first
        self._admit(range(num_rows))

    def step(self, graphs: bool, ahead: int) -> Tensor:
        """One step of the batch, the `ahead`th since the last look."""
        longest = min(max(self.held) + ahead, self.decoder._positions)
        return self.decoder.step(self.size, self.mode, longest, graphs)

    def advance(self) -> bool:
        """Some steps, then a look: ended rows give their answers, waiting prompts take their place. False once all is done."""
        active = [row for row, owner in enumerate(self.owner) if owner is not None]
        if not active:
            return False
        most_left = max(self.limits[self.owner[r]] - (self.held[r] - len(self.prompt_ids[self.owner[r]]) + 1) for r in active)
        for ahead in range(1, min(self.check_every, most_left) + 1):
            self.step(self.decoder.graphs, ahead)
        self._collect(active)
        return True

    def results(self) -> list[Generation]:
        return [self._answer(i) for i in range(len(self.prompt_ids))]

    def _admit(self, rows: Sequence[int]) -> None:
        """Put waiting prompts into these rows: all but their last token go into the cache now, the last is the first step's."""
        decoder, device = self.decoder, self.decoder.model.device
        taken = [(row, self.waiting.popleft()) for row in rows if self.waiting]
        group: list[tuple[int, int]] = []
        for row, prompt in [(r, p) for r, p in taken if len(self.prompt_ids[p]) > 1]:
            if group and (len(group) + 1) * len(self.prompt_ids[group[0][1]]) > self.prefill_tokens:
                self._prefill(group)
                group = []
            group.append((row, prompt))
        self._prefill(group)
        index = torch.tensor([row for row, _ in taken], device=device)
        for row, prompt in taken:
            self.owner[row], self.held[row], self.row_of[prompt] = prompt, len(self.prompt_ids[prompt]) - 1, row
        values = torch.tensor([[self.prompt_ids[p][-1], len(self.prompt_ids[p]) - 1, 0, self.limits[p]] for _, p in taken], device=device)
        for state, column in zip((decoder.tokens, decoder.lengths, decoder.counts, decoder.limits), values.T, strict=True):
            state[index] = column
        if self.mode != "greedy":
            for row, prompt in taken:
                drawn = uniforms(self.sampling.seed, prompt, 0, self.limits[prompt])
                decoder.uniform[row, : self.limits[prompt]] = torch.as_tensor(drawn, dtype=torch.float64).to(device)
        decoder.finished[index] = False

    def _prefill(self, group: list[tuple[int, int]]) -> None:
        if group:
            self.decoder.model.prefill([self.prompt_ids[p][:-1] for _, p in group], [row for row, _ in group])

    def _collect(self, active: list[int]) -> None:
        decoder = self.decoder
        state = torch.stack([decoder.finished[: self.size].long(), decoder.counts[: self.size]]).tolist()
        ended = {r for r in active if state[0][r]}
        looked_at = active if self.sampling.stop else sorted(ended)
        if looked_at:
            width = max(state[1][r] for r in looked_at)
            generated = dict(zip(looked_at, decoder.history[looked_at, :width].tolist(), strict=True))
        freed = []
        for row in active:
            self.held[row] = len(self.prompt_ids[self.owner[row]]) - 1 + state[1][row]
            if row in ended or self.sampling.stop and self._has_stop(generated[row][: state[1][row]]):
                self.ids[self.owner[row]] = generated[row][: state[1][row]]
                self.owner[row], self.held[row] = None, 0
                freed.append(row)
        if freed:
            index = torch.tensor(freed, device=decoder.model.device)
            decoder.finished[index] = True
            decoder.lengths[index] = 0
        free = [row for row, owner in enumerate(self.owner) if owner is None]
        if self.waiting:
            if 8 * len(free) >= self.size:  # a prefill of very few rows is poor work
                self._admit(free)
        elif len(free) < self.size:
            self._shrink()

    def _shrink(self) -> None:
        """Without graphs any smaller batch is as good: shrink once an eighth is free. With graphs, to the sizes that have one."""
        decoder = self.decoder
        rows = [row for row, owner in enumerate(self.owner) if owner is not None]
        size = decoder.size_for(len(rows))
        if not rows or 8 * (self.size - size) < self.size:
            return
        index = torch.tensor(rows, device=decoder.model.device)
        decoder.model.keep(index)
        for state in (decoder.tokens, decoder.lengths, decoder.counts, decoder.limits, decoder.finished, decoder.history, decoder.uniform):
            state[: len(rows)] = state[index]
        decoder.finished[len(rows):] = True
        self.owner = [self.owner[r] for r in rows] + [None] * (size - len(rows))
        self.held = [self.held[r] for r in rows] + [0] * (size - len(rows))
        self.size = size

    def _has_stop(self, ids: list[int]) -> bool:
        """Whether a stop text is in the answer. Only its end is decoded, which reaches back over the steps since the last look and a
        token for each byte of the longest stop text; a find is confirmed on the whole."""
        reach = self.check_every + 8 + max(len(s.encode()) for s in self.sampling.stop)
        return self._contains_stop(ids[-reach:]) and self._contains_stop(ids)

    def _contains_stop(self, ids: list[int]) -> bool:
        text = self.decoder.text_of(ids)
        return any(stop in text for stop in self.sampling.stop)

    def _answer(self, prompt: int) -> Generation:
        return answer_of(self.ids[prompt], len(self.prompt_ids[prompt]), self.sampling, self.decoder.eos_ids, self.decoder.text_of)


def limits_of(prompt_ids: Sequence[Sequence[int]], max_new_tokens: int, max_positions: int) -> list[int]:
    """Tokens that each answer may have. ValueError for a prompt without a token, or one that leaves none for the answer."""
    for index, ids in enumerate(prompt_ids):
        if not ids:
            raise ValueError(f"prompt {index} has no token: give it some text, or use a tokenizer that puts a BOS first")
        if len(ids) >= max_positions:
            raise ValueError(f"prompt {index} has {len(ids)} tokens, and the model takes {max_positions} positions: nothing is "
                             "left to generate in; shorten the prompt or use a model with a longer context")
    return [min(max_new_tokens, max_positions - len(ids)) for ids in prompt_ids]


def answer_of(ids: Sequence[int], num_prompt_tokens: int, sampling: Sampling, eos_ids: Collection[int],
              text_of: Callable[[Sequence[int]], str]) -> Generation:
    """The answer in generated ids, cut at the first stop text: with the fewest tokens that complete one, whatever was generated after."""

    def has_stop(ids: Sequence[int]) -> bool:
        text = text_of(ids)
        return any(stop in text for stop in sampling.stop)

    ended, text = ids[-1] in eos_ids, text_of(ids)
    if any(stop in text for stop in sampling.stop):
        low, high = 1, len(ids)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if has_stop(ids[:middle]) else (middle + 1, high)
        ids, ended = ids[:low], True
        text = text_of(ids)
        text = text[: min(found for stop in sampling.stop if (found := text.find(stop)) >= 0)]
    return Generation(text, tuple(ids), num_prompt_tokens, len(ids), not ended)


def _rounded(size: int) -> int:
    """Sizes of batches that have graphs: 1, 2, 4, 8, then multiples of 8."""
    return next(s for s in (1, 2, 4, 8) if s >= size) if size <= 8 else -(-size // 8) * 8


def _halves(size: int) -> list[int]:
    """`size`, half of it, a quarter, ... down to 8: few enough that capturing them costs little."""
    sizes = [size]
    while sizes[-1] > 8:
        sizes.append(_rounded(-(-sizes[-1] // 2)))
    return sizes
