"""What a weight switch costs: ours against adding and subtracting fresh Gaussian noise, and against a plain device copy, in one run.

    python bench/weight_switch.py [--sizes 50 200 500] [--repeats-ms 200]

Rows: millions of bfloat16 elements in one tensor; then a model of many small tensors (the shapes of Qwen2 0.5B, 290 tensors).
Columns: a device copy of the weights (the faster of tensor by tensor and multi-tensor, which is not bound by launches); perturb +
restore as RandOpt does it (randn, scale, add; then the same numbers again, and subtract); our switch under both schemes, from base to
live, after which nothing needs restoring. Medians by CUDA events, the L2 cache flushed between calls. `share` is the copy's time over
ours, `speed-up` perturb + restore over ours.
"""

import argparse
import itertools
from collections.abc import Callable

import torch
from torch import nn
from triton.testing import do_bench

from bitsperbyte.randopt import noise
from bitsperbyte.randopt.layout import Layout
from bitsperbyte.randopt.perturb import Perturber

DEVICE, DTYPE, SIGMA = torch.device("cuda"), torch.bfloat16, 1e-3


def median_ms(call: Callable[[], None], repeats_ms: int) -> float:
    return float(do_bench(call, warmup=max(20, repeats_ms // 5), rep=repeats_ms, return_mode="median"))


def perturb_and_restore(tensors: list[torch.Tensor], seed: int) -> None:
    generator = torch.Generator(DEVICE)
    for sign in (1, -1):
        for tensor in tensors:
            generator.manual_seed(seed)
            tensor.add_(torch.randn(tensor.shape, dtype=tensor.dtype, device=DEVICE, generator=generator).mul_(sign * SIGMA))


def qwen2_half_billion() -> nn.Module:
    """Parameters of the shapes of Qwen2 0.5B (tied head): 290 tensors, 494,032,768 elements."""
    width, hidden, kv = 896, 4864, 128
    shapes = {"embed_tokens.weight": (151_936, width), "norm.weight": (width,)}
    for i in range(24):
        layer = f"layers.{i}."
        shapes |= {layer + "q_proj.weight": (width, width), layer + "q_proj.bias": (width,), layer + "o_proj.weight": (width, width)}
        shapes |= {layer + f"{k}_proj.weight": (kv, width) for k in "kv"} | {layer + f"{k}_proj.bias": (kv,) for k in "kv"}
        shapes |= {layer + "gate_proj.weight": (hidden, width), layer + "up_proj.weight": (hidden, width)}
        shapes |= {layer + "down_proj.weight": (width, hidden), layer + "norm_1.weight": (width,), layer + "norm_2.weight": (width,)}
    module = nn.Module()
    for name, shape in shapes.items():
        value = torch.randn(shape, dtype=DTYPE, device=DEVICE) * 0.02
        module.register_parameter(name.replace(".", "_"), nn.Parameter(value, requires_grad=False))
    return module


def one_tensor(num: int) -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(torch.randn(num, dtype=DTYPE, device=DEVICE) * 0.02, requires_grad=False)
    return module


def measure(label: str, module: nn.Module, repeats_ms: int) -> None:
    weights = [p.detach() for p in module.parameters()]
    sources = [t.clone() for t in weights]

    def copy_each() -> None:
        for live, source in zip(weights, sources, strict=True):
            live.copy_(source)

    times = {
        "copy": min(median_ms(copy, repeats_ms) for copy in (copy_each, lambda: torch._foreach_copy_(weights, sources))),
        "perturb+restore": median_ms(lambda: perturb_and_restore(weights, 1), repeats_ms),
    }
    sources.clear()
    for scheme in noise.SCHEMES:
        perturber = Perturber(Layout.of_module(module), scheme=scheme, verify_every=10**9)
        seeds = itertools.count()
        times[scheme] = median_ms(lambda p=perturber, s=seeds: p.perturb(next(s), SIGMA), repeats_ms)  # type: ignore[misc]
    row = [f"{label:>22}", f"{times['copy']:9.4f}", f"{times['perturb+restore']:16.4f}"]
    for scheme in noise.SCHEMES:
        row += [f"{times[scheme]:11.4f}", f"{times['copy'] / times[scheme]:7.1%}", f"{times['perturb+restore'] / times[scheme]:8.2f}x"]
    print(" ".join(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[50, 200, 500], help="millions of elements")
    parser.add_argument("--repeats-ms", type=int, default=200, help="milliseconds of measurement for each figure")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench/weight_switch.py needs a GPU, and torch sees none here")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bfloat16, milliseconds")
    heads = [f"{'elements':>22}", f"{'copy':>9}", f"{'perturb+restore':>16}"]
    for scheme in noise.SCHEMES:
        heads += [f"{scheme:>11}", f"{'share':>7}", f"{'speed-up':>9}"]
    print(" ".join(heads))
    for millions in options.sizes:
        measure(f"{millions}M", one_tensor(millions * 10**6), options.repeats_ms)
    measure("494M in 290 tensors", qwen2_half_billion(), options.repeats_ms)


if __name__ == "__main__":
    main()
