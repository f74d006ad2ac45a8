"""Batches from shards: deterministic, resumable at a token position, and the same for every number of ranks.

Shapes: B sequences of this rank, T tokens a sequence.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from bitsperbyte.text.shards import ShardInfo, open_shard


class TokenStream:
    """The shards of a split as one endless stream: position `length` is position 0 again."""

    def __init__(self, shards: Sequence[ShardInfo]) -> None:
        self._maps = [open_shard(shard.path) for shard in shards]
        self._ends = list(accumulate(len(tokens) for tokens in self._maps))
        if not self._ends:
            raise ValueError("a token stream needs at least one shard")
        self.length: int = self._ends[-1]

    def read(self, position: int, count: int) -> np.ndarray:
        """`count` tokens (uint16) from `position` >= 0 on. A view of the memory map where one shard holds them all."""
        assert position >= 0 and count >= 0, "positions and counts in a stream are not negative"
        parts = []
        position %= self.length
        shard = bisect_right(self._ends, position)
        offset = position - (self._ends[shard] - len(self._maps[shard]))
        while True:
            part = self._maps[shard][offset : offset + count]
            parts.append(part)
            count -= len(part)
            if count == 0:
                return part if len(parts) == 1 else np.concatenate(parts)
            shard, offset = (shard + 1) % len(self._maps), 0


class BatchLoader:
    """Step after step, this rank's part of the global batch.

    The global batch of a step is the tokens `position .. position + batch_tokens` of the stream, the last one only as a
    target; it holds batch_tokens / seq_len sequences, and rank r takes the r-th contiguous block of them. So targets
    are disjoint over the ranks, and what a step trains on does not depend on world_size. `position` is the whole state:
    it counts every token since the start, without wrapping, and is the same on all ranks.
    """

    def __init__(self, stream: TokenStream, *, batch_tokens: int, seq_len: int, rank: int = 0, world_size: int = 1,
                 position: int = 0) -> None:
        if min(batch_tokens, seq_len, world_size) <= 0 or not 0 <= rank < world_size or position < 0:
            raise ValueError(f"batch_tokens {batch_tokens}, seq_len {seq_len} and world_size {world_size} must be "
                             "positive, rank "
                             f"{rank} below world_size, and position {position} not negative")
        if batch_tokens % (seq_len * world_size):
            raise ValueError(f"batch_tokens {batch_tokens} must be a multiple of seq_len * world_size = {seq_len} * "
                             f"{world_size} = "
                             f"{seq_len * world_size}")
        if stream.length < batch_tokens + 1:
            raise ValueError(f"the stream has {stream.length:,} tokens and one batch needs {batch_tokens + 1:,}: "
                             "prepare more text, or "
                             "lower train.batch_tokens")
        self.stream, self.batch_tokens, self.seq_len = stream, batch_tokens, seq_len
        self._local_tokens = batch_tokens // world_size
        self._first = rank * self._local_tokens
        self._position = position

    @property
    def position(self) -> int:
        return self._position

    def next(self) -> tuple[np.ndarray, np.ndarray]:
        """(inputs_BT, targets_BT), int64, target t being input t + 1; advances the position by batch_tokens."""
        tokens = self.stream.read(self._position + self._first, self._local_tokens + 1).astype(np.int64)
        self._position += self.batch_tokens
        return tokens[:-1].reshape(-1, self.seq_len), tokens[1:].reshape(-1, self.seq_len)
