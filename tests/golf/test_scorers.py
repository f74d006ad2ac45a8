"""A network under windows against golf/evaluate.py and against a network run on one prefix at a time."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bitsperbyte.golf.evaluate import Protocol, evaluate
from bitsperbyte.golf.model import GolfModel, ModelConfig
from bitsperbyte.golf.scorers import NetworkScorer, Scored, as_scorer, evaluation, state_digests
from bitsperbyte.text.tokenizers import ByteTable

VOCAB, BOS = 20, 1
PROTOCOLS = [Protocol(8), Protocol(8, 3), Protocol(8, 1), Protocol(8, 3, "isolated"), Protocol(64, None, "isolated")]


@pytest.fixture(scope="module")
def model() -> GolfModel:
    torch.manual_seed(0)
    model = GolfModel(ModelConfig(vocab_size=VOCAB, dim=16, num_heads=2, num_kv_heads=1, order=(0, 1, 0), skips=((0, 2),)))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model


def stream(n: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(2, VOCAB, n)
    tokens[rng.random(n) < 0.1] = BOS
    tokens[0] = BOS
    return tokens


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("batch_tokens", [1, 20, 65_536])
def test_its_sums_are_those_of_the_evaluation(model: GolfModel, protocol: Protocol, batch_tokens: int) -> None:
    ids = np.arange(VOCAB)
    table = ByteTable(np.where(ids < 2, 0, 1 + ids % 4), np.zeros(VOCAB, bool), ids < 2)
    for n in (9, 23, 60):
        tokens = stream(n, n)
        (scored,) = evaluation(NetworkScorer(model, protocol, bos_id=BOS, batch_tokens=batch_tokens), [tokens])
        result = evaluate(model, tokens.astype(np.uint16), table, BOS, protocol)
        assert len(scored.positions) == result.score.num_tokens
        assert scored.nats.sum() == pytest.approx(result.score.nats, rel=1e-6)
        assert (np.diff(scored.positions) > 0).all()


def test_each_target_is_predicted_from_its_window_alone(model: GolfModel) -> None:
    """Independent of batching: the network is run on each prefix of each window by itself."""
    tokens, window = stream(21, 3), 8
    (scored,) = evaluation(NetworkScorer(model, Protocol(window)), [tokens])
    for at, target in enumerate(scored.positions):
        start = (target - 1) // window * window
        prefix = torch.from_numpy(tokens[start:target])[None]
        row = model.logits(model.hidden(prefix)[0, -1:]).log_softmax(-1)[0].detach().numpy()
        np.testing.assert_allclose(scored.log_probs[at], row, atol=2e-5)
        assert scored.nats[at] == pytest.approx(-row[tokens[target]], abs=2e-5)


def test_all_ways_of_giving_a_network_score_alike(model: GolfModel) -> None:
    def logits(tokens: torch.Tensor) -> torch.Tensor:
        return model.logits(model.hidden(tokens).flatten(0, 1)).unflatten(0, tokens.shape)

    protocol, streams = Protocol(8, 3), [stream(30, s) for s in range(3)]
    made = [NetworkScorer(model, protocol), NetworkScorer(logits, protocol, vocab_size=VOCAB),
            NetworkScorer(lambda t: logits(t).log_softmax(-1), protocol, vocab_size=VOCAB, outputs="log_probs"),
            NetworkScorer(lambda t: logits(t).double(), protocol, vocab_size=VOCAB), NetworkScorer(model, Protocol(5)).under(protocol)]
    expected = evaluation(made[0], streams)
    for scorer in made[1:]:
        for one, two in zip(expected, evaluation(scorer, streams), strict=True):
            np.testing.assert_allclose(one.nats, two.nats, atol=1e-5)
            np.testing.assert_allclose(one.log_probs, two.log_probs, atol=1e-5)


def test_distributions_too_large_to_keep_are_left_out(model: GolfModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bitsperbyte.golf.scorers.MAX_ROW_BYTES", 4 * VOCAB * 29 - 1)
    (scored,) = NetworkScorer(model, Protocol(8)).score([stream(30)])
    assert scored.log_probs is None and len(scored.nats) == 29


class Answers:
    vocab_size = VOCAB

    def __init__(self, *answers: Any) -> None:
        self.answers = answers

    def score(self, streams: list[np.ndarray]) -> list[Any]:
        for given in streams:
            given[:] = 0  # what a scorer does to its copy is its own business
        return list(self.answers)


def test_answers_are_brought_into_one_form() -> None:
    streams = [stream(4), stream(3)]
    one, two = evaluation(Answers(torch.ones(3), Scored(torch.tensor([2]), torch.tensor([0.5]))), streams)
    assert streams[0].any(), "the streams are copies"
    assert one.positions.tolist() == [1, 2, 3] and one.nats.tolist() == [1, 1, 1] and one.steps.tolist() == [0, 1, 2]
    assert two.positions.tolist() == [2] and two.nats.dtype == np.float64 and two.steps.tolist() == [3]


@pytest.mark.parametrize("answers, words", [
    ((np.ones(3),), "answered 1 streams when asked for 2"),
    ((np.ones(4), np.ones(2)), "has 3 targets"),
    ((Scored(np.array([1, 2]), np.ones(3)), np.ones(2)), "Scored.nats has shape"),
    ((Scored(np.array([1]), np.ones(1), np.zeros((1, 3))), np.ones(2)), "Scored.log_probs has shape"),
    ((Scored(np.array([0]), np.ones(1)), np.ones(2)), "targets are 1..3"),
    ((Scored(np.array([4]), np.ones(1)), np.ones(2)), "targets are 1..3"),
    ((Scored(np.array([1]), np.ones(1), steps=np.zeros(1)), np.ones(2)), "for all or for none"),
])
def test_answers_that_do_not_fit_are_refused(answers: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        evaluation(Answers(*answers), [stream(4), stream(3)])


@pytest.mark.parametrize("network, words", [
    (lambda tokens: tokens, "network returned"), (lambda tokens: None, "a NoneType"),
    (lambda tokens: torch.zeros(*tokens.shape, VOCAB + 1), "not \\(")])
def test_a_network_of_another_shape_is_refused(network: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        evaluation(NetworkScorer(network, Protocol(4), vocab_size=VOCAB), [stream(9)])


def test_what_cannot_be_a_scorer_is_refused() -> None:
    with pytest.raises(ValueError, match="give vocab_size"):
        as_scorer(lambda tokens: tokens, Protocol(4))
    with pytest.raises(ValueError, match="a str cannot be scored"):
        as_scorer("model", Protocol(4), vocab_size=VOCAB)
    with pytest.raises(ValueError, match="attribute vocab_size"):
        as_scorer(type("S", (), {"score": lambda self, streams: []})(), Protocol(4))
    with pytest.raises(ValueError, match="logits, log_probs"):
        NetworkScorer(lambda tokens: tokens, Protocol(4), vocab_size=VOCAB, outputs="probs")
    own = Answers()
    assert as_scorer(own, Protocol(4)) is own


def test_digests_see_every_tensor_that_is_held() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.register_buffer("buffer", torch.zeros(3))
            self.plain = [torch.zeros(2), {"deep": np.zeros(2)}]
            self.empty = torch.zeros(0)

    holder, kept = Holder(), np.zeros(4)

    def function(tokens: torch.Tensor) -> Any:
        return holder, kept

    for owner in (holder, function):
        before = state_digests(owner)
        for change in (lambda: holder.layer.weight.data.add_(1), lambda: holder.buffer.add_(1), lambda: holder.plain[0].add_(1)):
            change()
            after = state_digests(owner)
            assert before.keys() == after.keys() and sum(before[k] != after[k] for k in before) == 1
            before = after
    before = state_digests(function)
    kept[1] = 1
    assert [name for name, digest in state_digests(function).items() if before[name] != digest] == ["kept"]
