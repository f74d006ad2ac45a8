"""The noise kernels and the perturber on a real GPU: bit for bit the reference."""

import pytest
import torch
from torch import nn

from bitsperbyte.randopt import noise
from bitsperbyte.randopt.layout import Layout, LiveTensor, Piece
from bitsperbyte.randopt.noise import LIVE_DTYPES, SCHEMES, Target, TorchWriter
from bitsperbyte.randopt.perturb import Perturber, checksums

pytestmark = pytest.mark.gpu

NAME, SIGMA = "model.layers.3.mlp.up_proj.weight", 0.0123


def write(piece: Piece, live: torch.Tensor, source: torch.Tensor, seed: int, scheme: str) -> None:
    from bitsperbyte.randopt.noise_triton import TritonWriter

    writer = TritonWriter([Target(piece, live, source)], scheme)
    writer.write(seed, writer.prepare(noise.scaled_levels(scheme, SIGMA)[None]))


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()


def values(num: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Of every magnitude that the type has, subnormal ones included."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-42, 4, (num,), generator=generator)
    return (torch.randn(num, generator=generator, dtype=torch.float64) * 10.0**exponents).to(dtype)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", LIVE_DTYPES, ids=str)
@pytest.mark.parametrize("offset", [0, 128 * 5, 77, 2**32, 2**32 + 3, 2**40 - 5])
@pytest.mark.parametrize("num", [1, 127, 4096, 3 * 4096 + 5, 1_000_003])
def test_kernel_equals_the_reference(scheme: str, dtype: torch.dtype, offset: int, num: int) -> None:
    base = values(num, dtype, num)
    live = torch.full((num,), torch.nan, dtype=dtype, device="cuda")
    piece = Piece(NAME, (offset + num,), offset, offset + num, 0, 1, offset=0, row_stride=1)
    for seed in (1, 2**63 + 16 * num):
        write(piece, live, base.cuda(), seed, scheme)
        assert bytes_of(live) == bytes_of(noise.perturbed_reference(base, NAME, seed, SIGMA, scheme=scheme, offset=offset))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("rows", [(0, 40), (3, 21)])
@pytest.mark.parametrize("cols", [(0, 200), (64, 192), (13, 170)])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_rectangles_equal_the_reference(scheme: str, rows: tuple[int, int], cols: tuple[int, int], is_transposed: bool) -> None:
    whole = values(40 * 200, torch.bfloat16).view(40, 200)
    num_rows, num_cols = rows[1] - rows[0], cols[1] - cols[0]
    strides = (1, num_rows) if is_transposed else (num_cols, 1)
    held = (slice(*rows), slice(*cols))
    base = torch.empty_strided((num_rows, num_cols), strides, dtype=whole.dtype, device="cuda").copy_(whole[held])
    live = torch.empty_strided((num_rows, num_cols), strides, dtype=whole.dtype, device="cuda").fill_(torch.nan)
    piece = Piece(NAME, (40, 200), *rows, *cols, 0, *strides)
    write(piece, live, base, 9, scheme)
    expected = noise.perturbed_reference(whole, NAME, 9, SIGMA, scheme=scheme)[held]
    assert bytes_of(live) == bytes_of(expected)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_tensor_of_more_than_2_to_the_31_elements(scheme: str) -> None:
    num = 2**31 + 4096 * 3 + 77
    if torch.cuda.mem_get_info()[0] < 5 * num:
        pytest.skip("needs 11 GB of free GPU memory")
    live = torch.empty(num, dtype=torch.bfloat16, device="cuda").normal_()
    piece = Piece(NAME, (num,), 0, num, 0, 1, offset=0, row_stride=1)
    spans = [(0, 5000), (2**30 - 9, 2**30 + 5000), (2**31 - 4000, 2**31 + 4000), (num - 9000, num)]
    before = [live[begin:end].cpu() for begin, end in spans]
    write(piece, live, live, 3, scheme)
    for (begin, end), base in zip(spans, before, strict=True):
        assert bytes_of(live[begin:end]) == bytes_of(noise.perturbed_reference(base, NAME, 3, SIGMA, scheme=scheme, offset=begin))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_many_elements_equal_the_torch_writer(scheme: str) -> None:
    base = torch.empty(40_000_129, dtype=torch.bfloat16, device="cuda").normal_()
    piece = Piece(NAME, tuple(base.shape), 0, len(base), 0, 1, offset=0, row_stride=1)
    one, other = torch.full_like(base, torch.nan), torch.full_like(base, torch.nan)
    write(piece, one, base, 8, scheme)
    reference = TorchWriter([Target(piece, other, base)], scheme)
    reference.write(8, reference.prepare(noise.scaled_levels(scheme, SIGMA)[None]))
    assert torch.equal(one.view(torch.int16), other.view(torch.int16))


def test_seeds_and_sizes_do_not_compile_anew() -> None:
    from bitsperbyte.randopt import noise_triton

    def num_compiled() -> int:
        kernels = (noise_triton._write_wide_tiles, noise_triton._write_tiles)
        return sum(len(caches[0]) for kernel in kernels for caches in kernel.device_caches.values())

    base = torch.zeros(50_001, device="cuda")
    counts = []
    for num in (50_001, 2048 * 16, 4097, 16, 1):
        piece = Piece(NAME, (num,), 0, num, 0, 1, offset=0, row_stride=1)
        for seed in (7, 0, 1, 16, 2**31, 2**32 - 1, 2**32, 2**64 - 1):
            write(piece, base, base, seed, "rademacher")
            counts.append(num_compiled())
    assert counts[0] > 0 and len(set(counts)) == 1


class Small(nn.Module):
    """Tensors of two types, a tied one and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(61, 96)
        self.layers = nn.ModuleList(nn.Linear(96, 96) for _ in range(3))
        self.norm = nn.LayerNorm(96)
        self.head = nn.Linear(96, 61, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.ones(96))
        self.to(torch.bfloat16)
        self.norm.float()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens) * self.table
        for layer in self.layers:
            hidden = hidden + torch.relu(layer(hidden))
        return self.head(self.norm(hidden.float()).to(torch.bfloat16))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("sigma", ["absolute", "relative"])
@pytest.mark.parametrize("base", ["device", "pinned"])
def test_perturber_gives_the_bytes_of_a_cpu(scheme: str, sigma: str, base: str) -> None:
    on_cpu, on_gpu = Small(), Small().cuda()
    one = Perturber(Layout.of_module(on_cpu), scheme=scheme, sigma=sigma)
    other = Perturber(Layout.of_module(on_gpu), scheme=scheme, sigma=sigma, base=base, verify_every=2)
    assert other.describe()["writer"] == "triton" and one.describe()["rms"] == other.describe()["rms"]
    pointers = [p.data_ptr() for p in on_gpu.parameters()]
    original = [bytes_of(p) for p in on_gpu.parameters()]
    for seed in range(5):
        one.perturb(seed, 0.02)
        other.perturb(seed, 0.02)
        assert [bytes_of(p) for p in on_cpu.parameters()] == [bytes_of(p) for p in on_gpu.parameters()]
    other.reset()
    assert [bytes_of(p) for p in on_gpu.parameters()] == original
    assert [p.data_ptr() for p in on_gpu.parameters()] == pointers
    assert checksums([p.detach() for p in on_gpu.parameters()]) == checksums([p.detach() for p in Small().parameters()])
    other.verify_base()
    assert other.switch_s() > 0
    for a, b in zip(one.effective_rms(0.02, 3), other.effective_rms(0.02, 3), strict=True):
        assert a.pop("name") == b.pop("name") and a == pytest.approx(b, rel=1e-9)


def test_without_a_base_the_weights_come_back_roughly() -> None:
    model = Small().cuda()
    before = [p.detach().clone() for p in model.parameters()]
    perturber = Perturber(Layout.of_module(model), base="none")
    assert perturber.describe()["exact"] is False
    for seed in range(3):
        perturber.perturb(seed, 0.01)
    perturber.reset()
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert (parameter.detach() - old).abs().max() < 0.02


def test_a_captured_graph_sees_the_new_weights() -> None:
    model, tokens = Small().cuda(), torch.arange(32, device="cuda") % 61
    with torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                model(tokens)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = model(tokens)
        perturber = Perturber(Layout.of_module(model))
        seen = set()
        for seed in (1, 2, 3):
            perturber.perturb(seed, 0.05)
            graph.replay()
            assert torch.equal(logits, model(tokens))
            seen.add(bytes_of(logits))
        assert len(seen) == 3


def test_a_changed_base_is_noticed_on_the_gpu() -> None:
    weight = torch.zeros(1000, dtype=torch.bfloat16, device="cuda")
    piece = Piece("w", (1000,), 0, 1000, 0, 1, offset=0, row_stride=1)
    perturber = Perturber(Layout((LiveTensor("w", weight, (piece,)),), {}))
    perturber._base[0][17] = -0.0
    with pytest.raises(RuntimeError, match="copy of the base weights changed"):
        perturber.verify_base()
