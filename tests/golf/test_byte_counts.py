"""Bytes counted are bytes decoded; another count is caught at its first wrong token."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bitsperbyte.golf.byte_counts import PROBES, check_bytes
from bitsperbyte.golf.scorers import Scored
from bitsperbyte.text.tokenizers import ByteTable, ByteTokenizer, SentencePieceTokenizer, Tokenizer, train_sentencepiece

TEXTS = [f"The dog of house {n} sees {n * n} stones, naïve \U0001f40d {n % 7}." for n in range(150)]


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> SentencePieceTokenizer:
    return train_sentencepiece(TEXTS, 330, tmp_path_factory.mktemp("pieces"))


class Counting:
    """Uniform over the vocabulary, with byte counts of its own."""

    def __init__(self, tokenizer: Tokenizer, count: Any) -> None:
        self.vocab_size, self.count = tokenizer.vocab_size, count

    def score(self, streams: list[np.ndarray]) -> list[Scored]:
        made = []
        for stream in streams:
            nats = np.full(len(stream) - 1, np.log(self.vocab_size))
            made.append(Scored(np.arange(1, len(stream)), nats, num_bytes=self.count and self.count(stream[:-1], stream[1:])))
        return made


def changed(table: ByteTable, **columns: np.ndarray) -> ByteTable:
    return ByteTable(**{name: columns.get(name, getattr(table, name)) for name in ("base_bytes", "starts_with_space", "is_boundary")})


@pytest.mark.parametrize("kind", ["pieces", "bytes"])
def test_right_counts_pass(kind: str, pieces: SentencePieceTokenizer) -> None:
    tokenizer = pieces if kind == "pieces" else ByteTokenizer()
    found = check_bytes(tokenizer, TEXTS, tokenizer.table, Counting(tokenizer, tokenizer.table.target_bytes))
    assert (found.check, found.ok) == ("bytes", True) and f"{len(TEXTS) + len(PROBES)} documents" in found.detail
    assert "the table's" in found.detail and "the scorer counts the same in" in found.detail
    found = check_bytes(tokenizer, TEXTS, None, Counting(tokenizer, None))
    assert found.ok is True and "scorer" not in found.detail, "what was not counted is not said to be right"


def test_a_tokenizer_is_needed(pieces: SentencePieceTokenizer) -> None:
    assert check_bytes(None, TEXTS, None, Counting(pieces, None)).ok is None


WRONG = {  # the ways in which public trainers have counted wrongly: each a table made of the right one
    "no space counted": lambda t: changed(t, starts_with_space=np.zeros_like(t.starts_with_space)),
    "byte pieces as they are written": lambda t: changed(t, base_bytes=np.where(t.base_bytes == 1, 6, t.base_bytes)),
    "characters instead of bytes": lambda t: changed(t, base_bytes=np.minimum(t.base_bytes, 1)),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_counts_are_caught_where_they_begin(wrong: str, pieces: SentencePieceTokenizer) -> None:
    table = WRONG[wrong](pieces.table)
    for arguments in ((table, Counting(pieces, None)), (None, Counting(pieces, table.target_bytes))):
        found = check_bytes(pieces, TEXTS, *arguments)
        assert found.ok is False and "which stands for" in found.detail and "\n" not in found.detail
        assert found.change is not None
        streams = [np.array([pieces.bos_id, *pieces.encode(text)]) for text in (*TEXTS, *PROBES)]
        differs = [np.flatnonzero(table.target_bytes(s[:-1], s[1:]) != pieces.table.target_bytes(s[:-1], s[1:])) for s in streams]
        assert found.position in {int(d[0]) + 1 for d in differs if len(d)}


def test_one_token_counted_twice_by_a_scorer_is_caught(pieces: SentencePieceTokenizer) -> None:
    def count(prev: np.ndarray, target: np.ndarray) -> np.ndarray:
        counted = pieces.table.target_bytes(prev, target)
        counted[5] += 1
        return counted

    found = check_bytes(pieces, TEXTS, None, Counting(pieces, count))
    assert (found.ok, found.position, found.change) == (False, 6, 1)


def test_a_tokenizer_that_loses_text_is_refused(tmp_path: Path) -> None:
    lossy = train_sentencepiece(TEXTS, 330, tmp_path)
    found = check_bytes(lossy, ["a\tb \r\n " * 30], None, Counting(lossy, None))
    assert found.ok is False and "normaliser" in found.detail
