"""The noise of noise.py in Triton: base in, perturbed weights out, up to three launches for all tensors of a type.

Shapes: B Philox blocks of a tile, 4 words of a block, L elements of a word (32 signs or 1 binomial value): 4 * L elements a block.

A model has hundreds of tensors, many of them tiny, so a kernel takes a table of pieces instead of one piece, and a table of tiles:
each program looks up its tile's piece and first slot. A tile is B slots, and a slot a block's place in a row of the piece: slot s lies
in row s // (slots of a row). Runs (pieces that are consecutive on both sides) are one long row; where they begin at a block and at 16
bytes, they go to a kernel of their own, with wide accesses and next to no masking (in one kernel, the other path would take all
registers).

Also runs under Triton's interpreter (TRITON_INTERPRET=1 before triton is imported), on CPU tensors.
"""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from bitsperbyte.randopt.layout import matrix_shape
from bitsperbyte.randopt.noise import SCHEMES, Target, tensor_id

# blocks of a tile by scheme, and warps of its program: the fastest of those tried on an H200 (docs/performance.md)
_WIDE_BLOCKS, _BLOCKS = {"rademacher": 16, "binomial": 512}, {"rademacher": 16, "binomial": 256}
_WARPS = 4
_WIDE = 8  # elements: 16 bytes of the narrower types
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# columns of the table of pieces
_LIVE, _SOURCE, _ID, _FIRST, _ROW_LENGTH, _ROWS, _COLS, _ROW_STRIDE, _COL_STRIDE, _ROW_SLOTS, _IS_FAST = range(11)
_NUM_FIELDS = 11


class TritonWriter:
    """Writes perturbed weights by one to three kernel launches for each type and device among the targets."""

    def __init__(self, targets: Sequence[Target], scheme: str) -> None:
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for i, target in enumerate(targets):
            kinds.setdefault((target.live.dtype, target.live.device), []).append(i)
        self._groups = [(_Group([targets[i] for i in members], scheme), members) for members in kinds.values()]

    def prepare(self, levels: np.ndarray) -> list[torch.Tensor]:
        """`levels` float32 (number of targets, values of the scheme), `scaled_levels` of each target's sigma, for `write`."""
        return [torch.from_numpy(levels[members]).to(group.device) for group, members in self._groups]

    def write(self, seed: int, prepared: list[torch.Tensor]) -> None:
        for (group, _), levels in zip(self._groups, prepared, strict=True):
            group.launch(seed, levels)


class _Group:
    """Targets of one type on one device, with the tables that the kernels read: made once, so that a switch costs only launches."""

    def __init__(self, targets: Sequence[Target], scheme: str) -> None:
        self._targets = tuple(targets)  # the tables hold addresses, so their memory must live
        self.device, dtype, per_block = targets[0].live.device, targets[0].live.dtype, SCHEMES[scheme].per_block
        rows = [_row_of(target, per_block) for target in targets]
        self._pieces = torch.tensor(np.array(rows, dtype=np.int64), device=self.device)
        tiles: dict[str, list[np.ndarray]] = {"wide": [], "cut": [], "strided": []}
        for i, row in enumerate(rows):
            num_slots, wide = row[_ROWS] * row[_ROW_SLOTS], _WIDE_BLOCKS[scheme]
            assert num_slots < 2**31, "a piece of more blocks than the table of tiles can count"
            num_fast = 0
            if row[_IS_FAST]:  # all of its tiles, or all but the last
                num_fast = num_slots if row[_COLS] % _WIDE == 0 else row[_COLS] // per_block // wide * wide
            tiles["wide"].append(_tiles_of(i, 0, num_fast, wide))
            tiles["cut" if row[_COL_STRIDE] == 1 else "strided"].append(_tiles_of(i, num_fast, num_slots, _BLOCKS[scheme]))
        constants = {"TYPE": _TYPES[dtype], "NUM_LEVELS": len(SCHEMES[scheme].levels), "LANES": per_block // 4, "FIELDS": _NUM_FIELDS,
                     "BY_HAND": _IS_INTERPRETED and dtype == torch.bfloat16, "num_warps": _WARPS}
        own = {"wide": {"BLOCKS": _WIDE_BLOCKS[scheme]}, "cut": {"BLOCKS": _BLOCKS[scheme], "COL_STRIDE_IS_1": True},
               "strided": {"BLOCKS": _BLOCKS[scheme], "COL_STRIDE_IS_1": False}}
        self._launches = []
        for kind, tables in tiles.items():
            if sum(map(len, tables)):
                kernel, table = _write_wide_tiles if kind == "wide" else _write_tiles, torch.from_numpy(np.concatenate(tables))
                self._launches.append((kernel[(len(table),)], table.to(self.device), {**constants, **own[kind]}))

    def launch(self, seed: int, levels: torch.Tensor) -> None:
        # always as int32, since triton compiles anew for each type of argument
        low, high = np.array([seed & 0xFFFFFFFF, seed >> 32], dtype=np.uint32).view(np.int32).tolist()
        with torch.cuda.device_of(levels):
            for kernel, tiles, constants in self._launches:
                kernel(self._pieces, tiles, levels, low, high, **constants)


def _tiles_of(target: int, begin: int, end: int, step: int) -> np.ndarray:
    """Rows (number of the target, first slot) of the tiles from slot `begin` to `end`, int32."""
    slots = np.arange(begin, end, step, dtype=np.int32)
    return np.stack([np.full_like(slots, target), slots], axis=1)


def _row_of(target: Target, per_block: int) -> list[int]:
    """A piece's row of the table; a run becomes one row of the piece."""
    piece, size = target.piece, target.live.element_size()
    pointers = [t.data_ptr() + piece.offset * size for t in (target.live, target.source)]
    if piece.is_run:
        row_length, num_rows, num_cols, row_stride, col_stride = 0, 1, piece.num_elements, 0, 1
    else:
        row_length, num_rows, num_cols = matrix_shape(piece.shape)[1], piece.num_rows, piece.num_cols
        row_stride, col_stride = piece.row_stride, piece.col_stride
    if num_rows == 1 or row_length % per_block == 0:  # every row begins at the same place of a block
        row_slots = -(-(piece.flat_begin % per_block + num_cols) // per_block)
    else:
        row_slots = -(-(per_block - 1 + num_cols) // per_block)
    is_fast = piece.is_run and piece.flat_begin % per_block == 0 and all(pointer % 16 == 0 for pointer in pointers)
    identity = tensor_id(piece.name)
    signed = identity - 2**64 if identity >= 2**63 else identity
    return [*pointers, signed, piece.flat_begin, row_length, num_rows, num_cols, row_stride, col_stride, row_slots, int(is_fast)]


@triton.jit
def _philox(c0, c1, c2, c3, k0, k1):
    """Philox4x32-10 of uint32 counters and keys."""
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, 0xD2511F53), c0 * 0xD2511F53
        high1, low1 = tl.umulhi(c2, 0xCD9E8D57), c2 * 0xCD9E8D57
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def _products(block, identity, levels, seed_low, seed_high, BLOCKS: tl.constexpr, LANES: tl.constexpr):
    """sigma * z of the blocks int64 (B,), float32 (B, 4, L), from the piece's table of products at `levels`."""
    zero = tl.zeros((BLOCKS,), tl.uint32)
    w0, w1, w2, w3 = _philox(
        block.to(tl.uint32), (block >> 32).to(tl.uint32), zero + identity.to(tl.uint32), zero + (identity >> 32).to(tl.uint32),
        seed_low.to(tl.uint32, bitcast=True), seed_high.to(tl.uint32, bitcast=True),
    )  # fmt: skip
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (BLOCKS, 4, 1))
    if LANES == 32:
        bits = (words >> tl.arange(0, 32).to(tl.uint32)[None, None, :]) & 1
        return tl.where(bits == 1, tl.load(levels + 1), tl.load(levels))
    else:
        words = words - ((words >> 1) & 0x55555555)
        words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
        words = (words + (words >> 4)) & 0x0F0F0F0F
        return tl.load(levels + ((words * 0x01010101) >> 24).to(tl.int32))


# bfloat16 is converted by hand in the interpreter, whose casts round it wrongly and mistake its subnormal numbers (triton 3.6 to 3.9)


@triton.jit
def _widened(values, BY_HAND: tl.constexpr):
    """To float32, exactly."""
    if BY_HAND:
        return (values.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return values.to(tl.float32)


@triton.jit
def _rounded(exact, TYPE: tl.constexpr, BY_HAND: tl.constexpr):
    """From float32 to the nearest, ties to even."""
    if BY_HAND:
        bits = exact.to(tl.uint32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        return (bits >> 16).to(tl.uint16).to(TYPE, bitcast=True)
    else:
        return exact.to(TYPE)


@triton.jit(do_not_specialize=["seed_low", "seed_high"])
def _write_wide_tiles(
    pieces, tiles, levels, seed_low, seed_high,
    TYPE: tl.constexpr, NUM_LEVELS: tl.constexpr, BLOCKS: tl.constexpr, LANES: tl.constexpr, FIELDS: tl.constexpr,
    BY_HAND: tl.constexpr,
):  # fmt: skip
    """Tiles of runs that begin at a block and at 16 bytes, and of which a multiple of 8 elements is there."""
    target = tl.load(tiles + 2 * tl.program_id(0))
    begin = tl.load(tiles + 2 * tl.program_id(0) + 1).to(tl.int64) * (4 * LANES)
    row = pieces + target * FIELDS
    num_there = tl.multiple_of(tl.minimum(tl.load(row + 6) - begin, BLOCKS * 4 * LANES).to(tl.int32), 8)
    live = tl.multiple_of(tl.load(row).to(tl.pointer_type(TYPE)) + begin, 16)
    source = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(TYPE)) + begin, 16)
    slot = tl.arange(0, BLOCKS)
    offset = slot[:, None, None] * (4 * LANES) + _within(LANES)
    old = _widened(tl.load(source + offset, mask=offset < num_there, other=0), BY_HAND)
    block = (tl.load(row + 3) + begin) // (4 * LANES) + slot
    products = _products(block, tl.load(row + 2), levels + target * NUM_LEVELS, seed_low, seed_high, BLOCKS, LANES)
    tl.store(live + offset, _rounded(old + products, TYPE, BY_HAND), mask=offset < num_there)


@triton.jit(do_not_specialize=["seed_low", "seed_high"])
def _write_tiles(
    pieces, tiles, levels, seed_low, seed_high,
    TYPE: tl.constexpr, NUM_LEVELS: tl.constexpr, BLOCKS: tl.constexpr, LANES: tl.constexpr, FIELDS: tl.constexpr,
    BY_HAND: tl.constexpr, COL_STRIDE_IS_1: tl.constexpr,
):  # fmt: skip
    """Any tiles. The compiler must know of a column stride of 1: otherwise it spreads a warp over rows, and each thread fetches a
    sector of its own, ten times slower."""
    target = tl.load(tiles + 2 * tl.program_id(0))
    slot = tl.load(tiles + 2 * tl.program_id(0) + 1).to(tl.int64) + tl.arange(0, BLOCKS)
    row = pieces + target * FIELDS
    live = tl.load(row).to(tl.pointer_type(TYPE))
    source = tl.load(row + 1).to(tl.pointer_type(TYPE))
    row_slots = tl.load(row + 9)
    piece_row = slot // row_slots
    row_first = tl.load(row + 3) + piece_row * tl.load(row + 4)
    block = row_first // (4 * LANES) + slot % row_slots
    col = (block * (4 * LANES) - row_first)[:, None, None] + _within(LANES)
    mask = (piece_row < tl.load(row + 5))[:, None, None] & (col >= 0) & (col < tl.load(row + 6))
    offset = (piece_row * tl.load(row + 7))[:, None, None]
    if COL_STRIDE_IS_1:
        offset += col
    else:
        offset += col * tl.load(row + 8)
    old = _widened(tl.load(source + offset, mask=mask, other=0), BY_HAND)
    products = _products(block, tl.load(row + 2), levels + target * NUM_LEVELS, seed_low, seed_high, BLOCKS, LANES)
    tl.store(live + offset, _rounded(old + products, TYPE, BY_HAND), mask=mask)


@triton.jit
def _within(LANES: tl.constexpr):
    """Places of a block's elements in it, (1, 4, L)."""
    return tl.arange(0, 4)[None, :, None] * LANES + tl.arange(0, LANES)[None, None, :]


_IS_INTERPRETED = not isinstance(_write_tiles, triton.JITFunction)
