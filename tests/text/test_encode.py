"""Which split a document belongs to, and the shards that its tokens end up in."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitsperbyte.text import encode
from bitsperbyte.text.encode import ShardWriter, Splitter, write_splits
from bitsperbyte.text.hub import file_sha256
from bitsperbyte.text.shards import open_shard, read_header
from bitsperbyte.text.tokenizers import ByteTokenizer

TEXTS = st.lists(st.text(min_size=1, max_size=4), max_size=40)


def split(splitter: Splitter, texts: list[str], val: list[str] = ()) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {"train": [], "val": []}
    for name, text in splitter.split(texts, val):
        found[name].append(text)
    return found


@given(texts=TEXTS, val=TEXTS, seed=st.integers(0, 3), how=st.sampled_from(["fraction", "docs", "source"]))
@settings(max_examples=150, deadline=None)
def test_no_document_is_in_both_splits_and_none_is_lost(texts: list[str], val: list[str], seed: int, how: str) -> None:
    fraction, docs = {"fraction": (0.3, None), "docs": (None, 3), "source": (None, None)}[how]
    given_as_val = val if how == "source" else []
    splitter = Splitter(fraction, docs, seed)
    found = split(splitter, texts, given_as_val)
    assert not set(found["train"]) & set(found["val"]) and len(set(found["val"])) == len(found["val"])
    assert set(found["train"]) | set(found["val"]) == {*texts, *given_as_val}
    assert len(found["train"]) + len(found["val"]) + splitter.num_dropped == len(texts) + len(given_as_val)
    assert found["train"] == [text for text in texts if text in set(found["train"])]  # in order, copies kept
    if how == "docs":
        assert found["val"] == list(dict.fromkeys(texts))[:3]
    if how == "source":
        assert found["val"] == list(dict.fromkeys(val)) and found["train"] == [text for text in texts if text not in set(val)]


def test_the_hash_decides_alone() -> None:
    """The same document falls into the same split in any company; about the asked share falls into val."""
    texts = [f"document {n}" for n in range(2000)]
    whole = split(Splitter(0.2, None, 0), texts)
    assert 320 < len(whole["val"]) < 480
    part = split(Splitter(0.2, None, 0), texts[::-7])
    assert set(part["val"]) == set(whole["val"]) & set(texts[::-7])
    assert set(split(Splitter(0.2, None, 1), texts)["val"]) != set(whole["val"])
    assert set(split(Splitter(0.1, None, 0), texts)["val"]) < set(whole["val"])


@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=12), shard_tokens=st.integers(1, 7))
@settings(max_examples=25, deadline=None)
def test_shards_hold_the_tokens_in_order(sizes: list[int], shard_tokens: int, tmp_path_factory) -> None:
    folder = tmp_path_factory.mktemp("shards")
    tokens = np.arange(sum(sizes), dtype=np.uint16)
    writer = ShardWriter(folder, "val", shard_tokens)
    for part in np.split(tokens, np.cumsum(sizes)[:-1]):
        writer.add(part)
    writer.finish()
    writer.finish()  # nothing is left to finish
    assert [row["num_tokens"] for row in writer.rows] == [
        min(shard_tokens, len(tokens) - at) for at in range(0, len(tokens), shard_tokens)]
    paths = [folder / row["file"] for row in writer.rows]
    assert sorted(folder.iterdir()) == paths == sorted(paths)  # no temporary file is left, the names are in order
    assert all(file_sha256(path) == row["sha256"] for path, row in zip(paths, writer.rows, strict=True))
    assert np.array_equal(np.concatenate([open_shard(path) for path in paths] or [tokens[:0]]), tokens)


def test_an_unfinished_shard_has_no_name_of_its_own(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "train", 4)
    writer.add(np.arange(6, dtype=np.uint16))
    assert read_header(tmp_path / "train_000000.bin") == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train_000000.bin", "train_000001.bin.tmp"]
    writer.abandon()
    with pytest.raises(ValueError):
        read_header(tmp_path / "train_000001.bin.tmp")


def test_write_splits_puts_a_bos_before_each_document_and_counts(tmp_path: Path) -> None:
    tokenizer, seen = ByteTokenizer(), []
    pairs = [("val", "é"), ("train", "ab"), ("train", "c"), ("val", "d")]
    entries, proofs = write_splits(iter(pairs), tokenizer, tmp_path, 1000, lambda *at: seen.append(at))
    assert open_shard(tmp_path / "train_000000.bin").tolist() == [1, 101, 102, 1, 103]
    assert open_shard(tmp_path / "val_000000.bin").tolist() == [1, 4 + 0xC3, 4 + 0xA9, 1, 104]
    for name in ("train", "val"):
        entry = entries[name]
        assert (entry["num_documents"], entry["num_tokens"], entry["num_bytes"], entry["counted_bytes"]) == (2, 5, 3, 3)
        assert proofs[name]["lost_share"] == 0 and proofs[name]["num_documents"] == 2
    assert seen == [("encoding documents", 4, None)]


def test_documents_are_encoded_in_bounded_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "_BATCH_BYTES", 10)
    sizes: list[int] = []

    class Counting(ByteTokenizer):
        def encode_batch(self, texts):
            sizes.append(sum(map(len, texts)))
            return super().encode_batch(texts)

    write_splits([("train", "abcd")] * 9 + [("val", "x")], Counting(), tmp_path, 1000, lambda *_: None)
    assert sizes == [12, 12, 12, 1]


@pytest.mark.parametrize("pairs, has_val_source, sentence", [
    ([], False, "no document"), ([("val", "a")], False, "a single document"), ([("train", "a")] * 2, False, "raise --val-fraction"),
    ([("val", "a")] * 2, False, "none is left to train on"), ([("train", "a")], True, "--val-source holds no document"),
    ([("val", "a")], True, "no document to train on"), ([], True, "no document"),
])
def test_an_empty_split_is_refused(tmp_path: Path, pairs: list, has_val_source: bool, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        write_splits(pairs, ByteTokenizer(), tmp_path, 1000, lambda *_: None, has_val_source=has_val_source)
    assert not list(tmp_path.glob("*.json"))
