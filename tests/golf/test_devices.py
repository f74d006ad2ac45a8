"""Where a run computes, the sums over ranks, and whether it fits."""

import dataclasses
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist

from bitsperbyte.golf import devices as module
from bitsperbyte.golf.devices import (
    GIB,
    Ranks,
    describe_device,
    expected_memory_bytes,
    join_ranks,
    peak_memory_bytes,
    pick_device,
    require_memory,
)
from bitsperbyte.golf.model import ModelConfig, parameter_counts

CPU = torch.device("cpu")
ONE = Ranks(0, 1, CPU)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_a_gpu_asked_for_where_there_is_none(no_gpu: None) -> None:
    with pytest.raises(ValueError, match=r"cuda, and torch sees no GPU here: ask for cpu or auto"):
        pick_device("cuda")
    with pytest.raises(ValueError, match="no GPU"):
        join_ranks("cuda")
    assert not dist.is_initialized()
    assert pick_device("auto") == pick_device("cpu") == CPU


def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    with pytest.raises(ValueError, match=r"rank 2 of this host has no GPU: torch sees 2; start that many"):
        pick_device("auto", local_rank=2)
    assert pick_device("auto", local_rank=1) == torch.device("cuda", 1) == chosen[0]
    assert pick_device("cpu", local_rank=5) == CPU


def test_a_single_rank_needs_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    ranks = join_ranks("cpu")
    assert ranks == ONE and ranks.is_main and not dist.is_initialized()
    ranks.barrier()
    ranks.synchronize()
    assert ranks.mean(torch.tensor(2.5)) == 2.5
    ranks.close()


def test_the_other_rank_counts_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second rank that holds 10 everywhere, played by a stand-in for all_reduce."""
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: tensor.add_(10.0))
    ranks = Ranks(1, 2, CPU)
    assert not ranks.is_main
    value = torch.tensor(2.0)
    assert ranks.mean(value) == 6.0 and value == 2.0


def test_description_and_peak_of_a_cpu() -> None:
    told = describe_device(CPU, 2)
    assert told == {"device": "cpu", "num_devices": 2, "num_threads": torch.get_num_threads(), "dtype": "float32"}
    peak = peak_memory_bytes(CPU)
    assert psutil.Process().memory_info().rss * 0.5 < peak < psutil.virtual_memory().total


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_expected_memory_grows_with_what_it_must(device_type: str) -> None:
    config = ModelConfig()
    base = expected_memory_bytes(config, 65_536, device_type)
    assert base > parameter_counts(config)["total"] * 4 * 4, "weights, gradients and two moments"
    assert expected_memory_bytes(config, 131_072, device_type) > 1.8 * base
    deeper = dataclasses.replace(config, order=config.order * 2, skips=())
    assert expected_memory_bytes(deeper, 65_536, device_type) > 1.7 * base, "unrolled blocks keep activations of their own"
    assert expected_memory_bytes(config, 65_536, "cpu") > expected_memory_bytes(config, 65_536, "cuda")


def test_the_measured_baseline_on_a_gpu_is_within_a_quarter() -> None:
    """10,940 MiB were measured for the baseline at 65,536 tokens."""
    assert expected_memory_bytes(ModelConfig(), 65_536, "cuda") == pytest.approx(10_940 * 2**20, rel=0.25)


def test_a_micro_batch_that_cannot_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"needs about [\d.]+ GiB on cpu and [\d.]+ GiB are free; lower "
                                         r"train\.micro_batch_tokens \(now 10000000000\), which leaves the result as it is"):
        require_memory(ModelConfig(), 10**10, ONE)
    require_memory(ModelConfig(dim=16, num_heads=2, num_kv_heads=1, order=(0,), skips=()), 1024, ONE)


def test_the_ranks_of_a_host_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = expected_memory_bytes(ModelConfig(), 1024, "cpu")
    monkeypatch.setattr(module.psutil, "virtual_memory", lambda: SimpleNamespace(available=int(1.5 * needed)))
    require_memory(ModelConfig(), 1024, ONE)
    with pytest.raises(ValueError, match=f"{0.75 * needed / GIB:.1f} GiB are free"):
        require_memory(ModelConfig(), 1024, Ranks(0, 2, CPU))


def test_a_gpu_is_asked_what_it_has_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * GIB, 80 * GIB))
    with pytest.raises(ValueError, match=r"on cuda:0 and 2\.0 GiB are free"):
        require_memory(ModelConfig(), 65_536, Ranks(0, 1, torch.device("cuda", 0)))


@pytest.mark.parametrize("name", ["foo", "", "CPU", "cuda:0", "metal"])
def test_an_unknown_device_is_refused_and_not_taken_for_the_cpu(no_gpu: None, name: str) -> None:
    with pytest.raises(ValueError, match=r"no device '.*': ask for one of auto, cpu, cuda"):
        pick_device(name)


def test_an_evaluation_that_cannot_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig(dim=64, num_heads=4, num_kv_heads=2, order=(0,), skips=())
    advice = r"evaluation needs about [\d.]+ GiB on cpu .* lower eval\.window or eval\.batch_tokens"
    monkeypatch.setattr(module.psutil, "virtual_memory", lambda: SimpleNamespace(available=GIB))
    require_memory(config, 1024, ONE)
    require_memory(config, 1024, ONE, eval_tokens=65_536, eval_window=65_536)
    with pytest.raises(ValueError, match=advice):
        require_memory(config, 1024, ONE, eval_tokens=2**20)
    windowed = dataclasses.replace(config, attention_window=64)
    require_memory(windowed, 1024, ONE, eval_tokens=65_536, eval_window=1024)
    with pytest.raises(ValueError, match=advice + r" \(now a window of 65536 in batches of 65536 tokens\)"):
        require_memory(windowed, 1024, ONE, eval_tokens=65_536, eval_window=65_536)
    require_memory(dataclasses.replace(config, attention_window=65_536), 1024, ONE, eval_tokens=65_536, eval_window=65_536)
