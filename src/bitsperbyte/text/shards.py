"""Token shards in the challenge's .bin format, and the folder that holds them.

A shard is 256 little-endian int32 (the first three: 20240520, 1, number of tokens) and then that many little-endian
uint16 tokens. A folder made by `bpb data prepare` has a manifest.json, written last, that names every file with its
sha256; a bare folder of the challenge's shards (no manifest) is read too, with its tokenizer given by the caller.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from bitsperbyte.text.tokenizers import Tokenizer, load_tokenizer

MAGIC, SHARD_VERSION = 20240520, 1
HEADER_BYTES = 256 * 4
MANIFEST, STATE = "manifest.json", ".preparing.json"  # STATE stands in a folder whose preparation has not finished
FORMAT, FORMAT_VERSION = "bitsperbyte.data", 1
SPLITS = ("train", "val")
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class ShardInfo:
    path: Path
    num_tokens: int
    sha256: str | None  # of the whole file; None in a bare folder until it is computed


def shard_header(num_tokens: int) -> bytes:
    header = np.zeros(256, dtype="<i4")
    header[:3] = MAGIC, SHARD_VERSION, num_tokens
    return header.tobytes()


def write_shard(path: Path, tokens: np.ndarray) -> None:
    """Write tokens (1-D integers below 65,536, at least one) beside `path`, sync, and rename onto it."""
    path = Path(path)
    if tokens.ndim != 1 or tokens.size == 0 or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(f"{path}: a shard takes a 1-D array of at least one integer token, not "
                         f"{tokens.dtype}{tokens.shape}")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high > 0xFFFF:
        raise ValueError(f"{path}: token ids must lie in 0..65535, and these reach from {low} to {high}")
    beside = path.with_name(path.name + ".tmp")
    with open(beside, "wb") as file:
        file.write(shard_header(tokens.size))
        file.write(np.ascontiguousarray(tokens, dtype="<u2").data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def read_header(path: Path) -> int:
    """The number of tokens of a shard, after its header and its size are found to agree; ValueError names the file."""
    try:
        with open(path, "rb") as file:
            raw = file.read(HEADER_BYTES)
            size = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        raise ValueError(f"{path}: this shard is missing; prepare the data again") from None
    if len(raw) < HEADER_BYTES:
        raise ValueError(f"{path}: {size} bytes are too few for a shard, whose header alone has {HEADER_BYTES}; fetch "
                         "it again")
    magic, version, num_tokens = (int(value) for value in np.frombuffer(raw, dtype="<i4", count=3))
    if magic != MAGIC:
        raise ValueError(f"{path}: not a token shard (it starts with {magic}, a shard with {MAGIC})")
    if version != SHARD_VERSION:
        raise ValueError(f"{path}: shard version {version}, and only version {SHARD_VERSION} can be read")
    if (size - HEADER_BYTES) % 2:
        raise ValueError(f"{path}: odd length ({size} bytes), and tokens take 2 bytes each; the file is damaged, fetch "
                         "it again")
    if num_tokens <= 0:
        raise ValueError(f"{path}: the header announces {num_tokens} tokens; a shard holds at least one")
    expected = HEADER_BYTES + 2 * num_tokens
    if size != expected:
        raise ValueError(f"{path}: {'truncated' if size < expected else 'overlong'}: the header announces {num_tokens} "
                         "tokens, "
                         f"so {expected} bytes, and the file has {size}; fetch it again")
    return num_tokens


def scan_shard(path: Path) -> tuple[str, int]:
    """(sha256 of the file, largest token id), read once in blocks of 1 MiB."""
    read_header(path)
    digest, largest = hashlib.sha256(), 0
    with open(path, "rb") as file:
        digest.update(file.read(HEADER_BYTES))
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            largest = max(largest, int(np.frombuffer(block, dtype="<u2").max()))
    return digest.hexdigest(), largest


def check_shard(path: Path, *, vocab_size: int | None, sha256: str | None) -> str:
    """Header, checksum (against `sha256` where given) and token ids of one shard; returns the sha256 of the file."""
    found, largest = scan_shard(path)
    if sha256 is not None and found != sha256:
        raise ValueError(f"{path}: its sha256 is {found[:16]}... and the manifest says {sha256[:16]}...: the file "
                         "changed or is "
                         "damaged; prepare the data again")
    if vocab_size is not None and largest >= vocab_size:
        raise ValueError(f"{path}: it holds token id {largest}, beyond the tokenizer's vocabulary of {vocab_size}; the "
                         "shards "
                         "and the tokenizer do not belong together")
    return found


def open_shard(path: Path, *, vocab_size: int | None = None, sha256: str | None = None) -> np.memmap:
    """The tokens of a shard as a read-only memory map of uint16, shape (num_tokens,).

    The header is always checked. Giving `vocab_size` or `sha256` reads the whole file once to check those as well.
    """
    path = Path(path)
    num_tokens = read_header(path)
    if vocab_size is not None or sha256 is not None:
        check_shard(path, vocab_size=vocab_size, sha256=sha256)
    return np.memmap(path, dtype="<u2", mode="r", offset=HEADER_BYTES, shape=(num_tokens,))


@dataclass(frozen=True)
class DataFolder:
    """A folder of shards with what is known about it. `bare` is True where there is no manifest."""

    path: Path
    manifest: dict[str, Any]
    bare: bool
    tokenizer_path: Path | None
    _sha256s: dict[Path, str] = field(default_factory=dict, repr=False)  # found by verify, for a bare folder

    @classmethod
    def open(cls, directory: Path | str, *, tokenizer_path: Path | str | None = None) -> DataFolder:
        """Read the manifest, or list the shards of a bare folder. Token data is not read; see `verify`."""
        path = Path(directory)
        given = Path(tokenizer_path) if tokenizer_path else None
        if not path.is_dir():
            raise ValueError(f"{path}: there is no such data folder; make it with `bpb data prepare --out {path}`")
        if (path / MANIFEST).exists():
            return cls(path, _read_manifest(path / MANIFEST), False, given)
        if (path / STATE).exists():
            raise ValueError(f"{path}: its preparation has not finished; run the same `bpb data prepare` again")
        splits = {split: {"files": [{"file": file.name, "num_tokens": read_header(file), "sha256": None}
                                    for file in sorted(path.glob(f"*_{split}_*.bin"))]} for split in SPLITS}
        if not any(part["files"] for part in splits.values()):
            raise ValueError(f"{path}: no manifest.json and no shard (*_train_*.bin, *_val_*.bin) in this folder; make "
                             "it with "
                             "`bpb data prepare`")
        for part in splits.values():
            part["num_tokens"] = sum(row["num_tokens"] for row in part["files"])
        return cls(path, {"format": "bare", "source": "shards without a manifest", "splits": splits}, True, given)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The folder's tokenizer; its sha256 must be the manifest's. A bare folder needs `tokenizer_path`."""
        if self.bare:
            if self.tokenizer_path is None:
                raise ValueError(f"{self.path}: these shards have no manifest, so the tokenizer that made them must be "
                                 "named "
                                 "(data.tokenizer in a config)")
            return load_tokenizer(self.tokenizer_path)
        entry = self.manifest["tokenizer"]
        path = self.tokenizer_path or self.path / entry["file"]
        tokenizer = load_tokenizer(path)
        if tokenizer.sha256 != entry["sha256"] or tokenizer.vocab_size != entry["vocab_size"]:
            raise ValueError(f"{path}: this tokenizer (sha256 {tokenizer.sha256[:16]}..., {tokenizer.vocab_size} "
                             "pieces) is not the one "
                             f"that made the shards (sha256 {entry['sha256'][:16]}..., {entry['vocab_size']} pieces)")
        return tokenizer

    def shards(self, split: str) -> list[ShardInfo]:
        """The shards of a split in stream order; ValueError if there is none."""
        files = self.manifest["splits"].get(split, {}).get("files", [])
        if not files:
            raise ValueError(f"{self.path}: no shard for the split {split!r} in this folder; prepare the data again")
        paths = [self.path / row["file"] for row in files]
        return [ShardInfo(path, row["num_tokens"], row["sha256"] or self._sha256s.get(path))
                for path, row in zip(paths, files, strict=True)]

    def verify(self, split: str, which: Collection[str] | None = None) -> None:
        """Check header, sha256 and token ids of the split's shards, or of the file names in `which`."""
        shards = self.shards(split)
        if which is not None and (unknown := set(which) - {shard.path.name for shard in shards}):
            raise ValueError(f"{self.path}: no shard {sorted(unknown)[0]} in the split {split!r}")
        for shard in shards:
            if which is not None and shard.path.name not in which:
                continue
            if (num_tokens := read_header(shard.path)) != shard.num_tokens:
                raise ValueError(f"{shard.path}: it holds {num_tokens} tokens and the manifest says "
                                 f"{shard.num_tokens}; prepare again")
            vocab_size = self.tokenizer.vocab_size
            self._sha256s[shard.path] = check_shard(shard.path, vocab_size=vocab_size, sha256=shard.sha256)

    def split_sha256(self, split: str) -> str:
        """One hash for a split: over its shards' sha256s and token counts, in order (hashes a bare folder's files)."""
        digest = hashlib.sha256()
        for shard in self.shards(split):
            found = shard.sha256 or self._sha256s.setdefault(shard.path, scan_shard(shard.path)[0])
            digest.update(f"{found} {shard.num_tokens}\n".encode())
        return digest.hexdigest()


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid JSON ({error}); prepare the data again") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(f"{path}: not a manifest of token shards (its format must be {FORMAT!r}); prepare the data "
                         "again")
    if manifest.get("version") != FORMAT_VERSION:
        raise ValueError(f"{path}: manifest version {manifest.get('version')!r}, and only {FORMAT_VERSION} can be read")
    try:
        tokenizer, splits = manifest["tokenizer"], manifest["splits"]
        rows = [row for split in SPLITS for row in splits[split]["files"]]
        sound = (all(_is_digest(row["sha256"]) for row in rows)
                 and all(type(row["num_tokens"]) is int and row["num_tokens"] > 0 for row in rows)
                 and _is_digest(tokenizer["sha256"]) and type(tokenizer["vocab_size"]) is int)
        names = [row["file"] for row in rows] + [tokenizer["file"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: the manifest is malformed (at {error}); prepare the data again") from None
    if not sound:
        raise ValueError(f"{path}: the manifest is malformed (a sha256, token count or vocabulary size is not one); "
                         "prepare again")
    for name in names:
        parts = PurePosixPath(name).parts if isinstance(name, str) and "\\" not in name else ()
        if not parts or parts[0] == "/" or ".." in parts:
            raise ValueError(f"{path}: the file name {name!r} leads outside the folder, so this manifest is not "
                             "trusted")
    return manifest


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None
