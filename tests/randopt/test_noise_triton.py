"""The Triton kernels under Triton's interpreter, and compiled for a GPU that need not be there.

The interpreter is chosen when triton is imported, which other tests may have done: each of these runs in a process of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed, and its kernels cannot be tried")

CASES = '''
import json, sys
import numpy as np, torch
from bitsperbyte.randopt import noise
from bitsperbyte.randopt.layout import Layout, LiveTensor, Piece
from bitsperbyte.randopt.noise import LIVE_DTYPES, SCHEMES, Target
from bitsperbyte.randopt.noise_triton import TritonWriter
from bitsperbyte.randopt.perturb import Perturber

NAME, SIGMA = "model.layers.3.mlp.up_proj.weight", 0.0123
scheme = sys.argv[1]

def bits(tensor):
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).numpy().tobytes()

def values(shape, dtype):
    """Of every magnitude that the type has, subnormal ones included."""
    generator = torch.Generator().manual_seed(len(shape) + shape[0])
    exponents = torch.randint(-42, 4, shape, generator=generator)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * 10.0**exponents).to(dtype)

def check(targets, expected, seed):
    writer = TritonWriter(targets, scheme)
    writer.write(seed, writer.prepare(np.repeat(noise.scaled_levels(scheme, SIGMA)[None], len(targets), 0)))
    for target, right in zip(targets, expected, strict=True):
        assert bits(target.piece.view(target.live)) == bits(right), (scheme, target.piece, target.live.dtype)
'''

RUNS = '''
# tensors of many sizes at many places, all of them in one writer
for offset, seed in ((0, 1), (77, 2**63 + 16), (2**32 - 64, 16), (2**40, 2**32)):
    targets, expected = [], []
    for dtype in LIVE_DTYPES:
        for num in (1, 8, 127, 2048, 2 * 2048 + 40, 2 * 2048 + 5):
            base = values((num,), dtype)
            live = torch.full((num + 1,), 7.0, dtype=dtype)  # what lies behind the piece must stay
            targets.append(Target(Piece(NAME, (offset + num,), offset, offset + num, 0, 1, offset=0, row_stride=1), live, base))
            expected.append(noise.perturbed_reference(base, NAME, seed, SIGMA, scheme=scheme, offset=offset))
    check(targets, expected, seed)
    assert all(target.live[-1] == 7.0 for target in targets)

# rectangles: column shards, transposed memory, pieces inside a fused tensor that begin at odd places
whole = values((21, 300), torch.bfloat16)
right = noise.perturbed_reference(whole, NAME, 9, SIGMA, scheme=scheme)
for rows, cols in (((0, 21), (0, 300)), ((3, 20), (128, 256)), ((0, 21), (13, 170)), ((5, 6), (1, 2))):
    held = whole[slice(*rows), slice(*cols)]
    for strides in ((held.shape[1], 1), (held.shape[1] + 3, 1), (1, held.shape[0])):
        base = torch.empty(2000 * 8, dtype=whole.dtype).fill_(5.0)
        piece = Piece(NAME, (21, 300), *rows, *cols, 11, *strides)
        piece.view(base).copy_(held)
        live = torch.full_like(base, 5.0)
        check([Target(piece, live, base)], [right[slice(*rows), slice(*cols)]], 9)
        piece.view(live).fill_(5.0)
        assert (live == 5.0).all()  # nothing beside the piece was written
        check([Target(piece, base, base)], [right[slice(*rows), slice(*cols)]], 9)  # in place

# the perturber over it: known answer, relative sigmas (one row of products for each tensor), reset
model = torch.nn.Sequential(torch.nn.Linear(33, 40), torch.nn.Linear(40, 7)).bfloat16()
before = [bits(p.detach()) for p in model.parameters()]
perturber = Perturber(Layout.of_module(model), scheme=scheme, sigma="relative", writer="triton")
perturber.perturb(5, 0.1)
found = {name: p.detach().clone() for name, p in model.named_parameters()}
perturber.reset()
assert [bits(p.detach()) for p in model.parameters()] == before
for name, p in model.named_parameters():
    assert bits(found[name]) == bits(noise.perturbed_reference(p.detach(), name, 5, 0.1 * perturber.rms[name], scheme=scheme))
print("done")
'''

# triton's own Philox, which we do not use, as an independent library
LIBRARY = '''
import triton, triton.language as tl

@triton.jit
def draw(out, seed, c0, c1, c2, c3):
    zero = tl.zeros((1,), tl.uint32)
    words = tl.philox(seed, zero + c0.to(tl.uint32), zero + c1.to(tl.uint32), zero + c2.to(tl.uint32), zero + c3.to(tl.uint32))
    for i in tl.static_range(4):
        tl.store(out + i + tl.arange(0, 1), words[i].to(tl.int64))

for seed, name, block in ((12345, NAME, 0), (2**62 + 9, "lm_head.weight", 2**33 + 7), (2**40, "x", 2**32 - 1)):
    identity = noise.tensor_id(name)
    counter = [block % 2**32, block >> 32, identity % 2**32, identity >> 32]
    out = torch.zeros(4, dtype=torch.int64)
    draw[(1,)](out, seed, *counter)
    assert out.tolist() == noise.philox(np.array([counter], dtype=np.uint32), seed)[0].tolist(), (seed, name)
print("done")
'''

COMPILE = '''
import torch, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from bitsperbyte.randopt import noise_triton as nt
from bitsperbyte.randopt.noise import SCHEMES

scheme, lanes = sys.argv[1], SCHEMES[sys.argv[1]].per_block // 4
for kernel, blocks, own in ((nt._write_wide_tiles, nt._WIDE_BLOCKS, {}), (nt._write_tiles, nt._BLOCKS, {"COL_STRIDE_IS_1": True})):
    constants = {"TYPE": tl.bfloat16, "NUM_LEVELS": len(SCHEMES[scheme].levels), "BLOCKS": blocks[scheme], "LANES": lanes,
                 "FIELDS": nt._NUM_FIELDS, "BY_HAND": False, **own}
    kinds = {"pieces": "*i64", "tiles": "*i32", "levels": "*fp32", "seed_low": "i32", "seed_high": "i32"}
    source = ASTSource(kernel, {**kinds, **dict.fromkeys(constants, "constexpr")},
                       {(kernel.arg_names.index(name),): value for name, value in constants.items()},
                       {(i,): [["tt.divisibility", 16]] for i in range(3)})
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": nt._WARPS}).asm["ptx"]
    assert "fma" not in ptx and "ftz" not in ptx and "cvt.rn.bf16" in ptx
    if kernel is nt._write_wide_tiles:  # 16-byte accesses for the signs, 8-byte ones for four binomial values
        assert ("ld.global.v4.b32" if scheme == "rademacher" else "ld.global.v2.b32") in ptx and "st.global.b16" not in ptx
print("done")
'''


def run(code: str, scheme: str, tmp_path: Path, interpret: bool) -> None:
    script = tmp_path / "case.py"  # triton reads the source of its kernels, so they must lie in a file
    script.write_text(code, encoding="utf-8")
    environment = {**os.environ, "TRITON_INTERPRET": "1" if interpret else "0", "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    paths = [str(Path(__file__).parents[2] / "src"), os.environ.get("PYTHONPATH", "")]
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(script), scheme], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "done\n", done.stderr[-3000:]


@pytest.mark.parametrize("scheme", ["rademacher", "binomial"])
def test_kernels_equal_the_reference_bit_for_bit(scheme: str, tmp_path: Path) -> None:
    run(CASES + RUNS, scheme, tmp_path, interpret=True)


def test_the_words_are_those_of_tritons_own_generator(tmp_path: Path) -> None:
    run(CASES + LIBRARY, "rademacher", tmp_path, interpret=True)


@pytest.mark.parametrize("scheme", ["rademacher", "binomial"])
def test_kernels_compile_for_hopper_without_fused_sums_and_with_wide_accesses(scheme: str, tmp_path: Path) -> None:
    run("import sys\n" + COMPILE, scheme, tmp_path, interpret=False)
