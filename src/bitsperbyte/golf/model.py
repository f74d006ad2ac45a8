"""The golf model: one transformer whose `order` of block indices covers the flat baseline and every depth-recurrent run.

Shapes: B batch, T time, D width, H query heads, K key/value heads, E head width, V vocabulary, N any number of positions.

The network (Parameter Golf's baseline and its recurrent descendants):

    x = x0 = rms_norm(tok_emb[tokens])
    for position p, block index b in enumerate(order):
        if a skip ends at p:   x = x + skip_weights[k] * (output of the position where skip k starts)
        x = mix[0] * x + mix[1] * x0;  x = x + attn_scale * attention(rms_norm(x));  x = x + mlp_scale * mlp(rms_norm(x))
    logits = softcap * tanh(rms_norm(x) @ E^T / softcap)

The baseline is order 0..8 with skips 3->4, 2->5, 1->6, 0->7. A recurrent U-Net of U unique blocks is order 0..U-1, U-1..0 with
skips j -> 2U-1-j. Weights are float32; `compute_dtype` is what the residual stream and the matrix products use (bfloat16 on
CUDA, float32 on a CPU).
"""

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Tensors that steer the network rather than mix features: stepped by Adam, kept in float32 by every quantisation scheme.
CONTROL_NAMES = ("attn_scale", "mlp_scale", "resid_mix", "q_gain", "skip_weights")

# Head widths that flash attention's kernels are cut for. Zero-padding 72 (recurrent_v7) to 96 took a step of three of its blocks
# from 186 to 143 ms (H200): presumably the kernels check bounds between two widths.
FLASH_WIDTHS = (64, 96, 128)

# A config read from an artifact is not trusted: these bounds keep a hostile one from asking for the machine's memory.
MAX_DIM, MAX_BLOCKS, MAX_VOCAB, MAX_POSITIONS = 16_384, 1_024, 65_536, 4_096


@dataclass(frozen=True)
class ModelConfig:
    """Everything that fixes the network. `order` lists block indices in the order they run; `skips` lists pairs of positions in
    `order` (from, to), whose k-th pair uses row k of `skip_weights`. `attention_window` limits attention to that many tokens,
    the current one included. Raises ValueError when the numbers do not fit together."""

    vocab_size: int = 1024
    dim: int = 512
    num_heads: int = 8
    num_kv_heads: int = 4
    mlp_mult: int = 2
    order: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7, 8)
    skips: tuple[tuple[int, int], ...] = ((3, 4), (2, 5), (1, 6), (0, 7))
    tie_embeddings: bool = True
    rope_base: float = 10_000.0
    logit_softcap: float = 30.0
    qk_gain_init: float = 1.5
    tied_embed_init_std: float = 0.005
    attention_window: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "order", tuple(self.order))
        object.__setattr__(self, "skips", tuple(tuple(pair) for pair in self.skips))
        bounds = [("vocab_size", MAX_VOCAB), ("dim", MAX_DIM), ("num_heads", MAX_DIM), ("num_kv_heads", MAX_DIM), ("mlp_mult", 64)]
        for name, most in bounds:
            _require(_is_int(getattr(self, name)) and 1 <= getattr(self, name) <= most, f"{name} must be 1..{most}")
        for name in ("rope_base", "logit_softcap", "qk_gain_init", "tied_embed_init_std"):
            value = getattr(self, name)
            _require(isinstance(value, (int, float)) and 0 < value < 1e30, f"{name} must be a positive number")
        _require(isinstance(self.tie_embeddings, bool), "tie_embeddings must be true or false")
        _require(self.attention_window is None or (_is_int(self.attention_window) and self.attention_window >= 1),
                 "attention_window must be at least 1 token, or null for full attention")
        _require(self.dim % self.num_heads == 0, f"dim {self.dim} must be a multiple of num_heads {self.num_heads}")
        _require(self.head_dim % 2 == 0, f"the head width {self.head_dim} (dim / num_heads) must be even for rotary positions")
        _require(self.num_heads % self.num_kv_heads == 0,
                 f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}")
        _require(1 <= len(self.order) <= MAX_POSITIONS, f"order must list 1..{MAX_POSITIONS} blocks")
        _require(all(_is_int(b) and 0 <= b < MAX_BLOCKS for b in self.order), f"order must hold block indices 0..{MAX_BLOCKS - 1}")
        _require(set(self.order) == set(range(self.num_blocks)), f"order must use every block 0..{self.num_blocks - 1}")
        for pair in self.skips:
            _require(len(pair) == 2 and all(_is_int(p) for p in pair) and 0 <= pair[0] < pair[1] < len(self.order),
                     f"skip {list(pair)} must go from an earlier to a later of the {len(self.order)} positions in order")
        ends = [to for _, to in self.skips]
        _require(len(set(ends)) == len(ends), "two skips end at the same position")

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    @property
    def kv_dim(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def num_blocks(self) -> int:
        return max(self.order) + 1

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "order": list(self.order), "skips": [list(pair) for pair in self.skips]}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ModelConfig":
        """Build from untrusted JSON; ValueError names what is unknown, missing or out of bounds."""
        known = {field.name for field in dataclasses.fields(cls)}
        _require(isinstance(values, dict), "a model config must be a mapping")
        _require(not set(values) - known, f"unknown model settings {sorted(set(values) - known)}")
        for name in ("order", "skips"):
            _require(isinstance(values.get(name, []), (list, tuple)), f"{name} must be a list")
        _require(all(isinstance(pair, (list, tuple)) for pair in values.get("skips", [])), "skips must be pairs of positions")
        return cls(**values)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(f"model config: {message}")


def is_control(name: str) -> bool:
    """Whether the tensor of this name is a control tensor (scales, mixes, gains, skip weights)."""
    return any(part in name for part in CONTROL_NAMES)


def state_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all parameters, in the module's own order, without building it."""
    d, hidden = config.dim, config.mlp_mult * config.dim
    shapes: dict[str, tuple[int, ...]] = {}
    if config.skips:
        shapes["skip_weights"] = (len(config.skips), d)
    shapes["tok_emb.weight"] = (config.vocab_size, d)
    for i in range(config.num_blocks):
        shapes |= {
            f"blocks.{i}.attn_scale": (d,), f"blocks.{i}.mlp_scale": (d,), f"blocks.{i}.resid_mix": (2, d),
            f"blocks.{i}.attn.q_gain": (config.num_heads,),
            f"blocks.{i}.attn.c_q.weight": (d, d), f"blocks.{i}.attn.c_k.weight": (config.kv_dim, d),
            f"blocks.{i}.attn.c_v.weight": (config.kv_dim, d), f"blocks.{i}.attn.proj.weight": (d, d),
            f"blocks.{i}.mlp.fc.weight": (hidden, d), f"blocks.{i}.mlp.proj.weight": (d, hidden),
        }
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, d)
    return shapes


def parameter_counts(config: ModelConfig) -> dict[str, int]:
    """Number of parameters by part: embedding, blocks, skips, head, total."""
    counts = {"embedding": 0, "blocks": 0, "skips": 0, "head": 0}
    parts = {"tok_emb": "embedding", "blocks": "blocks", "skip_weights": "skips", "lm_head": "head"}
    for name, shape in state_shapes(config).items():
        counts[parts[name.split(".")[0]]] += math.prod(shape)
    return {**counts, "total": sum(counts.values())}


def flops_per_token(config: ModelConfig, seq_len: int) -> int:
    """Floating-point operations of one training token: 6 for each weight of every block *application* and of the head, plus causal
    attention, whose forward costs 2 * D * (mean context) for the scores and again for the values, the backward twice that."""
    d = config.dim
    block = 2 * d * d + 2 * d * config.kv_dim + 2 * config.mlp_mult * d * d
    window = min(config.attention_window or seq_len, seq_len)
    mean_context = window - window * (window - 1) / (2 * seq_len)
    attention = 3 * 2 * 2 * d * mean_context
    return round(len(config.order) * (6 * block + attention) + 6 * config.vocab_size * d)


def rms_norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.size(-1),))


class Linear(nn.Module):
    """A bias-free linear map kept in float32 and applied in the dtype of its input."""

    def __init__(self, num_in: int, num_out: int, zero: bool = False) -> None:
        super().__init__()
        bound = 0.0 if zero else num_in**-0.5  # the default of torch's own linear layer
        self.weight = nn.Parameter(torch.empty(num_out, num_in).uniform_(-bound, bound) if bound else torch.zeros(num_out, num_in))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Attention(nn.Module):
    """Causal grouped-query attention with normalised queries and keys, rotary positions and a learned gain for each query head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.q_gain = nn.Parameter(torch.full((config.num_heads,), config.qk_gain_init))
        self.c_q = Linear(config.dim, config.dim)
        self.c_k = Linear(config.dim, config.kv_dim)
        self.c_v = Linear(config.dim, config.kv_dim)
        self.proj = Linear(config.dim, config.dim, zero=True)

    def forward(self, x_BTD: Tensor, rotary: tuple[Tensor, Tensor], mask: Any) -> Tensor:
        c = self.config
        B, T, D = x_BTD.shape
        # One product for the three maps: three narrow ones leave a GPU half idle. The parameters stay apart, since Muon
        # orthogonalises each map by itself.
        weight = torch.cat([self.c_q.weight, self.c_k.weight, self.c_v.weight]).to(x_BTD.dtype)
        q, k, v = F.linear(x_BTD, weight).split([D, c.kv_dim, c.kv_dim], dim=-1)
        q = apply_rotary(rms_norm(q.view(B, T, c.num_heads, c.head_dim).float()), rotary) * self.q_gain[:, None]
        k = apply_rotary(rms_norm(k.view(B, T, c.num_kv_heads, c.head_dim).float()), rotary)
        v = v.view(B, T, c.num_kv_heads, c.head_dim)
        y = attend(q.to(v.dtype).transpose(1, 2), k.to(v.dtype).transpose(1, 2), v.transpose(1, 2), mask)
        return self.proj(y.transpose(1, 2).reshape(B, T, D))


def rotary_table(num_positions: int, head_dim: int, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each (T, 1, E/2) float32, for the half-split form of rotary positions."""
    rates = base ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(num_positions, device=device, dtype=torch.float32), rates)[:, None, :]
    return angles.cos(), angles.sin()


def apply_rotary(x_BTHE: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rotary
    first, second = x_BTHE.chunk(2, dim=-1)
    return torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1)


def attend(q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, mask: Any) -> Tensor:
    """Causal attention. `mask` is None for full attention, a boolean (T, T) tensor, or a FlexAttention block mask."""
    if mask is not None and not isinstance(mask, Tensor):
        return compiled_flex_attention()(q_BHTE, k_BKTE, v_BKTE, block_mask=mask, enable_gqa=True)
    width = q_BHTE.size(-1)
    padding = next((full - width for full in FLASH_WIDTHS if full >= width), 0) if q_BHTE.is_cuda else 0
    if padding:
        q_BHTE, k_BKTE, v_BKTE = (F.pad(x, (0, padding)) for x in (q_BHTE, k_BKTE, v_BKTE))
    y = F.scaled_dot_product_attention(q_BHTE, k_BKTE, v_BKTE, attn_mask=mask, is_causal=mask is None, enable_gqa=True,
                                       scale=width**-0.5)
    return y[..., :width] if padding else y


@functools.cache
def compiled_flex_attention() -> Any:
    """FlexAttention compiled by itself: inside a compiled network it is inlined, and in an eager one it would otherwise materialise
    all scores."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def window_mask(num_positions: int, window: int, device: torch.device) -> Any:
    """The mask of sliding-window attention: token t sees t-window+1..t. A FlexAttention block mask on CUDA, which skips the
    blocks outside the window; a boolean tensor elsewhere."""
    if device.type == "cuda":
        from torch.nn.attention.flex_attention import create_block_mask

        def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (query - key < window)

        return create_block_mask(visible, None, None, num_positions, num_positions, device=device)
    at = torch.arange(num_positions, device=device)
    distance = at[:, None] - at[None, :]
    return (distance >= 0) & (distance < window)


class MLP(nn.Module):
    """proj(relu(fc(x))^2)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.fc = Linear(config.dim, config.mlp_mult * config.dim)
        self.proj = Linear(config.mlp_mult * config.dim, config.dim, zero=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(F.relu(self.fc(x)).square())


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attn_scale = nn.Parameter(torch.ones(config.dim))
        self.mlp_scale = nn.Parameter(torch.ones(config.dim))
        self.resid_mix = nn.Parameter(torch.stack([torch.ones(config.dim), torch.zeros(config.dim)]))
        self.attn = Attention(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, x0: Tensor, rotary: tuple[Tensor, Tensor], mask: Any) -> Tensor:
        mix = self.resid_mix.to(x.dtype)
        x = mix[0] * x + mix[1] * x0
        x = x + self.attn_scale.to(x.dtype) * self.attn(rms_norm(x), rotary, mask)
        return x + self.mlp_scale.to(x.dtype) * self.mlp(rms_norm(x))


class GolfModel(nn.Module):
    """The network of `config`. Parameters are drawn on the device that is current, from torch's global generator: seed it first."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.compute_dtype = torch.float32
        if config.skips:
            self.skip_weights = nn.Parameter(torch.ones(len(config.skips), config.dim))
        self.tok_emb = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_blocks))
        if config.tie_embeddings:
            nn.init.normal_(self.tok_emb.weight, std=config.tied_embed_init_std)
        else:
            self.lm_head = Linear(config.dim, config.vocab_size, zero=True)
        self._skip_into = {to: (row, start) for row, (start, to) in enumerate(config.skips)}
        self._prepared: dict[tuple[int, torch.device], tuple[tuple[Tensor, Tensor], Any]] = {}

    def place(self, device: torch.device) -> "GolfModel":
        """Move to `device` and compute as that device does best: bfloat16 on CUDA, float32 elsewhere (a CPU without matrix units
        takes 40 to 130 times longer in bfloat16)."""
        self.compute_dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        return self.to(device)

    def prepare(self, num_positions: int, device: torch.device) -> tuple[tuple[Tensor, Tensor], Any]:
        """Rotary table and attention mask (None for full causal attention) for this length, built once. Call it before compiling:
        traced into the network, the table's sines would be computed anew in the kernels that normalise and rotate every head, which
        then took 36% of the device's time (H200, profiled before this was changed; what is left of it was not profiled)."""
        key = (num_positions, device)
        if key not in self._prepared:
            window = self.config.attention_window
            full = window is None or window >= num_positions
            rotary = rotary_table(num_positions, self.config.head_dim, self.config.rope_base, device)
            self._prepared[key] = rotary, None if full else window_mask(num_positions, window, device)
        return self._prepared[key]

    def hidden(self, tokens_BT: Tensor) -> Tensor:
        """Final normalised hidden states (B, T, D)."""
        rotary, mask = self.prepare(tokens_BT.size(1), tokens_BT.device)
        x = x0 = rms_norm(self.tok_emb(tokens_BT).to(self.compute_dtype))
        starts = {start for start, _ in self.config.skips}
        outputs: dict[int, Tensor] = {}
        for position, block in enumerate(self.config.order):
            if position in self._skip_into:
                row, start = self._skip_into[position]
                x = x + self.skip_weights[row].to(x.dtype) * outputs[start]
            x = self.blocks[block](x, x0, rotary, mask)
            if position in starts:
                outputs[position] = x
        return rms_norm(x)

    def logits(self, x_ND: Tensor) -> Tensor:
        """Softcapped float32 logits (N, V) of final hidden states (N, D)."""
        head = self.tok_emb.weight if self.config.tie_embeddings else self.lm_head.weight
        cap = self.config.logit_softcap
        return cap * torch.tanh(F.linear(x_ND, head.to(x_ND.dtype)).float() / cap)

    def loss(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Mean nats a target token, a float32 scalar."""
        logits = self.logits(self.hidden(inputs_BT).flatten(0, 1))
        return F.cross_entropy(logits, targets_BT.flatten().long())
