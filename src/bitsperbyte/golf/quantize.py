"""Weights to small integers and back. Shapes: R rows, C columns of a matrix.

A scheme says how each tensor is stored. Matrices above the scheme's size limit become integers with one float16 scale a
row; everything else is kept as floating point: control tensors (scales, mixes, gains, skip weights) in float32, the
rest in float16.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bitsperbyte.golf.model import ModelConfig, is_control, state_shapes

Shapes = Mapping[str, tuple[int, ...]]

# Both sit at the model's ends: the tied table is used twice, and its error reaches every logit without a residual
# stream to average it out. It is a thirtieth of the baseline's weights, so 8 bits instead of 6 cost 131 kB of 16 MB.
EMBEDDING_NAMES = ("tok_emb.weight", "lm_head.weight")

FP16_MAX, FP16_STEP, FP16_NORMAL = 65_504.0, 2.0**-24, 2.0**-14  # largest value, spacing below FP16_NORMAL


@dataclass(frozen=True)
class Scheme:
    """`clip_quantile` clips a row at that quantile of |w|; `clip_fractions`, where given, replaces it by a search: of
    these fractions of the row's largest |w|, the one with the least squared error. `scale_floor` is the least scale (0:
    none). Matrices of at most `keep_elements` elements stay floating point."""

    name: str
    bits: int
    embedding_bits: int
    keep_elements: int
    scale_floor: float = 0.0
    clip_quantile: float = 1.0
    clip_fractions: tuple[float, ...] = ()
    stored_scale: bool = True  # integers are computed with the scale as stored, in float16


# Why the quantile: 0.9999984 lies between the two largest of a row of 512, so it is the challenge's maximum with 0.08 %
# off. Why 4,096: the challenge keeps matrices up to 65,536 elements (256 x 256) in float16, which would leave a small
# model without any integers; its limit stays only where its figures are to be reproduced. The fractions: rows of a
# trained matrix are near Gaussian, where the best 6-bit clip is the maximum; heavy-tailed rows gain from less. 1.0
# comes first, so that equal errors keep it and a dequantised row returns to the same integers.
SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme("reference_int8", 8, 8, 65_536, scale_floor=1 / 127, clip_quantile=0.9999984, stored_scale=False),
        Scheme("int8", 8, 8, 4_096, clip_quantile=0.9999984),
        Scheme("int6", 6, 8, 4_096, clip_quantile=0.9999984, clip_fractions=(1.0, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6)),
    )
}


@dataclass(frozen=True)
class Storage:
    """How one tensor is stored: integers of `bits` with float16 row scales, or floating point of `bits`."""

    is_integer: bool
    bits: int

    def __str__(self) -> str:
        return f"{'int' if self.is_integer else 'float'}{self.bits}"

    def payload_bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes before any entropy coding: packed integers plus 2 bytes a row, or the floating-point values."""
        num_elements = math.prod(shape)
        return -(-num_elements * self.bits // 8) + (2 * shape[0] if self.is_integer else 0)


@dataclass(frozen=True)
class QuantizedTensor:
    """`values`: int8 (R, C) with `scales` float16 (R,), or float16 / float32 of the tensor's own shape with `scales`
    None."""

    name: str
    storage: Storage
    values: Tensor
    scales: Tensor | None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)


def find_scheme(scheme: str | Scheme) -> Scheme:
    """The scheme of this name; ValueError lists the known ones."""
    if isinstance(scheme, Scheme):
        return scheme
    if scheme not in SCHEMES:
        raise ValueError(f"unknown quantisation scheme {str(scheme)[:80]!r}: choose one of {', '.join(SCHEMES)}")
    return SCHEMES[scheme]


def largest_int(bits: int) -> int:
    """127 for 8 bits, 31 for 6: symmetric, so the most negative code is not used."""
    return 2 ** (bits - 1) - 1


def storage_of(name: str, shape: tuple[int, ...], scheme: Scheme) -> Storage:
    """How `scheme` stores the tensor of this name and shape."""
    if is_control(name):
        return Storage(False, 32)
    if math.prod(shape) <= scheme.keep_elements:
        return Storage(False, 16)
    if len(shape) != 2:
        raise ValueError(
            f"tensor {name} has shape {shape}: only matrices can be quantised by rows, so keep it under "
            f"{scheme.keep_elements} elements or name it as a control tensor"
        )
    return Storage(True, scheme.embedding_bits if name in EMBEDDING_NAMES else scheme.bits)


def _shapes(model: ModelConfig | Shapes) -> Shapes:
    return state_shapes(model) if isinstance(model, ModelConfig) else model


def payload_bytes(model: ModelConfig | Shapes, scheme: str | Scheme) -> int:
    """Bytes of the quantised weights before any codec, from shapes alone."""
    found = find_scheme(scheme)
    return sum(storage_of(name, shape, found).payload_bytes(shape) for name, shape in _shapes(model).items())


def fp_bytes(model: ModelConfig | Shapes) -> int:
    """Bytes of the weights as trained on CUDA by the challenge: the embedding in bfloat16, all else in float32. The
    challenge's payload ratio is this over `payload_bytes`."""
    return sum(math.prod(shape) * (2 if name == "tok_emb.weight" else 4) for name, shape in _shapes(model).items())


def quantize(state: Mapping[str, Tensor], scheme: str | Scheme) -> list[QuantizedTensor]:
    """Every tensor of `state` as the scheme stores it, in the same order, on the CPU.

    Raises ValueError naming the tensor when it is not floating point, not finite, or too large for float16 (scales
    included).
    """
    found = find_scheme(scheme)
    return [_quantize_tensor(name, tensor, found) for name, tensor in state.items()]


def dequantize(tensors: list[QuantizedTensor]) -> dict[str, Tensor]:
    """float32 tensors by name: integer times row scale, or the kept value."""
    state: dict[str, Tensor] = {}
    for tensor in tensors:
        values = tensor.values.to(torch.float32)
        if tensor.values is values:  # already float32: never share memory with the quantised copy
            values = values.clone()
        state[tensor.name] = values if tensor.scales is None else values.mul_(tensor.scales.to(torch.float32)[:, None])
    return state


def _quantize_tensor(name: str, tensor: Tensor, scheme: Scheme) -> QuantizedTensor:
    if not tensor.is_floating_point():
        raise ValueError(f"tensor {name} has dtype {tensor.dtype}: only floating-point weights can be quantised")
    storage = storage_of(name, tuple(tensor.shape), scheme)
    w = tensor.detach().to("cpu", torch.float32).contiguous()
    if not bool(torch.isfinite(w).all()):
        raise ValueError(
            f"tensor {name} holds values that are not finite: training diverged; go back to an earlier checkpoint"
        )
    if not storage.is_integer:
        kept = w.to(torch.float16 if storage.bits == 16 else torch.float32)
        if not bool(torch.isfinite(kept).all()):
            raise ValueError(
                f"tensor {name} holds values above {FP16_MAX:.0f}, which float16 cannot hold: training diverged"
            )
        return QuantizedTensor(name, storage, kept.clone(), None)
    q_max = largest_int(storage.bits)
    if scheme.clip_fractions and storage.bits == scheme.bits:
        values, scales = _search_clip(w, q_max, scheme)
    else:
        clip = row_quantile(w.abs(), scheme.clip_quantile)
        exact = (clip / q_max).clamp_min(scheme.scale_floor)
        scales = to_fp16_scale(exact)
        values = _round(w.clamp(-clip[:, None], clip[:, None]), scales.float() if scheme.stored_scale else exact, q_max)
    if not bool(torch.isfinite(scales).all()):
        raise ValueError(
            f"tensor {name} holds values above {FP16_MAX * q_max:.0f}, beyond float16 row scales: training diverged"
        )
    return QuantizedTensor(name, storage, values, scales)


def row_quantile(rows_RC: Tensor, q: float) -> Tensor:
    """The quantile `q` of each row (R,), linearly interpolated, equal to torch.quantile's bit for bit, which sorts
    whole rows and refuses more than 16 million elements. Only the values from the lower neighbour upwards are looked
    at: two for rows of fewer than 600,000 columns at the quantile used here."""
    num_columns = rows_RC.shape[1]
    rank = torch.tensor(q, dtype=torch.float32) * (num_columns - 1)  # in float32, as torch.quantile does
    below = int(rank)
    above = min(below + int(rank > below), num_columns - 1)
    top = rows_RC.topk(num_columns - below, dim=1).values
    return top[:, num_columns - 1 - below].lerp(top[:, num_columns - 1 - above], rank - below)


def to_fp16_scale(scales: Tensor) -> Tensor:
    """float32 scales to float16. Below float16's normal range the spacing is wide, and rounding down would clip the row
    to a fraction of itself or divide it by zero; there the scale is rounded up. A scale of 0 (a row of zeros) stays
    0."""
    rounded_up = (scales / FP16_STEP).ceil() * FP16_STEP
    return torch.where(scales < FP16_NORMAL, rounded_up, scales).to(torch.float16)


def _round(w_RC: Tensor, scales_R: Tensor, q_max: int) -> Tensor:
    """Integers of the rows: half to even, within -q_max..q_max; rows of scale 0 are all zero."""
    divisor = torch.where(scales_R > 0, scales_R, 1.0)[:, None]
    return (w_RC / divisor).round_().clamp_(-q_max, q_max).to(torch.int8)


def _search_clip(w_RC: Tensor, q_max: int, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Per row the clip, among `clip_fractions` of its largest |w|, whose rounding plus clipping error is the least in
    squares."""
    largest = w_RC.abs().amax(dim=1)
    best_scales = to_fp16_scale(largest * scheme.clip_fractions[0] / q_max)
    best_error = _squared_error(w_RC, best_scales, q_max)
    for fraction in scheme.clip_fractions[1:]:
        scales = to_fp16_scale(largest * fraction / q_max)
        error = _squared_error(w_RC, scales, q_max)
        better = error < best_error
        best_scales, best_error = torch.where(better, scales, best_scales), torch.where(better, error, best_error)
    return _round(w_RC, best_scales.float(), q_max), best_scales


def _squared_error(w_RC: Tensor, scales_R: Tensor, q_max: int) -> Tensor:
    scales = scales_R.float()[:, None]
    divided = w_RC / torch.where(scales > 0, scales, 1.0)
    # In units of the scale: squares of the weights themselves would underflow for rows near float16's limits.
    return (divided.round().clamp_(-q_max, q_max) - divided).square_().sum(dim=1) * scales[:, 0].double() ** 2
