"""Two and four ranks, each a process of vLLM's: every byte is compared with the checkpoint inside them, and one seed is one model."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from bitsperbyte.randopt.engines.base import Sampling

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
