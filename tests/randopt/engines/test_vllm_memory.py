"""What vLLM may take of a GPU: nothing is planned twice, nothing that lies outside its share is forgotten."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitsperbyte.randopt.engines.vllm_memory import BATCHED_TOKENS, GIB, GRAPHS_BYTES, LOGPROB_SHARE, MIN_BATCHED_TOKENS, plan_vllm


@given(total=st.integers(8, 200), share=st.floats(0.001, 1.2), vocabulary=st.integers(256, 300_000),
       base=st.sampled_from(["auto", "device", "pinned", "none"]), scores=st.booleans(), graphs=st.booleans())
@settings(max_examples=200, deadline=None)
def test_shares_add_up_and_the_cache_is_what_is_left(total: int, share: float, vocabulary: int, base: str, scores: bool, graphs: bool) -> None:
    weights = int(share * total * GIB)
    made = plan_vllm(total * GIB, weights, vocabulary, base=base, scores=scores, graphs=graphs)
    outside = sum(made.parts.values())
    assert made.utilization * total * GIB + outside <= total * GIB * (1 + 1e-4) or made.utilization == 0.0
    assert made.cache_bytes + weights <= total * GIB - outside or made.cache_bytes <= 0
    assert made.base == (base if base != "auto" else "pinned" if 3 * weights > total * GIB else "device")
    assert made.parts.get("base weights", 0) == (weights if made.base == "device" else 0)
    assert made.parts.get("captured graphs", 0) == (GRAPHS_BYTES if graphs else 0)
    assert MIN_BATCHED_TOKENS <= made.batched_tokens <= BATCHED_TOKENS
    logits = made.parts.get("logits when scoring", 0)
    assert logits == (12 * made.batched_tokens * vocabulary if scores else 0)
    assert logits <= LOGPROB_SHARE * total * GIB or made.batched_tokens == MIN_BATCHED_TOKENS
    if made.cache_bytes > 0:
        made.require_cache()
    else:
        with pytest.raises(ValueError, match="nothing is left for a cache"):
            made.require_cache()


def test_the_base_copy_of_a_7b_model_by_hand() -> None:
    weights = 2 * 7_615_616_512
    made = plan_vllm(80 * GIB, weights, 152_064, base="auto", scores=True, graphs=True)
    assert made.base == "device" and made.batched_tokens == 2048  # 12 bytes * 152,064 * 2,048 = 3.5 GiB, twice that is above 6%
    outside = weights + GRAPHS_BYTES + 12 * 2048 * 152_064 + int(0.03 * 80 * GIB)
    assert made.utilization == pytest.approx(1 - outside / (80 * GIB), abs=1e-4)
    small = plan_vllm(24 * GIB, weights, 152_064, base="auto", scores=False, graphs=True)
    assert small.base == "pinned" and small.batched_tokens == BATCHED_TOKENS and small.cache_bytes > 0
    with pytest.raises(ValueError, match="set noise.base to pinned, or split the model over more GPUs"):
        plan_vllm(24 * GIB, weights, 152_064, base="device", scores=False, graphs=True).require_cache()
    with pytest.raises(ValueError, match="a cache: split it over more GPUs"):
        plan_vllm(14 * GIB, weights, 152_064, base="auto", scores=False, graphs=True).require_cache()
