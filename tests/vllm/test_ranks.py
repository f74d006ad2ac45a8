"""Two and four ranks, each a process of vLLM's: every byte is compared with the checkpoint inside them, and one seed is one model."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from bitsperbyte.randopt.engines.base import Sampling
from bitsperbyte.randopt.noise import perturbed_reference

SEEDS = [0, 1, 12345, 2**31, 2**32 + 1, 2**40 + 3, 2**53, 2**63 - 1, 2**63, 2**64 - 1]
PROMPTS = [[5, 6, 7, 8], [100, 101], [9] * 20, list(range(10, 63))]


# with four ranks two of them hold the same head of keys and values
@pytest.mark.parametrize(("kind", "world"), [("qwen2", 2), ("qwen3", 4)])
def test_a_seed_is_the_same_model_on_any_number_of_ranks(opened: Callable[..., Any], text: str, kind: str, world: int) -> None:
    split = {"hardware": {"num_gpus": world, "tensor_parallel": world}, "noise": {"scheme": "binomial", "sigma": "relative"}}
    native, vllm = opened("native", kind, {"noise": split["noise"]}), opened("vllm", kind, split)
    try:
        alike, unlike = (dict(engine.describe()["noise"]) for engine in (native, vllm))
        assert alike["rms"] == unlike["rms"] and alike["num_perturbed"] == unlike["num_perturbed"]
        rows = [{row["name"]: row for row in engine.effective_rms(0.1, 7)} for engine in (native, vllm)]
        assert {name: row["num_elements"] for name, row in rows[0].items()} == {name: row["num_elements"] for name, row in rows[1].items()}
        for name, row in rows[0].items():
            assert rows[1][name]["effective_rms"] == pytest.approx(row["effective_rms"], rel=1e-9)
        answers = []
        for seed in (None, 3, 2**63 + 5):
            for engine in (native, vllm):
                engine.reset() if seed is None else engine.perturb(seed, 0.1)
            answers.append(vllm.generate(PROMPTS, Sampling(6)))
            assert answers[-1] == native.generate(PROMPTS, Sampling(6))
            for one, other in zip(native.score([text[:150]], 48), vllm.score([text[:150]], 48), strict=True):
                assert np.allclose(one.nats, other.nats, atol=2e-4, rtol=0)
        assert answers[0] != answers[1] != answers[2]
        vllm.reset()
        vllm.verify_base()
        assert vllm.generate(PROMPTS, Sampling(6)) == answers[0]
    finally:
        vllm.close()
        native.close()


def digests() -> Callable[[Any], list[tuple]]:
    """A function that tells a worker's live weights by piece. It is nested, so that it travels to the workers by value."""

    def told(worker: Any) -> list[tuple]:
        import hashlib

        shard = worker.bpb_shard
        return [(p.name, p.row_begin, p.row_end, p.col_begin, p.col_end, p in shard.owned,
                 hashlib.sha256(p.view(live.tensor.detach()).contiguous().numpy().tobytes()).hexdigest())
                for live in shard.layout.tensors for p in live.pieces]

    return told


@pytest.mark.parametrize(("kind", "world", "tied"), [("llama", 1, True), ("qwen2", 1, False), ("qwen2", 2, False), ("qwen3", 2, True),
                                                     ("llama", 4, False)])
def test_ten_seeds_have_the_bytes_of_the_checkpoint(opened: Callable[..., Any], checkpoint_folder: Callable[..., Path], kind: str, world: int,
                                                   tied: bool) -> None:
    """Every piece of every live tensor that vLLM itself loaded, on every rank, after the switch to each seed."""
    vllm = opened("vllm", kind, {"hardware": {"num_gpus": world, "tensor_parallel": world}}, tie_word_embeddings=tied)
    try:
        stored = load_file(vllm._files.weights[0])
        for seed in (None, *SEEDS):
            vllm.reset() if seed is None else vllm.perturb(seed, 0.05)
            weights = stored if seed is None else {n: perturbed_reference(t, n, seed, 0.05) for n, t in stored.items()}
            ranks = vllm.llm.collective_rpc(digests())
            held = dict.fromkeys(weights, 0)
            for name, r0, r1, c0, c1, is_owner, digest in (piece for rank in ranks for piece in rank):
                matrix = weights[name].reshape(len(weights[name]), -1)
                assert hashlib.sha256(matrix[r0:r1, c0:c1].contiguous().numpy().tobytes()).hexdigest() == digest, (name, seed)
                held[name] += is_owner * (r1 - r0) * (c1 - c0)
            assert len(ranks) == world and held == {name: tensor.numel() for name, tensor in weights.items()}
    finally:
        vllm.close()
