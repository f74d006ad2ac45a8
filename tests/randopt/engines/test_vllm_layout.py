"""One seed, the same bytes: the shards that vLLM makes of a model against the model as transformers holds it.

The shards here are built by cutting and joining tensors as vLLM's documentation describes it, in code that shares nothing with the rules
under test; tests/vllm does the same with vLLM's own loader.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from bitsperbyte.randopt.engines import vllm_layout
from bitsperbyte.randopt.engines.vllm_layout import ShardLayout, derived_tensors, different, live_names, shard_layout, squares, total_squares
from bitsperbyte.randopt.layout import Layout, matrix_shape
from bitsperbyte.randopt.perturb import Perturber

KINDS = ("llama", "qwen2", "qwen3")
SEEDS = [0, 1, 12345, 2**31, 2**32 + 1, 2**40 + 3, 2**53, 2**63 - 1, 2**63, 2**64 - 1]
SIGMA, HEAD, HEADS, KV_HEADS, PAD_TO = 0.05, 8, 4, 2, 64


class ColumnParallelLinear(nn.Module):
    pass


class QKVParallelLinear(ColumnParallelLinear):
    pass


class MergedColumnParallelLinear(ColumnParallelLinear):
    pass


class RowParallelLinear(nn.Module):
    pass


class VocabParallelEmbedding(nn.Module):
    pass


class ParallelLMHead(VocabParallelEmbedding):
    pass


def frozen(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.clone(memory_format=torch.contiguous_format), requires_grad=False)


def put(root: nn.Module, path: str, module: nn.Module) -> None:
    *folders, last = path.split(".")
    for folder in folders:
        if folder not in root._modules:
            root.add_module(folder, nn.Module())
        root = root.get_submodule(folder)
    root.add_module(last, module)


def share(tensor: torch.Tensor, rank: int, world: int, dim: int = 0) -> torch.Tensor:
    return tensor.chunk(world, dim)[rank]


def vocabulary(tensor: torch.Tensor, rank: int, world: int, cls: type[nn.Module]) -> nn.Module:
    padded = -(-len(tensor) // PAD_TO) * PAD_TO
    rows = padded // world
    whole = torch.cat([tensor, torch.full((padded - len(tensor), tensor.shape[1]), 7.0, dtype=tensor.dtype)])
    module = cls()
    begin, end = min(rows * rank, len(tensor)), min(rows * (rank + 1), len(tensor))
    module.shard_indices = SimpleNamespace(org_vocab_start_index=begin, org_vocab_end_index=end, added_vocab_start_index=len(tensor),
                                           added_vocab_end_index=len(tensor))
    module.tp_size, module.tp_rank = world, rank
    module.weight = frozen(whole[rows * rank : rows * (rank + 1)])
    return module


def as_vllm(model: nn.Module, rank: int, world: int) -> nn.Module:
    """Rank `rank` of `world` of a Llama-like model."""
    made = nn.Module()
    made.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    tensors = {name: p.detach() for name, p in model.named_parameters()}
    put(made, "model.embed_tokens", vocabulary(tensors["model.embed_tokens.weight"], rank, world, VocabParallelEmbedding))
    head = ParallelLMHead() if "lm_head.weight" not in tensors else vocabulary(tensors["lm_head.weight"], rank, world, ParallelLMHead)
    if "lm_head.weight" not in tensors:
        head.shard_indices, head.weight = made.model.embed_tokens.shard_indices, made.model.embed_tokens.weight
    for layer in range(2):
        at = f"model.layers.{layer}"
        qkv = QKVParallelLinear()
        qkv.total_num_heads, qkv.total_num_kv_heads, qkv.head_size, qkv.v_head_size = HEADS, KV_HEADS, HEAD, HEAD
        joined = {}
        for kind in ("weight", "bias"):
            if f"{at}.self_attn.q_proj.{kind}" in tensors:
                heads = [tensors[f"{at}.self_attn.{p}_proj.{kind}"].unflatten(0, (-1, HEAD)) for p in "qkv"]
                kv = [share(x, rank, world) if world <= KV_HEADS else x[rank * KV_HEADS // world :][:1] for x in heads[1:]]
                joined[kind] = torch.cat([share(heads[0], rank, world), *kv]).flatten(0, 1)
        gate_up, output, down = MergedColumnParallelLinear(), RowParallelLinear(), RowParallelLinear()
        gate_up.output_sizes = [len(tensors[f"{at}.mlp.{p}_proj.weight"]) for p in ("gate", "up")]
        parts = [share(tensors[f"{at}.mlp.{p}_proj.weight"], rank, world) for p in ("gate", "up")]
        for module, weights in ((qkv, joined), (gate_up, {"weight": torch.cat(parts)}),
                                (output, {"weight": share(tensors[f"{at}.self_attn.o_proj.weight"], rank, world, 1)}),
                                (down, {"weight": share(tensors[f"{at}.mlp.down_proj.weight"], rank, world, 1)})):
            module.tp_rank, module.tp_size = rank, world
            for kind, tensor in weights.items():
                module.register_parameter(kind, frozen(tensor))
        for path, module in (("self_attn.qkv_proj", qkv), ("self_attn.o_proj", output), ("mlp.gate_up_proj", gate_up), ("mlp.down_proj", down)):
            put(made, f"{at}.{path}", module)
    for name, tensor in tensors.items():
        if "norm" in name:
            norm = nn.Module()
            norm.weight = frozen(tensor)
            put(made, name.removesuffix(".weight"), norm)
    made.add_module("lm_head", head)
    return made


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16)


def padding(shard: ShardLayout) -> dict[str, torch.Tensor]:
    """What no piece names, by live tensor."""
    left = {}
    for live in shard.layout.tensors:
        rest = torch.ones_like(live.tensor, dtype=torch.bool)
        for piece in live.pieces:
            piece.view(rest)[:] = False
        left[live.name] = live.tensor.detach()[rest].clone()
    return left


@pytest.mark.parametrize("scheme", ["rademacher", "binomial"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_ten_seeds_give_the_bytes_of_the_checkpoint_under_one_two_and_four_ranks(tiny_model: Callable, kind: str, tied: bool, scheme: str) -> None:
    model = tiny_model(kind, tie_word_embeddings=tied).bfloat16()
    shapes = shapes_of(model)
    worlds = {world: [shard_layout(as_vllm(model, rank, world), shapes, rank) for rank in range(world)] for world in (1, 2, 4)}
    shards = [shard for shards in worlds.values() for shard in shards]
    for world, ranks in worlds.items():
        assert total_squares([squares(shard) for shard in ranks], shapes).keys() == shapes.keys()
        assert any(n for shard in ranks for n in map(len, padding(shard).values())), f"no padding with {world} ranks: the test lost it"
    before = [padding(shard) for shard in shards]
    whole = Perturber(Layout.of_module(model), scheme=scheme)
    perturbers = [Perturber(shard.layout, scheme=scheme) for shard in shards]
    weights = dict(model.named_parameters())
    for seed in SEEDS:
        for perturber in (whole, *perturbers):
            perturber.perturb(seed, SIGMA)
        for shard, kept in zip(shards, before, strict=True):
            for live in shard.layout.tensors:
                for piece in live.pieces:
                    expected = weights[piece.name].detach().view(matrix_shape(piece.shape))
                    expected = expected[piece.row_begin : piece.row_end, piece.col_begin : piece.col_end]
                    assert torch.equal(words(piece.view(live.tensor.detach())), words(expected)), (live.name, piece, seed)
            assert all(torch.equal(now, kept[name]) for name, now in padding(shard).items())
    for perturber in (whole, *perturbers):
        perturber.reset()
    base = tiny_model(kind, tie_word_embeddings=tied).bfloat16()
    assert all(torch.equal(words(p), words(weights[name])) for name, p in base.named_parameters())
    assert not any(different(shard.layout, reader(base)) for shard in shards)


def reader(model: nn.Module) -> Callable[..., torch.Tensor]:
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return lambda name, r0, r1, c0, c1: weights[name].view(matrix_shape(tuple(weights[name].shape)))[r0:r1, c0:c1]


def test_every_element_is_owned_once_and_squares_add_up(tiny_model: Callable) -> None:
    model = tiny_model("qwen2")
    shapes = shapes_of(model)
    for world in (1, 2, 4):
        shards = [shard_layout(as_vllm(model, rank, world), shapes, rank) for rank in range(world)]
        counts = {name: torch.zeros(matrix_shape(shape), dtype=torch.int64) for name, shape in shapes.items()}
        for shard in shards:
            for piece in shard.owned:
                counts[piece.name][piece.row_begin : piece.row_end, piece.col_begin : piece.col_end] += 1
        assert all((count == 1).all() for count in counts.values())
        found = total_squares([squares(shard) for shard in shards], shapes)
        for name, p in model.named_parameters():
            assert found[name] == (pytest.approx(float(p.double().square().sum()), rel=1e-12), p.numel())
    with pytest.raises(ValueError, match="elements of .*vLLM splits it in a way that is not known"):
        total_squares([squares(shards[0])], shapes)


def test_a_tensor_in_another_order_is_seen(tiny_model: Callable) -> None:
    """Every kind of wrong loading that leaves the shapes right."""
    model = tiny_model("qwen2")
    shapes = shapes_of(model)

    def wrong(change: Callable[[nn.Module], Any]) -> list[str]:
        made = as_vllm(model, 1, 2)
        change(made)
        return different(shard_layout(made, shapes, 1).layout, reader(model))

    assert wrong(lambda made: None) == []
    layer = "model.layers.1."
    assert wrong(lambda made: made.get_parameter(layer + "self_attn.qkv_proj.weight").copy_(
        made.get_parameter(layer + "self_attn.qkv_proj.weight").flip(0))) == [f"{layer}self_attn.qkv_proj.weight (of {layer}self_attn.q_proj.weight)"]
    swapped = wrong(lambda made: made.get_parameter(layer + "mlp.gate_up_proj.weight").copy_(
        made.get_parameter(layer + "mlp.gate_up_proj.weight").roll(24, 0)))
    assert swapped == [f"{layer}mlp.gate_up_proj.weight (of {layer}mlp.gate_proj.weight)"]
    assert wrong(lambda made: made.get_parameter("model.norm.weight")[3].add_(1e-6)) == ["model.norm.weight (of model.norm.weight)"]


def test_models_that_no_rule_explains_are_refused(tiny_model: Callable) -> None:
    model = tiny_model("llama")
    shapes = shapes_of(model)

    def refusal(change: Callable[[nn.Module], Any], shapes: dict = shapes, world: int = 2) -> str:
        made = as_vllm(model, 0, world)
        change(made)
        with pytest.raises(ValueError) as caught:
            shard_layout(made, shapes, 0)
        return str(caught.value)

    def transpose(made: nn.Module) -> None:
        made.model.layers.get_submodule("0.self_attn.o_proj").weight = frozen(made.model.layers.get_submodule("0.self_attn.o_proj").weight.t())

    assert "which is no share of" in refusal(transpose)
    assert "repacked" in refusal(lambda made: setattr(made.model.layers.get_submodule("0.mlp.down_proj"), "weight", frozen(torch.zeros(0))))
    assert "gate of vLLM's model is not made of tensors" in refusal(lambda made: made.register_parameter("gate", frozen(torch.ones(3))))
    assert "vLLM keeps model.norm.W_UK" in refusal(lambda made: setattr(made.model.norm, "W_UK", torch.ones(2, 2)))
    assert "LoRA" in refusal(lambda made: setattr(made.lm_head.shard_indices, "added_vocab_end_index", 99))
    taller = {**shapes, "model.layers.0.self_attn.k_proj.weight": (24, 32)}
    assert "makes it of 64 rows, and the checkpoint has 72" in refusal(lambda made: None, taller)
    assert "entries of the vocabulary" in refusal(lambda made: None, {**shapes, "model.embed_tokens.weight": (50, 32)})
    for row in (taller, shapes):
        assert "native engine" in refusal(transpose, row)


def test_state_that_is_no_weight_is_no_second_form() -> None:
    module = nn.Module()
    module.weight = frozen(torch.ones(2, 2))
    module.register_buffer("cos_sin", torch.ones(2, 2))
    module.kv_cache, module.scale, module.index, module.view = [torch.ones(2, 2)], torch.ones(3), torch.ones(2, 2).long(), module.weight.t()
    assert list(derived_tensors(module)) == []
    module.packed = [torch.ones(2, 2)]
    assert list(derived_tensors(nn.ModuleDict({"a": module}))) == ["a.packed"]


def test_names_follow_the_models_own_maps() -> None:
    model = nn.Module()
    for path in ("language_model.model.layers.0.qkv", "language_model.lm_head"):
        linear = nn.Module()
        linear.weight = frozen(torch.ones(2, 2))
        put(model, path, linear)
    model.packed_modules_mapping = {"qkv": ["q", "k", "v"]}
    model.hf_to_vllm_mapper = SimpleNamespace(_map_name=lambda name: None if "vision" in name else "language_model." + name)
    stored = ["vision.weight", *(f"model.layers.0.{p}.weight" for p in "vkq"), "lm_head.weight"]
    assert live_names(model, stored) == {"language_model.model.layers.0.qkv.weight": [f"model.layers.0.{p}.weight" for p in "qkv"],
                                         "language_model.lm_head.weight": ["lm_head.weight"]}
    assert "language_model.lm_head.weight" not in live_names(model, stored[:-1])
    plain = nn.Module()
    put(plain, "model.norm", nn.LayerNorm(2))
    assert live_names(plain, ["norm.weight", "model.norm.bias"]) == {"model.norm.weight": ["norm.weight"], "model.norm.bias": ["model.norm.bias"]}


def test_a_checkpoint_that_joins_its_tensors_itself() -> None:
    """One stored tensor for q, k and v, as some models have it: a rank's rows of it lie apart."""
    fused = torch.arange(64 * 3, dtype=torch.float32).view(64, 3)
    q, k, v = fused.split([32, 16, 16])
    for rank in range(4):
        model, module = nn.Module(), QKVParallelLinear()
        module.total_num_heads, module.total_num_kv_heads, module.head_size, module.tp_rank, module.tp_size = HEADS, KV_HEADS, HEAD, rank, 4
        module.weight = frozen(torch.cat([q[rank * 8 :][:8], *(x[rank // 2 * 8 :][:8] for x in (k, v))]))
        model.packed_modules_mapping = {"qkv_proj": ["qkv_proj"]}
        put(model, "layer.qkv_proj", module)
        shard = shard_layout(model, {"layer.qkv_proj.weight": (64, 3)}, rank)
        assert different(shard.layout, lambda name, r0, r1, c0, c1: fused[r0:r1, c0:c1]) == []
        assert len(shard.owned) == (3 if rank % 2 == 0 else 1)


def test_layers_without_a_part_in_the_split_are_whole_on_every_rank() -> None:
    for rank in range(2):
        module = ColumnParallelLinear()
        module.tp_rank, module.tp_size = 0, 1  # as vLLM sets them for a layer that is not split
        assert vllm_layout.share_of(module, "weight", 6, 4, rank) == vllm_layout.Share(((0, 6),), None, (rank == 0,))
        row = RowParallelLinear()
        row.tp_rank, row.tp_size = rank, 2
        assert vllm_layout.share_of(row, "bias", 6, 1, rank).owned == (rank == 0,)
        assert vllm_layout.share_of(row, "weight", 6, 4, rank).cols == (2 * rank, 2 * rank + 2)
        with pytest.raises(ValueError, match="5 rows or columns cannot be split into 2"):
            vllm_layout.share_of(row, "weight", 6, 5, rank)
