"""The self-test must see what it is there for: a step that computes something else, a graph that does not follow the weights."""

from types import SimpleNamespace

import pytest
import torch

from bitsperbyte.randopt.engines.selftest import NUM_TOKENS, check_graphs, relative_error, sample_prompts, step_error

VOCAB = 11


class FakeDecoder:
    """Logits that depend on a weight; its `captured` ones read `graph_weight`, which a right graph shares with the eager step."""

    def __init__(self, stale: bool = False, noise: float = 0.0, noise_from: float = 0.0) -> None:
        self.weight, self.stale, self.noise, self.noise_from, self.first = 1.0, stale, noise, noise_from, None

    def perturb(self, seed: int) -> None:
        self.weight = 1.0 + 0.1 * seed

    def trace(self, prompts: list[list[int]], num_tokens: int, graphs: bool) -> tuple[torch.Tensor, torch.Tensor]:
        self.first = self.weight if self.first is None else self.first
        weight = self.first if graphs and self.stale else self.weight
        logits = torch.arange(1.0, VOCAB + 1).expand(len(prompts), num_tokens, VOCAB) * weight + torch.linspace(0, weight**2, VOCAB)
        noise = self.noise if graphs and self.weight >= self.noise_from else 0.0
        return torch.full((len(prompts), num_tokens), VOCAB - 1), logits * (1 + noise)


def test_a_right_graph_passes() -> None:
    decoder = FakeDecoder()
    assert check_graphs(decoder, decoder.perturb, VOCAB, torch.float32) == 0.0
    rounded = FakeDecoder(noise=0.01)
    assert check_graphs(rounded, rounded.perturb, VOCAB, torch.bfloat16) == pytest.approx(0.01, rel=1e-3)


def test_a_stale_graph_is_refused() -> None:
    decoder = FakeDecoder(stale=True)
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(RuntimeError, match="does not compute with the current weights"):
            check_graphs(decoder, decoder.perturb, VOCAB, dtype)


@pytest.mark.parametrize("noise", [0.03, float("nan")])
@pytest.mark.parametrize("noise_from", [0.0, 1.15])
def test_a_graph_that_is_a_little_wrong_or_not_a_number_under_either_seed_is_refused(noise: float, noise_from: float) -> None:
    decoder = FakeDecoder(noise=noise, noise_from=noise_from)
    with pytest.raises(RuntimeError, match="self-test"):
        check_graphs(decoder, decoder.perturb, VOCAB, torch.bfloat16)


def test_noise_that_reaches_nothing_is_refused() -> None:
    decoder = FakeDecoder()
    with pytest.raises(RuntimeError, match="does not reach the weights"):
        check_graphs(decoder, lambda seed: None, VOCAB, torch.float32)


def test_a_step_is_compared_at_every_prompt_with_the_whole_forward() -> None:
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))

    def forward(ids: list[int]) -> torch.Tensor:
        return table[torch.tensor(ids)]

    def decoder(wrong_row: int | None, wrong: float = 5.0) -> SimpleNamespace:
        def trace(prompts: list[list[int]], num_tokens: int, graphs: bool) -> tuple[torch.Tensor, torch.Tensor]:
            assert not graphs
            tokens, logits = [], []
            for prompt in prompts:
                ids = list(prompt)
                for _ in range(num_tokens):
                    ids.append(int(table[ids[-1]].argmax()))
                tokens.append(ids[-num_tokens:])
                logits.append(table[torch.tensor(ids[-num_tokens - 1 : -1])])
            logits = torch.stack(logits)
            if wrong_row is not None:
                logits[wrong_row, NUM_TOKENS - 1, 3] += wrong
            return torch.tensor(tokens), logits

        return SimpleNamespace(trace=trace)

    assert step_error(decoder(None), forward, VOCAB) == 0.0
    for row in range(len(sample_prompts(VOCAB))):
        assert step_error(decoder(row), forward, VOCAB) > 0.1
        assert not step_error(decoder(row, float("nan")), forward, VOCAB) <= 1e9


def test_not_a_number_never_passes() -> None:
    nan = torch.tensor([1.0, float("nan")])
    assert not relative_error(nan, torch.ones(2)) <= 1e9 and not relative_error(torch.ones(2), nan) <= 1e9
