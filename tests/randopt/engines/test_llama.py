"""The fused steps: which models they serve, and what laying projections side by side leaves as it was."""

from collections.abc import Callable

import pytest
import torch

from bitsperbyte.randopt.engines.llama import LlamaSteps, fuse_projections, why_not
from bitsperbyte.randopt.layout import Layout


@pytest.mark.parametrize(("kind", "settings", "reason"), [
    ("llama", {}, None), ("mistral", {"sliding_window": None}, None), ("qwen2", {}, None), ("qwen3", {}, None), ("gemma", {}, None),
    ("mistral", {"sliding_window": 6}, "sliding window"), ("gpt2", {}, "architecture gpt2"),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}, "kinds of attention"),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "depends on the length"),
    ("llama", {"hidden_act": "relu"}, "activation relu")])
def test_it_serves_what_it_computes(tiny_model: Callable, kind: str, settings: dict, reason: str | None) -> None:
    found = why_not(tiny_model(kind, **settings))
    assert found is None if reason is None else reason in found


def test_parameters_of_several_types_are_left_alone(tiny_model: Callable) -> None:
    model = tiny_model("llama")
    model.model.norm.to(torch.float16)
    assert "several types" in why_not(model)


def test_fusing_changes_no_name_value_or_output(tiny_model: Callable) -> None:
    model = tiny_model("qwen2", tie_word_embeddings=True)
    ids = torch.arange(9)[None]
    before, logits = {name: p.clone() for name, p in model.named_parameters()}, model(ids).logits
    fuse_projections(model)
    after = dict(model.named_parameters())
    assert list(after) == list(before) and all(torch.equal(after[n], before[n]) and after[n].is_contiguous() for n in before)
    assert torch.equal(model(ids).logits, logits)
    layout = Layout.of_module(model)  # refuses memory that overlaps
    assert layout.num_elements == sum(p.numel() for p in before.values())


def test_steps_compute_with_the_models_own_memory(tiny_model: Callable) -> None:
    """A weight changed through the model's parameter changes the next step, for every parameter there is."""
    model = tiny_model("qwen2")
    fuse_projections(model)
    steps = LlamaSteps(model)
    steps.allocate(2, 16)

    def logits() -> torch.Tensor:
        steps.prefill([[5, 6, 7], [8]], [1, 0])
        with torch.inference_mode():
            return steps.step(torch.tensor([3, 4]), torch.tensor([1, 3]), 4).clone()

    base = logits()
    assert torch.equal(logits(), base)
    for name, parameter in model.named_parameters():
        kept = parameter.clone()
        parameter += 0.3 * torch.randn_like(parameter)
        if name.endswith("embed_tokens.weight"):
            assert not torch.equal(logits(), base)
        elif not name.endswith("k_proj.bias"):  # one bias of all keys turns with the position, and matters little
            assert not torch.allclose(logits(), base, atol=1e-4), name
        parameter.copy_(kept)
    assert torch.equal(logits(), base)


def test_steps_over_projections_that_lie_apart_are_refused(tiny_model: Callable) -> None:
    with pytest.raises(AssertionError, match="fuse_projections"):
        LlamaSteps(tiny_model("llama"))


def test_rows_are_moved_with_their_caches(tiny_model: Callable) -> None:
    model = tiny_model("qwen3")
    fuse_projections(model)
    steps = LlamaSteps(model)
    steps.allocate(4, 16)
    steps.prefill([[1, 2, 3], [4, 5], [6], [7, 8, 9, 10]], [0, 1, 2, 3])
    tokens, lengths = torch.tensor([11, 12, 13, 14]), torch.tensor([3, 2, 1, 4])
    with torch.inference_mode():
        whole = steps.step(tokens, lengths, 8)
        kept = torch.tensor([1, 3])
        steps.keep(kept)
        assert torch.allclose(steps.step(tokens[kept], lengths[kept], 8), whole[kept], atol=1e-5)
