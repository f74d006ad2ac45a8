"""The operations of layer_ops.py as Triton kernels, one launch each (attention: two where its work is split): same names, same shapes,
same meaning. A decode step is bound by the number of launches, so nothing here is left to elementwise operations of torch.

Attention reads each row's length on the device, so one captured launch serves every length: a row's positions are cut into `num_splits`
equal parts whose softmaxes are joined afterwards, and no mask and no repeated key exists.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_POSITIONS = 64
PROGRAMS = 528  # enough to fill 132 multiprocessors four deep
MAX_SPLITS = 16


def norm(x: Tensor, weight: Tensor, eps: float, shifted: bool) -> Tensor:
    out = torch.empty_like(x)
    _norm_kernel[(len(x),)](x, x, weight, out, x.shape[1], eps, ADD=False, SHIFTED=shifted, BLOCK=triton.next_power_of_2(x.shape[1]),
                            num_warps=_warps(x.shape[1]))
    return out


def add_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float, shifted: bool) -> Tensor:
    out = torch.empty_like(x)
    _norm_kernel[(len(x),)](x, y, weight, out, x.shape[1], eps, ADD=True, SHIFTED=shifted, BLOCK=triton.next_power_of_2(x.shape[1]),
                            num_warps=_warps(x.shape[1]))
    return out


def rotate_and_store(qkv: Tensor, cos: Tensor, sin: Tensor, rows: Tensor, positions: Tensor, keys: Tensor, values: Tensor,
                     q_norm: Tensor | None, k_norm: Tensor | None, eps: float) -> Tensor:
    num_kv, num_positions, width = keys.shape[1:]
    num_q = qkv.shape[1] // width - 2 * num_kv
    has_norm = q_norm is not None
    _rotate_kernel[(len(qkv), 3)](
        qkv, cos, sin, rows, positions, keys, values, q_norm if has_norm else cos, k_norm if has_norm else cos, eps, num_positions,
        NUM_Q=num_q, NUM_KV=num_kv, HALF=width // 2, BLOCK_HEADS=triton.next_power_of_2(num_q),
        BLOCK_HALF=triton.next_power_of_2(width // 2), HAS_NORM=has_norm, num_warps=4)
    return qkv.view(len(qkv), -1, width)[:, :num_q]


def gated(both: Tensor, activation: str) -> Tensor:
    width = both.shape[1] // 2
    out = both.new_empty(len(both), width)
    _gated_kernel[(len(both), triton.cdiv(width, 1024))](both, out, width, ACTIVATION=activation, BLOCK=1024, num_warps=4)
    return out


def attend(q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, longest: int, scale: float) -> Tensor:
    num_rows, num_q, width = q.shape
    num_kv, num_positions = keys.shape[1:3]
    num_splits = max(1, min(PROGRAMS // (num_rows * num_kv), triton.cdiv(longest, BLOCK_POSITIONS), MAX_SPLITS))
    out = q.new_empty(num_rows, num_q * width)
    sums = torch.empty(num_rows, num_q, num_splits, width, dtype=torch.float32, device=q.device) if num_splits > 1 else out
    logs = torch.empty(num_rows, num_q, num_splits, dtype=torch.float32, device=q.device) if num_splits > 1 else out
    group = num_q // num_kv
    _attend_kernel[(num_rows, num_kv, num_splits)](
        q, keys, values, lengths, out, sums, logs, scale, q.stride(0), num_positions, num_splits, NUM_Q=num_q, NUM_KV=num_kv, GROUP=group,
        WIDTH=width, BLOCK_GROUP=max(16, triton.next_power_of_2(group)), BLOCK_WIDTH=max(16, triton.next_power_of_2(width)),
        BLOCK=BLOCK_POSITIONS, SPLIT=num_splits > 1, num_warps=4, num_stages=2)
    if num_splits > 1:
        _join_kernel[(num_rows, num_q)](sums, logs, out, num_splits, NUM_Q=num_q, WIDTH=width,
                                        BLOCK_WIDTH=triton.next_power_of_2(width), BLOCK_SPLITS=triton.next_power_of_2(num_splits),
                                        num_warps=1)
    return out


def _warps(width: int) -> int:
    return 4 if width <= 2048 else 8


@triton.jit
def _norm_kernel(x, y, weight, out, width, eps, ADD: tl.constexpr, SHIFTED: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * width
    cols = tl.arange(0, BLOCK)
    inside = cols < width
    value = tl.load(x + start + cols, mask=inside, other=0.0)
    kind = value.dtype
    if ADD:
        value = (value.to(tl.float32) + tl.load(y + start + cols, mask=inside, other=0.0).to(tl.float32)).to(kind)
        tl.store(x + start + cols, value, mask=inside)
    wide = value.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    w = tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
    if SHIFTED:
        result = wide * (1.0 + w)
    else:
        result = wide.to(kind).to(tl.float32) * w
    tl.store(out + start + cols, result.to(kind), mask=inside)


@triton.jit
def _rotate_kernel(qkv, cos, sin, rows, positions, keys, values, q_norm, k_norm, eps, num_positions, NUM_Q: tl.constexpr,
                   NUM_KV: tl.constexpr, HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
                   HAS_NORM: tl.constexpr):
    """One program for a token's queries, one for its keys, one for its values; a tile is (heads, half of a head)."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    row = tl.load(rows + token)
    position = tl.load(positions + token)
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    col = tl.arange(0, BLOCK_HALF)[None, :]
    num_heads = tl.where(part == 0, NUM_Q, NUM_KV)
    first = tl.where(part == 0, 0, tl.where(part == 1, NUM_Q, NUM_Q + NUM_KV))
    inside = (head < num_heads) & (col < HALF)
    source = qkv + token * ((NUM_Q + 2 * NUM_KV) * 2 * HALF) + (first + head) * (2 * HALF) + col
    a_raw = tl.load(source, mask=inside, other=0.0)
    b_raw = tl.load(source + HALF, mask=inside, other=0.0)
    target = ((row * NUM_KV + head) * num_positions + position) * (2 * HALF) + col
    if part == 2:
        tl.store(values + target, a_raw, mask=inside)
        tl.store(values + target + HALF, b_raw, mask=inside)
    else:
        a = a_raw.to(tl.float32)
        b = b_raw.to(tl.float32)
        in_half = col < HALF
        if HAS_NORM:
            scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
            weight = q_norm
            if part == 1:
                weight = k_norm
            a = (a * scale).to(a_raw.dtype).to(tl.float32) * tl.load(weight + col, mask=in_half, other=0.0).to(tl.float32)
            b = (b * scale).to(a_raw.dtype).to(tl.float32) * tl.load(weight + HALF + col, mask=in_half, other=0.0).to(tl.float32)
            a = a.to(a_raw.dtype).to(tl.float32)
            b = b.to(a_raw.dtype).to(tl.float32)
        c = tl.load(cos + position * HALF + col, mask=in_half, other=0.0)
        s = tl.load(sin + position * HALF + col, mask=in_half, other=0.0)
        first_half = (a * c - b * s).to(a_raw.dtype)
        second_half = (b * c + a * s).to(a_raw.dtype)
        if part == 0:
            tl.store(source, first_half, mask=inside)
            tl.store(source + HALF, second_half, mask=inside)
        else:
            tl.store(keys + target, first_half, mask=inside)
            tl.store(keys + target + HALF, second_half, mask=inside)


@triton.jit
def _gated_kernel(both, out, width, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < width
    gate_raw = tl.load(both + token * 2 * width + cols, mask=inside, other=0.0)
    gate = gate_raw.to(tl.float32)
    up = tl.load(both + token * 2 * width + width + cols, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        gate = gate * tl.sigmoid(gate)
    elif ACTIVATION == "gelu":
        gate = 0.5 * gate * (1.0 + tl.math.erf(gate * 0.7071067811865476))
    else:
        # tanh(u) = 2 sigmoid(2u) - 1
        gate = gate * tl.sigmoid(2.0 * 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate))
    tl.store(out + token * width + cols, (gate * up).to(gate_raw.dtype), mask=inside)


@triton.jit
def _attend_kernel(q, keys, values, lengths, out, sums, logs, scale, q_stride, num_positions, num_splits, NUM_Q: tl.constexpr,
                   NUM_KV: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, BLOCK_GROUP: tl.constexpr,
                   BLOCK_WIDTH: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr):
    """All query heads of one key head of one row, over one of the row's splits."""
    row = tl.program_id(0).to(tl.int64)
    kv = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lengths + row).to(tl.int32) + 1
    part = tl.cdiv(tl.cdiv(length, BLOCK), num_splits) * BLOCK
    begin = split * part
    end = tl.minimum(length, begin + part)
    member = tl.arange(0, BLOCK_GROUP)
    col = tl.arange(0, BLOCK_WIDTH)
    step = tl.arange(0, BLOCK)
    head = kv * GROUP + member
    q_inside = (member[:, None] < GROUP) & (col[None, :] < WIDTH)
    query = tl.load(q + row * q_stride + head[:, None] * WIDTH + col[None, :], mask=q_inside, other=0.0)
    base = (row * NUM_KV + kv) * num_positions * WIDTH
    highest = tl.full((BLOCK_GROUP,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_GROUP,), tl.float32)
    result = tl.zeros((BLOCK_GROUP, BLOCK_WIDTH), tl.float32)
    for start in range(begin, end, BLOCK):
        position = start + step
        seen = position < end
        key = tl.load(keys + base + position[None, :] * WIDTH + col[:, None], mask=seen[None, :] & (col[:, None] < WIDTH), other=0.0)
        score = tl.dot(query, key, input_precision="ieee") * scale
        score = tl.where(seen[None, :], score, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(score, 1))
        weight = tl.exp(score - new_highest[:, None])
        shrink = tl.exp(highest - new_highest)
        total = total * shrink + tl.sum(weight, 1)
        value = tl.load(values + base + position[:, None] * WIDTH + col[None, :], mask=seen[:, None] & (col[None, :] < WIDTH), other=0.0)
        result = result * shrink[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        highest = new_highest
    if SPLIT:
        nonempty = tl.where(total > 0.0, total, 1.0)
        place = (row * NUM_Q + head) * num_splits + split
        tl.store(sums + place[:, None] * WIDTH + col[None, :], result / nonempty[:, None], mask=q_inside)
        tl.store(logs + place, tl.where(total > 0.0, highest + tl.log(nonempty), float("-inf")), mask=member < GROUP)
    else:
        target = out + (row * NUM_Q + head[:, None]) * WIDTH + col[None, :]
        tl.store(target, (result / total[:, None]).to(query.dtype), mask=q_inside)


@triton.jit
def _join_kernel(sums, logs, out, num_splits, NUM_Q: tl.constexpr, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
                 BLOCK_SPLITS: tl.constexpr):
    """Average of the splits' attention, weighted by their sums of exponentials."""
    place = tl.program_id(0).to(tl.int64) * NUM_Q + tl.program_id(1)
    split = tl.arange(0, BLOCK_SPLITS)
    col = tl.arange(0, BLOCK_WIDTH)
    log = tl.load(logs + place * num_splits + split, mask=split < num_splits, other=float("-inf"))
    weight = tl.exp(log - tl.max(log, 0))
    inside = (split[:, None] < num_splits) & (col[None, :] < WIDTH)
    part = tl.load(sums + (place * num_splits + split[:, None]) * WIDTH + col[None, :], mask=inside, other=0.0)
    result = tl.sum(part * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out + place * WIDTH + col, result.to(out.dtype.element_ty), mask=col < WIDTH)
