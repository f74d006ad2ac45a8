"""Which layout of 6-bit values compresses best under which codec? One row a layout, one column a codec: bits per value.

    PYTHONPATH=src python bench/int6_layouts.py [--values 2000000] [--train-steps 200]

Inputs: rows drawn from a Gaussian whose spread differs from row to row, and the matrices of a small golf model trained
here on the embedded documentation of Python (Muon, then int6). The title gives the order-0 entropy of the values with
one histogram for all of them: what a static arithmetic coder would reach. The layouts live here; golf/codecs.py keeps
the winner.
"""

import argparse
import bz2
import lzma
import time
import zlib
from collections.abc import Callable

import numpy as np
import torch

from bitsperbyte.golf.model import GolfModel, ModelConfig
from bitsperbyte.golf.quantize import SCHEMES, quantize

Matrices = list[np.ndarray]  # int8 (R, C) in -31..31


def one_byte(matrices: Matrices) -> bytes:
    return b"".join(m.tobytes() for m in matrices)


def one_byte_columns(matrices: Matrices) -> bytes:
    return b"".join(np.ascontiguousarray(m.T).tobytes() for m in matrices)


def one_byte_offset(matrices: Matrices) -> bytes:
    return b"".join((m + 32).astype(np.uint8).tobytes() for m in matrices)


def one_byte_zigzag(matrices: Matrices) -> bytes:
    return b"".join(
        np.where(m < 0, -2 * m.astype(np.int16) - 1, 2 * m.astype(np.int16)).astype(np.uint8).tobytes()
        for m in matrices
    )


def _bits(matrices: Matrices) -> np.ndarray:
    """uint8 (N, 6), most significant first, of value + 32; padded to a multiple of 8 values."""
    flat = np.concatenate([m.ravel() for m in matrices]).astype(np.int16) + 32
    flat = np.concatenate([flat, np.zeros(-len(flat) % 8, np.int16)]).astype(np.uint8)
    return np.unpackbits(flat[:, None], axis=1)[:, 2:]


def packed_4_in_3(matrices: Matrices) -> bytes:
    return np.packbits(_bits(matrices).ravel()).tobytes()


def bit_planes(matrices: Matrices) -> bytes:
    return np.packbits(np.ascontiguousarray(_bits(matrices).T).ravel()).tobytes()


def split_4_2(matrices: Matrices) -> bytes:
    bits = _bits(matrices)
    return np.packbits(bits[:, :4].ravel()).tobytes() + np.packbits(bits[:, 4:].ravel()).tobytes()


def split_5_1(matrices: Matrices) -> bytes:
    """The upper five bits one value a byte, the lowest (almost a coin flip) eight a byte."""
    bits = _bits(matrices)
    return (
        np.packbits(np.pad(bits[:, :5], ((0, 0), (3, 0))).ravel()).tobytes() + np.packbits(bits[:, 5].ravel()).tobytes()
    )


LAYOUTS: dict[str, Callable[[Matrices], bytes]] = {
    "one byte": one_byte,
    "one byte, columns": one_byte_columns,
    "one byte, +32": one_byte_offset,
    "one byte, zigzag": one_byte_zigzag,
    "4 in 3 bytes": packed_4_in_3,
    "bit planes": bit_planes,
    "split 4+2": split_4_2,
    "split 5+1": split_5_1,
}


def _zlib(strategy: int) -> Callable[[bytes], bytes]:
    def compress(data: bytes) -> bytes:
        coder = zlib.compressobj(9, zlib.DEFLATED, 15, 9, strategy)
        return coder.compress(data) + coder.flush()

    return compress


def _zstd(**settings: int) -> Callable[[bytes], bytes]:
    import zstandard

    params = zstandard.ZstdCompressionParameters.from_level(22, write_content_size=0, **settings)
    return zstandard.ZstdCompressor(compression_params=params).compress


def _lzma(lc: int, lp: int, pb: int) -> Callable[[bytes], bytes]:
    chain = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": lc, "lp": lp, "pb": pb}]
    return lambda data: lzma.compress(data, format=lzma.FORMAT_RAW, filters=chain)


def _brotli(mode: str) -> Callable[[bytes], bytes]:
    import brotli

    return lambda data: brotli.compress(data, quality=11, lgwin=24, mode=getattr(brotli, mode))


CODECS: dict[str, Callable[[bytes], bytes]] = {
    "zlib 9": _zlib(zlib.Z_DEFAULT_STRATEGY),
    "zlib filt": _zlib(zlib.Z_FILTERED),
    "zlib huff": _zlib(zlib.Z_HUFFMAN_ONLY),
    "zstd 22": _zstd(),
    "zstd mm7": _zstd(min_match=7),
    "zstd dfast7": _zstd(min_match=7, strategy=2),
    "lzma 3,0,2": _lzma(3, 0, 2),
    "lzma 0,0,0": _lzma(0, 0, 0),
    "lzma 0,2,2": _lzma(0, 2, 2),
    "brotli": _brotli("MODE_GENERIC"),
    "brotli font": _brotli("MODE_FONT"),
    "bz2": lambda data: bz2.compress(data, 9),
}


def gaussian_rows(num_values: int, columns: int = 512) -> Matrices:
    draw = torch.Generator().manual_seed(0)
    rows = num_values // columns
    spread = torch.empty(rows, 1).log_normal_(-3.5, 0.3, generator=draw)
    return _int6({"blocks.0.mlp.fc.weight": torch.randn(rows, columns, generator=draw) * spread})


def trained(steps: int) -> Matrices:
    """The block matrices of a 2.6-million-parameter model trained on bytes of Python's documentation."""
    import pydoc_data.topics

    torch.manual_seed(0)
    text = np.frombuffer("\n".join(pydoc_data.topics.topics.values()).encode(), np.uint8).astype(np.int64)
    model = GolfModel(ModelConfig(vocab_size=256, dim=256, order=(0, 1, 2, 3), skips=((1, 2), (0, 3))))
    matrices = [p for n, p in model.named_parameters() if n.startswith("blocks") and n.endswith(".weight")]
    others = [p for p in model.parameters() if all(p is not m for m in matrices)]
    optimisers = [torch.optim.Muon(matrices, lr=0.02, weight_decay=0.0), torch.optim.Adam(others, lr=0.01)]
    pick = np.random.default_rng(0)
    for step in range(steps):
        starts = pick.integers(0, len(text) - 257, size=8)
        batch = torch.from_numpy(np.stack([text[s : s + 257] for s in starts]))
        loss = model.loss(batch[:, :-1], batch[:, 1:])
        loss.backward()
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad()
        if step % 50 == 0 or step == steps - 1:
            print(f"  step {step} loss {loss.item():.3f} nats a byte", flush=True)
    return _int6({n: p.detach() for n, p in model.named_parameters() if n.startswith("blocks")})


def _int6(state: dict[str, torch.Tensor]) -> Matrices:
    return [t.values.numpy() for t in quantize(state, SCHEMES["int6"]) if t.scales is not None]


def entropy(matrices: Matrices) -> float:
    counts = np.bincount(np.concatenate([m.ravel() for m in matrices]).astype(np.int64) + 32).astype(np.float64)
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log2(share)).sum())


def table(title: str, matrices: Matrices) -> None:
    num_values = sum(m.size for m in matrices)
    print(f"\n{title}: {num_values:,} values, order-0 entropy {entropy(matrices):.3f} bits a value; after the codec:")
    print(f"{'':20}" + "".join(f"{name:>12}" for name in CODECS))
    seconds = dict.fromkeys(CODECS, 0.0)
    for layout, arrange in LAYOUTS.items():
        data, cells = arrange(matrices), []
        for name, compress in CODECS.items():
            start = time.perf_counter()
            cells.append(8 * len(compress(data)) / num_values)
            seconds[name] += time.perf_counter() - start
        print(f"{layout:20}" + "".join(f"{cell:12.3f}" for cell in cells), flush=True)
    print(f"{'seconds, all':20}" + "".join(f"{value:12.1f}" for value in seconds.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--values", type=int, default=2_000_000, help="size of the Gaussian sample")
    parser.add_argument("--train-steps", type=int, default=200, help="steps of the trained model (0: leave it out)")
    arguments = parser.parse_args()
    table("Gaussian rows", gaussian_rows(arguments.values))
    if arguments.train_steps:
        table("trained matrices", trained(arguments.train_steps))


if __name__ == "__main__":
    main()
