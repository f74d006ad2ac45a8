"""Memory of a GPU under vLLM, planned from the model's size: what vLLM may take, and what must stay out of its hands.

vLLM fills its share of the GPU (gpu_memory_utilization) with weights, what it measures in a profiling run, and the cache. Three things
lie outside that share, and so outside its plan: the base copy, captured graphs, and the logits of prompts whose log-probabilities are
asked for.
"""

from dataclasses import dataclass
from typing import Literal

GIB = 2**30
GRAPHS_BYTES = round(0.59 * GIB)  # recorded for 51 captured decode steps of a 7B model
LOGPROB_COPIES = 3  # float32 matrices of tokens by vocabulary that live at once: logits, their float32 form, log-softmax
MARGIN = 0.03  # of the GPU: the driver's context, fragmentation, buffers of collectives
BATCHED_TOKENS = 8_192  # tokens of one forward pass at most
MIN_BATCHED_TOKENS = 512
LOGPROB_SHARE = 0.06  # of the GPU that prompts' logits may take; fewer tokens a pass keep them below it
CACHE_SHARE = 0.85  # of what vLLM has beside the weights that the cache gets; the rest is for what its profiling run needs


@dataclass(frozen=True)
class VllmMemory:
    """Bytes on each GPU. `utilization` is vLLM's share of the GPU; `cache_bytes` what of it is left for the cache, as far as that can be
    told before a profiling run; `parts` are what lies outside."""

    base: Literal["device", "pinned", "none"]
    batched_tokens: int
    utilization: float
    weights_bytes: int
    cache_bytes: int
    parts: dict[str, int]
    total_bytes: int

    def require_cache(self) -> None:
        """ValueError, with what to change, where nothing is left for a cache."""
        if self.cache_bytes > 0:
            return
        change = "set noise.base to pinned, or split the model over more GPUs" if "base weights" in self.parts else "split it over more GPUs"
        raise ValueError(f"the model takes {self.weights_bytes / GIB:.1f} GiB of a GPU of {self.total_bytes / GIB:.1f} GiB, what vLLM does not count "
                         f"{sum(self.parts.values()) / GIB:.1f} GiB ({', '.join(self.parts)}), and nothing is left for a cache: {change} "
                         "(hardware.tensor_parallel)")


def plan_vllm(total_bytes: int, weights_bytes: int, vocab_size: int, *, base: str, scores: bool, graphs: bool) -> VllmMemory:
    """The plan for a GPU of `total_bytes` that holds `weights_bytes` of the model. `base` as noise.base: auto takes pinned CPU memory
    where weights and base would leave less than a third. `scores`: whether documents are scored. Where nothing is left for a cache,
    `cache_bytes` is not above 0."""
    place = base if base != "auto" else "pinned" if 3 * weights_bytes > total_bytes else "device"
    tokens = BATCHED_TOKENS
    if scores:
        fitting = int(LOGPROB_SHARE * total_bytes) // (LOGPROB_COPIES * 4 * vocab_size)
        tokens = max(MIN_BATCHED_TOKENS, min(BATCHED_TOKENS, 2 ** max(0, fitting.bit_length() - 1)))
    parts = {"base weights": weights_bytes if place == "device" else 0, "captured graphs": GRAPHS_BYTES if graphs else 0,
             "logits when scoring": LOGPROB_COPIES * 4 * tokens * vocab_size if scores else 0, "kept free": int(MARGIN * total_bytes)}
    ours = total_bytes - sum(parts.values())
    cache = int(CACHE_SHARE * (ours - weights_bytes))
    return VllmMemory(place, tokens, max(0.0, round(ours / total_bytes, 4)), weights_bytes, cache, {k: v for k, v in parts.items() if v}, total_bytes)
