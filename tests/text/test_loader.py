"""The global batch does not depend on the number of ranks, and the position is the whole state."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitsperbyte.text.loader import BatchLoader, TokenStream
from bitsperbyte.text.shards import ShardInfo, write_shard

SIZES = (50, 1, 30, 64)
LENGTH = sum(SIZES)
TOKENS = np.arange(LENGTH) + 1000  # each token tells its position


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> TokenStream:
    folder: Path = tmp_path_factory.mktemp("shards")
    shards, start = [], 0
    for number, size in enumerate(SIZES):
        path = folder / f"train_{number:06d}.bin"
        write_shard(path, TOKENS[start : start + size])
        shards.append(ShardInfo(path, size, None))
        start += size
    return TokenStream(shards)


@given(position=st.integers(0, 5 * LENGTH), count=st.integers(0, 3 * LENGTH))
@settings(max_examples=100, deadline=None)
def test_read_is_a_cyclic_slice(stream: TokenStream, position: int, count: int) -> None:
    assert stream.length == LENGTH
    assert stream.read(position, count).tolist() == [1000 + (position + n) % LENGTH for n in range(count)]


def test_a_read_inside_a_shard_copies_nothing(stream: TokenStream) -> None:
    assert stream.read(3, 20).base is not None and not stream.read(3, 20).flags.owndata


@given(seq_len=st.sampled_from([1, 2, 4]), per_rank=st.integers(1, 8), position=st.integers(0, 3 * LENGTH))
@settings(max_examples=60, deadline=None)
def test_every_world_size_sees_the_same_global_batch(
    stream: TokenStream, seq_len: int, per_rank: int, position: int
) -> None:
    batch_tokens = 4 * seq_len * per_rank
    for world_size in (1, 2, 4):
        ranks = [
            BatchLoader(
                stream, batch_tokens=batch_tokens, seq_len=seq_len, rank=rank, world_size=world_size, position=position
            )
            for rank in range(world_size)
        ]
        for step in range(3):
            batches = [loader.next() for loader in ranks]
            start = position + step * batch_tokens
            expected = 1000 + (start + np.arange(batch_tokens + 1)) % LENGTH
            inputs = np.concatenate([x for x, _ in batches])
            targets = np.concatenate([y for _, y in batches])
            assert inputs.shape == (batch_tokens // seq_len, seq_len) and inputs.dtype == targets.dtype == np.int64
            assert inputs.ravel().tolist() == expected[:-1].tolist()
            assert (
                targets.ravel().tolist() == expected[1:].tolist()
            )  # each target once: disjoint over ranks, none left out
            assert {loader.position for loader in ranks} == {start + batch_tokens}


@given(num_before=st.integers(0, 20))
@settings(max_examples=20, deadline=None)
def test_resuming_equals_going_on(stream: TokenStream, num_before: int) -> None:
    whole = BatchLoader(stream, batch_tokens=48, seq_len=8, rank=1, world_size=2)
    for _ in range(num_before):
        whole.next()
    resumed = BatchLoader(stream, batch_tokens=48, seq_len=8, rank=1, world_size=2, position=whole.position)
    for _ in range(5):
        for one, other in zip(whole.next(), resumed.next(), strict=True):
            assert np.array_equal(one, other)


def test_refusals(stream: TokenStream) -> None:
    with pytest.raises(ValueError, match="multiple of seq_len"):
        BatchLoader(stream, batch_tokens=48, seq_len=16, world_size=2)
    with pytest.raises(ValueError, match=f"{LENGTH} tokens and one batch needs {LENGTH + 1}"):
        BatchLoader(stream, batch_tokens=LENGTH, seq_len=1)
    BatchLoader(stream, batch_tokens=LENGTH - 1, seq_len=1)
    for wrong in ({"rank": 2, "world_size": 2}, {"rank": -1}, {"position": -1}, {"seq_len": 0}, {"batch_tokens": 0}):
        with pytest.raises(ValueError, match="must be positive"):
            BatchLoader(stream, **{"batch_tokens": 16, "seq_len": 4, **wrong})
    with pytest.raises(ValueError, match="at least one shard"):
        TokenStream([])
