"""The Triton operations against the torch ones, under Triton's interpreter (a process of its own: the switch is read at import).

float32 and float16 only, because the interpreter rounds bfloat16 otherwise than a GPU; tests/gpu/test_native_cuda.py has all three.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import torch
from bitsperbyte.randopt.engines import layer_ops as reference, layer_ops_triton as kernels
torch.set_num_threads(1)
torch.manual_seed(0)
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}
num_compared = 0

def same(found, expected):
    global num_compared
    error = ((found.float() - expected.float()).norm() / expected.float().norm()).item()
    assert error <= TOLERANCE[found.dtype], (error, found.dtype, found.shape)
    assert found.shape == expected.shape and found.dtype == expected.dtype
    num_compared += 1

for dtype in TOLERANCE:
    for width, shifted in ((32, False), (40, True)):
        x, y, weight = torch.randn(2, width).to(dtype), torch.randn(2, width).to(dtype), torch.randn(width).to(dtype)
        same(kernels.norm(x, weight, 1e-6, shifted), reference.norm(x, weight, 1e-6, shifted))
        sums = x.clone(), x.clone()
        same(kernels.add_norm(sums[0], y, weight, 1e-6, shifted), reference.add_norm(sums[1], y, weight, 1e-6, shifted))
        same(*sums)
    for activation in reference.ACTIVATIONS:
        both = torch.randn(2, 2 * 40).to(dtype)
        same(kernels.gated(both, activation), reference.gated(both, activation))
    for num_q, num_kv, width, has_norm in ((4, 2, 16, True), (7, 1, 24, False), (3, 3, 6, True)):
        cos, sin = torch.randn(150, width // 2), torch.randn(150, width // 2)
        rows, positions = torch.tensor([3, 1, 0, 2]), torch.tensor([0, 5, 149, 64])
        qkv = torch.randn(4, (num_q + 2 * num_kv) * width).to(dtype)
        norms = [torch.randn(width).to(dtype) if has_norm else None for _ in range(2)]
        caches = [[torch.zeros(4, num_kv, 150, width, dtype=dtype) for _ in range(2)] for _ in range(2)]
        queries = [ops.rotate_and_store(qkv.clone(), cos, sin, rows, positions, *cache, *norms, 1e-6)
                   for ops, cache in zip((kernels, reference), caches)]
        same(*queries)
        same(caches[0][0], caches[1][0])
        same(caches[0][1], caches[1][1])
        keys, values = (torch.randn(4, num_kv, 150, width).to(dtype) for _ in range(2))
        for programs in (528, 1):  # split and whole
            kernels.PROGRAMS = programs
            lengths = positions if num_q == 4 else torch.tensor([63, 64, 1, 148])
            same(kernels.attend(queries[0], keys, values, lengths, 150, 0.25), reference.attend(queries[0], keys, values, lengths, 150, 0.25))
print(num_compared)
"""


def test_kernels_equal_the_torch_operations(repo_dir: Path) -> None:
    if importlib.util.find_spec("triton") is None:
        if os.environ.get("CI") == "true":
            pytest.fail("Triton is missing, and CI must have it")
        pytest.skip("Triton is not installed here")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(repo_dir / "src")}
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 2 * (6 + 3 + 3 * 5)
