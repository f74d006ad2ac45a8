"""How vLLM lays a checkpoint out over its ranks, as the pieces of a Layout: pure rules, which need no vLLM.

A live tensor of vLLM is seen as some rows, or some columns, of one matrix: the checkpoint tensors it is made of, one below the other
(q, k and v; gate and up), or the one tensor it is. Which rows or columns a rank holds follows from the kind of its module, by the names
that vLLM gives its parallel layers:

    QKVParallelLinear           heads of q, then of k, then of v; where there are fewer k/v heads than ranks, neighbours hold the same
    MergedColumnParallelLinear  an equal share of the rows of each part
    ColumnParallelLinear        an equal share of the rows
    RowParallelLinear           an equal share of the columns; its bias whole
    VocabParallelEmbedding      an equal share of the rows of the padded vocabulary; what is padding has no piece
    any other                   the whole tensor

These rules are not trusted: `different` compares every piece with the checkpoint, byte for byte, before a weight is touched. A model
whose tensors are transposed, repacked, permuted or quantised in loading does not pass, whatever the reason.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bitsperbyte.randopt.layout import Layout, LiveTensor, Piece, is_quantisation_scale, matrix_shape

READ_ELEMENTS = 2**24  # of a checkpoint tensor read at once
_PARALLEL = ("QKVParallelLinear", "MergedColumnParallelLinear", "ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding")
# attributes of vLLM's modules that hold tensors which are no weights
_STATE = ("kv_cache", "cos_sin_cache")


@dataclass(frozen=True)
class Share:
    """Rows (begin, end) of the matrix, one run below the other, and its columns (begin, end), None for all of them. `owned`: by run,
    whether this rank is the first that holds it."""

    rows: tuple[tuple[int, int], ...]
    cols: tuple[int, int] | None
    owned: tuple[bool, ...]


@dataclass(frozen=True)
class ShardLayout:
    """The layout of one rank. `owned` are its pieces that no lower rank holds: over all ranks each element of the checkpoint is owned
    once."""

    layout: Layout
    owned: frozenset[Piece]


def share_of(module: nn.Module, parameter: str, rows: int, cols: int, rank: int) -> Share:
    """What the module's `parameter` ("weight", "bias") holds on tensor-parallel rank `rank` of a matrix of `rows` by `cols`. ValueError
    where the module's own sizes contradict the matrix."""
    names = [cls.__name__ for cls in type(module).__mro__]
    kind = next((name for name in names if name in _PARALLEL), None)
    world = getattr(module, "tp_size", 1)
    is_whole = kind is None or world == 1 or kind == "RowParallelLinear" and parameter == "bias"
    if kind == "VocabParallelEmbedding":
        begin, end = _vocabulary_range(module, rows)
        return Share(((begin, end),) if begin < end else (), None, (not is_whole or rank == 0,) if begin < end else ())
    if is_whole and kind not in ("QKVParallelLinear", "MergedColumnParallelLinear"):
        return Share(((0, rows),), None, (rank == 0,))
    is_first, rank = not is_whole or rank == 0, getattr(module, "tp_rank", rank)
    if kind == "RowParallelLinear":
        return Share(((0, rows),), _equal_share(cols, rank, world), (True,))
    if kind == "QKVParallelLinear":
        heads, kv_heads = module.total_num_heads, module.total_num_kv_heads
        replicas = max(1, world // kv_heads)
        parts = [(heads * module.head_size, rank, world, is_first)]
        parts += [(kv_heads * size, rank // replicas, world // replicas, is_first and rank % replicas == 0)
                  for size in (module.head_size, getattr(module, "v_head_size", module.head_size))]
    elif kind == "MergedColumnParallelLinear":
        parts = [(size, rank, world, is_first) for size in module.output_sizes]
    else:
        parts = [(rows, rank, world, is_first)]
    if (total := sum(size for size, *_ in parts)) != rows:
        raise ValueError(f"vLLM makes it of {total} rows, and the checkpoint has {rows}")
    held, owned, above = [], [], 0
    for size, share, shares, is_owner in parts:
        begin, end = _equal_share(size, share, shares)
        held.append((above + begin, above + end))
        owned.append(is_owner)
        above += size
    return Share(tuple(held), None, tuple(owned))


def _equal_share(size: int, rank: int, world: int) -> tuple[int, int]:
    if size % world:
        raise ValueError(f"{size} rows or columns cannot be split into {world} equal shares")
    return size // world * rank, size // world * (rank + 1)


def _vocabulary_range(module: nn.Module, rows: int) -> tuple[int, int]:
    indices = module.shard_indices
    if indices.added_vocab_end_index > indices.added_vocab_start_index:
        raise ValueError("vLLM adds entries to its vocabulary (LoRA), which no checkpoint holds")
    begin, end = indices.org_vocab_start_index, indices.org_vocab_end_index
    if end > rows:
        raise ValueError(f"vLLM has {end} entries of the vocabulary, and the checkpoint {rows}")
    return begin, end


# -- names ------------------------------------------------------------------------------------------------------------


def live_names(model: nn.Module, stored: Sequence[str]) -> dict[str, list[str]]:
    """Live parameter name -> names in the checkpoint of what it is made of, in order. Those that the checkpoint lacks are left out of
    the result. The model's own `hf_to_vllm_mapper` and `packed_modules_mapping` say how names change; a checkpoint may leave out, or
    have, the prefix `model.`."""
    mapper, packed = getattr(model, "hf_to_vllm_mapper", None), dict(getattr(model, "packed_modules_mapping", None) or {})
    for part, (whole, _) in (getattr(mapper, "orig_to_new_stacked", None) or {}).items():  # newer versions name them there
        parts = packed.setdefault(whole.strip("."), [])
        if part.strip(".") not in parts:
            parts.append(part.strip("."))
    by_name: dict[str, str] = {}
    for name in stored:
        if (renamed := _renamed(mapper, name)) is not None:
            by_name.setdefault(renamed, name)

    def found(name: str) -> str | None:
        return next((by_name[n] for n in (name, name.removeprefix("model."), f"model.{name}") if n in by_name), None)

    names = {}
    for live, _ in model.named_parameters(remove_duplicate=False):
        owner = live.split(".")
        wanted = [live]
        if len(owner) > 1 and (parts := packed.get(owner[-2])) and found(live) is None:
            wanted = [".".join([*owner[:-2], part, owner[-1]]) for part in parts]
        parts_found = [found(name) for name in wanted]
        if None not in parts_found:
            names[live] = parts_found
    return names


def _renamed(mapper: Any, name: str) -> str | None:
    """The name after the model's mapper, but for what joins several tensors into one."""
    if mapper is None:
        return name
    if getattr(mapper, "orig_to_new_stacked", None):
        mapper = dataclasses.replace(mapper, orig_to_new_stacked={})
    map_name = getattr(mapper, "map_name", None) or mapper._map_name
    return map_name(name)


# -- the layout -------------------------------------------------------------------------------------------------------


def shard_layout(model: nn.Module, shapes: Mapping[str, tuple[int, ...]], rank: int) -> ShardLayout:
    """The layout of a vLLM model on tensor-parallel rank `rank`; `shapes` are those of the checkpoint's tensors.

    ValueError for what noise by checkpoint tensor cannot be told for: a parameter that the checkpoint has no tensor for, shapes that no
    rule explains, and weights that are kept in a second form.
    """
    if derived := next(derived_tensors(model), None):
        raise ValueError(f"vLLM keeps {derived}, which it made from the weights in loading and which noise on the weights would not reach: "
                         "this model needs the native engine")
    names = live_names(model, list(shapes))
    skipped: dict[str, str] = {}
    tensors, owned = [], set()
    seen: set[tuple[str, int]] = set()
    for name, tensor in model.named_parameters(remove_duplicate=False):
        if tensor.numel() == 0 and name not in names or (str(tensor.device), tensor.data_ptr()) in seen and tensor.numel():
            continue
        if tensor.is_floating_point() and is_quantisation_scale(name, model):
            skipped[name] = "a quantisation scale"
            continue
        seen.add((str(tensor.device), tensor.data_ptr()))
        if name not in names:
            raise ValueError(f"the parameter {name} of vLLM's model is not made of tensors of the checkpoint that are known here: this model "
                             "needs the native engine")
        pieces = list(_pieces(model, name, tensor, names[name], shapes, rank))
        tensors.append(LiveTensor(name, tensor, tuple(piece for piece, _ in pieces)))
        owned |= {piece for piece, is_owner in pieces if is_owner}
    return ShardLayout(Layout(tuple(tensors), skipped), frozenset(owned))


def _pieces(model: nn.Module, name: str, tensor: torch.Tensor, stored: Sequence[str], shapes: Mapping[str, tuple[int, ...]],
            rank: int) -> Iterator[tuple[Piece, bool]]:
    """The pieces of one live tensor, each with whether this rank owns it."""
    module_name, _, parameter = name.rpartition(".")
    matrices = [matrix_shape(shapes[part]) for part in stored]
    rows, cols = sum(r for r, _ in matrices), matrices[0][1]
    try:
        share = share_of(model.get_submodule(module_name), parameter, rows, cols, rank)
    except ValueError as error:
        raise ValueError(f"{name} cannot be laid out: {error}; this model needs the native engine") from None
    begin, end = share.cols or (0, cols)
    held_rows = sum(e - b for b, e in share.rows)
    live_rows, live_cols = matrix_shape(tuple(tensor.shape))
    is_padded = any(cls.__name__ == "VocabParallelEmbedding" for cls in type(model.get_submodule(module_name)).__mro__)
    if any(c != cols for _, c in matrices) or live_cols != end - begin or (held_rows > live_rows if is_padded else held_rows != live_rows):
        raise ValueError(f"vLLM holds {name} as {tuple(tensor.shape)}, which is no share of {', '.join(stored)} of the checkpoint "
                         f"({rows} rows by {cols}) that is known here: it is transposed, repacked or split in another way; this model needs "
                         "the native engine")
    row_stride, col_stride = _strides(name, tensor)
    offset = 0
    for (first, last), is_owner in zip(share.rows, share.owned, strict=True):
        above = 0
        for part, (part_rows, _) in zip(stored, matrices, strict=True):
            low, high = max(first, above) - above, min(last, above + part_rows) - above
            if low < high:
                yield Piece(part, shapes[part], low, high, begin, end, offset, row_stride, col_stride), is_owner
                offset += (high - low) * row_stride
            above += part_rows


def _strides(name: str, tensor: torch.Tensor) -> tuple[int, int]:
    """Of rows and columns. ValueError for memory that is no matrix."""
    if tensor.dim() == 2:
        return tensor.stride(0), tensor.stride(1) if tensor.shape[1] > 1 else 1
    if tensor.dim() < 2:
        return (tensor.stride(0) if tensor.dim() else 1), 1
    if not tensor.is_contiguous():
        raise ValueError(f"vLLM holds {name} with strides {tensor.stride()}, which is no matrix in memory: this model needs the native engine")
    return matrix_shape(tuple(tensor.shape))[1], 1


def derived_tensors(model: nn.Module) -> Iterator[str]:
    """Names of floating-point matrices that modules keep beside their parameters and buffers, in memory of their own: a second form of
    weights (absorbed projections of latent attention, packed copies) that a change of the weights would not reach."""
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute in (*_STATE, "_parameters", "_buffers", "_modules"):
                continue
            values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
            for tensor in values:
                if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point() or tensor.dim() < 2 or not tensor.numel():
                    continue
                if tensor.untyped_storage().data_ptr() not in known:
                    yield f"{name}.{attribute}" if name else attribute


# -- against the checkpoint -------------------------------------------------------------------------------------------


def different(layout: Layout, read: Callable[[str, int, int, int, int], torch.Tensor]) -> list[str]:
    """Live tensors whose bytes are not those of the checkpoint in the live type. `read(name, row_begin, row_end, col_begin, col_end)`
    gives that rectangle of a checkpoint tensor, seen as a matrix."""
    wrong = []
    for live in layout.tensors:
        for piece in live.pieces:
            if not all(_equal_bytes(part.view(live.tensor.detach()), read(part.name, part.row_begin, part.row_end, part.col_begin, part.col_end))
                       for part in piece.cut(READ_ELEMENTS)):
                wrong.append(f"{live.name} (of {piece.name})")
                break
    return wrong


def _equal_bytes(live: torch.Tensor, expected: torch.Tensor) -> bool:
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[live.element_size()]
    expected = expected.to(live.device).to(live.dtype).reshape(live.shape)
    return torch.equal(live.contiguous().view(words), expected.contiguous().view(words))


def squares(shard: ShardLayout) -> dict[str, tuple[float, int]]:
    """Of each checkpoint tensor, over the pieces that this rank owns: the float64 sum of squares, and the number of elements."""
    sums: dict[str, tuple[float, int]] = {}
    for live in shard.layout.tensors:
        for piece in live.pieces:
            if piece in shard.owned:
                total, num = sums.get(piece.name, (0.0, 0))
                parts = [part.view(live.tensor.detach()).double().square().sum() for part in piece.cut(2**22)]
                sums[piece.name] = (total + float(torch.stack(parts).sum()), num + piece.num_elements)
    return sums


def total_squares(ranks: Sequence[Mapping[str, tuple[float, int]]], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[float, int]]:
    """`squares` summed over all ranks. ValueError unless each tensor's elements are all owned, once."""
    totals: dict[str, tuple[float, int]] = {}
    for rank in ranks:
        for name, (total, num) in rank.items():
            before = totals.get(name, (0.0, 0))
            totals[name] = (before[0] + total, before[1] + num)
    for name, (_, num) in totals.items():
        rows, cols = matrix_shape(tuple(shapes[name]))
        if num != rows * cols:
            raise ValueError(f"the ranks hold {num:,} of the {rows * cols:,} elements of {name}: vLLM splits it in a way that is not known here; "
                             "this model needs the native engine")
    return totals
