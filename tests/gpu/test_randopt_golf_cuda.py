"""On an NVIDIA GPU: a golf model's captured decode step against the same step launched by itself and against the CPU."""

import pytest
import torch

from bitsperbyte.golf.model import GolfModel, ModelConfig
from bitsperbyte.randopt.config import RandOptConfig
from bitsperbyte.randopt.engines.base import Sampling
from bitsperbyte.randopt.engines.golf import GolfEngine
from bitsperbyte.text.tokenizers import ByteTokenizer

pytestmark = pytest.mark.gpu

SIZES = {"vocab_size": 260, "dim": 120, "num_heads": 4, "num_kv_heads": 2}  # heads of 30, which no flash kernel is cut for
NETWORKS = {
    "flat": ModelConfig(**SIZES, order=(0, 1, 2), skips=((0, 2),)),
    "recurrent": ModelConfig(**SIZES, order=(0, 1, 1, 0), skips=((0, 3), (1, 2)), tie_embeddings=False),
    "windowed": ModelConfig(**SIZES, order=(0, 1), skips=(), attention_window=5),
}
QUESTIONS = [f"{a}?{a * 7 % 50}=" * (1 + a % 3) for a in range(40)]


def engine_of(network: str, device: str, graphs: str, dtype: str) -> GolfEngine:
    torch.manual_seed(0)
    model = GolfModel(NETWORKS[network])
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    config = RandOptConfig.model_validate({
        "model": {"path": "x.bpb", "device": device, "dtype": dtype}, "task": {"name": "arithmetic"}, "noise": {"sigmas": [0.1]},
        "decode": {"graphs": graphs}})
    return GolfEngine(model, ByteTokenizer(), config=config, max_positions=64, facts={})


@pytest.mark.parametrize("network", NETWORKS)
def test_captured_steps_follow_the_weights_and_agree_with_the_cpu(network: str) -> None:
    captured, eager, cpu = (engine_of(network, device, graphs, "float32")
                            for device, graphs in (("cuda", "on"), ("cuda", "off"), ("cpu", "off")))
    captured.self_test(0.1)
    assert captured.describe()["decode"]["graphs"] and not eager.describe()["decode"]["graphs"]
    ids = captured.encode([[{"role": "user", "content": text}] for text in QUESTIONS])
    seen = set()
    for seed in (1, 2, None):
        for engine in (captured, eager, cpu):
            engine.reset() if seed is None else engine.perturb(seed, 0.1)
        for ours, theirs in zip(captured.model.parameters(), cpu.model.parameters(), strict=True):
            assert torch.equal(ours.cpu(), theirs)
        answers = [[g.token_ids for g in engine.generate(ids, Sampling(6))] for engine in (captured, eager, cpu)]
        assert answers[0] == answers[1]
        equal = sum(a == b for a, b in zip(answers[0], answers[2], strict=True))
        assert equal >= len(ids) - 2, f"{len(ids) - equal} of {len(ids)} answers differ from the CPU's: more than near ties explain"
        seen.add(tuple(answers[0]))
    assert len(seen) == 3


def test_bfloat16_scores_are_near_those_of_the_cpu() -> None:
    texts = ["The quick brown fox jumps over the lazy dog. " * 5, "12?34=46"]
    on_gpu, on_cpu = (engine_of("windowed", device, "off", "auto").score(texts, 32) for device in ("cuda", "cpu"))
    for gpu, cpu in zip(on_gpu, on_cpu, strict=True):
        assert gpu.nats.sum() == pytest.approx(cpu.nats.sum(), rel=0.02) and (gpu.num_bytes == cpu.num_bytes).all()
