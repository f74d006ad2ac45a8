"""The noise of RandOpt, defined once: which number each seed adds to each element of each checkpoint tensor.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). Key: the 64-bit seed, low word first. Counter:
the block index as 64 bits, then the tensor id as 64 bits, low words first. The tensor id is the first 8 bytes, little-endian, of
SHA-256 of the tensor's name in the checkpoint. The element index is the flat row-major index in that checkpoint tensor, so neither the
device nor the way a layout fuses, pads or shards the tensor has a say.

    rademacher   block = index // 128; the block's four words are 128 signs, least significant bit first: bit 1 is +1, bit 0 is -1
    binomial     block = index // 4, word = index % 4, z = (popcount(word) - 16) / sqrt(8): the bit-exact stand-in for a Gaussian

    perturbed weight = round_to_live_type(float32(base) + float32(sigma) * z)

The product is rounded to float32 before it is added (no fused multiply-add) and every rounding is to nearest, ties to even. All schemes
look their products up in a short table that is multiplied out beforehand, which leaves one addition, that nothing can fuse.

This file holds the numpy reference and the torch version for any device; noise_triton.py holds the GPU kernel.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from bitsperbyte.randopt.layout import Piece, matrix_shape

SCHEME_VERSION = 1
LIVE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
# (n - 16) / sqrt(8) for n = 16..32, rounded from float64 to float32; frozen, because other roundings would be another scheme
_BINOMIAL_HALF = (
    0.0, 0.3535533845424652, 0.7071067690849304, 1.0606601238250732, 1.4142135381698608, 1.7677669525146484,
    2.1213202476501465, 2.4748737812042236, 2.8284270763397217, 3.1819806098937988, 3.535533905029297, 3.889087200164795,
    4.242640495300293, 4.596194267272949, 4.949747562408447, 5.303300857543945, 5.656854152679443,
)  # fmt: skip


@dataclass(frozen=True)
class Scheme:
    """`per_block`: elements that one Philox call serves. `levels`: the float32 values z can take. `known_answer`: what
    `known_answer(name)` must give; it stands in every record."""

    per_block: int
    levels: tuple[float, ...]
    known_answer: str


SCHEMES = {
    "rademacher": Scheme(128, (-1.0, 1.0), "1bbcf53d293cc608"),
    "binomial": Scheme(4, tuple(-z for z in reversed(_BINOMIAL_HALF[1:])) + _BINOMIAL_HALF, "129949226e4c8e03"),
}

# Works on int, uint64 arrays and int64 tensors alike: products may wrap at 64 bits, and every shift is masked.
Words = TypeVar("Words", int, np.ndarray, torch.Tensor)


def philox_words(c0: Words, c1: Words, c2: Any, c3: Any, key: int) -> tuple[Words, Words, Words, Words]:
    """Philox4x32-10 of counters given as four 32-bit words each, in 64-bit containers (uint64 arrays, int64 tensors, or int)."""
    k0, k1 = key & _MASK, key >> 32
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, p1 & _MASK, ((p0 >> 32) & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def philox(counter: np.ndarray, key: int) -> np.ndarray:
    """Philox4x32-10: counter uint32 (N, 4), word 0 first, and a 64-bit key give uint32 (N, 4)."""
    columns = [np.ascontiguousarray(counter[:, i], dtype=np.uint64) for i in range(4)]
    return np.stack(philox_words(*columns, checked_seed(key)), axis=1).astype(np.uint32)


def tensor_id(name: str) -> int:
    """The 64-bit number that stands for a checkpoint tensor in the counter."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")


def scaled_levels(scheme: str, sigma: float) -> np.ndarray:
    """float32 products float32(sigma) * z for every value z of the scheme, each rounded once. ValueError unless sigma is finite."""
    with np.errstate(over="ignore"):
        scale = np.float32(sigma)
    if not np.isfinite(scale):
        raise ValueError(f"sigma is {sigma}, and must be a finite float32")
    return scale * np.array(_scheme(scheme).levels, dtype=np.float32)


def noise(name: str, seed: int, begin: int, end: int, scheme: str = "rademacher") -> np.ndarray:
    """The reference: z, float32 (end - begin,), of the flat elements begin..end of the checkpoint tensor `name` under `seed`."""
    return _reference(tensor_id(name), seed, begin, end, scheme, scaled_levels(scheme, 1.0))


def perturbed_reference(
    base: torch.Tensor, name: str, seed: int, sigma: float, *, scheme: str = "rademacher", offset: int = 0
) -> torch.Tensor:
    """The reference of a switch: `base` (float32, bfloat16 or float16, any shape) holds the flat elements from `offset` on of the
    checkpoint tensor `name`; the result has its shape and type and lies on the CPU."""
    assert base.dtype in LIVE_DTYPES, base.dtype
    products = _reference(tensor_id(name), seed, offset, offset + base.numel(), scheme, scaled_levels(scheme, sigma))
    exact = base.detach().cpu().float().numpy().reshape(-1) + products
    return torch.from_numpy(exact).to(base.dtype).reshape(base.shape)


def uniforms(seed: int, stream: int, begin: int, end: int) -> np.ndarray:
    """Draws number begin..end of a stream, float64 (end - begin,) in (0, 1): (word + 1/2) / 2**32, four words a block.

    Streams are keyed like tensors, under names with blanks and brackets that no checkpoint uses, so that they never meet weight noise.
    """
    words = _reference_words(tensor_id(f"<uniform draws of stream {stream}>"), seed, begin // 4, -(-end // 4)).reshape(-1)
    return (words[begin - begin // 4 * 4 :][: end - begin].astype(np.float64) + 0.5) / 2**32


def known_answer(scheme: str) -> str:
    """Digest of the scheme's noise at a few places (high words of seed and block index included), to compare with the frozen one."""
    digest = hashlib.sha256()
    for name, seed, begin in KNOWN_PLACES:
        digest.update(noise(name, seed, begin, begin + KNOWN_LENGTH, scheme).astype("<f4").tobytes())
    return digest.hexdigest()[:16]


KNOWN_PLACES = (("model.layers.0.self_attn.q_proj.weight", 12345, 0), ("lm_head.weight", 2**63 + 7, 2**40 + 3))
KNOWN_LENGTH = 515


def describe(scheme: str) -> dict[str, Any]:
    """What a record says of the noise."""
    return {"scheme": scheme, "version": SCHEME_VERSION, "known_answer": _scheme(scheme).known_answer}


# -- torch, any device ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """One piece to write: live := round(source + sigma * z), where the piece lies. `source` has the strides of `live`, or is it."""

    piece: Piece
    live: torch.Tensor
    source: torch.Tensor


class TorchWriter:
    """Writes perturbed weights with torch operations, on any device, in parts of bounded size."""

    def __init__(self, targets: Sequence[Target], scheme: str) -> None:
        self._targets, self._scheme = tuple(targets), scheme

    def prepare(self, levels: np.ndarray) -> list[torch.Tensor]:
        """`levels` float32 (number of targets, values of the scheme), `scaled_levels` of each target's sigma, for `write`."""
        return [torch.from_numpy(row).to(target.live.device) for target, row in zip(self._targets, levels, strict=True)]

    def write(self, seed: int, prepared: list[torch.Tensor]) -> None:
        for target, levels in zip(self._targets, prepared, strict=True):
            for part, products in parts(target.piece, seed, self._scheme, levels):
                part.view(target.live).copy_(part.view(target.source) + products)


def parts(piece: Piece, seed: int, scheme: str, levels: torch.Tensor) -> Iterator[tuple[Piece, torch.Tensor]]:
    """A piece cut small, each part with its sigma * z, float32 (num_rows, num_cols), on the device of `levels`."""
    on_cpu = levels.device.type == "cpu"  # where small parts stay in the caches; elsewhere each operation is a launch
    most_blocks = (2**13 if on_cpu else 2**15) if scheme == "rademacher" else (2**15 if on_cpu else 2**18)
    identity, row_length = tensor_id(piece.name), matrix_shape(piece.shape)[1]
    for part in piece.cut(most_blocks * _scheme(scheme).per_block):
        if part.num_rows == 1 or part.num_cols == row_length:
            begin = part.flat_begin
            products = scaled_noise(identity, seed, begin, begin + part.num_elements, scheme, levels)
            yield part, products.view(part.num_rows, part.num_cols)
        else:  # columns of several rows: the whole rows are drawn
            products = scaled_noise(identity, seed, part.row_begin * row_length, part.row_end * row_length, scheme, levels)
            yield part, products.view(part.num_rows, row_length)[:, part.col_begin : part.col_end]


def scaled_noise(identity: int, seed: int, begin: int, end: int, scheme: str, levels: torch.Tensor) -> torch.Tensor:
    """sigma * z, float32 (end - begin,), of the flat elements begin..end of the tensor with id `identity`, on the device of `levels`
    (`scaled_levels` there). Takes some 100 bytes of scratch memory a Philox block."""
    per_block = _scheme(scheme).per_block
    first = begin // per_block
    words = _block_words(identity, seed, first, -(-end // per_block), levels.device)
    products = _EXPANSIONS[scheme](words, levels)
    return products[begin - first * per_block :][: end - begin]


def _block_words(identity: int, seed: int, first: int, last: int, device: torch.device) -> torch.Tensor:
    """Words of the blocks first..last, int64 (last - first, 4) below 2**32."""
    block = torch.arange(first, last, dtype=torch.int64, device=device)
    third = torch.full_like(block, identity & _MASK)
    words = philox_words(block & _MASK, block >> 32, third, identity >> 32, checked_seed(seed))
    return torch.stack(words, dim=1)


def _expand_rademacher(words: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """A byte's eight signs are one row of a table, already multiplied by sigma."""
    bits = (torch.arange(256, device=words.device)[:, None] >> torch.arange(8, device=words.device)) & 1
    in_bytes = (words[..., None] >> torch.arange(0, 32, 8, device=words.device)) & 0xFF
    return levels[bits].index_select(0, in_bytes.reshape(-1)).reshape(-1)


def _expand_binomial(words: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    return levels.index_select(0, _popcount(words.reshape(-1)))


_EXPANSIONS = {"rademacher": _expand_rademacher, "binomial": _expand_binomial}


def _popcount(words: Words) -> Words:
    """Number of set bits of 32-bit words in 64-bit containers."""
    words = words - ((words >> 1) & 0x55555555)
    words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F
    return ((words * 0x01010101) & _MASK) >> 24


# -- numpy, the reference ---------------------------------------------------------------------------------------------


def _reference(identity: int, seed: int, begin: int, end: int, scheme: str, levels: np.ndarray) -> np.ndarray:
    per_block = _scheme(scheme).per_block
    assert 0 <= begin <= end <= 2**63, (begin, end)
    out = np.empty(end - begin, dtype=np.float32)
    step = 2**15 * per_block  # blocks at once, which bounds the memory
    for low in range(begin, end, step):
        high, first = min(end, low + step), low // per_block
        words = _reference_words(identity, seed, first, -(-high // per_block))
        if scheme == "rademacher":
            index = np.unpackbits(words.astype("<u4").view(np.uint8), bitorder="little")
        else:
            index = _popcount(words.astype(np.uint64)).reshape(-1)
        out[low - begin : high - begin] = levels[index[low - first * per_block :][: high - low]]
    return out


def _reference_words(identity: int, seed: int, first: int, last: int) -> np.ndarray:
    """Words of the blocks first..last, uint32 (last - first, 4)."""
    block = np.arange(first, last, dtype=np.uint64)
    counter = np.empty((last - first, 4), dtype=np.uint32)
    counter[:, 0], counter[:, 1] = block & _MASK, block >> 32
    counter[:, 2], counter[:, 3] = identity & _MASK, identity >> 32
    return philox(counter, seed)


def _scheme(scheme: str) -> Scheme:
    if scheme not in SCHEMES:
        raise ValueError(f"there is no noise scheme {scheme!r}: choose one of {', '.join(SCHEMES)}")
    return SCHEMES[scheme]


def checked_seed(seed: int) -> int:
    """The seed; ValueError unless it is a key of 64 bits."""
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed {seed} does not fit in 64 bits: take one from 0 to 2**64 - 1")
    return int(seed)
