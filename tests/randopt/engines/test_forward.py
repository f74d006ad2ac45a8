"""Steps through the transformers forward; that they decode as transformers does is in test_decode.py."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from bitsperbyte.randopt.engines.forward import UNBOUNDED, CachedSteps, RecomputedSteps, max_positions, padded


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2", "gpt2"])
@pytest.mark.parametrize("make", [CachedSteps, RecomputedSteps])
def test_steps_equal_the_whole_forward_at_any_row_and_length(tiny_model: Callable, kind: str, make: type) -> None:
    model = tiny_model(kind, **({} if kind == "gpt2" else {"sliding_window": 4}))
    steps = make(model)
    steps.allocate(3, 20)
    sequences = [[5, 9, 2, 44, 7, 13, 60, 3], [8, 1], [30, 31, 32, 33, 34, 35]]
    with torch.inference_mode():
        steps.prefill([sequences[2][:-2], sequences[0][:-2]], [2, 0])
        for back in (2, 1):
            tokens, lengths = torch.tensor([s[-back] for s in sequences]), torch.tensor([len(s) - back for s in sequences])
            logits = steps.step(tokens, lengths, 12)
        for row, sequence in zip(logits, sequences, strict=True):
            assert torch.allclose(row, model(torch.tensor([sequence])).logits[0, -1], atol=1e-4)
        steps.keep(torch.tensor([0, 2]))
        steps.step(torch.tensor([1, 2]), torch.tensor([8, 6]), 9)
        again = steps.step(torch.tensor([1, 2]), torch.tensor([9, 7]), 12)
        assert torch.allclose(again[1], model(torch.tensor([[*sequences[2], 2, 2]])).logits[0, -1], atol=1e-4)


@pytest.mark.parametrize(("kind", "settings"), [
    ("bloom", {}), ("mamba", {"vocab_size": 97, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4, "pad_token_id": 0})])
def test_models_that_keep_more_than_keys_are_refused_a_cache(tiny_model: Callable, kind: str, settings: dict) -> None:
    with pytest.raises(ValueError):
        CachedSteps(tiny_model(kind, **settings))


def test_rows_cost_what_is_allocated(tiny_model: Callable) -> None:
    steps = CachedSteps(tiny_model("llama", num_attention_heads=4, num_key_value_heads=2))
    steps.allocate(5, 32)
    allocated = sum(x.numel() * x.element_size() for pair in steps._cache.stored for x in pair)
    assert 5 * steps.row_bytes(32) == allocated == 5 * 32 * 2 * 2 * 2 * 8 * 4  # rows, positions, layers, k and v, heads, width, bytes


def test_positions_of_a_configuration() -> None:
    def positions(**settings: int) -> int:
        return max_positions(SimpleNamespace(get_text_config=lambda: SimpleNamespace(**settings)))

    assert positions(max_position_embeddings=77) == 77 and positions(n_positions=78) == 78 and positions() == UNBOUNDED


def test_padding_is_on_the_right() -> None:
    assert padded([[1, 2, 3], [4]], torch.device("cpu")).tolist() == [[1, 2, 3], [4, 0, 0]]
