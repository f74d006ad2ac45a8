"""What several ranks do, over NCCL on one GPU: a group of one rank makes the same calls on the same kinds of tensors."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from bitsperbyte.golf.evaluate import _of_all_ranks
from bitsperbyte.golf.model import GolfModel, ModelConfig
from bitsperbyte.golf.muon import OptimConfig, build_optimizers
from bitsperbyte.golf.reduce import GradientReducer

pytestmark = pytest.mark.gpu
CONFIG = ModelConfig(vocab_size=256, dim=128, num_heads=4, num_kv_heads=2, order=(0, 1, 2, 1, 0), skips=((0, 4),))


@pytest.fixture
def group(tmp_path: Path) -> Iterator[torch.device]:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1, device_id=device)
    yield device
    dist.destroy_process_group()


def model_on(device: torch.device) -> GolfModel:
    torch.manual_seed(0)
    return GolfModel(CONFIG).place(device)


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_pass_through_the_buckets_unchanged(group: torch.device, compiled: bool) -> None:
    tokens = torch.randint(0, 256, (4, 65), device=group)
    gradients = []
    for reduced in (False, True):
        model = model_on(group)
        model.prepare(64, group)
        loss = torch.compile(model.loss, dynamic=False) if compiled else model.loss
        reducer = GradientReducer(model.parameters(), 1, bucket_bytes=50_000) if reduced else None
        for i, part in enumerate(tokens.split(2)):
            if reducer and i == 1:
                reducer.begin()
            loss(part[:, :-1], part[:, 1:]).backward()
        if reducer:
            assert reducer._next == len(reducer.buckets) > 3, "all were under way when backward returned"
            reducer.finish()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-5)  # atomic adds of the embedding's gradient come in any order


def test_exchanged_updates_are_those_of_one_rank(group: torch.device) -> None:
    made = []
    for exchanged in (False, True):
        model = model_on(group)
        muon = build_optimizers(model, OptimConfig(weight_decay=0.1)).muon
        for step in range(3):
            for i, p in enumerate(model.parameters()):
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + i)).to(group)
            if exchanged:
                muon._exchanges.append(muon._exchange([p for p in muon.param_groups[0]["params"]], muon.param_groups[0]))
                muon.finish()
            else:
                muon.step()
        made.append([p.detach().clone() for p in model.parameters()])
    for one, two in zip(*made, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=2e-3)  # two bfloat16 iterations on stacks of other orders


def test_losses_come_back_as_they_were(group: torch.device) -> None:
    losses = np.random.default_rng(0).random(100)
    [back] = _of_all_ranks(losses, [100], 1, group)
    assert np.array_equal(back, losses)
