"""Continuing a prompt: the seed decides, greedy needs none, and the text joins the prompt as the decoder joins it."""

from collections import Counter

import numpy as np
import pytest
import torch

from bitsperbyte.golf.model import GolfModel, ModelConfig
from bitsperbyte.golf.sample import sample
from bitsperbyte.text.tokenizers import ByteTokenizer, SentencePieceTokenizer, train_sentencepiece


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> SentencePieceTokenizer:
    texts = [f"Once upon a time there were {n} stories about {n * n} people and their {n + 7} dogs." for n in range(100)]
    return train_sentencepiece(texts, 330, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def model() -> GolfModel:
    torch.manual_seed(0)
    model = GolfModel(ModelConfig(vocab_size=330, dim=16, num_heads=2, num_kv_heads=1, order=(0, 1), skips=()))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model


class Says:
    """A model that says the given tokens one after the other, whatever it is asked."""

    def __init__(self, ids: list[int], vocab_size: int, prompt_length: int) -> None:
        self.tok_emb, self.ids, self.vocab_size, self.skip, self.seen = torch.nn.Embedding(1, 1), ids, vocab_size, prompt_length, []

    def hidden(self, tokens):
        self.seen.append(tokens[0].tolist())
        return torch.zeros(1, tokens.size(1), 1)

    def logits(self, x):
        said = self.ids[len(self.seen) - 1]
        return torch.nn.functional.one_hot(torch.tensor([said]), self.vocab_size).float() * 30


def test_the_seed_decides(model: GolfModel, tokenizer: SentencePieceTokenizer) -> None:
    def draw(seed: int) -> str:
        return sample(model, tokenizer, "Once", num_tokens=20, temperature=1.0, seed=seed)

    torch.manual_seed(1)
    first = draw(5)
    torch.manual_seed(2)  # the global generator has no part in it
    assert draw(5) == first != draw(6)


def test_greedy_takes_the_most_probable_token_each_time(model: GolfModel, tokenizer: SentencePieceTokenizer) -> None:
    ids = [tokenizer.bos_id, *tokenizer.encode("Once upon").tolist()]
    start = len(ids)
    for _ in range(12):
        with torch.no_grad():
            ids.append(int(model.logits(model.hidden(torch.tensor([ids]))[0])[-1].argmax()))
    assert tokenizer.bos_id not in ids[start:]
    expected = tokenizer.decode(ids[1:]).removeprefix("Once upon")
    for seed in (0, 1):
        assert sample(model, tokenizer, "Once upon", num_tokens=12, temperature=0, seed=seed) == expected
        assert sample(model, tokenizer, "Once upon", num_tokens=12, temperature=2.0, top_k=1, seed=seed) == expected
    assert sample(model, tokenizer, "Once upon", num_tokens=12, temperature=1e-40) == expected


def test_the_space_between_prompt_and_continuation_stays(tokenizer: SentencePieceTokenizer) -> None:
    whole = "Once upon a time"
    ids, start = tokenizer.encode(whole).tolist(), len(tokenizer.encode("Once"))
    assert tokenizer.decode(ids[:start]) == "Once"
    model = Says(ids[start:], 330, start)
    assert sample(model, tokenizer, "Once", num_tokens=len(ids) - start, temperature=0) == " upon a time"


def test_it_ends_where_the_next_document_begins(tokenizer: SentencePieceTokenizer) -> None:
    said = [*tokenizer.encode("time").tolist(), tokenizer.bos_id, *tokenizer.encode("dogs").tolist()]
    assert sample(Says(said, 330, 1), tokenizer, "", num_tokens=50, temperature=0) == "time"


def test_characters_of_several_bytes_are_put_together() -> None:
    tokenizer = ByteTokenizer()
    said = tokenizer.encode("é😀").tolist()
    assert sample(Says(said, 260, 1), tokenizer, "ü", num_tokens=6, temperature=0) == "é😀"
    assert sample(Says(said, 260, 1), tokenizer, "ü", num_tokens=1, temperature=0) == "\ufffd"  # cut within a character


def test_the_context_is_bounded(tokenizer: SentencePieceTokenizer) -> None:
    model = Says(list(range(10, 20)), 330, 1)
    sample(model, tokenizer, "Once upon a time there were", num_tokens=10, temperature=0, context=4)
    assert {len(seen) for seen in model.seen} == {4} and model.seen[-1] == [15, 16, 17, 18]


def test_top_k_and_temperature_shape_what_is_drawn() -> None:
    """One token is drawn from logits 3, 2, 1, 0 many times over; the frequencies are those of the softmax of the top two."""
    tokenizer = ByteTokenizer()

    class Fixed(Says):
        def logits(self, x):
            logits = torch.full((1, 260), -1.0)
            logits[0, [101, 102, 103, 104]] = torch.tensor([3.0, 2.0, 1.0, 0.0])
            return logits

    drawn = Counter(sample(Fixed([], 260, 1), tokenizer, "", num_tokens=1, temperature=0.5, top_k=2, seed=s) for s in range(1500))
    assert set(drawn) == {"a", "b"}
    assert drawn["a"] / 1500 == pytest.approx(1 / (1 + np.exp(-2)), abs=0.03)


@pytest.mark.parametrize("options", [{"temperature": -0.1}, {"temperature": float("nan")}, {"top_k": 0}])
def test_settings_that_mean_nothing_are_refused(model: GolfModel, tokenizer: SentencePieceTokenizer, options: dict) -> None:
    with pytest.raises(ValueError, match="must be 0 or more"):
        sample(model, tokenizer, "Once", **options)
