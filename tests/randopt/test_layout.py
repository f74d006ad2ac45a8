"""Layouts: any fusing, padding and sharding of a checkpoint gives the bytes of the checkpoint itself."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from bitsperbyte.randopt import noise
from bitsperbyte.randopt.layout import Layout, LiveTensor, Piece, is_quantisation_scale, matrix_shape
from bitsperbyte.randopt.perturb import Perturber

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB, PADDED = 24, 4, 4, 6, 40, 29, 32
SHAPES = {
    "embed.weight": (VOCAB, HIDDEN),
    "q.weight": (HEADS * HEAD_DIM, HIDDEN), "q.bias": (HEADS * HEAD_DIM,),
    "k.weight": (KV_HEADS * HEAD_DIM, HIDDEN), "k.bias": (KV_HEADS * HEAD_DIM,),
    "v.weight": (KV_HEADS * HEAD_DIM, HIDDEN), "v.bias": (KV_HEADS * HEAD_DIM,),
    "o.weight": (HIDDEN, HEADS * HEAD_DIM),
    "gate.weight": (INNER, HIDDEN), "up.weight": (INNER, HIDDEN), "down.weight": (HIDDEN, INNER),
    "norm.weight": (HIDDEN,),
    "experts.weight": (3, 5, 7),
}  # fmt: skip
FUSED = (("qkv.weight", ("q.weight", "k.weight", "v.weight")), ("qkv.bias", ("q.bias", "k.bias", "v.bias")),
         ("gate_up.weight", ("gate.weight", "up.weight")))  # fmt: skip


def checkpoint() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()}


def shard(tensors: dict[str, torch.Tensor], rank: int, world: int) -> Layout:
    """Rank `rank` of `world` as a serving engine lays it out: q, k, v and gate, up fused and split by rows, o and down split by
    columns, the vocabulary padded and then split by rows, the rest on every rank."""
    live: list[LiveTensor] = []
    for fused, names in FUSED:
        pieces, values, offset = [], [], 0
        for name in names:
            rows, cols = matrix_shape(SHAPES[name])
            begin, end = rows // world * rank, rows // world * (rank + 1)
            pieces.append(Piece(name, SHAPES[name], begin, end, 0, cols, offset, cols))
            values.append(tensors[name][begin:end])
            offset += (end - begin) * cols
        live.append(LiveTensor(fused, torch.cat(values), tuple(pieces)))
    for name in ("o.weight", "down.weight"):
        rows, cols = SHAPES[name]
        begin, end = cols // world * rank, cols // world * (rank + 1)
        held = tensors[name][:, begin:end].clone(memory_format=torch.contiguous_format)
        live.append(LiveTensor(name, held, (Piece(name, SHAPES[name], 0, rows, begin, end, 0, end - begin),)))
    begin, end = PADDED // world * rank, PADDED // world * (rank + 1)
    padded = torch.cat([tensors["embed.weight"], torch.full((PADDED - VOCAB, HIDDEN), 3.0, dtype=torch.bfloat16)])[begin:end].clone()
    pieces = (Piece("embed.weight", SHAPES["embed.weight"], begin, min(end, VOCAB), 0, HIDDEN, 0, HIDDEN),) if begin < VOCAB else ()
    live.append(LiveTensor("embed.weight", padded, pieces))
    for name in ("norm.weight", "experts.weight"):
        rows, cols = matrix_shape(SHAPES[name])
        live.append(LiveTensor(name, tensors[name].clone(), (Piece(name, SHAPES[name], 0, rows, 0, cols, 0, cols),)))
    return Layout(tuple(live), {})


def gathered(shards: list[Layout]) -> dict[str, torch.Tensor]:
    """The checkpoint again, from the pieces of all ranks; every element must be held."""
    whole = {name: torch.full(matrix_shape(shape), torch.nan, dtype=torch.bfloat16) for name, shape in SHAPES.items()}
    for layout in shards:
        for live in layout.tensors:
            for piece in live.pieces:
                whole[piece.name][piece.row_begin : piece.row_end, piece.col_begin : piece.col_end] = piece.view(live.tensor)
    assert not any(tensor.isnan().any() for tensor in whole.values())
    return {name: tensor.view(SHAPES[name]) for name, tensor in whole.items()}


@pytest.mark.parametrize("scheme", noise.SCHEMES)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_one_seed_gives_the_same_bytes_in_every_layout(world: int, scheme: str) -> None:
    tensors = checkpoint()
    shards = [shard(tensors, rank, world) for rank in range(world)]
    paddings = [layout.tensors[5].tensor[max(0, VOCAB - PADDED // world * rank) :].clone() for rank, layout in enumerate(shards)]
    for layout in shards:
        Perturber(layout, scheme=scheme).perturb(2**40 + 1, 0.05)
    for name, tensor in gathered(shards).items():
        expected = noise.perturbed_reference(tensors[name], name, 2**40 + 1, 0.05, scheme=scheme)
        assert torch.equal(tensor.view(torch.int16), expected.view(torch.int16)), name
    for rank, layout in enumerate(shards):  # what no piece names gets no noise
        assert torch.equal(layout.tensors[5].tensor[max(0, VOCAB - PADDED // world * rank) :], paddings[rank])


@given(
    shape=st.tuples(st.integers(1, 30), st.integers(1, 30)), most=st.integers(1, 200), data=st.data(), pad=st.integers(0, 3)
)
@settings(max_examples=60, deadline=None)
def test_cut_pieces_are_the_piece(shape: tuple[int, int], most: int, data: st.DataObject, pad: int) -> None:
    begin_end = [sorted(data.draw(st.lists(st.integers(0, n), min_size=2, max_size=2, unique=True))) for n in shape]
    (row_begin, row_end), (col_begin, col_end) = begin_end
    piece = Piece("w", shape, row_begin, row_end, col_begin, col_end, pad, col_end - col_begin + pad)
    live = torch.arange(piece.last + 1)
    parts = list(piece.cut(most))
    assert sum(part.num_elements for part in parts) == piece.num_elements
    rebuilt = torch.full(shape, -1)
    for part in parts:
        rebuilt[part.row_begin : part.row_end, part.col_begin : part.col_end] = part.view(live)
        assert part.num_elements <= max(most, 1)
    assert torch.equal(rebuilt[row_begin:row_end, col_begin:col_end], piece.view(live))
    first = torch.arange(shape[0] * shape[1]).view(shape)[row_begin, col_begin]
    assert piece.flat_begin == first
    consecutive = torch.arange(shape[0] * shape[1]).view(shape)[row_begin:row_end, col_begin:col_end].flatten().diff().eq(1).all()
    assert piece.is_run == bool(consecutive and piece.view(live).flatten().diff().eq(1).all())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.conv = nn.Parameter(torch.randn(6, 4).t())
        self.gain = nn.Parameter(torch.tensor(2.0))
        self.counts = nn.Parameter(torch.zeros(4, dtype=torch.int32), requires_grad=False)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.ones(4))


def test_a_module_is_its_parameters_with_tied_ones_once() -> None:
    model = Model()
    layout = Layout.of_module(model)
    assert layout.names == ["conv", "gain", "embed.weight", "layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"]
    assert layout.num_elements == sum(p.numel() for p in model.parameters()) - model.counts.numel()
    assert list(layout.skipped) == ["counts"] and "int32" in layout.skipped["counts"]
    for live in layout.tensors:
        assert live.tensor.data_ptr() == dict(model.named_parameters())[live.name].data_ptr()
        (piece,) = live.pieces
        assert torch.equal(piece.view(live.tensor), live.tensor.detach().reshape(matrix_shape(piece.shape)))


def test_names_of_the_checkpoint_decide() -> None:
    layout = Layout.of_module(Model(), {"head.weight": "lm_head.weight", "conv": "c.weight"})
    assert {"lm_head.weight", "c.weight"} < set(layout.names) and "embed.weight" not in layout.names


def test_parameters_tied_by_memory_alone_count_once() -> None:
    model = Model()
    model.head.weight = nn.Parameter(model.embed.weight.detach())
    assert model.head.weight is not model.embed.weight
    assert Layout.of_module(model).names.count("embed.weight") == 1 and "head.weight" not in Layout.of_module(model).names


def test_modules_that_cannot_be_laid_out_are_refused() -> None:
    model = Model()
    with pytest.raises(ValueError, match="mapped to one checkpoint tensor"):
        Layout.of_module(model, {"conv": "x", "gain": "x"})
    model.view = nn.Parameter(model.embed.weight.detach()[1:3])
    with pytest.raises(ValueError, match="share part of their memory"):
        Layout.of_module(model)
    model.view = nn.Parameter(torch.randn(4, 3, 2).permute(0, 2, 1))
    with pytest.raises(ValueError, match="view of strides .* is no matrix in memory"):
        Layout.of_module(model)
    model.view = nn.Parameter(torch.zeros(4, device="meta"))
    with pytest.raises(ValueError, match="device meta"):
        Layout.of_module(model)


def test_layouts_that_contradict_themselves_are_refused() -> None:
    tensor = torch.zeros(10)
    with pytest.raises(ValueError, match="reaches beyond the 10 elements"):
        Layout((LiveTensor("w", tensor, (Piece("w", (11,), 0, 11, 0, 1, 0, 1),)),), {})
    halves = tuple(Piece("w", (n,), 0, 5, 0, 1, o, 1) for n, o in ((5, 0), (6, 5)))
    with pytest.raises(ValueError, match="the shapes"):
        Layout((LiveTensor("w", tensor, halves),), {})


def test_quantisation_scales_are_told_from_learned_scales() -> None:
    plain, quantised = nn.Module(), nn.Module()
    for module in (plain, quantised):
        module.attn_scale = nn.Parameter(torch.ones(3))
        module.weight_scale_inv = nn.Parameter(torch.ones(3))
        module.weight = nn.Parameter(torch.ones(3))
    quantised.register_buffer("qweight", torch.zeros(3, dtype=torch.int8))
    model = nn.ModuleDict({"plain": plain, "quantised": quantised})
    assert Layout.of_module(model).skipped == dict.fromkeys(
        ["plain.weight_scale_inv", "quantised.attn_scale", "quantised.weight_scale_inv"], "a quantisation scale"
    )
    for name in ("weight_scale", "proj.input_scale", "a.scales", "a.qzeros", "w13_weight_scale_inv", "k_scale", "g.weight_zero_point"):
        assert is_quantisation_scale(name, model), name
    for name in ("plain.weight", "upscale.weight", "scaler", "plain.q_gain"):
        assert not is_quantisation_scale(name, model), name
