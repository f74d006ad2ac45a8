"""Documents -> train and val shards: which split a document belongs to, and its tokens behind a BOS."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from bitsperbyte.text.hub import file_sha256
from bitsperbyte.text.shards import HEADER_BYTES, SPLITS, shard_header
from bitsperbyte.text.tokenizers import Prover, Tokenizer

Progress = Callable[[str, int, int | None], None]  # (what is being done, units done, units in all or None)

_BATCH_BYTES = 4 << 20  # of text that is encoded in one call


@dataclass
class Splitter:
    """Sends each document to train or val, or nowhere where val has it already.

    With `val_docs` the first so many different documents are val. With a `val_fraction` a document is val where the hash
    of seed and text says so, which does not depend on the other documents. With neither, only those given as val are.
    """

    val_fraction: float | None
    val_docs: int | None
    seed: int
    num_dropped: int = 0
    _val: set[bytes] = field(default_factory=set)  # 16 bytes a document; train needs no such set

    def split(self, documents: Iterable[str], val_documents: Iterable[str] = ()) -> Iterator[tuple[str, str]]:
        """(split, document) for each document that is kept, in order, after all of `val_documents`, which are val."""
        for is_val, texts in ((True, val_documents), (False, documents)):
            for text in texts:
                digest = hashlib.sha256(f"{self.seed} {text}".encode()).digest()
                if digest[:16] in self._val:
                    self.num_dropped += 1
                elif is_val or self._wants_val(digest):
                    self._val.add(digest[:16])
                    yield "val", text
                else:
                    yield "train", text

    def _wants_val(self, digest: bytes) -> bool:
        if self.val_docs is not None:
            return len(self._val) < self.val_docs
        return self.val_fraction is not None and int.from_bytes(digest[-8:], "big") < self.val_fraction * 2**64


class ShardWriter:
    """Tokens of a split, written as they come into files of `shard_tokens`; a file gets its name once it is whole."""

    def __init__(self, folder: Path, split: str, shard_tokens: int) -> None:
        self._folder, self._split, self._shard_tokens = folder, split, shard_tokens
        self._file: BinaryIO | None = None
        self._num_tokens = 0
        self.rows: list[dict[str, Any]] = []  # the manifest's entries of the finished files

    def add(self, tokens: np.ndarray) -> None:
        while len(tokens):
            if self._file is None:
                self._file, self._num_tokens = open(self._path(".tmp"), "wb"), 0
                self._file.write(bytes(HEADER_BYTES))
            part = tokens[: self._shard_tokens - self._num_tokens]
            self._file.write(np.ascontiguousarray(part, dtype="<u2").data)
            self._num_tokens += len(part)
            tokens = tokens[len(part) :]
            if self._num_tokens == self._shard_tokens:
                self.finish()

    def finish(self) -> None:
        """Complete the file that is being written, if there is one."""
        if self._file is None:
            return
        with self._file as file:
            file.seek(0)
            file.write(shard_header(self._num_tokens))
            file.flush()
            os.fsync(file.fileno())
        self._file, path = None, self._path()
        os.replace(path.with_name(path.name + ".tmp"), path)
        self.rows.append({"file": path.name, "num_tokens": self._num_tokens, "sha256": file_sha256(path)})

    def abandon(self) -> None:
        if self._file is not None:
            self._file.close()

    def _path(self, suffix: str = "") -> Path:
        return self._folder / f"{self._split}_{len(self.rows):06d}.bin{suffix}"


def write_splits(documents: Iterable[tuple[str, str]], tokenizer: Tokenizer, out: Path, shard_tokens: int,
                 progress: Progress, *, has_val_source: bool = False,
                 ) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Encode (split, document) pairs into shards below `out`: (the manifest's entries of the splits, their proofs).

    A BOS stands before each document and nothing after it. `has_val_source`: val came from a source of its own, which
    an error about an empty split must know. ValueError if a split stays empty or the tokenizer fails its proof.
    """
    writers = {split: ShardWriter(out, split, shard_tokens) for split in SPLITS}
    provers = {split: Prover(tokenizer) for split in SPLITS}
    num_documents = dict.fromkeys(SPLITS, 0)
    bos = np.array([tokenizer.bos_id], dtype=np.uint16)
    try:
        for batch in _batches(documents):
            texts = [text for _, text in batch]
            for (split, text), ids in zip(batch, tokenizer.encode_batch(texts), strict=True):
                provers[split].add(text, ids)
                writers[split].add(bos)
                writers[split].add(ids)
                num_documents[split] += 1
            progress("encoding documents", sum(num_documents.values()), None)
        for split, count in num_documents.items():
            if count == 0:
                raise ValueError(empty_split(split, sum(num_documents.values()), has_val_source))
        proofs = {split: provers[split].result().to_dict() for split in SPLITS}  # may refuse: before a file is finished
        for writer in writers.values():
            writer.finish()
    finally:
        for writer in writers.values():
            writer.abandon()
    entries = {split: {"files": writers[split].rows, "num_documents": num_documents[split],
                       "num_tokens": sum(row["num_tokens"] for row in writers[split].rows),
                       "num_bytes": proofs[split]["raw_bytes"], "counted_bytes": proofs[split]["counted_bytes"]}
               for split in SPLITS}
    return entries, proofs


def _batches(documents: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    batch, num_chars = [], 0
    for pair in documents:
        batch.append(pair)
        num_chars += len(pair[1])
        if num_chars >= _BATCH_BYTES:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch


def empty_split(split: str, num_documents: int, has_val_source: bool) -> str:
    """Why a split has no document, and what to do about it."""
    if has_val_source and split == "val":
        return "the source given as --val-source holds no document that is more than whitespace"
    if has_val_source:
        return "the source holds no document to train on: all are blank, or in --val-source too, which keeps them from train"
    if num_documents == 0:
        return "the source holds no document that is more than whitespace"
    if num_documents == 1:
        return "the source is a single document, and train and val need one each: give a folder of files, or a .jsonl"
    if split == "val":
        return f"none of the {num_documents} documents fell into val: raise --val-fraction, or use --val-docs"
    return f"all {num_documents} documents went to val and none is left to train on: lower --val-fraction or --val-docs"
