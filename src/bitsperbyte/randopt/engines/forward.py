"""Decode steps through the transformers forward: for every causal model that has no step of its own.

`CachedSteps` gives the forward a cache whose rows have their own lengths; each step passes a mask made from them. `RecomputedSteps` has no
cache and reads every sequence anew at each step: slow, and right for any causal model whatever its state is.

Shapes: B rows of the batch, R rows and P positions of the cache, V vocabulary.
"""

import functools
import inspect
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

UNBOUNDED = 2**20  # positions of a model that states no limit
MASKED_KINDS = {"full_attention", "sliding_attention"}


def max_positions(config: Any) -> int:
    """Positions that a model takes, by its configuration; UNBOUNDED where it states none."""
    text = config.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "n_ctx"):
        if isinstance(found := getattr(text, name, None), int) and found > 0:
            return found
    return UNBOUNDED


def padded(ids: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """ids padded with 0 on the right, int64 (N, longest): a causal model's outputs at real tokens do not depend on what follows."""
    longest = max(map(len, ids))
    return torch.tensor([list(x) + [0] * (longest - len(x)) for x in ids], device=device)


def _accepted(model: nn.Module, *names: str) -> str | None:
    """The first of these arguments that the model's forward takes."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in names if name in parameters), None)


class RecomputedSteps:
    """StepModel without a cache: `step` runs the whole sequences again."""

    can_capture = False
    name = "transformers forward without a cache"

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.device = next(model.parameters()).device
        self.max_positions = max_positions(model.config)
        self.allocate(0, 0)

    def row_bytes(self, num_positions: int) -> int:
        text = self._model.config.get_text_config()
        return num_positions * (8 + 4 * text.vocab_size)  # the forward's logits, which are its largest part

    def allocate(self, num_rows: int, num_positions: int) -> None:
        self._ids = torch.zeros((num_rows, num_positions), dtype=torch.int64, device=self.device)

    def prefill(self, ids: Sequence[Sequence[int]], rows: Sequence[int]) -> None:
        for row, tokens in zip(rows, ids, strict=True):
            self._ids[row, : len(tokens)] = torch.tensor(list(tokens), device=self.device)

    def step(self, tokens: Tensor, lengths: Tensor, longest: int) -> Tensor:
        rows = torch.arange(len(tokens), device=self.device)
        self._ids[rows, lengths] = tokens
        logits = self._model(input_ids=self._ids[: len(tokens), :longest], use_cache=False).logits
        return logits[rows, lengths]

    def keep(self, rows: Tensor) -> None:
        self._ids[: len(rows)] = self._ids[rows]


class CachedSteps:
    """StepModel over a transformers model whose layers all keep plain keys and values. ValueError for one whose layers do not."""

    can_capture = True
    name = "transformers forward with a cache by row"

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        parameter = next(model.parameters())
        self.device, self._dtype = parameter.device, parameter.dtype
        self.max_positions = max_positions(model.config)
        text = model.config.get_text_config()
        self._window = getattr(text, "sliding_window", None) or 0
        self._kinds = set(getattr(text, "layer_types", None) or [])
        if not self._kinds:
            # a configuration may name a window that its architecture has no mask for, and then ignores
            has_window = self._window and hasattr(sys.modules[type(model).__module__], "create_sliding_window_causal_mask")
            self._kinds = {"sliding_attention" if has_window else "full_attention"}
        if not self._kinds <= MASKED_KINDS:
            raise ValueError(f"layers of the kinds {', '.join(sorted(self._kinds - MASKED_KINDS))} keep more than keys and values")
        self._adds_mask = model.config._attn_implementation == "eager"
        self._cache_name = _accepted(model, "cache", "past_key_values")
        if self._cache_name is None or _accepted(model, "position_ids") is None:
            raise ValueError("its forward takes no cache or no positions")
        self._last_only = {} if (name := _accepted(model, "logits_to_keep", "num_logits_to_keep")) is None else {name: 1}
        self._cache = _row_cache()(text.num_hidden_layers)
        self._probe()
        self.allocate(0, 0)

    def row_bytes(self, num_positions: int) -> int:
        return num_positions * self._dtype.itemsize * sum(h * d for pair in self._shapes for h, d in pair)

    def allocate(self, num_rows: int, num_positions: int) -> None:
        self._cache.stored = []
        self._cache.stored = [
            tuple(torch.zeros((num_rows, h, num_positions, d), dtype=self._dtype, device=self.device) for h, d in pair)
            for pair in self._shapes]
        self._rows = torch.arange(num_rows, device=self.device)
        self._places = torch.arange(num_positions, device=self.device)

    def prefill(self, ids: Sequence[Sequence[int]], rows: Sequence[int]) -> None:
        self._cache.begin_prefill(torch.tensor(list(rows), device=self.device))
        self._forward(padded(ids, self.device), None, None)

    def step(self, tokens: Tensor, lengths: Tensor, longest: int) -> Tensor:
        self._cache.begin_step(self._rows[: len(tokens)], lengths, longest)
        seen = self._places[:longest] <= lengths[:, None]
        masks = {"full_attention": seen, "sliding_attention": seen & (self._places[:longest] > lengths[:, None] - self._window)}
        masks = {kind: self._mask(masks[kind]) for kind in self._kinds}
        mask = masks if len(masks) > 1 else next(iter(masks.values()))
        return self._forward(tokens[:, None], mask, lengths[:, None])[:, -1]

    def keep(self, rows: Tensor) -> None:
        for pair in self._cache.stored:
            for stored in pair:
                stored[: len(rows)] = stored[rows]

    def _mask(self, seen: Tensor) -> Tensor:
        seen = seen[:, None, None]
        if not self._adds_mask:
            return seen
        return torch.zeros(seen.shape, dtype=self._dtype, device=self.device).masked_fill(~seen, torch.finfo(self._dtype).min)

    def _forward(self, ids: Tensor, mask: Any, positions: Tensor | None) -> Tensor:
        return self._model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, **self._last_only,
                           **{self._cache_name: self._cache}).logits

    @torch.inference_mode()
    def _probe(self) -> None:
        """Learn from one forward what each layer keeps."""
        self._cache.begin_prefill(None)
        self._forward(torch.zeros((1, 2), dtype=torch.int64, device=self.device), None, None)
        if None in self._cache.shapes:
            raise ValueError("a layer keeps no keys and values")
        self._shapes = self._cache.shapes


@functools.cache
def _row_cache() -> type:
    from transformers.cache_utils import Cache, DynamicLayer

    class RowCache(Cache):
        """What `CachedSteps` passes as a cache. A prefill stores all of its keys from position 0 on and attends to them as they are; a
        step stores one key a row at the row's own length and attends to the stored ones under the mask that came with it."""

        def __init__(self, num_layers: int) -> None:
            super().__init__(layers=[DynamicLayer() for _ in range(num_layers)])  # stand-ins, which stay empty
            self.stored: list[tuple[Tensor, Tensor]] = []  # by layer: keys and values (R, heads, P, width)
            self.shapes: list[Any] = [None] * num_layers  # by layer: (heads, width) of keys and of values

        def begin_prefill(self, rows: Tensor | None) -> None:
            """rows None only notes the shapes."""
            self._rows, self._lengths, self._longest = rows, None, 0

        def begin_step(self, rows: Tensor, lengths: Tensor, longest: int) -> None:
            self._rows, self._lengths, self._longest = rows, lengths, longest

        def update(self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            if self._rows is None:
                self.shapes[layer] = tuple((x.shape[1], x.shape[3]) for x in (keys, values))
                return keys, values
            for stored, new in zip(self.stored[layer], (keys, values), strict=True):
                if self._lengths is None:
                    stored[self._rows, :, : new.shape[2]] = new
                else:
                    stored[self._rows, :, self._lengths] = new[:, :, 0]
            if self._lengths is None:
                return keys, values
            return tuple(x[: len(self._rows), :, : self._longest] for x in self.stored[layer])

    return RowCache
