"""Whether the bytes that a scorer counts are those of the text, token by token: the finding `bytes` of golf/legality.py.

The tokenizer's own table is proven first (text/tokenizers.py: counted bytes are those of the decoded text); then another table, or a
scorer that counts for itself, is compared with it, so that the first wrong token can be named.
"""

from collections.abc import Iterable
from itertools import islice
from typing import Any

import numpy as np

from bitsperbyte.golf.findings import LegalityFinding
from bitsperbyte.golf.scorers import Scorer, evaluation
from bitsperbyte.text.tokenizers import Prover, SentencePieceTokenizer, Tokenizer

MAX_DOCUMENTS = 1_000
SCORED_CHARS = 300  # of each of SCORED_DOCUMENTS, for scorers that count bytes themselves
SCORED_DOCUMENTS = 8

# What byte counts must survive: spaces at each end and in runs, characters outside any vocabulary, each kind of UTF-8 length
PROBES = (" a  b ", "a b c", "\u4e2d \u6587 x", "na\u00efve caf\u00e9 \U0001f40d \U0001f40d", "x\u00a0y", "tab\tnew\nline")


def check_bytes(tokenizer: Tokenizer | None, texts: Iterable[str] | None, table: Any, scorer: Scorer) -> LegalityFinding:
    """The finding of `texts` (at most the first 1,000) and of a few made to be awkward."""
    if tokenizer is None:
        return LegalityFinding("bytes", None, "no tokenizer was given, so that bytes cannot be counted")
    given = list(islice(texts or (), MAX_DOCUMENTS))
    streams = []
    try:
        prover = Prover(tokenizer)
        for text, ids in zip(given, tokenizer.encode_batch(given), strict=True):
            prover.add(text, ids)
            streams.append(_stream(tokenizer, ids))
        if given:
            prover.result()
        awkward = Prover(tokenizer)  # normalising changes most of these, so their share of lost bytes says nothing
        for text in PROBES:
            ids = tokenizer.encode(text)
            awkward.add(text, ids)
            streams.append(_stream(tokenizer, ids))
    except ValueError as error:
        return LegalityFinding("bytes", False, str(error))
    proof = f"counted bytes are those of the decoded text in {len(streams)} documents"
    if table is not None:
        for number, stream in enumerate(streams, 1):
            if wrong := _compare(tokenizer, stream, np.asarray(table.target_bytes(stream[:-1], stream[1:])), "the table"):
                return LegalityFinding("bytes", False, f"{wrong[0]} (document {number} of {len(streams)})", *wrong[1:])
        proof += ", and the table's"
    counted = 0
    for text in (*given[:SCORED_DOCUMENTS], *PROBES):
        stream = _stream(tokenizer, tokenizer.encode(text[:SCORED_CHARS]))
        if len(stream) < 2 or int(stream.max()) >= scorer.vocab_size:
            continue
        (scored,) = evaluation(scorer, [stream])
        if scored.num_bytes is None:
            break
        claimed = np.zeros(len(stream) - 1, np.int64)
        np.add.at(claimed, scored.positions - 1, scored.num_bytes)
        if wrong := _compare(tokenizer, stream, claimed, "the scorer"):
            return LegalityFinding("bytes", False, *wrong)
        counted += 1
    return LegalityFinding("bytes", True, proof + (f"; the scorer counts the same in {counted}" if counted else ""))


def _stream(tokenizer: Tokenizer, ids: np.ndarray) -> np.ndarray:
    return np.concatenate([np.array([tokenizer.bos_id], np.int64), np.asarray(ids, np.int64)])


def _compare(tokenizer: Tokenizer, stream: np.ndarray, claimed: np.ndarray, who: str) -> tuple[str, int, float] | None:
    """(sentence, first wrong target, bytes too many or too few in all) where `claimed` is not what the tokens stand for."""
    right = tokenizer.table.target_bytes(stream[:-1], stream[1:])
    wrong = np.flatnonzero(claimed != right)
    if not len(wrong):
        return None
    at = int(wrong[0])
    token = int(stream[at + 1])
    cause = ""
    if isinstance(tokenizer, SentencePieceTokenizer):
        piece = tokenizer.processor.id_to_piece(token)
        if tokenizer.processor.is_byte(token):
            cause = f" ({piece} is a byte-fallback piece: one byte)"
        elif tokenizer.table.starts_with_space[token]:
            cause = f" ({piece!r}: its space is one byte, and none where it begins the text)"
        else:
            cause = f" ({piece!r})"
    off = int(claimed.sum() - right.sum())
    return (f"{who} counts {int(claimed[at])} bytes for token {token} at target {at + 1}, which stands for {int(right[at])}{cause}; "
            f"over the document {abs(off)} bytes too {'many' if off >= 0 else 'few'} of {int(right.sum())}"), at + 1, float(abs(off))
