"""The optimisers: Muon for the matrices inside the blocks, Adam for everything else.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) replaces the momentum of a matrix by the nearest
semi-orthogonal matrix, found by a quintic Newton-Schulz iteration whose coefficients are chosen for a steep slope at
zero: the singular values end in a band around 1 rather than at 1, which training does not notice.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bitsperbyte.golf.model import is_control
from bitsperbyte.golf.ranks import all_gather

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


def shares(shapes: Sequence[tuple[int, int]], world_size: int) -> list[list[int]]:
    """Which matrices each rank orthogonalises: the costliest first, each to the rank that has least to do so far. Every matrix is in one
    share, and all ranks come to the same shares."""
    def cost(index: int) -> int:
        short, long = sorted(shapes[index])
        return short * short * (2 * long + short)  # of one iteration, up to a factor: two products with the long side, one without

    made: list[list[int]] = [[] for _ in range(world_size)]
    loads = [0] * world_size
    for index in sorted(range(len(shapes)), key=lambda index: (-cost(index), index)):
        least = loads.index(min(loads))
        made[least].append(index)
        loads[least] += cost(index)
    return made


class Muon(torch.optim.Optimizer):
    """Muon over 2-D parameters, batched: one chain of matrix products for all matrices of one shape.

    With g the gradient: buf = m buf + g; u = g + m buf (Nesterov) or buf; p -= lr sqrt(max(1, rows / cols))
    newton_schulz(u); and then p *= 1 - lr weight_decay. `lr`, `momentum` and `weight_decay` are read from
    `param_groups` at each step. A parameter without a gradient is left alone. Raises ValueError for a parameter that is
    not 2-D.

    With several ranks, whose gradients must be equal, each orthogonalises its share of the matrices (`shares`) and gets the others'
    updates in the dtype that they were computed in. Momenta are kept whole on every rank: they cost two passes over memory, and any
    rank's state is a checkpoint for any number of ranks. `step` is `start` and `finish`; what is done between the two overlaps with
    the exchange.
    """

    def __init__(
        self, params: Iterable[Tensor], lr: float, momentum: float = 0.95, nesterov: bool = True, ns_steps: int = 5,
        weight_decay: float = 0.0, rank: int = 0, world_size: int = 1,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self._exchanges: list[_Exchange] = []
        super().__init__(params, {
            "lr": lr, "momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "weight_decay": weight_decay,
        })
        for group in self.param_groups:
            for p in group["params"]:
                if p.ndim != 2:
                    raise ValueError(f"Muon steps matrices only: give the parameter of shape {tuple(p.shape)} to Adam")

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.start()
        self.finish()

    @torch.no_grad()
    def start(self) -> None:
        """All of the step with one rank; with several, all but what needs the other ranks' updates."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if self.world_size == 1:
                for _, same in _by_shape(params):
                    self._apply(same, newton_schulz(torch.stack(self._momenta(same, group)), group["ns_steps"]), group)
            elif params:
                self._exchanges.append(self._exchange(params, group))

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the other ranks' updates and apply all of them."""
        for exchange in self._exchanges:
            exchange.work.wait()
            for params, updates in exchange.received():
                self._apply(params, updates, exchange.group)
        self._exchanges.clear()

    def _exchange(self, params: list[Tensor], group: dict) -> "_Exchange":
        of_ranks = [[params[i] for i in share] for share in shares([tuple(p.shape) for p in params], self.world_size)]
        updates = dict(zip(params, self._momenta(params, group), strict=True))
        dtype = torch.bfloat16 if params[0].is_cuda else torch.float32  # what newton_schulz answers in
        room = max(sum(p.numel() for p in share) for share in of_ranks)
        sent = torch.zeros(room, dtype=dtype, device=params[0].device)
        parts = _parts(sent, of_ranks[self.rank])
        for _, same in _by_shape(parts):
            for p, made in zip(same, newton_schulz(torch.stack([updates[p] for p in same]), group["ns_steps"], dtype), strict=True):
                parts[p].copy_(made)
        got = torch.empty(self.world_size * room, dtype=dtype, device=sent.device)
        work = all_gather(got, sent, async_op=True)
        return _Exchange(work, got.view(self.world_size, room), sent, of_ranks, group)

    def _momenta(self, params: list[Tensor], group: dict) -> list[Tensor]:
        """Take the gradients into the momenta, and return what is to be orthogonalised."""
        grads = [p.grad for p in params]
        for p in params:
            if "momentum" not in self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p, memory_format=torch.contiguous_format)
        bufs = [self.state[p]["momentum"] for p in params]
        torch._foreach_mul_(bufs, group["momentum"])
        torch._foreach_add_(bufs, grads)
        if not group["nesterov"]:
            return bufs
        updates = torch._foreach_mul(bufs, group["momentum"])
        torch._foreach_add_(updates, grads)
        return list(updates)

    def _apply(self, params: list[Tensor], updates: Tensor, group: dict) -> None:
        """Step `params`, of one shape, by their updates (len(params), rows, cols)."""
        rows, cols = params[0].shape
        # Back to the parameters' dtype and layout in one go: mixed ones would send _foreach_add_ down its slow path.
        stacked = updates.to(params[0].dtype).contiguous()
        torch._foreach_add_(params, list(stacked.unbind(0)), alpha=-group["lr"] * max(1.0, rows / cols) ** 0.5)
        if group["weight_decay"]:
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])


@dataclass(frozen=True)
class _Exchange:
    """Updates on their way: got (ranks, room), each row the flattened updates of a rank's share. `sent` is held until they are there."""

    work: dist.Work
    got: Tensor
    sent: Tensor
    of_ranks: list[list[Tensor]]
    group: dict

    def received(self) -> Iterable[tuple[list[Tensor], Tensor]]:
        """(parameters of one shape, their updates stacked)."""
        made: dict[Tensor, Tensor] = {}
        for row, share in zip(self.got, self.of_ranks, strict=True):
            made |= _parts(row, share)
        for _, same in _by_shape(made):
            yield same, torch.stack([made[p] for p in same])


def _parts(flat: Tensor, params: Iterable[Tensor]) -> dict[Tensor, Tensor]:
    """The views of `flat` that hold one tensor of each parameter's shape, one after the other."""
    views, at = {}, 0
    for p in params:
        views[p] = flat[at : at + p.numel()].view(p.shape)
        at += p.numel()
    return views


def _by_shape(params: Iterable[Tensor]) -> list[tuple[tuple, list[Tensor]]]:
    found: dict[tuple, list[Tensor]] = {}
    for p in params:
        found.setdefault((p.shape, p.device, p.dtype), []).append(p)
    return list(found.items())


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

    def __init__(self, named_params: dict[str, nn.Parameter], config: OptimConfig, rank: int = 0, world_size: int = 1) -> None:
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
            matrices, config.matrix_lr, config.momentum, ns_steps=config.ns_steps, weight_decay=config.weight_decay, rank=rank,
            world_size=world_size)
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
        self.muon.start()
        self.adam.step()  # while the ranks' shares of the matrices are on their way
        self.muon.finish()

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


def build_optimizers(model: nn.Module, config: OptimConfig, rank: int = 0, world_size: int = 1) -> Optimizers:
    """Optimisers over every parameter of `model`, each in exactly one group (`group_of`); of several ranks, this one's.

    Pass the model itself, not its compiled or distributed wrapper: the names decide.
    """
    return Optimizers(dict(model.named_parameters()), config, rank, world_size)
