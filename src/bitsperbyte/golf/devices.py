"""Whether a run will fit on its device, and what the record says of it. Device and ranks themselves are in ranks.py, which a
submission bundles; what others use of it is importable from here."""

from typing import Any

import psutil
import torch

from bitsperbyte.golf.model import ModelConfig, parameter_counts
from bitsperbyte.golf.ranks import DEVICE_NAMES, Ranks, join_ranks, peak_memory_bytes, pick_device

__all__ = ["DEVICE_NAMES", "Ranks", "describe_device", "evaluation_memory_bytes", "expected_memory_bytes", "join_ranks",
           "peak_memory_bytes", "pick_device", "require_memory"]

GIB = 2**30
# Bytes of activations a token keeps for the backward pass, in units of (positions in order) * dim * bytes of the compute type.
# On CUDA, compiled, 17.3 and 20.2 follow from the peaks of the two H200 records (baseline, recurrent_v7); on a CPU the resident size
# grew by 23.8 to 25.8 over three sizes (widths 192 and 512, 2,048 to 8,192 tokens). Rounded up: it guards against running out.
ACTIVATIONS_CUDA, ACTIVATIONS_CPU = 21, 27
# Without a backward pass a token has about 12 * dim values alive at once (12.3 measured on a CPU, two blocks of width 64).
EVALUATION_UNITS = 12
# The boolean mask of limited attention on a CPU and the copies made of it, bytes for each pair of positions in a window: 11 measured,
# whatever the number of heads and of windows in the batch.
MASK_BYTES = 11


def describe_device(device: torch.device, world_size: int) -> dict[str, Any]:
    """Name, number and memory of the devices, for the record."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {"device": properties.name, "num_devices": world_size, "device_memory_bytes": properties.total_memory,
                "cuda": torch.version.cuda, "dtype": "bfloat16"}
    return {"device": "cpu", "num_devices": world_size, "num_threads": torch.get_num_threads(), "dtype": "float32"}


def expected_memory_bytes(config: ModelConfig, micro_batch_tokens: int, device_type: str) -> int:
    """Weights, gradients, two optimiser moments and a warm-up copy, plus the activations of one micro-batch and its float32 logits."""
    units, num_bytes = (ACTIVATIONS_CUDA, 2) if device_type == "cuda" else (ACTIVATIONS_CPU, 4)
    activations = micro_batch_tokens * len(config.order) * config.dim * units * num_bytes
    logits = micro_batch_tokens * config.vocab_size * 4 * 2
    return parameter_counts(config)["total"] * 4 * 7 + activations + logits


def evaluation_memory_bytes(config: ModelConfig, eval_tokens: int, eval_window: int, device_type: str) -> int:
    """Weights, gradients and two moments, which stay, plus the activations of one evaluation batch; on a CPU also what limited
    attention takes for its mask."""
    activations = eval_tokens * config.dim * EVALUATION_UNITS * (2 if device_type == "cuda" else 4)
    masked = device_type != "cuda" and config.attention_window is not None and config.attention_window < eval_window
    mask = eval_window**2 * MASK_BYTES if masked else 0
    return parameter_counts(config)["total"] * 4 * 4 + activations + mask


def require_memory(config: ModelConfig, micro_batch_tokens: int, ranks: Ranks, eval_tokens: int = 0, eval_window: int = 0) -> None:
    """ValueError before the start of a run that will not fit in the device's free memory: a micro-batch of training, or a batch of
    `eval_tokens` tokens in windows of `eval_window`."""
    needed = expected_memory_bytes(config, micro_batch_tokens, ranks.device.type)
    if ranks.device.type == "cuda":
        free = torch.cuda.mem_get_info(ranks.device)[0]
    else:
        free = psutil.virtual_memory().available // ranks.world_size
    if needed > free:
        raise ValueError(f"the run needs about {needed / GIB:.1f} GiB on {ranks.device} and {free / GIB:.1f} GiB are free; lower "
                         f"train.micro_batch_tokens (now {micro_batch_tokens}), which leaves the result as it is")
    needed = evaluation_memory_bytes(config, eval_tokens, eval_window, ranks.device.type)
    if eval_tokens and needed > free:
        raise ValueError(f"the evaluation needs about {needed / GIB:.1f} GiB on {ranks.device} and {free / GIB:.1f} GiB are free; "
                         f"lower eval.window or eval.batch_tokens (now a window of {eval_window} in batches of {eval_tokens} tokens)")
