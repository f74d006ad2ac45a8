"""Tokenizers and the exact UTF-8 bytes that each of their tokens stands for.

Shapes: V vocabulary, N tokens.

A score in bits per byte is only as good as its byte counts: ByteTable holds the counting rule, Prover shows for given
documents that counted bytes are those of the decoded text, and how much the tokenizer's normaliser had changed before.
"""

import hashlib
import io
import json
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol as StructuralType

import numpy as np
import sentencepiece

SPACE = "\u2581"  # SentencePiece writes a space as this character
MAX_VOCAB_SIZE = 65_536  # shards hold ids as uint16
MODEL_FILE = "tokenizer.model"
BYTE_FILE = "tokenizer.json"
WARN_LOST_SHARE, MAX_LOST_SHARE = 0.001, 0.01
# The number of threads is written into the trained file, so a varying one would change its sha256.
TRAINING_THREADS = 2


@dataclass(frozen=True, eq=False)
class ByteTable:
    """How many bytes a token stands for: base_bytes int64 (V,), starts_with_space and is_boundary bool (V,).

    base_bytes: 1 for a byte-fallback piece, 0 for a control, unknown or unused one (these are the boundaries),
    otherwise the UTF-8 length of the piece without its leading U+2581. The rule is the challenge's.
    """

    base_bytes: np.ndarray
    starts_with_space: np.ndarray
    is_boundary: np.ndarray

    def target_bytes(self, prev: np.ndarray, target: np.ndarray) -> np.ndarray:
        """Bytes, int64 (N,), of each target (N,) that follows the token `prev` (N,) in the stream.

        A leading U+2581 counts one byte unless the previous token is a boundary: decoders drop the space that begins a
        text. ValueError for ids outside the vocabulary.
        """
        prev, target = np.asarray(prev), np.asarray(target)
        assert prev.shape == target.shape, (prev.shape, target.shape)
        for ids in (prev, target):
            _check_ids(ids, len(self.base_bytes))
        return self.base_bytes[target] + (self.starts_with_space[target] & ~self.is_boundary[prev])


class Tokenizer(StructuralType):
    """What the lab needs of a tokenizer. Equal `sha256` (of the file that `save` writes) means the same tokenizer."""

    name: str
    vocab_size: int
    bos_id: int
    sha256: str
    table: ByteTable
    file_name: str

    def encode(self, text: str) -> np.ndarray:
        """Token ids, uint16 (N,), without BOS."""

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]: ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str: ...

    def save(self, directory: Path | str) -> Path:
        """Writes the tokenizer's file into `directory` and returns its path."""


class SentencePieceTokenizer:
    """Any SentencePiece model, from the path of a .model file or from its bytes.

    Its name says its size (sp1024) and not the file's, so that a copy in a run folder has the same name.
    ValueError, naming the file, where it is missing or corrupt, has more than 65,536 pieces or no BOS.
    """

    file_name = MODEL_FILE

    def __init__(self, model: Path | str | bytes) -> None:
        source = "the model" if isinstance(model, bytes) else str(model)
        try:
            self.model_bytes = model if isinstance(model, bytes) else Path(model).read_bytes()
        except OSError as error:
            raise ValueError(f"{source}: cannot read the tokenizer ({error.strerror}); give the path of a "
                             "SentencePiece .model") from error
        self.processor, self.table = _load_model(self.model_bytes, source)
        self.vocab_size = int(self.processor.vocab_size())
        if self.vocab_size > MAX_VOCAB_SIZE:
            raise ValueError(f"{source}: {self.vocab_size} pieces do not fit into shards of 16-bit ids; use at most "
                             f"{MAX_VOCAB_SIZE}")
        self.bos_id = int(self.processor.bos_id())
        if not (self.bos_id >= 0 and self.table.is_boundary[self.bos_id]):
            raise ValueError(f"{source}: this model has no BOS control piece, which marks where a document starts; "
                             "train it with bos_id set")
        self.name = f"sp{self.vocab_size}"
        self.sha256 = hashlib.sha256(self.model_bytes).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids, uint16, of each text, without BOS; several use all cores. ValueError for a lone surrogate."""
        for text in texts:
            _utf8(text)
        return [np.array(ids, np.uint16) for ids in self.processor.encode(list(texts), out_type=int)]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self.processor.decode(_checked_ids(ids, self.vocab_size))

    def save(self, directory: Path | str) -> Path:
        return _write(Path(directory) / self.file_name, self.model_bytes)

    def defect(self) -> str | None:
        """Why this vocabulary cannot give exact byte counts of any text, or None if it can."""
        encodes_byte = np.zeros(256, bool)
        for token in range(self.vocab_size):
            if self.processor.is_byte(token):
                encodes_byte[int(self.processor.id_to_piece(token)[3:5], 16)] = True
        if not encodes_byte.all():
            return (f"it has byte-fallback pieces for {int(encodes_byte.sum())} of 256 bytes, so some characters "
                    "become the unknown piece, whose bytes nobody can count; train it with byte_fallback")
        if self.processor.id_to_piece(self.processor.piece_to_id(SPACE)) != SPACE:
            return ("it has no piece that is U+2581 alone, so a space before a character outside the vocabulary is "
                    "written as the three bytes of U+2581: counted three times, and no space when decoded")
        if self.decode(self.encode("Aa")) != "Aa":
            return "its normaliser folds upper and lower case, so it would score an easier text than the one given"
        return None


class ByteTokenizer:
    """One token per UTF-8 byte: pad, bos, eos and unk are 0..3, byte b is 4 + b (the challenge's byte260 variant)."""

    file_name = BYTE_FILE
    name, vocab_size, bos_id, offset = "byte260", 260, 1, 4

    def __init__(self) -> None:
        is_boundary = np.arange(self.vocab_size) < self.offset
        self.table = _frozen_table((~is_boundary).astype(np.int64), np.zeros(self.vocab_size, bool), is_boundary)
        self.sha256 = hashlib.sha256(self.file_bytes()).hexdigest()

    @classmethod
    def description(cls) -> dict[str, object]:
        """The content of its file."""
        return {"format": "bitsperbyte.tokenizer", "version": 1, "kind": "bytes", "vocab_size": cls.vocab_size,
                "offset": cls.offset, "pad_id": 0, "bos_id": cls.bos_id, "eos_id": 2, "unk_id": 3}

    @classmethod
    def file_bytes(cls) -> bytes:
        return (json.dumps(cls.description(), indent=2) + "\n").encode()

    @classmethod
    def load(cls, path: Path | str) -> "ByteTokenizer":
        """From a tokenizer.json that this class wrote; ValueError for any other file."""
        try:
            found = json.loads(Path(path).read_bytes())
        except OSError as error:
            raise ValueError(f"{path}: cannot read the tokenizer ({error.strerror})") from error
        except ValueError as error:
            raise ValueError(f"{path}: this is not JSON, so not a byte tokenizer of bitsperbyte; restore the "
                             "file") from error
        if found != cls.description():
            raise ValueError(f"{path}: this JSON does not describe the byte tokenizer of bitsperbyte; a tokenizer of "
                             "another library must be given as a SentencePiece .model")
        return cls()

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(_utf8(text), np.uint8).astype(np.uint16) + np.uint16(self.offset)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Control ids say nothing; bytes that are not UTF-8 become U+FFFD."""
        known = _checked_ids(ids, self.vocab_size)
        return bytes(i - self.offset for i in known if i >= self.offset).decode("utf-8", errors="replace")

    def save(self, directory: Path | str) -> Path:
        return _write(Path(directory) / self.file_name, self.file_bytes())


def load_tokenizer(path: Path | str) -> Tokenizer:
    """From a .model file, a tokenizer.json of ours, or a folder that holds exactly one of them; else ValueError."""
    path = Path(path)
    if path.is_dir():
        found = sorted(p for p in path.iterdir() if p.is_file() and (p.suffix == ".model" or p.name == BYTE_FILE))
        if len(found) != 1:
            names = ", ".join(p.name for p in found) or "none"
            raise ValueError(f"{path}: a folder must hold exactly one tokenizer (*.model or {BYTE_FILE}), and this one "
                             f"holds {names}; give the path of the file")
        path = found[0]
    if not path.is_file():
        raise ValueError(f"{path}: there is no such tokenizer; give a SentencePiece .model, a {BYTE_FILE} or a folder "
                         "with one of them")
    return ByteTokenizer.load(path) if path.suffix == ".json" else SentencePieceTokenizer(path)


def train_sentencepiece(texts: Iterable[str], vocab_size: int, out: Path | str, *,
                        num_threads: int = TRAINING_THREADS) -> SentencePieceTokenizer:
    """Train BPE with the challenge's settings and write it to `out`: a .model file, or a folder for tokenizer.model.

    The same texts give the same bytes (num_threads is part of the file). Unlike the challenge's, which leaves out
    documents above 4,192 bytes, training uses all text; documents with a NUL character are left out by SentencePiece.
    ValueError where the texts cannot fill the vocabulary, or it cannot hold their characters.
    """
    if not 1 <= vocab_size <= MAX_VOCAB_SIZE:
        raise ValueError(f"a vocabulary of {vocab_size} pieces is impossible: shards hold 16-bit ids, so choose at "
                         f"most {MAX_VOCAB_SIZE}")
    model, failures = io.BytesIO(), []

    def sentences() -> Iterator[str]:
        try:
            yield from (text for text in texts if _utf8(text).strip())
        except (Exception, KeyboardInterrupt) as error:  # SentencePiece would bury it in a message of its own
            failures.append(error)
            raise

    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=sentences(), model_writer=model, model_type="bpe",
            vocab_size=vocab_size, pad_id=0, bos_id=1, eos_id=2, unk_id=3, byte_fallback=True, split_digits=True,
            character_coverage=0.999, normalization_rule_name="nmt_nfkc", add_dummy_prefix=False,
            max_sentence_length=2**30, num_threads=num_threads, minloglevel=2)  # 2: errors only
    except RuntimeError as error:
        if failures:
            raise failures[0] from failures[0].__cause__
        raise ValueError(_training_failure(str(error), vocab_size)) from error
    out = Path(out)
    return SentencePieceTokenizer(_write(out if out.suffix == ".model" else out / MODEL_FILE, model.getvalue()))


def _training_failure(message: str, vocab_size: int) -> str:
    if most := re.search(r"Vocabulary size too high.*<= (\d+)", message):
        return (f"too little text for a vocabulary of {vocab_size}: it fills at most {most[1]} pieces; give more text "
                "or choose a smaller vocabulary")
    if least := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        return (f"a vocabulary of {vocab_size} is too small for this text: its characters, the 256 bytes and the "
                f"control pieces need {least[1]}; choose a larger one")
    if "sentences_.empty()" in message:
        return "there is no text to train a tokenizer on; give at least one document that is not blank"
    return f"SentencePiece could not train a vocabulary of {vocab_size} on this text: {message.strip()}"


@dataclass(frozen=True)
class Proof:
    """What was found over documents whose counted bytes all equal the bytes of their decoded text.

    raw_bytes: UTF-8 of the given texts; counted_bytes: what the tokens stand for; num_resized_documents: those where
    the two differ; lost_bytes: sum of these absolute differences, the least that the normaliser changed. A newline that
    became a space is not seen in it: it has the same size.
    """

    num_documents: int
    raw_bytes: int
    counted_bytes: int
    num_resized_documents: int
    lost_bytes: int

    @property
    def net_bytes(self) -> int:
        """By how much the raw texts are longer than the counted ones."""
        return self.raw_bytes - self.counted_bytes

    @property
    def lost_share(self) -> float:
        """Loss to the normaliser as a share of the raw bytes: `lost_bytes` / `raw_bytes`."""
        return self.lost_bytes / self.raw_bytes if self.raw_bytes else 0.0

    def to_dict(self) -> dict[str, float | int]:
        return {**asdict(self), "lost_share": self.lost_share}


class Prover:
    """Checks documents one by one as they stream by: `add` each, then `result`.

    ValueError, with the reason, for a vocabulary that cannot count (SentencePieceTokenizer.defect), and from `add` for
    a document that has unknown tokens or whose counted bytes are not those of its decoded text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        if isinstance(tokenizer, SentencePieceTokenizer) and (defect := tokenizer.defect()):
            raise ValueError(f"tokenizer {tokenizer.name} is refused: {defect}")
        self.tokenizer = tokenizer
        self._num_documents = self._raw_bytes = self._counted_bytes = self._num_resized = self._lost_bytes = 0

    def add(self, text: str, ids: np.ndarray) -> int:
        """Check one document and its token ids (without BOS); returns its counted bytes, BOS before the first token."""
        tokenizer, table = self.tokenizer, self.tokenizer.table
        refused = f"tokenizer {tokenizer.name} is refused at document {self._num_documents + 1} ({text[:40]!r}...)"
        stream = np.concatenate([np.array([tokenizer.bos_id], np.int64), np.asarray(ids, np.int64)])
        counted = int(table.target_bytes(stream[:-1], stream[1:]).sum())
        if table.is_boundary[stream[1:]].any():
            raise ValueError(f"{refused}: part of it becomes unknown or control tokens, whose bytes cannot be counted; "
                             "use a vocabulary with byte fallback")
        decoded = len(tokenizer.decode(ids).encode())
        if counted != decoded:
            raise ValueError(f"{refused}: its tokens count {counted} bytes and decode to {decoded}; the vocabulary or "
                             "its normaliser writes spaces in a way that the counting rule does not cover, so use "
                             "another tokenizer")
        raw = len(_utf8(text))
        self._num_documents += 1
        self._raw_bytes += raw
        self._counted_bytes += counted
        self._num_resized += raw != counted
        self._lost_bytes += abs(raw - counted)
        return counted

    def result(self) -> Proof:
        """The proof so far. Warns above 0.1% of raw bytes lost to normalising; ValueError above 1%, or without text."""
        proof = Proof(self._num_documents, self._raw_bytes, self._counted_bytes, self._num_resized, self._lost_bytes)
        name = self.tokenizer.name
        if proof.raw_bytes == 0:
            raise ValueError("nothing proves the tokenizer: there was no text; give at least one document with text")
        if proof.lost_share > WARN_LOST_SHARE:
            message = (f"the normaliser of tokenizer {name} changes {proof.lost_share:.2%} of the text before it "
                       f"encodes it ({proof.lost_bytes} of {proof.raw_bytes} bytes), so bits per byte are of the "
                       "changed text")
            if proof.lost_share > MAX_LOST_SHARE:
                raise ValueError(f"{message}; above {MAX_LOST_SHARE:.0%} it is refused: clean the text (likely "
                                 "causes: tabs, line ends with \\r, runs of spaces, zero-width or full-width "
                                 "characters), or use the byte tokenizer")
            warnings.warn(message, stacklevel=2)
        return proof


def prove(tokenizer: Tokenizer, texts: Iterable[str]) -> Proof:
    """Prove the byte counts of `tokenizer` on `texts`, one document each. Errors and warnings: see Prover."""
    prover = Prover(tokenizer)
    for batch in _batched(texts, 64):
        for text, ids in zip(batch, tokenizer.encode_batch(batch), strict=True):
            prover.add(text, ids)
    return prover.result()


def _batched(texts: Iterable[str], size: int) -> Iterator[list[str]]:
    iterator = iter(texts)
    while batch := list(islice(iterator, size)):
        yield batch


def _load_model(model_bytes: bytes, source: str) -> tuple[sentencepiece.SentencePieceProcessor, ByteTable]:
    processor = sentencepiece.SentencePieceProcessor()
    try:
        if not model_bytes:  # SentencePiece accepts an empty model and prints complaints later
            raise RuntimeError("the file is empty")
        processor.LoadFromSerializedProto(model_bytes)
        return processor, _sentencepiece_table(processor)
    except (RuntimeError, UnicodeDecodeError) as error:  # the second: a piece that is not UTF-8
        raise ValueError(f"{source}: this is not an intact SentencePiece model ({str(error).strip()}); fetch or train "
                         "it again") from error


def _sentencepiece_table(processor: sentencepiece.SentencePieceProcessor) -> ByteTable:
    vocab_size = processor.vocab_size()
    base_bytes = np.zeros(vocab_size, np.int64)
    starts_with_space, is_boundary = np.zeros(vocab_size, bool), np.zeros(vocab_size, bool)
    for token in range(vocab_size):
        piece = processor.id_to_piece(token)
        if processor.is_control(token) or processor.is_unknown(token) or processor.is_unused(token):
            is_boundary[token] = True
        elif processor.is_byte(token):
            base_bytes[token] = 1
        else:
            starts_with_space[token] = piece.startswith(SPACE)
            base_bytes[token] = len(piece.removeprefix(SPACE).encode())
    return _frozen_table(base_bytes, starts_with_space, is_boundary)


def _frozen_table(*columns: np.ndarray) -> ByteTable:
    for column in columns:
        column.flags.writeable = False
    return ByteTable(*columns)


def _checked_ids(ids: Sequence[int] | np.ndarray, vocab_size: int) -> list[int]:
    checked = np.asarray(ids, np.int64)
    _check_ids(checked, vocab_size)
    return checked.tolist()


def _check_ids(ids: np.ndarray, vocab_size: int) -> None:
    if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
        raise ValueError(f"token ids {ids.min()}..{ids.max()} reach outside the vocabulary of {vocab_size} pieces: the "
                         "tokens were made by another tokenizer")


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the text has a lone surrogate at character {error.start} ({text[error.start]!r}) and so no "
                         "UTF-8 form; repair or drop the document") from error


def _write(path: Path, content: bytes) -> Path:
    """Whole or not at all: written beside and renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    beside.write_bytes(content)
    os.replace(beside, path)
    return path
