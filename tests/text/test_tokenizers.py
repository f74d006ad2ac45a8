import hashlib
import io
import json
import warnings

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from bitsperbyte.text import tokenizers
from bitsperbyte.text.tokenizers import (
    SPACE,
    ByteTokenizer,
    Prover,
    SentencePieceTokenizer,
    load_tokenizer,
    prove,
    train_sentencepiece,
)

WORDS = "the cat sat on a mat while seven dogs ran over hills, and nobody knew why they did so in 1987 or 2024".split()
CORPUS = [" ".join(WORDS[(i * k) % len(WORDS)] for k in range(1, 40)) + f". No. {i}\nEnd" for i in range(1, 60)]
VOCAB_SIZE = 320


def raw_model(**changes: object) -> bytes:
    """A small SentencePiece model whose settings differ from the challenge's by `changes`."""
    settings = {"model_type": "bpe", "vocab_size": VOCAB_SIZE, "pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3,
                "byte_fallback": True, "add_dummy_prefix": False, "minloglevel": 2} | changes
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(CORPUS), model_writer=model, **settings)
    return model.getvalue()


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> SentencePieceTokenizer:
    return train_sentencepiece(CORPUS, VOCAB_SIZE, tmp_path_factory.mktemp("sp"))


@pytest.fixture(scope="module")
def dummy_prefix() -> SentencePieceTokenizer:
    return SentencePieceTokenizer(raw_model(add_dummy_prefix=True))


def counted_bytes(tokenizer, ids: np.ndarray) -> int:
    stream = np.concatenate([[tokenizer.bos_id], ids]).astype(np.int64)
    return int(tokenizer.table.target_bytes(stream[:-1], stream[1:]).sum())


def reference_bytes(processor, prev: int, target: int) -> int:
    """The rule of the metric, one token at a time, straight from the pieces."""
    kinds = (processor.is_control, processor.is_unknown, processor.is_unused)
    special = [i for i in (prev, target) if any(is_kind(i) for is_kind in kinds)]
    piece = processor.id_to_piece(target)
    if target in special:
        return 0
    if processor.is_byte(target):
        return 1
    spaced = piece[:1] == SPACE
    return len(piece[1 if spaced else 0 :].encode("utf-8")) + (1 if spaced and prev not in special else 0)


def test_the_table_follows_the_rule(trained):
    rng = np.random.default_rng(0)
    prev, target = rng.integers(0, VOCAB_SIZE, (2, 4000))
    expected = [reference_bytes(trained.processor, int(p), int(t)) for p, t in zip(prev, target, strict=True)]
    counted = trained.table.target_bytes(prev, target.astype(np.uint16))
    assert counted.dtype == np.int64 and counted.tolist() == expected


@given(st.text(max_size=200))
@settings(max_examples=200, deadline=None)
def test_any_text_counts_what_it_decodes_to(trained, dummy_prefix, text: str):
    for tokenizer in (trained, dummy_prefix, ByteTokenizer()):
        ids = tokenizer.encode(text)
        assert ids.dtype == np.uint16
        assert counted_bytes(tokenizer, ids) == len(tokenizer.decode(ids).encode())


@given(st.text(alphabet=st.sampled_from("ab \t\n\r.7\u00a0\u200b\u2581\u3000\u00e9\u4e2d\U0001f600"), max_size=40))
@settings(max_examples=200, deadline=None)
def test_spaces_and_rare_characters_count_what_they_decode_to(trained, dummy_prefix, text: str):
    for tokenizer in (trained, dummy_prefix):
        ids = tokenizer.encode(text)
        assert counted_bytes(tokenizer, ids) == len(tokenizer.decode(ids).encode())


@given(st.text(max_size=100))
def test_the_byte_tokenizer_loses_nothing(text: str):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.tolist() == [byte + 4 for byte in text.encode()]
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(np.concatenate([[1], ids, [2, 0]])) == text


def test_batches_equal_single_texts(trained):
    texts = [*CORPUS, "", "\u4e2d\u6587"]
    for tokenizer in (trained, ByteTokenizer()):
        batch = tokenizer.encode_batch(texts)
        assert [ids.tolist() for ids in batch] == [tokenizer.encode(text).tolist() for text in texts]
        assert tokenizer.encode_batch([]) == []


def test_ids_outside_the_vocabulary_are_refused(trained):
    for tokenizer in (trained, ByteTokenizer()):
        for bad in (-1, tokenizer.vocab_size):
            with pytest.raises(ValueError, match="outside the vocabulary"):
                tokenizer.table.target_bytes(np.array([1, bad]), np.array([5, 5]))
            with pytest.raises(ValueError, match="outside the vocabulary"):
                tokenizer.table.target_bytes(np.array([1, 5]), np.array([5, bad]))
            with pytest.raises(ValueError, match="outside the vocabulary"):
                tokenizer.decode([5, bad])


def test_text_without_utf8_form_is_refused(trained, tmp_path):
    for tokenizer in (trained, ByteTokenizer()):
        with pytest.raises(ValueError, match="lone surrogate at character 1"):
            tokenizer.encode("a\ud800b")
    with pytest.raises(ValueError, match="lone surrogate"):
        train_sentencepiece(["a\ud800b"], VOCAB_SIZE, tmp_path)


def test_training_has_the_settings_of_the_challenge(trained):
    processor = trained.processor
    assert [processor.id_to_piece(i) for i in range(5)] == ["<pad>", "<s>", "</s>", "<unk>", "<0x00>"]
    assert (trained.vocab_size, trained.bos_id, processor.vocab_size()) == (VOCAB_SIZE, 1, VOCAB_SIZE)
    assert sum(processor.is_byte(i) for i in range(VOCAB_SIZE)) == 256
    assert not [p for p in map(processor.id_to_piece, range(260, VOCAB_SIZE)) if sum(c.isdigit() for c in p) > 1]
    assert processor.id_to_piece(trained.encode("the").tolist())[0][0] != SPACE, "no space is put before a text"
    assert trained.decode(trained.encode("a\nb")) == "a b"


def test_training_is_deterministic_and_quiet(trained, tmp_path, capfd):
    again = train_sentencepiece(iter(CORPUS), VOCAB_SIZE, tmp_path / "deep" / "again.model")
    assert again.sha256 == trained.sha256
    assert trained.name == again.name == f"sp{VOCAB_SIZE}"
    assert load_tokenizer(tmp_path / "deep" / "again.model").sha256 == trained.sha256
    assert capfd.readouterr() == ("", "")


def test_an_error_of_the_texts_comes_through_training_unchanged(tmp_path):
    problem = ValueError("source.jsonl:40: this line is not JSON")

    def texts():
        yield from CORPUS
        raise problem

    with pytest.raises(ValueError) as caught:
        train_sentencepiece(texts(), VOCAB_SIZE, tmp_path)
    assert caught.value is problem and str(problem) == "source.jsonl:40: this line is not JSON"


def test_likely_causes_of_a_large_loss_are_named(trained):
    with pytest.raises(ValueError, match=r"tabs, line ends with \\r, runs of spaces"):
        prove(trained, ["a     b\r\n" * 20])


def test_training_uses_long_documents(trained, tmp_path):
    whole = train_sentencepiece([" ".join(CORPUS)], VOCAB_SIZE, tmp_path)
    assert whole.vocab_size == VOCAB_SIZE


@pytest.mark.parametrize(("texts", "vocab_size", "reason"), [
    (CORPUS, 5000, "too little text for a vocabulary of 5000: it fills at most"),
    (CORPUS, 262, "262 is too small for this text"),
    ([], VOCAB_SIZE, "no text to train"),
    (["", "  \n"], VOCAB_SIZE, "no text to train"),
    (CORPUS, 65_537, "at most 65536"),
    (CORPUS, 0, "impossible"),
])
def test_training_refusals(tmp_path, texts, vocab_size, reason):
    with pytest.raises(ValueError, match=reason):
        train_sentencepiece(texts, vocab_size, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_save_and_load(trained, tmp_path):
    for tokenizer, name in ((trained, "tokenizer.model"), (ByteTokenizer(), "tokenizer.json")):
        folder = tmp_path / tokenizer.name
        path = tokenizer.save(folder)
        assert path == folder / name == folder / tokenizer.file_name
        assert [p.name for p in folder.iterdir()] == [name]
        assert hashlib.sha256(path.read_bytes()).hexdigest() == tokenizer.sha256
        for loaded in (load_tokenizer(path), load_tokenizer(str(folder))):
            assert type(loaded) is type(tokenizer)
            assert loaded.sha256 == tokenizer.sha256
            assert (loaded.name, loaded.vocab_size) == (tokenizer.name, tokenizer.vocab_size)
    with pytest.raises(ValueError, match="holds none"):
        load_tokenizer(tmp_path)
    trained.save(tmp_path / "byte260")
    with pytest.raises(ValueError, match="exactly one.*tokenizer.json, tokenizer.model"):
        load_tokenizer(tmp_path / "byte260")
    with pytest.raises(ValueError, match="there is no such tokenizer"):
        load_tokenizer(tmp_path / "absent.model")


def test_damaged_files_are_refused_by_name(trained, tmp_path):
    path = tmp_path / "broken.model"
    model = trained.model_bytes
    for content in (b"", b"garbage", model[:100], model[: len(model) // 2], model[:-1],
                    model.replace(SPACE.encode(), b"\xe2\x96\x41", 1)):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"broken\.model.*not an intact SentencePiece model"):
            load_tokenizer(path)
    other = tmp_path / "tokenizer.json"
    for content, reason in (("{", "not JSON"), ("\udcff", "not JSON"),
                            ('{"model": {"type": "BPE"}}', "does not describe"),
                            (json.dumps(ByteTokenizer.description() | {"offset": 3}), "does not describe")):
        other.write_bytes(content.encode(errors="surrogateescape"))
        with pytest.raises(ValueError, match=rf"tokenizer\.json.*{reason}"):
            load_tokenizer(other)


def test_models_the_shards_cannot_hold_are_refused(trained, monkeypatch):
    monkeypatch.setattr(tokenizers, "MAX_VOCAB_SIZE", VOCAB_SIZE - 1)
    with pytest.raises(ValueError, match="16-bit ids"):
        SentencePieceTokenizer(trained.model_bytes)


def test_a_model_without_bos_is_refused():
    with pytest.raises(ValueError, match="no BOS"):
        SentencePieceTokenizer(raw_model(bos_id=-1))


def test_proof_of_good_tokenizers(trained, dummy_prefix):
    size = sum(len(text.encode()) for text in CORPUS)
    for tokenizer in (trained, dummy_prefix, ByteTokenizer()):
        proof = prove(tokenizer, CORPUS)
        assert (proof.num_documents, proof.raw_bytes, proof.counted_bytes) == (len(CORPUS), size, size)
        assert (proof.num_resized_documents, proof.lost_bytes, proof.lost_share) == (0, 0, 0.0)
        assert proof.to_dict()["lost_share"] == 0.0


def test_a_prover_streams(trained):
    prover = Prover(trained)
    counted = [prover.add(text, trained.encode(text)) for text in CORPUS]
    assert prover.result() == prove(trained, iter(CORPUS))
    assert prover.result().counted_bytes == sum(counted)


def test_lost_bytes_do_not_cancel_between_documents(trained):
    filler = "word " * 2000
    prover = Prover(trained)
    for text in (filler + "x", "\u2026", "a  b"):  # an ellipsis becomes three dots, 3 bytes too; two spaces lose 1
        prover.add(text, trained.encode(text))
    prover.add("\u00bd", trained.encode("\u00bd"))  # one half: 2 bytes become the 5 of 1, U+2044, 2
    proof = prover.result()
    assert (proof.net_bytes, proof.lost_bytes, proof.num_resized_documents) == (1 - 3, 1 + 3, 2)


def test_loss_to_the_normaliser_warns_then_refuses(trained):
    text = "word " * 199 + "words"  # 1000 bytes
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prove(trained, [text * 2 + "  "])
    with pytest.warns(UserWarning, match="changes 0.40%"):
        assert prove(trained, [text + "    "]).lost_bytes == 4
    with pytest.raises(ValueError, match="above 1% it is refused"):
        prove(trained, [text + " " * 20])
    with pytest.raises(ValueError, match="no text"):
        prove(trained, [])


def test_a_vocabulary_without_byte_fallback_is_refused(trained):
    tokenizer = SentencePieceTokenizer(raw_model(byte_fallback=False, vocab_size=100))
    with pytest.raises(ValueError, match="byte-fallback pieces for 0 of 256 bytes"):
        prove(tokenizer, CORPUS)
    monkey = Prover(trained)
    monkey.tokenizer = tokenizer  # past the look at the vocabulary, the documents themselves show it
    with pytest.raises(ValueError, match="document 1.*unknown"):
        monkey.add("\u4e2d", tokenizer.encode("\u4e2d"))


def without_standalone_space(model: bytes) -> bytes:
    """The model with its piece U+2581 (field 1, length 3) renamed to a snowman, which no text here holds."""
    piece, other = b"\x0a\x03" + SPACE.encode(), b"\x0a\x03" + "\u2603".encode()
    assert model.count(piece) == 1
    return model.replace(piece, other)


def test_a_vocabulary_without_standalone_space_is_refused(trained):
    tokenizer = SentencePieceTokenizer(without_standalone_space(trained.model_bytes))
    with pytest.raises(ValueError, match=r"no piece that is U\+2581 alone"):
        prove(tokenizer, CORPUS)
    ids = tokenizer.encode("a \u4e2d")
    assert tokenizer.decode(ids) == "a\u2581\u4e2d" and counted_bytes(tokenizer, ids) == 7, "the fault that is named"
    assert counted_bytes(trained, trained.encode("a \u4e2d")) == 5


def test_a_case_folding_normaliser_is_refused():
    with pytest.raises(ValueError, match="upper and lower case"):
        prove(SentencePieceTokenizer(raw_model(normalization_rule_name="nmt_nfkc_cf")), CORPUS)


def test_spaces_the_rule_cannot_count_are_refused():
    """A leading space that the decoder keeps is not counted after BOS: such documents refuse the tokenizer."""
    tokenizer = SentencePieceTokenizer(raw_model(remove_extra_whitespaces=False, normalization_rule_name="identity"))
    assert prove(tokenizer, CORPUS).lost_bytes == 0
    with pytest.raises(ValueError, match="document 2.*count 5 bytes and decode to 6"):
        prove(tokenizer, ["hello", " hello"])
