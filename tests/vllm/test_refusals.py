"""Models that vLLM keeps in another form than the checkpoint are refused with the reason, before a weight is touched."""

from collections.abc import Callable
from typing import Any

import pytest

from bitsperbyte.randopt.engines import vllm as engine
from bitsperbyte.randopt.engines import vllm_worker


def test_weights_that_vllm_transposes(opened: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="native engine"):
        opened("vllm", "gpt2", n_embd=64, n_head=4)


def test_weights_that_vllm_repacks(opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the word to keep them plain: whatever vLLM then does on this machine, nothing is perturbed that it does not compute with."""
    from vllm import _custom_ops

    monkeypatch.setattr(engine, "keep_plain_weights", lambda: None)
    monkeypatch.setattr(_custom_ops, "_supports_onednn", True)
    with pytest.raises(ValueError, match=r"qkv_proj.weight as \(0,\), which is no share of .*repacked"):
        opened("vllm", sections={"noise": {"verify_every": 3}})
    monkeypatch.undo()
    vllm_worker.keep_plain_weights()


@pytest.mark.parametrize("where", ["model.layers.1.mlp.gate_up_proj.weight", "model.embed_tokens.weight"])
def test_weights_that_are_not_the_checkpoints(opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    start = engine.VllmEngine._start

    def spoiled(self: engine.VllmEngine) -> Any:
        llm = start(self)
        (parameter,) = llm.apply_model(lambda model: model.get_parameter(where))
        parameter.data[30, 3] *= 1.0001
        return llm

    monkeypatch.setattr(engine.VllmEngine, "_start", spoiled)
    with pytest.raises(ValueError, match=f"1 tensors differ .{where}"):
        opened("vllm")


def test_a_model_that_vllm_does_not_know(opened: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="vLLM cannot start .*: "):
        opened("vllm", sections={"decode": {"max_sequences": 1}, "model": {"dtype": "float16"}, "hardware": {"num_gpus": 3, "tensor_parallel": 3}})
