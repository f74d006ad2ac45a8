"""Which piece of which checkpoint tensor each live tensor holds.

Noise belongs to elements of checkpoint tensors; weights live in tensors that may fuse several of them (q, k and v in one), pad them, or
hold a shard. A `Piece` says where a rectangle of a checkpoint tensor, seen as the matrix (shape[0], everything else), lies in a live
tensor. What no piece names (padding) gets no noise.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Piece:
    """Rows row_begin..row_end and columns col_begin..col_end of the checkpoint tensor `name` (of `shape`, seen as the matrix
    (shape[0], rest)). Element (r, c) lies at offset + (r - row_begin) * row_stride + (c - col_begin) * col_stride, in elements
    counted from the live tensor's data_ptr."""

    name: str
    shape: tuple[int, ...]
    row_begin: int
    row_end: int
    col_begin: int
    col_end: int
    offset: int
    row_stride: int
    col_stride: int = 1

    def __post_init__(self) -> None:
        rows, cols = matrix_shape(self.shape)
        assert 0 <= self.row_begin < self.row_end <= rows and 0 <= self.col_begin < self.col_end <= cols, self
        assert self.offset >= 0 and self.row_stride >= 0 and self.col_stride >= 0, self

    @property
    def num_rows(self) -> int:
        return self.row_end - self.row_begin

    @property
    def num_cols(self) -> int:
        return self.col_end - self.col_begin

    @property
    def num_elements(self) -> int:
        return self.num_rows * self.num_cols

    @property
    def last(self) -> int:
        """Where its furthest element lies, in elements from the live tensor's data_ptr."""
        return self.offset + (self.num_rows - 1) * self.row_stride + (self.num_cols - 1) * self.col_stride

    @property
    def flat_begin(self) -> int:
        """Index in the checkpoint tensor of the piece's first element."""
        return self.row_begin * matrix_shape(self.shape)[1] + self.col_begin

    @property
    def is_run(self) -> bool:
        """Its elements are consecutive both in the checkpoint tensor and in the live one."""
        whole_rows = self.num_cols == matrix_shape(self.shape)[1]
        return self.num_rows == 1 and self.col_stride == 1 or whole_rows and (
            (self.num_cols == 1 or self.col_stride == 1) and self.row_stride == self.num_cols
        )

    def view(self, live: torch.Tensor) -> torch.Tensor:
        """The piece as a view (num_rows, num_cols) of the live tensor, or of a tensor with its strides."""
        return live.as_strided(
            (self.num_rows, self.num_cols), (self.row_stride, self.col_stride), live.storage_offset() + self.offset
        )

    def cut(self, most: int) -> Iterator["Piece"]:
        """The same elements in parts: as many whole rows of the checkpoint tensor as `most` elements hold, or where not even one fits,
        parts of single rows."""
        row_length = matrix_shape(self.shape)[1]
        row_step, col_step = max(1, most // row_length), self.num_cols if row_length <= most else most
        for row in range(self.row_begin, self.row_end, row_step):
            for col in range(self.col_begin, self.col_end, col_step):
                offset = self.offset + (row - self.row_begin) * self.row_stride + (col - self.col_begin) * self.col_stride
                row_end, col_end = min(self.row_end, row + row_step), min(self.col_end, col + col_step)
                yield Piece(self.name, self.shape, row, row_end, col, col_end, offset, self.row_stride, self.col_stride)


@dataclass(frozen=True)
class LiveTensor:
    """A tensor that the model computes with, under its name in the module, and the pieces it holds."""

    name: str
    tensor: torch.Tensor
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Layout:
    """`skipped`: parameters that never get noise, each with the reason."""

    tensors: tuple[LiveTensor, ...]
    skipped: Mapping[str, str]

    def __post_init__(self) -> None:
        shapes: dict[str, tuple[int, ...]] = {}
        for live in self.tensors:
            reach = _reach(live.tensor)
            for piece in live.pieces:
                if shapes.setdefault(piece.name, piece.shape) != piece.shape:
                    raise ValueError(f"the layout gives {piece.name} the shapes {shapes[piece.name]} and {piece.shape}")
                if piece.last >= reach:
                    raise ValueError(f"the piece {piece} reaches beyond the {reach} elements of {live.name}")

    @property
    def num_elements(self) -> int:
        return sum(piece.num_elements for live in self.tensors for piece in live.pieces)

    @property
    def names(self) -> list[str]:
        """The checkpoint tensors it holds pieces of, in order."""
        return list(dict.fromkeys(piece.name for live in self.tensors for piece in live.pieces))

    @staticmethod
    def of_module(module: nn.Module, names: Mapping[str, str] | None = None) -> "Layout":
        """The layout of a module whose parameters are the checkpoint's tensors.

        `names` maps a parameter's name to the one that the checkpoint stores, where they differ. Tied parameters count once, under the
        first name that `names` knows, else under the first of all. Buffers are no part of it; quantisation scales and parameters that
        are no floating-point numbers are skipped. ValueError for parameters that overlap without being equal, that are not on a device,
        or whose memory is no matrix.
        """
        names = names or {}
        skipped: dict[str, str] = {}
        aliases: dict[tuple, list[str]] = {}  # parameters by the memory they stand for
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in module.named_parameters(remove_duplicate=False):
            if tensor.numel() == 0:
                continue
            if tensor.is_meta:
                raise ValueError(f"the parameter {name} has no values yet (device meta): load the whole model onto one device")
            if not tensor.is_floating_point():
                skipped[name] = f"{tensor.dtype} is no floating-point type"
            elif is_quantisation_scale(name, module):
                skipped[name] = "a quantisation scale"
            else:
                key = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
                aliases.setdefault(key, []).append(name)
                tensors[name] = tensor
        found = []
        for group in aliases.values():
            name = next((alias for alias in group if alias in names), group[0])
            found.append(LiveTensor(name, tensors[name], (_whole(names.get(name, name), tensors[name]),)))
        _refuse_overlaps(found)
        if len({live.pieces[0].name for live in found}) != len(found):
            raise ValueError("two parameters that are not tied are mapped to one checkpoint tensor")
        return Layout(tuple(found), skipped)


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """(shape[0], product of the rest): how a checkpoint tensor is seen. A scalar is 1 x 1."""
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)


# names that only quantisation uses, and names that others use too (a golf model learns an `attn_scale`)
_SCALES = re.compile(
    r"(^|\.)(\w*weight_scale(_2)?|\w*scale_inv|(input|output|activation|[qkv])_scale|q?scales|q?zeros|\w*zero_point)$")
_PERHAPS_SCALES = re.compile(r"(^|\.)(\w+_)?scale$")


def is_quantisation_scale(name: str, module: nn.Module) -> bool:
    """Whether a parameter scales quantised weights: by its name, or by an ambiguous name beside weights of 8 bits or fewer."""
    if _SCALES.search(name):
        return True
    if not _PERHAPS_SCALES.search(name):
        return False
    owner = module.get_submodule(name.rpartition(".")[0])
    beside = [*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False)]
    return any(tensor.element_size() == 1 and tensor.dtype != torch.bool for _, tensor in beside)


def _whole(name: str, tensor: torch.Tensor) -> Piece:
    """A checkpoint tensor that one live tensor holds whole, with any strides that keep its matrix a matrix."""
    rows, cols = matrix_shape(tuple(tensor.shape))
    matrix = tensor.unsqueeze(1) if tensor.dim() == 1 else tensor.reshape(1, 1) if tensor.dim() == 0 else tensor
    try:
        matrix = matrix.view(rows, cols)
    except RuntimeError:
        raise ValueError(f"the parameter {name} of strides {tensor.stride()} is no matrix in memory: make it contiguous") from None
    row_stride, col_stride = matrix.stride()
    return Piece(name, tuple(tensor.shape), 0, rows, 0, cols, 0, row_stride, col_stride if cols > 1 else 1)


def _reach(tensor: torch.Tensor) -> int:
    """Elements from a tensor's first to its last in memory."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _refuse_overlaps(found: list[LiveTensor]) -> None:
    def begin(live: LiveTensor) -> tuple[str, int]:
        return str(live.tensor.device), live.tensor.data_ptr()

    ordered = sorted(found, key=begin)
    for one, other in zip(ordered, ordered[1:], strict=False):
        end = one.tensor.data_ptr() + _reach(one.tensor) * one.tensor.element_size()
        if begin(one)[0] == begin(other)[0] and end > begin(other)[1]:
            raise ValueError(f"the parameters {one.name} and {other.name} share part of their memory: one would get the other's noise")
