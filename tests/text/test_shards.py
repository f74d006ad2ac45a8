"""The .bin format and the folder: round trips, and a refusal that names the file for each way to be damaged."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bitsperbyte.text.shards import DataFolder, open_shard, read_header, write_shard
from bitsperbyte.text.tokenizers import ByteTokenizer

NUM_TOKENS = 700


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_manifest(folder: Path, **changes) -> None:
    splits = {}
    for split in ("train", "val"):
        files = [
            {"file": path.name, "num_tokens": read_header(path), "sha256": sha256(path)}
            for path in sorted(folder.glob(f"{split}_*.bin"))
        ]
        splits[split] = {
            "files": files,
            "num_documents": 1,
            "num_tokens": sum(row["num_tokens"] for row in files),
            "num_bytes": 1,
            "counted_bytes": 1,
        }
    tokenizer = ByteTokenizer()
    tokenizer.save(folder)
    entry = {"file": "tokenizer.json", "name": "byte", "sha256": tokenizer.sha256, "vocab_size": 260}
    manifest = {
        "format": "bitsperbyte.data",
        "version": 1,
        "source": "test",
        "revision": None,
        "tokenizer": entry,
        "splits": splits,
        "proof": {},
        **changes,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for name in ("train_000000", "train_000001", "val_000000"):
        write_shard(tmp_path / f"{name}.bin", rng.integers(0, 260, NUM_TOKENS))
    write_manifest(tmp_path)
    return tmp_path


@given(st.lists(st.integers(0, 65_535), min_size=1, max_size=300))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_round_trip(tmp_path: Path, tokens: list[int]) -> None:
    path = tmp_path / "s.bin"
    write_shard(path, np.array(tokens))
    found = open_shard(path, vocab_size=max(tokens) + 1, sha256=sha256(path))
    assert found.dtype == np.uint16 and found.tolist() == tokens
    assert [file.name for file in tmp_path.iterdir()] == ["s.bin"]  # nothing is left beside


def test_the_bytes_are_the_challenges(tmp_path: Path) -> None:
    write_shard(tmp_path / "s.bin", np.array([1, 939, 65_535]))
    raw = (tmp_path / "s.bin").read_bytes()
    header = np.frombuffer(raw[:1024], "<i4")
    assert header[:3].tolist() == [20240520, 1, 3] and not header[3:].any()
    assert raw[1024:] == bytes([1, 0, 0xAB, 0x03, 0xFF, 0xFF])


@pytest.mark.parametrize(
    "tokens", [np.array([], int), np.array([[1]]), np.array([0.5]), np.array([-1]), np.array([65_536])]
)
def test_what_cannot_be_a_shard_is_not_written(tmp_path: Path, tokens: np.ndarray) -> None:
    with pytest.raises(ValueError, match="s.bin"):
        write_shard(tmp_path / "s.bin", tokens)
    assert not list(tmp_path.iterdir())


def patch(path: Path, offset: int, data: bytes) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset : offset + len(data)] = data
    path.write_bytes(raw)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda path: patch(path, 0, b"\x00"), "not a token shard"),
        (lambda path: patch(path, 4, b"\x02"), "version 2"),
        (lambda path: patch(path, 8, b"\x00\x00\x00\x00"), "0 tokens"),
        (lambda path: patch(path, 8, b"\xff\xff\xff\xff"), "-1 tokens"),
        (lambda path: path.write_bytes(path.read_bytes()[:-2]), "truncated"),
        (lambda path: path.write_bytes(path.read_bytes() + b"\0\0"), "overlong"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "odd length"),
        (lambda path: path.write_bytes(path.read_bytes()[:100]), "too few"),
        (lambda path: path.write_bytes(b""), "too few"),
        (lambda path: path.unlink(), "missing"),
    ],
)
def test_a_damaged_file_is_named_with_its_damage(folder: Path, damage, sentence: str) -> None:
    path = folder / "train_000001.bin"
    damage(path)
    for act in (lambda: open_shard(path), lambda: DataFolder.open(folder).verify("train")):
        with pytest.raises(ValueError, match="train_000001.bin") as caught:
            act()
        assert sentence in str(caught.value)


@given(st.integers(0, 1024 + 2 * NUM_TOKENS - 1), st.integers(1, 255))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_flipped_byte_is_caught(folder: Path, offset: int, mask: int) -> None:
    path = folder / "val_000000.bin"
    good = path.read_bytes()
    patch(path, offset, bytes([good[offset] ^ mask]))
    try:
        with pytest.raises(ValueError, match="val_000000.bin"):
            DataFolder.open(folder).verify("val")
    finally:
        path.write_bytes(good)
    DataFolder.open(folder).verify("val")


def test_token_beyond_the_vocabulary(folder: Path) -> None:
    write_shard(folder / "train_000001.bin", np.array([1, 260, 5]))
    write_manifest(folder)
    with pytest.raises(ValueError, match=r"train_000001.bin.*260.*vocabulary of 260"):
        DataFolder.open(folder).verify("train")
    with pytest.raises(ValueError, match="token id 260"):
        open_shard(folder / "train_000001.bin", vocab_size=260)
    DataFolder.open(folder).verify("train", {"train_000000.bin"})  # the other file is sound


def test_a_folder_reads_what_its_manifest_says(folder: Path) -> None:
    data = DataFolder.open(folder)
    assert [shard.path.name for shard in data.shards("train")] == ["train_000000.bin", "train_000001.bin"]
    assert data.tokenizer.vocab_size == 260 and not data.bare
    rows = "".join(f"{sha256(folder / f'train_00000{n}.bin')} {NUM_TOKENS}\n" for n in range(2))
    assert data.split_sha256("train") == hashlib.sha256(rows.encode()).hexdigest() != data.split_sha256("val")
    with pytest.raises(ValueError, match="no shard for the split 'test'"):
        data.shards("test")
    with pytest.raises(ValueError, match="no shard other.bin"):
        data.verify("train", ["other.bin"])


def test_the_wrong_tokenizer_is_refused(folder: Path) -> None:
    entry = {"file": "tokenizer.json", "name": "byte", "sha256": "0" * 64, "vocab_size": 260}
    write_manifest(folder, tokenizer=entry)
    with pytest.raises(ValueError, match="not the one that made the shards"):
        _ = DataFolder.open(folder).tokenizer


def test_a_bare_folder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    bare = tmp_path_factory.mktemp("bare")
    for name in ("train_000000", "train_000001", "val_000000"):
        (bare / f"fineweb_{name}.bin").write_bytes((folder / f"{name}.bin").read_bytes())
    with pytest.raises(ValueError, match="tokenizer"):
        _ = DataFolder.open(bare).tokenizer
    data = DataFolder.open(bare, tokenizer_path=folder / "tokenizer.json")
    assert data.bare and [shard.sha256 for shard in data.shards("train")] == [None, None]
    data.verify("train")
    assert data.shards("train")[0].sha256 == sha256(bare / "fineweb_train_000000.bin")
    assert data.split_sha256("train") == DataFolder.open(folder).split_sha256("train")
    write_shard(bare / "fineweb_val_000000.bin", np.array([5, 999]))
    with pytest.raises(ValueError, match="token id 999"):
        DataFolder.open(bare, tokenizer_path=folder / "tokenizer.json").verify("val")


def test_folders_that_hold_no_data(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such data folder"):
        DataFolder.open(tmp_path / "absent")
    with pytest.raises(ValueError, match="no shard"):
        DataFolder.open(tmp_path)
    write_shard(tmp_path / "fineweb_train_000000.bin", np.array([1, 2]))
    with pytest.raises(ValueError, match="no shard for the split 'val'"):
        DataFolder.open(tmp_path).shards("val")
    (tmp_path / ".preparing.json").write_text("{}")
    with pytest.raises(ValueError, match="has not finished"):
        DataFolder.open(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"format": "other"},
        {"version": 2},
        {"tokenizer": None},
        {"tokenizer": {}},
        {"splits": {}},
        {"splits": []},
        {"splits": {"train": {"files": [{}]}, "val": {"files": []}}},
        {"splits": {"train": {"files": [{"file": "a", "num_tokens": "3", "sha256": "0" * 64}]}, "val": {"files": []}}},
        {"splits": {"train": {"files": [{"file": "a", "num_tokens": 3, "sha256": "zz"}]}, "val": {"files": []}}},
        {"splits": {"train": {"files": [{"file": "../a", "num_tokens": 3, "sha256": "0" * 64}]}, "val": {"files": []}}},
        {
            "splits": {
                "train": {"files": [{"file": "/etc/a", "num_tokens": 3, "sha256": "0" * 64}]},
                "val": {"files": []},
            }
        },
        {"splits": {"train": {"files": [{"file": 7, "num_tokens": 3, "sha256": "0" * 64}]}, "val": {"files": []}}},
    ],
)
def test_malformed_manifests(folder: Path, change: dict) -> None:
    write_manifest(folder, **change)
    with pytest.raises(ValueError, match="manifest"):
        DataFolder.open(folder)


def test_a_manifest_that_is_not_json(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text()[:-20])
    with pytest.raises(ValueError, match="not valid JSON"):
        DataFolder.open(folder)


def test_another_count_of_tokens_than_the_manifest_says(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["splits"]["val"]["files"][0]["num_tokens"] += 1
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="val_000000.bin: it holds 700 tokens and the manifest says 701"):
        DataFolder.open(folder).verify("val")
