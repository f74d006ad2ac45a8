"""Compression of an artifact's bytes: codecs with a hard output limit, and layouts of small integers.

A codec is a pair (compress, decompress). `decompress(data, num_bytes)` gives exactly `num_bytes` and never holds much
more: it asks its library for output in bounded pieces and stops with ValueError as soon as there is more, less, or
input left over. A layout is how the integers of a tensor become bytes before the codec sees them.

Measured (bench/int6_layouts.py on 2 CPU cores: 1 M Gaussian values in rows of different spread, entropy 5.372 bits a
value; bits a value after the codec):

                  zlib 9  zlib 9, filtered  zstd 22  zstd, matches of 7+  lzma lc=3  lzma lc=0  brotli 11
    one byte       5.596             5.410    5.416                5.406      5.499      5.497      5.403
    split 4+2      5.424             5.419    5.439                5.410      5.442      5.435      5.398
    4 in 3 bytes   5.819             5.816    5.811                5.807      5.842      5.868      5.751
    bit planes     6.001             6.007    6.000                6.000      6.000      6.000      6.000

So 6-bit values stay one byte each, not packed: their gain is in the histogram, which packing hides. The split pays only
for lzma (1.1 %; brotli's 0.1 % is within what other data change). Default zlib and zstd lose to chance matches of three
or four values; the setting that forbids them is tried beside the default and the smaller result is kept. An arithmetic
coder would save another 0.5 % over brotli (the entropy above), which is not worth its code.
"""

import lzma
import zlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import NamedTuple

import numpy as np

PIECE_BYTES = 1 << 18  # output asked for at a time
WINDOW_LOG = 24  # 16 MiB: as large as any artifact, and the most memory a decoder's window may take
# Raw LZMA2: the chain is fixed here, so a file cannot ask for a larger dictionary. lc = lp = pb = 0: a value's
# neighbours and its position say nothing about it, so one histogram learns faster than many.
LZMA_CHAIN = [
    {
        "id": lzma.FILTER_LZMA2,
        "preset": 9 | lzma.PRESET_EXTREME,
        "dict_size": 1 << WINDOW_LOG,
        "lc": 0,
        "lp": 0,
        "pb": 0,
    }
]


class Codec(NamedTuple):
    compress: Callable[[bytes], bytes]
    decompress: Callable[[bytes, int], bytes]


def _collect(pieces: Iterator[bytes], num_bytes: int) -> bytes:
    """Join the pieces of a decoder; ValueError as soon as they exceed `num_bytes`, or when they end short of it."""
    out = bytearray()
    for piece in pieces:
        out += piece
        if len(out) > num_bytes:
            raise ValueError(f"it decompresses to more than the {num_bytes:,} bytes it should hold")
    if len(out) != num_bytes:
        raise ValueError(f"it decompresses to {len(out):,} bytes instead of {num_bytes:,}")
    return bytes(out)


def _compress_zlib(data: bytes) -> bytes:
    candidates = []
    for strategy in (zlib.Z_DEFAULT_STRATEGY, zlib.Z_FILTERED):
        coder = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS, 9, strategy)
        candidates.append(coder.compress(data) + coder.flush())
    return min(candidates, key=len)


def _zlib_pieces(data: bytes) -> Iterator[bytes]:
    decoder = zlib.decompressobj()
    while not decoder.eof:
        piece = decoder.decompress(data, PIECE_BYTES)
        if not piece and not decoder.eof and not decoder.unconsumed_tail:
            raise ValueError("its compressed data end too early")
        data = decoder.unconsumed_tail
        yield piece
    if decoder.unused_data:
        raise ValueError("it holds bytes behind its compressed data")


def _decompress_zlib(data: bytes, num_bytes: int) -> bytes:
    try:
        return _collect(_zlib_pieces(data), num_bytes)
    except zlib.error as error:
        raise ValueError(f"its zlib data are damaged ({error})") from None


def _compress_lzma(data: bytes) -> bytes:
    return lzma.compress(data, format=lzma.FORMAT_RAW, filters=LZMA_CHAIN)


def _lzma_pieces(data: bytes) -> Iterator[bytes]:
    decoder = lzma.LZMADecompressor(format=lzma.FORMAT_RAW, filters=LZMA_CHAIN)
    while not decoder.eof:
        piece = decoder.decompress(data, PIECE_BYTES)
        data = b""
        if not piece and not decoder.eof and decoder.needs_input:
            raise ValueError("its compressed data end too early")
        yield piece
    if decoder.unused_data:
        raise ValueError("it holds bytes behind its compressed data")


def _decompress_lzma(data: bytes, num_bytes: int) -> bytes:
    try:
        return _collect(_lzma_pieces(data), num_bytes)
    except (lzma.LZMAError, EOFError) as error:
        raise ValueError(f"its lzma data are damaged ({error})") from None


def _zstandard() -> ModuleType:
    try:
        import zstandard
    except ModuleNotFoundError:
        raise ValueError(
            "the codec zstd needs the package zstandard: pip install zstandard, or choose zlib or lzma"
        ) from None
    return zstandard


def _compress_zstd(data: bytes) -> bytes:
    zstandard = _zstandard()
    candidates = []
    for settings in ({}, {"min_match": 7}, {"min_match": 7, "strategy": zstandard.STRATEGY_DFAST}):
        params = zstandard.ZstdCompressionParameters.from_level(
            22, source_size=len(data), window_log=WINDOW_LOG, write_content_size=0, write_checksum=0, **settings
        )
        candidates.append(zstandard.ZstdCompressor(compression_params=params).compress(data))
    return min(candidates, key=len)


def _zstd_pieces(data: bytes) -> Iterator[bytes]:
    decoder = _zstandard().ZstdDecompressor(max_window_size=1 << WINDOW_LOG).decompressobj()
    # This decoder has no output limit, so its input is: a block of 3 bytes can become 128 KiB, hence 192 bytes at most
    # 8 MiB.
    for start in range(0, len(data), 192):
        if decoder.eof:
            raise ValueError("it holds bytes behind its compressed data")
        yield decoder.decompress(data[start : start + 192])
    if not decoder.eof:
        raise ValueError("its compressed data end too early")
    if decoder.unused_data:
        raise ValueError("it holds bytes behind its compressed data")


def _decompress_zstd(data: bytes, num_bytes: int) -> bytes:
    zstandard = _zstandard()
    try:
        return _collect(_zstd_pieces(data), num_bytes)
    except zstandard.ZstdError as error:
        raise ValueError(f"its zstd data are damaged ({error})") from None


def _brotli() -> ModuleType:
    try:
        import brotli
    except ModuleNotFoundError:
        raise ValueError(
            "the codec brotli needs the package brotli: pip install 'brotli>=1.2', or choose zlib or lzma"
        ) from None
    if not hasattr(brotli.Decompressor, "can_accept_more_data"):  # before 1.2 its output cannot be limited
        raise ValueError("the installed package brotli is too old to read safely: pip install 'brotli>=1.2'")
    return brotli


def _compress_brotli(data: bytes) -> bytes:
    return _brotli().compress(data, quality=11, lgwin=WINDOW_LOG)


def _brotli_pieces(data: bytes) -> Iterator[bytes]:
    decoder = _brotli().Decompressor()
    piece = decoder.process(data, output_buffer_limit=PIECE_BYTES)
    while True:
        yield piece
        if decoder.is_finished():
            return
        if not piece and decoder.can_accept_more_data():
            raise ValueError("its compressed data end too early")
        piece = decoder.process(b"", output_buffer_limit=PIECE_BYTES)


def _decompress_brotli(data: bytes, num_bytes: int) -> bytes:
    brotli = _brotli()
    try:
        return _collect(_brotli_pieces(data), num_bytes)
    except brotli.error as error:
        raise ValueError(f"its brotli data are damaged ({error})") from None


CODECS: dict[str, Codec] = {
    "zlib": Codec(_compress_zlib, _decompress_zlib),
    "zstd": Codec(_compress_zstd, _decompress_zstd),
    "lzma": Codec(_compress_lzma, _decompress_lzma),
    "brotli": Codec(_compress_brotli, _decompress_brotli),
}


class Layout(NamedTuple):
    """`num_bytes(num_values, bits)`, `pack(values int8 (N,), bits) -> bytes`, `unpack(bytes, num_values, bits) -> int8
    (N,)`."""

    num_bytes: Callable[[int, int], int]
    pack: Callable[[np.ndarray, int], bytes]
    unpack: Callable[[bytes, int, int], np.ndarray]


def _pack_bytes(values: np.ndarray, bits: int) -> bytes:
    return values.astype(np.int8).tobytes()


def _unpack_bytes(data: bytes, num_values: int, bits: int) -> np.ndarray:
    return np.frombuffer(data, np.int8, num_values)


def _split_sizes(num_values: int, bits: int) -> tuple[int, int]:
    return (-(-num_values // 2), -(-num_values // 4)) if 2 < bits <= 6 else (num_values, 0)


def _pack_split(values: np.ndarray, bits: int) -> bytes:
    """Upper bits (at most 4) two values a byte, then the lowest 2 bits four values a byte, of value + 2^(bits-1).
    Values of more than 6 bits do not fit and stay one byte each."""
    if not _split_sizes(len(values), bits)[1]:
        return _pack_bytes(values, bits)
    offset = np.pad((values.astype(np.int16) + (1 << (bits - 1))).astype(np.uint8), (0, -len(values) % 4))
    upper, lower = (offset >> 2).reshape(-1, 2), (offset & 3).reshape(-1, 4)
    first = (upper[:, 0] << 4 | upper[:, 1])[: -(-len(values) // 2)]
    return first.tobytes() + (lower[:, 0] << 6 | lower[:, 1] << 4 | lower[:, 2] << 2 | lower[:, 3]).tobytes()


def _unpack_split(data: bytes, num_values: int, bits: int) -> np.ndarray:
    num_upper, num_lower = _split_sizes(num_values, bits)
    if not num_lower:
        return _unpack_bytes(data, num_values, bits)
    upper, lower = np.frombuffer(data, np.uint8, num_upper), np.frombuffer(data, np.uint8, num_lower, num_upper)
    high = np.stack([upper >> 4, upper & 15], axis=1).ravel()[:num_values]
    low = np.stack([lower >> 6, lower >> 4 & 3, lower >> 2 & 3, lower & 3], axis=1).ravel()[:num_values]
    return ((high << 2 | low).astype(np.int16) - (1 << (bits - 1))).astype(np.int8)


LAYOUTS: dict[str, Layout] = {
    "bytes": Layout(lambda num_values, bits: num_values, _pack_bytes, _unpack_bytes),
    "split": Layout(lambda num_values, bits: sum(_split_sizes(num_values, bits)), _pack_split, _unpack_split),
}
BEST_LAYOUT = {"zlib": "bytes", "zstd": "bytes", "lzma": "split", "brotli": "bytes"}
