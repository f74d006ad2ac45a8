"""The small operations between a layer's matrix products: the torch reference, for any device. layer_ops_triton.py has the same
functions as GPU kernels; `ops_for` picks.

Arithmetic inside an operation is float32, and a result is rounded once to the type of its inputs.

Shapes: T tokens (rows of the batch, or all positions of a prefill), W width, F width of the MLP, Hq query heads, Hkv key and value heads,
D head width, R rows and P positions of the cache. Caches are (R, Hkv, P, D).
"""

import importlib
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional as F

OPS = {"torch": "bitsperbyte.randopt.engines.layer_ops", "triton": "bitsperbyte.randopt.engines.layer_ops_triton"}
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


def ops_for(device: torch.device) -> ModuleType:
    """The module of operations for a device: Triton's on CUDA, torch's elsewhere."""
    return importlib.import_module(OPS["triton" if device.type == "cuda" else "torch"])


def norm(x: Tensor, weight: Tensor, eps: float, shifted: bool) -> Tensor:
    """RMSNorm of x (T, W): x / rms(x) * weight, or * (1 + weight) where `shifted` (Gemma)."""
    return _normalised(x, weight, eps, shifted)


def add_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float, shifted: bool) -> Tensor:
    """x += y in place, rounded to its type; returns norm(x)."""
    x += y
    return _normalised(x, weight, eps, shifted)


def rotate_and_store(qkv: Tensor, cos: Tensor, sin: Tensor, rows: Tensor, positions: Tensor, keys: Tensor, values: Tensor,
                     q_norm: Tensor | None, k_norm: Tensor | None, eps: float) -> Tensor:
    """Split qkv (T, (Hq + 2 Hkv) * D), norm queries and keys by head where there are weights (D,) for it, rotate them by position, and
    write keys and values of token t to keys[rows[t], :, positions[t]]. cos, sin float32 (>= P, D/2); rows, positions int64 (T,).
    Returns the queries (T, Hq, D); qkv may be overwritten."""
    num_kv, width = keys.shape[1], keys.shape[3]
    heads = qkv.view(len(qkv), -1, width)
    q, k, v = heads.split([heads.shape[1] - 2 * num_kv, num_kv, num_kv], dim=1)
    if q_norm is not None:
        q, k = _normalised(q, q_norm, eps, False), _normalised(k, k_norm, eps, False)
    c, s = cos[positions][:, None], sin[positions][:, None]
    keys[rows, :, positions] = _rotated(k, c, s)
    values[rows, :, positions] = v
    return _rotated(q, c, s)


def gated(both: Tensor, activation: str) -> Tensor:
    """both (T, 2F), the gate first: activation(gate) * up, (T, F)."""
    gate, up = both.float().chunk(2, dim=-1)
    if activation == "silu":
        gate = F.silu(gate)
    else:
        gate = F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")
    return (gate * up).to(both.dtype)


def attend(q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, longest: int, scale: float) -> Tensor:
    """q (T, Hq, D), one token in each of the cache's rows 0..T-1, over positions 0..lengths[t] of its row: (T, Hq * D). Nothing at or
    after position `longest` is read."""
    seen = torch.arange(longest, device=q.device) <= lengths[:, None]
    out = F.scaled_dot_product_attention(q[:, :, None], keys[: len(q), :, :longest], values[: len(q), :, :longest],
                                         attn_mask=seen[:, None, None], scale=scale, enable_gqa=True)
    return out.reshape(len(q), -1)


def _normalised(x: Tensor, weight: Tensor, eps: float, shifted: bool) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * (1.0 + weight.float())).to(x.dtype) if shifted else weight * wide.to(x.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
