"""On an NVIDIA GPU: bfloat16 kernels against the CPU's float32, padded heads, Muon, and a whole run, resumed and scored."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from bitsperbyte.golf.config import GolfConfig
from bitsperbyte.golf.model import GolfModel, ModelConfig, attend, is_control
from bitsperbyte.golf.muon import OptimConfig, build_optimizers, newton_schulz
from bitsperbyte.golf.scoring import score_run
from bitsperbyte.golf.session import train
from bitsperbyte.records.store import read_record
from bitsperbyte.run.outcome import RunFailed
from bitsperbyte.text.prepare import prepare

pytestmark = pytest.mark.gpu

FLAT = ModelConfig(vocab_size=256, dim=128, num_heads=2, num_kv_heads=1, order=(0, 1, 2), skips=((0, 2),))
RECURRENT = ModelConfig(vocab_size=256, dim=288, num_heads=4, num_kv_heads=2, order=(0, 1, 1, 0), skips=((0, 3), (1, 2)))  # width 72
WINDOWED = ModelConfig(vocab_size=256, dim=128, num_heads=2, num_kv_heads=1, order=(0, 1, 2), skips=((0, 2),), attention_window=40)
CONFIGS = {"flat": FLAT, "recurrent": RECURRENT, "windowed": WINDOWED}


def perturbed(config: ModelConfig, seed: int = 0) -> GolfModel:
    """No tensor zero, so that attention and MLP take part, at the scale of a trained model's."""
    torch.manual_seed(seed)
    model = GolfModel(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.add_(torch.randn_like(p) * (0.1 if is_control(name) else 0.05))
    return model


def batch(length: int = 256) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 256, (4, length + 1), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1], ids[:, 1:]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", CONFIGS)
def test_loss_and_gradient_are_close_to_the_cpus(name: str, compiled: bool) -> None:
    cpu, gpu, device = perturbed(CONFIGS[name]), perturbed(CONFIGS[name]), torch.device("cuda")
    gpu.place(device)
    gpu.prepare(256, device)
    loss_fn = torch.compile(gpu.loss, dynamic=False) if compiled else gpu.loss
    x, y = batch()
    expected, actual = cpu.loss(x, y), loss_fn(x.to(device), y.to(device))
    expected.backward()
    actual.backward()
    assert gpu.compute_dtype == torch.bfloat16 and actual.dtype == torch.float32
    assert actual.item() == pytest.approx(expected.item(), rel=5e-3)
    for (parameter_name, a), b in zip(gpu.named_parameters(), cpu.parameters(), strict=True):
        similarity = F.cosine_similarity(a.grad.cpu().flatten().double(), b.grad.flatten().double(), dim=0).item()
        assert similarity > 0.98, (parameter_name, similarity)


def test_the_window_limits_what_is_seen_on_cuda_too() -> None:
    device = torch.device("cuda")
    model = perturbed(ModelConfig(vocab_size=256, dim=128, num_heads=2, num_kv_heads=1, order=(0,), skips=(), attention_window=40))
    model.place(device)
    x, _ = batch()
    changed = x.clone()
    changed[:, 100] = (changed[:, 100] + 1) % 256
    with torch.no_grad():
        differs = (model.hidden(x.to(device)) != model.hidden(changed.to(device))).any(-1).any(0).nonzero().flatten().tolist()
    assert differs[0] == 100 and differs[-1] == 139


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.bfloat16, 0.03)], ids=["float64", "bfloat16"])
@pytest.mark.parametrize("width", [24, 64, 72, 96, 100, 128, 136])
def test_padding_of_head_widths_changes_nothing(width: int, dtype: torch.dtype, tolerance: float) -> None:
    """Output and gradients against attention written out. float64 has no flash kernel and shows that the padding itself is exact;
    bfloat16 is what the kernels take."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 96, width, device="cuda", dtype=dtype, requires_grad=True) for heads in (4, 2, 2))
    y = attend(q, k, v, None)
    grad = torch.randn_like(y)
    found = torch.autograd.grad(y, (q, k, v), grad)
    reference = [t.detach().double().requires_grad_() for t in (q, k, v)]
    keys, values = (t.repeat_interleave(2, dim=1) for t in reference[1:])
    scores = reference[0] @ keys.mT / width**0.5
    mask = torch.ones(96, 96, device="cuda", dtype=torch.bool).tril()
    expected = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ values
    assert y.shape == q.shape
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)
    for a, b in zip(found, torch.autograd.grad(expected, reference, grad.double()), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2 * tolerance, atol=2 * tolerance)


def test_newton_schulz_in_bfloat16_is_close_to_float32() -> None:
    G = torch.randn(3, 96, 288, generator=torch.Generator().manual_seed(0))
    expected, actual = newton_schulz(G), newton_schulz(G.cuda()).float().cpu()
    assert (actual - expected).norm() / expected.norm() < 0.03


def test_optimiser_steps_are_those_of_the_cpu() -> None:
    """Three steps on the same gradients. A Muon update has a fixed size, so its direction is compared; Adam's, element by element."""
    cpu, gpu = perturbed(RECURRENT), perturbed(RECURRENT).place(torch.device("cuda"))
    before = {name: p.detach().clone() for name, p in cpu.named_parameters()}
    optimizers = [build_optimizers(model, OptimConfig(weight_decay=0.04)) for model in (cpu, gpu)]
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for a, b in zip(cpu.parameters(), gpu.parameters(), strict=True):
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.cuda()
        for optimizer in optimizers:
            optimizer.step(lr_scale=0.5, momentum=0.9)
    muon = {name for group in optimizers[0].groups() if group.optimizer == "muon" for name in group.param_names}
    for (name, a), b in zip(cpu.named_parameters(), gpu.parameters(), strict=True):
        expected, actual = a.detach() - before[name], b.detach().cpu() - before[name]
        if name in muon:
            assert (actual - expected).norm() / expected.norm() < 0.03, name
        else:
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6, msg=name)


@pytest.fixture
def config(tmp_path: Path) -> GolfConfig:
    prepare("embedded", "byte", tmp_path / "data", limit_docs=300)
    return GolfConfig.model_validate({
        "data": {"path": str(tmp_path / "data")},
        "model": {"vocab_size": 260, "dim": 128, "num_heads": 2, "num_kv_heads": 1, "order": [0, 1, 0], "skips": [[0, 2]]},
        "schedule": {"wallclock_s": None, "max_steps": 20, "warmdown": {"steps": 5}, "warmup_steps": 2},
        "train": {"batch_tokens": 4096, "seq_len": 256, "micro_batch_tokens": 2048, "device": "cuda", "checkpoint_every_steps": 5},
        "eval": {"every_steps": 10, "max_tokens": 20_000, "stride": 64}, "artifact": {"scheme": "int6", "codec": "zstd"}})


def test_a_run_is_resumed_and_scored(config: GolfConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bitsperbyte.golf.train import Trainer

    whole = train(config, tmp_path / "whole")
    original = Trainer.train_step

    def stops(self: Trainer, batch, scale):
        if self.step == 12 and self.clock.running:
            raise RunFailed("stopped here", 1, "interrupted")
        return original(self, batch, scale)

    monkeypatch.setattr(Trainer, "train_step", stops)
    with pytest.raises(RunFailed, match="stopped here"):
        train(config, tmp_path / "run")
    assert read_record(tmp_path / "run").status == "interrupted"
    monkeypatch.setattr(Trainer, "train_step", original)
    record = train(config, tmp_path / "run", resume=True)
    assert (record.status, record.training.num_steps, record.training.num_resumes) == ("finished", 20, 1)
    first, last = whole.score("artifact"), record.score("artifact")
    assert last.bpb == pytest.approx(first.bpb, abs=0.02)  # sums on a GPU depend on the order of its threads
    assert last.bpb < 6.0  # 8.02 bits for each byte before training
    assert record.training.peak_memory_bytes > 0 and record.provenance["dtype"] == "bfloat16"
    on_gpu = score_run(tmp_path / "run", stride=64, device_name="cuda", show_progress=False)
    on_cpu = score_run(tmp_path / "run", stride=64, device_name="cpu", show_progress=False)
    assert on_gpu.bpb == pytest.approx(on_cpu.bpb, rel=2e-3)
    assert (on_gpu.num_bytes, on_gpu.num_tokens) == (on_cpu.num_bytes, on_cpu.num_tokens)
