"""The worker extension without vLLM: a checkpoint in files, a shard that is right or wrong, and plain answers."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from bitsperbyte.randopt.engines.checkpoint import tensor_shapes
from bitsperbyte.randopt.engines.vllm_worker import EXTENSION, PerturbExtension, _Reader
from bitsperbyte.randopt.noise import perturbed_reference

SETTINGS = {"scheme": "rademacher", "sigma": "absolute", "base": "device", "include": ["*"], "exclude": [], "verify_every": 64}


class Worker(PerturbExtension):
    """As vLLM's worker is to its extension."""

    def __init__(self, model: nn.Module, **cache: Any) -> None:
        self.model = model
        self.vllm_config = SimpleNamespace(quant_config=None, cache_config=SimpleNamespace(enable_prefix_caching=False, **cache),
                                           parallel_config=SimpleNamespace(pipeline_parallel_size=1))

    def get_model(self) -> nn.Module:
        return self.model


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[Worker, list[str]]]:
    """A worker over a model of two layers, and the checkpoint's two files."""
    import sys

    monkeypatch.setitem(sys.modules, "vllm.distributed", SimpleNamespace(get_tensor_model_parallel_rank=lambda: 0))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(distributed=sys.modules["vllm.distributed"]))

    def make() -> tuple[Worker, list[str]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5)).bfloat16().requires_grad_(False)
        model[1].weight += torch.randn(5)
        for i in range(2):
            save_file({f"{i}.{name}": p.clone() for name, p in model[i].named_parameters()}, tmp_path / f"{i}.safetensors")
        return Worker(model), [str(tmp_path / f"{i}.safetensors") for i in range(2)]

    return make


def test_it_perturbs_and_answers_in_plain_data(saved: Callable) -> None:
    worker, files = saved()
    opened = worker.bpb_open(files)["value"]
    assert opened["squares"]["0.weight"] == [pytest.approx(float(worker.model[0].weight.double().square().sum())), 30]
    assert worker.bpb_prepare(SETTINGS, None) == {"value": None}
    base = worker.model[0].weight.clone()
    assert worker.bpb_perturb(2**64 - 1, 0.1) == {"value": None}
    assert torch.equal(worker.model[0].weight, perturbed_reference(base, "0.weight", 2**64 - 1, 0.1))
    facts = worker.bpb_describe()["value"]
    assert facts["num_perturbed"] == 30 + 5 + 5 + 5 and facts["names"] == ["0.bias", "0.weight", "1.bias", "1.weight"] and facts["switch_s"] > 0
    assert {row["name"] for row in worker.bpb_effective_rms(0.1, 1)["value"]} == {"*.weight", "*.bias"}
    assert worker.bpb_reset() == {"value": None} == worker.bpb_verify_base()
    assert torch.equal(worker.model[0].weight, base)
    worker.model[0].weight[0, 0] += 1
    assert worker.bpb_verify_base()["error"] == "RuntimeError" and "changed since loading" in worker.bpb_verify_base()["text"]
    assert worker.bpb_perturb(1, float("nan"))["error"] == "ValueError"


def test_what_must_not_be_perturbed_is_refused(saved: Callable) -> None:
    def refusal(change: Callable[[Worker], Any]) -> str:
        worker, files = saved()
        change(worker)
        answer = worker.bpb_open(files)
        assert answer["error"] == "ValueError" and not hasattr(worker, "bpb_shard")
        return answer["text"]

    assert "1 tensors differ (0.weight (of 0.weight))" in refusal(lambda worker: worker.model[0].weight[4, 5].add_(1e-2))
    assert "prefix cache is on" in refusal(lambda worker: setattr(worker.vllm_config.cache_config, "enable_prefix_caching", True))
    assert "quantises the weights (fp8)" in refusal(
        lambda worker: setattr(worker.vllm_config, "quant_config", SimpleNamespace(get_name=lambda: "fp8")))
    assert "pipeline parallelism" in refusal(lambda worker: setattr(worker.vllm_config.parallel_config, "pipeline_parallel_size", 2))


def test_rectangles_are_read_from_every_file(tmp_path: Path) -> None:
    tensors = {"matrix": torch.randn(6, 5), "vector": torch.randn(7), "experts": torch.randn(3, 4, 5), "scalar": torch.tensor(2.0)}
    where = {}
    for name, tensor in tensors.items():
        where[name] = tmp_path / f"{name}.safetensors"
        save_file({name: tensor}, where[name])
    shapes = {name: tensor_shapes(path)[name] for name, path in where.items()}
    assert shapes == {name: tuple(t.shape) for name, t in tensors.items()}
    with _Reader(where, shapes) as read:
        assert torch.equal(read("matrix", 1, 4, 2, 5), tensors["matrix"][1:4, 2:5])
        assert torch.equal(read("vector", 2, 6, 0, 1), tensors["vector"][2:6, None])
        assert torch.equal(read("experts", 1, 3, 7, 20), tensors["experts"].flatten(1)[1:3, 7:20])
        assert read("scalar", 0, 1, 0, 1).tolist() == [[2.0]]


def test_the_name_of_the_extension_is_where_it_is() -> None:
    assert f"{PerturbExtension.__module__}.{PerturbExtension.__name__}" == EXTENSION
    assert all(name.startswith(("bpb_", "_")) for name in vars(PerturbExtension))
