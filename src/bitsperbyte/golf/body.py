"""The body of an artifact: the table of its tensors, and their values as streams of one kind each.

Order: row scales, kept float16, kept float32 (each as byte planes), then the integers, those of fewer bits first.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bitsperbyte.golf.codecs import Layout
from bitsperbyte.golf.model import ModelConfig, state_shapes
from bitsperbyte.golf.quantize import QuantizedTensor, Storage, find_scheme, largest_int, storage_of


@dataclass(frozen=True)
class Entry:
    """One line of the table of tensors."""

    name: str
    shape: tuple[int, ...]
    storage: Storage

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


def table_of(model: ModelConfig, scheme: str) -> list[Entry]:
    """What the scheme makes of every tensor of the model, in the model's order."""
    found = find_scheme(scheme)
    return [Entry(name, shape, storage_of(name, shape, found)) for name, shape in state_shapes(model).items()]


def check_table(table: object, expected: list[Entry]) -> list[Entry]:
    """The expected entries in the order of the file's table, which must name each once, with the config's shape and the
    scheme's storage. Names are only ever looked up here; nothing on disk is named after them."""
    if not isinstance(table, list) or len(table) != len(expected):
        raise ValueError(f"its table of tensors must be a list of {len(expected)} lines, as its model config says")
    left = {entry.name: entry for entry in expected}
    entries = []
    for line in table:
        name = line[0] if isinstance(line, list) and line and isinstance(line[0], str) else None
        entry = left.pop(name, None) if name is not None else None
        if entry is None:
            raise ValueError(
                f"its table of tensors holds {str(line)[:120]!r}, which is unknown to its model config or there twice"
            )
        if line[1:] != [list(entry.shape), str(entry.storage)]:
            raise ValueError(
                f"its table says {str(line)[:120]!r}, not {list(entry.shape)}, {entry.storage} as its config"
            )
        entries.append(entry)
    return entries


def _integer_bits(entries: list[Entry]) -> list[int]:
    return sorted({entry.storage.bits for entry in entries if entry.storage.is_integer})


def body_size(entries: list[Entry], layout: Layout) -> int:
    """Bytes of the body before its codec, from the table alone."""
    floats = sum(e.num_elements * e.storage.bits // 8 for e in entries if not e.storage.is_integer)
    scales = sum(2 * e.shape[0] for e in entries if e.storage.is_integer)
    counts = {
        bits: sum(e.num_elements for e in entries if e.storage == Storage(True, bits))
        for bits in _integer_bits(entries)
    }
    return floats + scales + sum(layout.num_bytes(count, bits) for bits, count in counts.items())


def _planes(arrays: list[np.ndarray], dtype: str) -> bytes:
    """First the first byte of every value, then the second, ...: exponents next to exponents."""
    flat = np.concatenate([array.astype(dtype).ravel() for array in arrays]) if arrays else np.empty(0, dtype)
    return np.ascontiguousarray(flat.view(np.uint8).reshape(-1, flat.itemsize).T).tobytes()


def join_body(tensors: list[QuantizedTensor], layout: Layout) -> bytes:
    """The streams of these tensors, one after the other."""
    integers = [t for t in tensors if t.scales is not None]
    kept = [t for t in tensors if t.scales is None]
    parts = [_planes([t.scales.numpy() for t in integers if t.scales is not None], "<f2")]
    parts += [
        _planes([t.values.numpy() for t in kept if t.storage.bits == bits], f"<f{bits // 8}") for bits in (16, 32)
    ]
    for bits in sorted({t.storage.bits for t in integers}):
        parts.append(
            layout.pack(np.concatenate([t.values.numpy().ravel() for t in integers if t.storage.bits == bits]), bits)
        )
    return b"".join(parts)


def split_body(body: bytes, entries: list[Entry], layout: Layout) -> list[QuantizedTensor]:
    """The inverse of `join_body`; `body` has the length of `body_size`. ValueError for values no writer makes."""
    position = 0

    def take(num_bytes: int) -> bytes:
        nonlocal position
        position += num_bytes
        return body[position - num_bytes : position]

    def floats(sizes: list[int], dtype: str, what: str) -> list[Tensor]:
        width, count = np.dtype(dtype).itemsize, sum(sizes)
        planes = np.frombuffer(take(width * count), np.uint8).reshape(width, count)
        values = np.ascontiguousarray(planes.T).view(dtype).ravel().astype(np.dtype(dtype).newbyteorder("="))
        if not np.isfinite(values).all() or (what == "scale" and (values < 0).any()):
            raise ValueError(f"it holds a {what} that is not a finite{' positive' if what == 'scale' else ''} number")
        return list(torch.from_numpy(values).split(sizes)) if sizes else []

    integers = [e for e in entries if e.storage.is_integer]
    scales = dict(zip((e.name for e in integers), floats([e.shape[0] for e in integers], "<f2", "scale"), strict=True))
    values: dict[str, Tensor] = {}
    for bits in (16, 32):
        group = [e for e in entries if e.storage == Storage(False, bits)]
        values |= zip(
            (e.name for e in group), floats([e.num_elements for e in group], f"<f{bits // 8}", "weight"), strict=True
        )
    for bits in _integer_bits(entries):
        group = [e for e in integers if e.storage.bits == bits]
        count = sum(e.num_elements for e in group)
        flat = layout.unpack(take(layout.num_bytes(count, bits)), count, bits)
        if int(flat.min()) < -largest_int(bits) or int(flat.max()) > largest_int(bits):
            raise ValueError(f"it holds an integer outside the range of {bits} bits")
        values |= zip(
            (e.name for e in group), torch.from_numpy(flat.copy()).split([e.num_elements for e in group]), strict=True
        )
    assert position == len(body)
    return [QuantizedTensor(e.name, e.storage, values[e.name].view(e.shape), scales.get(e.name)) for e in entries]
