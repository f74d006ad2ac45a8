"""The optimisers: Muon for the matrices inside the blocks, Adam for everything else.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) replaces the momentum of a matrix by the nearest
semi-orthogonal matrix, found by a quintic Newton-Schulz iteration whose coefficients are chosen for a steep slope at
zero: the singular values end in a band around 1 rather than at 1, which training does not notice.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bitsperbyte.golf.model import is_control

NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NS_EPS = 1e-7


@dataclass(frozen=True)
class OptimConfig:
    """Learning rates at full scale and the constants of both optimisers.

    `embed_lr` serves a tied and an untied embedding alike, `head_lr` only an untied head. `weight_decay` touches the
    matrices that Muon steps. `grad_clip_norm` 0 turns clipping off.
    """

    matrix_lr: float = 0.04
    scalar_lr: float = 0.04
    embed_lr: float = 0.05
    head_lr: float = 0.008
    momentum: float = 0.95
    momentum_warmup_start: float = 0.85
    momentum_warmup_steps: int = 500
    ns_steps: int = 5
    beta1: float = 0.9
    beta2: float = 0.95
    adam_eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


def newton_schulz(G: Tensor, steps: int = 5, dtype: torch.dtype | None = None) -> Tensor:
    """Approximately orthogonalise every matrix of G (..., rows, cols): U S V^T becomes U S' V^T with S' near 1.

    Works in `dtype` and returns it, by default bfloat16 on CUDA and float32 elsewhere (a CPU without bfloat16 units
    is 40 to 130 times slower in it). A zero matrix stays zero.
    """
    if dtype is None:
        dtype = torch.bfloat16 if G.is_cuda else torch.float32
    a, b, c = NS_COEFFICIENTS
    # Bound the largest singular value by 1 before rounding to `dtype`: tiny gradients lose no more than large ones.
    X = (G / (torch.linalg.vector_norm(G, dim=(-2, -1), keepdim=True) + NS_EPS)).to(dtype)
    tall = G.size(-2) > G.size(-1)  # the Gram matrix below then has the shorter side
    X = (X.mT if tall else X).reshape(-1, min(G.shape[-2:]), max(G.shape[-2:]))
    for _ in range(steps):
        A = torch.bmm(X, X.mT)
        X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=b, alpha=c), X, beta=a)
    return (X.mT if tall else X).reshape(G.shape)


class Muon(torch.optim.Optimizer):
    """Muon over 2-D parameters, batched: one chain of matrix products for all matrices of one shape.

    With g the gradient: buf = m buf + g; u = g + m buf (Nesterov) or buf; p -= lr sqrt(max(1, rows / cols))
    newton_schulz(u); and then p *= 1 - lr weight_decay. `lr`, `momentum` and `weight_decay` are read from
    `param_groups` at each step. A parameter without a gradient is left alone. Raises ValueError for a parameter that is
    not 2-D.
    """

    def __init__(
        self, params: Iterable[Tensor], lr: float, momentum: float = 0.95, nesterov: bool = True, ns_steps: int = 5,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {
            "lr": lr, "momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "weight_decay": weight_decay,
        })
        for group in self.param_groups:
            for p in group["params"]:
                if p.ndim != 2:
                    raise ValueError(f"Muon steps matrices only: give the parameter of shape {tuple(p.shape)} to Adam")

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[tuple, list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    by_shape.setdefault((p.shape, p.device, p.dtype), []).append(p)
            for params in by_shape.values():
                self._step_shape(params, group)

    def _step_shape(self, params: list[Tensor], group: dict) -> None:
        lr, momentum = group["lr"], group["momentum"]
        grads = [p.grad for p in params]
        for p in params:
            if "momentum" not in self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p, memory_format=torch.contiguous_format)
        bufs = [self.state[p]["momentum"] for p in params]
        torch._foreach_mul_(bufs, momentum)
        torch._foreach_add_(bufs, grads)
        updates = bufs
        if group["nesterov"]:
            updates = torch._foreach_mul(bufs, momentum)
            torch._foreach_add_(updates, grads)
        rows, cols = params[0].shape
        # Back to the parameters' dtype and layout in one go: mixed ones would send _foreach_add_ down its slow path.
        stacked = newton_schulz(torch.stack(updates), group["ns_steps"]).to(params[0].dtype).contiguous()
        torch._foreach_add_(params, list(stacked.unbind(0)), alpha=-lr * max(1.0, rows / cols) ** 0.5)
        if group["weight_decay"]:
            torch._foreach_mul_(params, 1 - lr * group["weight_decay"])


@dataclass(frozen=True)
class ParamGroup:
    """One row of the plan: which optimiser steps which parameters at which full rate."""

    name: str
    optimizer: str
    base_lr: float
    param_names: tuple[str, ...]
    num_parameters: int


def group_of(name: str, param: Tensor) -> str:
    """The one group that steps a parameter: "embed", "head", "scalars" (all Adam) or "matrices" (Muon).

    Control tensors go to Adam even where they are 2-D, as resid_mix and skip_weights are.
    """
    if name.startswith("tok_emb."):
        return "embed"
    if name.startswith("lm_head."):
        return "head"
    if is_control(name) or param.ndim != 2:
        return "scalars"
    assert name.startswith("blocks."), f"no optimiser is assigned to the matrix {name}"
    return "matrices"


ADAM_STATE = ("exp_avg", "exp_avg_sq", "step")


class Optimizers:
    """All optimisers of one model behind one step; built by `build_optimizers`.

    State is a flat dict of tensors, keyed `muon.momentum/NAME` and `adam.{exp_avg,exp_avg_sq,step}/NAME`, empty before
    the first step, so that a checkpoint needs no pickle. Learning rates are not state: `step` is told the
    scale each time.
    """

    def __init__(self, named_params: dict[str, nn.Parameter], config: OptimConfig) -> None:
        self.config = config
        self._params = named_params
        rates = {
            "embed": config.embed_lr, "head": config.head_lr, "scalars": config.scalar_lr, "matrices": config.matrix_lr,
        }
        names: dict[str, list[str]] = {group: [] for group in rates}
        for name, p in named_params.items():
            names[group_of(name, p)].append(name)
        self._groups = [
            ParamGroup(group, "muon" if group == "matrices" else "adam", rates[group], tuple(members),
                       sum(named_params[name].numel() for name in members))
            for group, members in names.items() if members
        ]
        adam_groups = [{"params": [named_params[name] for name in g.param_names], "lr": g.base_lr, "base_lr": g.base_lr}
                       for g in self._groups if g.optimizer == "adam"]
        fused = all(p.device.type in ("cuda", "cpu") for p in named_params.values())
        self.adam = torch.optim.Adam(
            adam_groups, betas=(config.beta1, config.beta2), eps=config.adam_eps, weight_decay=0.0, fused=fused)
        matrices = [named_params[name] for name in names["matrices"]]
        assert matrices, "the model has no matrices for Muon to step"
        self.muon = Muon(
            matrices, config.matrix_lr, config.momentum, ns_steps=config.ns_steps, weight_decay=config.weight_decay)
        self.muon.param_groups[0]["base_lr"] = config.matrix_lr
        self._muon_names = frozenset(names["matrices"])

    def groups(self) -> list[ParamGroup]:
        return list(self._groups)

    def step(self, lr_scale: float, momentum: float) -> None:
        """Step every parameter at base_lr * lr_scale, Muon with this momentum. The caller has clipped the gradients."""
        for optimizer in (self.adam, self.muon):
            for group in optimizer.param_groups:
                group["lr"] = group["base_lr"] * lr_scale
        self.muon.param_groups[0]["momentum"] = momentum
        self.adam.step()
        self.muon.step()

    def zero_grad(self) -> None:
        self.adam.zero_grad(set_to_none=True)
        self.muon.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Tensor]:
        """The live state tensors, not copies; `snapshot` copies."""
        state: dict[str, Tensor] = {}
        for name, p in self._params.items():
            if name in self._muon_names:
                values = self.muon.state.get(p, {})
                state |= {f"muon.{key}/{name}": values[key] for key in ("momentum",) if key in values}
            else:
                values = self.adam.state.get(p, {})
                state |= {f"adam.{key}/{name}": values[key] for key in ADAM_STATE if key in values}
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Replace all state by copies of `state`.

        Raises ValueError, before anything changes, for a key of no parameter of this model, a wrong shape, or a
        parameter with only part of its state.
        """
        loaded: dict[str, dict[str, Tensor]] = {}
        for key, value in state.items():
            kind, _, name = key.partition("/")
            known = ("muon.momentum",) if name in self._muon_names else tuple(f"adam.{part}" for part in ADAM_STATE)
            if name not in self._params or kind not in known:
                raise ValueError(f"the optimiser state {key!r} fits no parameter: the checkpoint is of another model")
            p, part = self._params[name], kind.split(".")[1]
            shape = () if part == "step" else tuple(p.shape)
            if tuple(value.shape) != shape:
                raise ValueError(f"the optimiser state {key!r} has the shape {tuple(value.shape)}, not {shape}: the "
                                 "checkpoint is of another model")
            # Adam counts its steps in float32 whatever the parameter's dtype, on the device since it is fused.
            dtype = torch.float32 if part == "step" else p.dtype
            loaded.setdefault(name, {})[part] = value.detach().to(device=p.device, dtype=dtype, copy=True)
        for name, values in loaded.items():
            if name not in self._muon_names and len(values) != len(ADAM_STATE):
                raise ValueError(f"the optimiser state of {name!r} is incomplete: it has only {sorted(values)}")
        self.muon.state.clear()
        self.adam.state.clear()
        for name, values in loaded.items():
            (self.muon if name in self._muon_names else self.adam).state[self._params[name]] = values

    def snapshot(self) -> dict[str, Tensor]:
        """A copy of the state, for `restore` after the untimed warm-up steps."""
        return {key: value.detach().clone() for key, value in self.state_dict().items()}

    def restore(self, snapshot: dict[str, Tensor]) -> None:
        self.load_state_dict(snapshot)


def build_optimizers(model: nn.Module, config: OptimConfig) -> Optimizers:
    """Optimisers over every parameter of `model`, each in exactly one group (`group_of`).

    Pass the model itself, not its compiled or distributed wrapper: the names decide.
    """
    return Optimizers(dict(model.named_parameters()), config)
