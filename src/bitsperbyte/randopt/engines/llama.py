"""Decode steps of the Llama family (Llama, Mistral, Qwen2, Qwen3, Gemma) with few launches: ten a layer, where the transformers forward
takes about 45.

It computes with the parameters of the transformers model and owns none. `fuse_projections` first lays q, k and v, and gate and up, of each
layer side by side in memory, so that one matrix product serves each group; the model's own parameters become views of those buffers,
under their names, each contiguous: weights are still switched, scored and exported one by one.

Shapes as in layer_ops.py; N prompts of L positions in a prefill, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bitsperbyte.randopt.engines.layer_ops import ops_for

FAMILY = {"llama", "mistral", "qwen2", "qwen3", "gemma"}
ROTARY = {"default", "linear", "llama3", "yarn"}  # frequencies that do not depend on the length
ACTIVATION_NAMES = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}


@dataclass(frozen=True)
class _Layer:
    """One layer's weights. qkv and gate_up are the fused buffers; biases may be None."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


def why_not(model: nn.Module) -> str | None:
    """None where LlamaSteps computes what this transformers model does; otherwise the reason it does not."""
    config = model.config
    rotary = getattr(config, "rope_parameters", None) or {}
    if config.model_type not in FAMILY or not type(model).__module__.startswith("transformers.models."):
        return f"the architecture {config.model_type} has no fused decode step"
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or []):
        return "it mixes kinds of attention"
    if config.model_type == "mistral" and config.sliding_window is not None:
        return "its attention has a sliding window"
    if rotary.get("rope_type", "default") not in ROTARY:
        return f"its rotary embedding ({rotary.get('rope_type')}) depends on the length"
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    if activation not in ACTIVATION_NAMES:
        return f"its activation {activation} has no kernel"
    width = model.model.layers[0].self_attn.head_dim
    if 2 * model.model.rotary_emb.inv_freq.numel() != width:
        return "it rotates only a part of each head"
    if len({p.dtype for p in model.parameters()}) != 1:
        return "its parameters are of several types"
    return None


def fuse_projections(model: nn.Module) -> None:
    """Move each layer's q, k, v and gate, up weights (and biases) into one buffer each; the parameters stay, as views of it."""
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for group in ([attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj]):
            for name in ("weight", "bias"):
                parts = [getattr(linear, name) for linear in group]
                if parts[0] is None:
                    continue
                buffer = torch.cat([p.data for p in parts])
                for part, piece in zip(parts, buffer.split([len(p) for p in parts]), strict=True):
                    part.data = piece


def _fused(*linears: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """The buffer that `fuse_projections` made of these layers' weights, and that of their biases."""
    def whole(parts: list[Tensor]) -> Tensor:
        first = parts[0].detach()
        begin = first.data_ptr()
        for part in parts:
            assert part.data_ptr() == begin and part.is_contiguous(), "fuse_projections must have been called, and nothing moved since"
            begin += part.numel() * part.element_size()
        return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())

    biases = [linear.bias for linear in linears]
    return whole([linear.weight for linear in linears]), None if biases[0] is None else whole(biases)


class LlamaSteps:
    """StepModel over a transformers model that `why_not` allows and `fuse_projections` has prepared. `ops`: a module of layer_ops.OPS;
    None takes the device's."""

    can_capture = True
    name = "fused steps of the Llama family"

    def __init__(self, model: nn.Module, ops: Any = None) -> None:
        config = model.config
        self.device = model.model.embed_tokens.weight.device
        self.max_positions = config.max_position_embeddings
        self._ops = ops or ops_for(self.device)
        self._embed, self._rotary, self._final_norm, self._head = model.model.embed_tokens, model.model.rotary_emb, model.model.norm, model.lm_head
        self._dtype = self._embed.weight.dtype
        attention = model.model.layers[0].self_attn
        self._width, self._scale = attention.head_dim, attention.scaling
        self._num_q, self._num_kv = config.num_attention_heads, config.num_key_value_heads
        self._eps = config.rms_norm_eps
        self._shifted = config.model_type == "gemma"
        self._activation = ACTIVATION_NAMES[getattr(config, "hidden_activation", None) or config.hidden_act]
        self._layers = [self._layer_of(layer) for layer in model.model.layers]
        self.allocate(0, 0)

    @staticmethod
    def _layer_of(layer: nn.Module) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        qkv, qkv_bias = _fused(attention.q_proj, attention.k_proj, attention.v_proj)
        gate_up, gate_up_bias = _fused(mlp.gate_proj, mlp.up_proj)
        norms = [getattr(attention, name).weight if hasattr(attention, name) else None for name in ("q_norm", "k_norm")]
        return _Layer(layer.input_layernorm.weight, qkv, qkv_bias, *norms, attention.o_proj.weight, attention.o_proj.bias,
                      layer.post_attention_layernorm.weight, gate_up, gate_up_bias, mlp.down_proj.weight, mlp.down_proj.bias)

    def row_bytes(self, num_positions: int) -> int:
        return 2 * len(self._layers) * self._num_kv * num_positions * self._width * self._dtype.itemsize

    def allocate(self, num_rows: int, num_positions: int) -> None:
        self._cache = []
        shape = (num_rows, self._num_kv, num_positions, self._width)
        # zeros, because positions that were never written are masked, not skipped, and NaN would pass a mask
        self._cache = [tuple(torch.zeros(shape, dtype=self._dtype, device=self.device) for _ in range(2)) for _ in self._layers]
        self._rows = torch.arange(num_rows, device=self.device)
        places = torch.arange(num_positions, device=self.device)[None]
        table = self._rotary(torch.empty(0, dtype=torch.float32, device=self.device), places)
        self._cos, self._sin = (x[0, :, : self._width // 2].contiguous() for x in table)

    @torch.inference_mode()
    def prefill(self, ids: Sequence[Sequence[int]], rows: Sequence[int]) -> None:
        longest = max(map(len, ids))
        padded = torch.tensor([list(x) + [0] * (longest - len(x)) for x in ids], device=self.device)
        places = torch.arange(longest, device=self.device).repeat(len(ids))
        rows_on_device = torch.tensor(list(rows), device=self.device)

        def attend(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            # what follows a prompt in its row is padding, which a causal mask keeps from every real token
            q = q.view(len(ids), longest, self._num_q, self._width).transpose(1, 2)
            k, v = (cache[rows_on_device, :, :longest] for cache in (keys, values))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self._scale, enable_gqa=True)
            return out.transpose(1, 2).reshape(len(ids) * longest, -1)

        self._forward(padded.flatten(), rows_on_device.repeat_interleave(longest), places, attend, only_cache=True)

    def step(self, tokens: Tensor, lengths: Tensor, longest: int) -> Tensor:
        def attend(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return self._ops.attend(q, keys, values, lengths, longest, self._scale)

        return F.linear(self._forward(tokens, self._rows[: len(tokens)], lengths, attend), self._head.weight, self._head.bias)

    def keep(self, rows: Tensor) -> None:
        for pair in self._cache:
            for cache in pair:
                cache[: len(rows)] = cache[rows]

    def _forward(self, tokens: Tensor, rows: Tensor, positions: Tensor, attend: Any, only_cache: bool = False) -> Tensor | None:
        """Hidden states (T, W) of `tokens` at `positions` of `rows`, their keys and values written; None with only_cache, which saves
        what follows the last layer's keys."""
        ops, eps, shifted = self._ops, self._eps, self._shifted
        x = self._embed(tokens)
        h = ops.norm(x, self._layers[0].input_norm, eps, shifted)
        for number, (layer, (keys, values)) in enumerate(zip(self._layers, self._cache, strict=True), 1):
            qkv = F.linear(h, layer.qkv, layer.qkv_bias)
            q = ops.rotate_and_store(qkv, self._cos, self._sin, rows, positions, keys, values, layer.q_norm, layer.k_norm, eps)
            is_last = number == len(self._layers)
            if is_last and only_cache:
                return None
            h = ops.add_norm(x, F.linear(attend(q, keys, values), layer.out, layer.out_bias), layer.mlp_norm, eps, shifted)
            h = ops.gated(F.linear(h, layer.gate_up, layer.gate_up_bias), self._activation)
            next_norm = self._final_norm.weight if is_last else self._layers[number].input_norm
            h = ops.add_norm(x, F.linear(h, layer.down, layer.down_bias), next_norm, eps, shifted)
        return h
