"""Muon against a naive implementation and torch's own; every parameter in one group; exact state."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from bitsperbyte.golf.model import GolfModel, ModelConfig, is_control
from bitsperbyte.golf.muon import Muon, OptimConfig, Optimizers, build_optimizers, newton_schulz

SHAPES = [(24, 24), (12, 24), (48, 24), (24, 48), (24, 24), (12, 24), (1, 7), (7, 1)]
TINY = ModelConfig(vocab_size=40, dim=16, num_heads=4, num_kv_heads=2, order=(0, 1, 1, 0), skips=((1, 2), (0, 3)))
UNTIED = ModelConfig(
    vocab_size=40, dim=16, num_heads=4, num_kv_heads=2, order=(0, 1, 2), skips=(), tie_embeddings=False
)


def naive_orthogonal(G: Tensor, steps: int) -> Tensor:
    """Newton-Schulz on the singular values themselves, in float64: each step maps s to a s + b s^3 + c s^5."""
    U, s, Vh = torch.linalg.svd(G.double(), full_matrices=False)
    s = s / (s.square().sum().sqrt() + 1e-7)
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return U @ torch.diag(s) @ Vh


class NaiveMuon:
    """One matrix after another in float64, written from the formula."""

    def __init__(self, params: list[Tensor], nesterov: bool = True, ns_steps: int = 5) -> None:
        self.params = [p.detach().double().clone() for p in params]
        self.bufs = [torch.zeros_like(p) for p in self.params]
        self.nesterov, self.ns_steps = nesterov, ns_steps

    def step(self, grads: list[Tensor], lr: float, momentum: float, weight_decay: float) -> None:
        for i, g in enumerate(grads):
            self.bufs[i] = momentum * self.bufs[i] + g.double()
            update = g.double() + momentum * self.bufs[i] if self.nesterov else self.bufs[i]
            rows, cols = g.shape
            scale = math.sqrt(rows / cols) if rows > cols else 1.0
            p = self.params[i] - lr * scale * naive_orthogonal(update, self.ns_steps)
            self.params[i] = p * (1 - lr * weight_decay)


def matrices(seed: int, shapes: list[tuple[int, int]] = SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_equals_the_naive_implementation(nesterov: bool, weight_decay: float) -> None:
    params = matrices(0)
    naive = NaiveMuon(params, nesterov)
    muon = Muon(params, lr=0.0, nesterov=nesterov, weight_decay=weight_decay)
    for step in range(6):
        grads = [
            torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + i)) for i, p in enumerate(params)
        ]
        for p, g in zip(params, grads, strict=True):
            p.grad = g.clone()
        lr, momentum = 0.05 / (step + 1), 0.85 + 0.02 * step
        muon.param_groups[0]["lr"], muon.param_groups[0]["momentum"] = lr, momentum
        muon.step()
        naive.step(grads, lr, momentum, weight_decay)
    for p, expected in zip(params, naive.params, strict=True):
        torch.testing.assert_close(p.detach().double(), expected, rtol=0, atol=2e-5)


def test_equals_torchs_muon_at_constant_momentum_and_no_decay() -> None:
    """torch keeps a mean, buf' = m buf' + (1 - m) g, where ours is a sum, buf = m buf + g.

    At constant m, buf' = (1 - m) buf, and torch's Nesterov update (1 - m) g + m buf' is (1 - m) times ours, a factor
    that the orthogonaliser ignores. torch iterates in bfloat16 on any device, hence the tolerance, 2% of the distance.
    """
    params = [nn.Parameter(p.detach().clone()) for p in matrices(1)]
    theirs = [nn.Parameter(p.detach().clone()) for p in params]
    lr, num_steps = 0.02, 5
    muon = Muon(params, lr=lr, momentum=0.9)
    reference = torch.optim.Muon(theirs, lr=lr, momentum=0.9, weight_decay=0.0, adjust_lr_fn="original")
    start = [p.detach().clone() for p in params]
    for step in range(num_steps):
        for i, (p, q) in enumerate(zip(params, theirs, strict=True)):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + i))
            q.grad = p.grad.clone()
        muon.step()
        reference.step()
    for p, q, p0 in zip(params, theirs, start, strict=True):
        moved = (q - p0).norm()
        assert moved > lr and (p - q).norm() < 0.02 * moved


@given(rows=st.integers(2, 40), cols=st.integers(2, 40), scale=st.floats(1e-3, 1e3), seed=st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_orthogonalises_random_matrices(rows: int, cols: int, scale: float, seed: int) -> None:
    """Singular values over 1% of the norm end near 1: five steps take [0.01, 1] into [0.3, 1.3]."""
    G = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)) * scale
    s = torch.linalg.svdvals(G.double())
    X = newton_schulz(G)
    assert X.shape == G.shape and X.dtype == torch.float32
    ended = torch.linalg.svdvals(X.double())
    assert ended.max() < 1.3
    assert (ended.sort().values[(s / s.norm() < 0.01).sum() :] > 0.3).all()
    # the singular vectors stay: X is G's polar factor up to those values
    torch.testing.assert_close(X.double(), naive_orthogonal(G, 5), rtol=0, atol=1e-4)


def test_batched_equals_single_and_any_leading_dimensions() -> None:
    for shape in [(2, 3, 10, 16), (2, 3, 16, 10)]:
        G = torch.randn(shape, generator=torch.Generator().manual_seed(3))
        X = newton_schulz(G)
        assert X.shape == shape
        for i in range(2):
            for j in range(3):
                torch.testing.assert_close(X[i, j], newton_schulz(G[i, j]), rtol=0, atol=1e-5)


def test_transposing_commutes_and_scale_does_not_matter() -> None:
    G = torch.randn(8, 20, generator=torch.Generator().manual_seed(4))
    torch.testing.assert_close(newton_schulz(G.T).T, newton_schulz(G), rtol=0, atol=1e-6)
    torch.testing.assert_close(newton_schulz(1000 * G), newton_schulz(G), rtol=0, atol=1e-4)


def test_zero_gradient_moves_nothing() -> None:
    assert not newton_schulz(torch.zeros(3, 4, 5)).any()
    p = matrices(5, [(4, 6)])[0]
    before = p.detach().clone()
    p.grad = torch.zeros_like(p)
    Muon([p], lr=1.0).step()
    assert torch.equal(p, before)


def test_works_in_the_dtype_asked_for() -> None:
    G = torch.randn(6, 9, generator=torch.Generator().manual_seed(6))
    X = newton_schulz(G, dtype=torch.bfloat16)
    assert X.dtype == torch.bfloat16
    torch.testing.assert_close(X.float(), newton_schulz(G), rtol=0, atol=0.05)


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    still, moving = matrices(7, [(4, 6), (4, 6)])
    before = still.detach().clone()
    moving.grad = torch.ones_like(moving)
    Muon([still, moving], lr=0.1, weight_decay=0.5).step()
    assert torch.equal(still, before)


def test_refuses_vectors() -> None:
    with pytest.raises(ValueError, match="matrices only"):
        Muon([nn.Parameter(torch.zeros(3))], lr=0.1)


@pytest.mark.gpu
def test_cuda_in_bfloat16_is_near_the_naive_implementation() -> None:
    params = [nn.Parameter(p.detach().cuda()) for p in matrices(8)]
    naive = NaiveMuon([p.detach().cpu() for p in params])
    start = [p.detach().clone() for p in params]
    muon = Muon(params, lr=0.02, momentum=0.9)
    for step in range(4):
        grads = [
            torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + i)) for i, p in enumerate(params)
        ]
        for p, g in zip(params, grads, strict=True):
            p.grad = g.cuda()
        muon.step()
        naive.step(grads, 0.02, 0.9, 0.0)
    for p, expected, p0 in zip(params, naive.params, start, strict=True):
        moved = (expected - p0.cpu()).norm()
        assert (p.detach().cpu() - expected).norm() < 0.03 * moved


# -- groups ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        ModelConfig(),
        TINY,
        UNTIED,
        ModelConfig(dim=64, order=(0, 1, 2, 3, 3, 2, 1, 0), skips=((3, 4), (2, 5), (1, 6), (0, 7))),
        ModelConfig(dim=64, order=(0,), skips=(), attention_window=8),
    ],
)
def test_every_parameter_is_in_exactly_one_group(config: ModelConfig) -> None:
    with torch.device("meta"):
        model = GolfModel(config)
    optimizers = build_optimizers(model, OptimConfig())
    named = dict(model.named_parameters())
    stepped = [
        p for optimizer in (optimizers.muon, optimizers.adam) for g in optimizer.param_groups for p in g["params"]
    ]
    assert sorted(map(id, stepped)) == sorted(map(id, named.values()))
    listed = [name for group in optimizers.groups() for name in group.param_names]
    assert sorted(listed) == sorted(named)
    assert sum(group.num_parameters for group in optimizers.groups()) == sum(p.numel() for p in named.values())
    muon_ids = {id(p) for p in optimizers.muon.param_groups[0]["params"]}
    for name, p in named.items():
        is_block_matrix = name.startswith("blocks.") and name.endswith(".weight")
        assert (id(p) in muon_ids) == is_block_matrix, name
        assert not (is_block_matrix and is_control(name))


def test_rates_of_the_groups() -> None:
    torch.manual_seed(0)
    config = OptimConfig(matrix_lr=0.1, scalar_lr=0.2, embed_lr=0.3, head_lr=0.4)
    model = GolfModel(UNTIED)
    optimizers = build_optimizers(model, config)
    rate = {name: group.base_lr for group in optimizers.groups() for name in group.param_names}
    assert rate["tok_emb.weight"] == 0.3 and rate["lm_head.weight"] == 0.4
    assert rate["blocks.0.resid_mix"] == rate["blocks.1.attn.q_gain"] == 0.2
    assert rate["blocks.2.mlp.fc.weight"] == 0.1
    optimizers.step(lr_scale=0.5, momentum=0.7)
    live = {id(p): g["lr"] for o in (optimizers.muon, optimizers.adam) for g in o.param_groups for p in g["params"]}
    assert {name: live[id(p)] for name, p in model.named_parameters()} == {n: lr * 0.5 for n, lr in rate.items()}
    assert optimizers.muon.param_groups[0]["momentum"] == 0.7


def test_scale_zero_moves_nothing_although_state_gathers() -> None:
    model, optimizers = trained(TINY, 0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(model, optimizers, range(2), lr_scale=0.0)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert optimizers.state_dict()


def test_decay_touches_only_what_muon_steps() -> None:
    model, optimizers = trained(TINY, 0, OptimConfig(weight_decay=0.5))
    plain_model, plain = trained(TINY, 0, OptimConfig())
    train(model, optimizers, range(1))
    train(plain_model, plain, range(1))
    for (name, p), q in zip(model.named_parameters(), plain_model.parameters(), strict=True):
        factor = 1 - 0.04 * 0.5 if name.startswith("blocks.") and name.endswith("weight") else 1.0
        torch.testing.assert_close(p, q * factor, rtol=1e-6, atol=1e-7)


# -- state -----------------------------------------------------------------------------------------------------------


def trained(config: ModelConfig, num_steps: int, optim: OptimConfig | None = None) -> tuple[GolfModel, Optimizers]:
    torch.manual_seed(11)
    model = GolfModel(config)
    optimizers = build_optimizers(model, optim or OptimConfig(weight_decay=0.04))
    train(model, optimizers, range(num_steps))
    return model, optimizers


def train(model: GolfModel, optimizers: Optimizers, steps: range, lr_scale: float = 1.0) -> None:
    for step in steps:
        tokens = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(step))
        optimizers.zero_grad()
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizers.step(lr_scale=lr_scale, momentum=0.85 + 0.01 * step)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("config", [TINY, UNTIED])
@pytest.mark.parametrize("num_before", [0, 1, 4])
def test_restored_state_goes_on_bit_for_bit(config: ModelConfig, num_before: int) -> None:
    model, optimizers = trained(config, num_before)
    state, at = optimizers.snapshot(), weights(model)
    assert bool(state) == bool(num_before)
    train(model, optimizers, range(num_before, num_before + 3))
    expected, expected_state = weights(model), optimizers.snapshot()

    other, others = trained(config, 2)  # a state of its own, which must vanish
    other.load_state_dict(at)
    others.load_state_dict(state)
    train(other, others, range(num_before, num_before + 3))
    assert all(torch.equal(expected[name], p) for name, p in weights(other).items())
    assert all(torch.equal(expected_state[key], value) for key, value in others.state_dict().items())
    assert expected_state.keys() == others.state_dict().keys()


def test_snapshot_undoes_warm_up_steps() -> None:
    model, optimizers = trained(TINY, 0)
    saved, at = optimizers.snapshot(), weights(model)
    train(model, optimizers, range(20, 25))
    model.load_state_dict(at)
    optimizers.restore(saved)
    assert optimizers.state_dict() == {}
    train(model, optimizers, range(3))
    plain, _ = trained(TINY, 3)
    assert all(torch.equal(p, weights(plain)[name]) for name, p in weights(model).items())


def test_state_keys_and_copies() -> None:
    model, optimizers = trained(TINY, 1)
    state = optimizers.state_dict()
    assert state["muon.momentum/blocks.0.attn.c_q.weight"].shape == (16, 16)
    assert {f"adam.{part}/blocks.1.resid_mix" for part in ("exp_avg", "exp_avg_sq", "step")} <= state.keys()
    assert len(state) == sum(
        (1 if n.endswith("weight") and n.startswith("blocks") else 3) for n, _ in model.named_parameters()
    )
    snapshot = optimizers.snapshot()
    optimizers.load_state_dict(snapshot)
    train(model, optimizers, range(1, 2))
    assert snapshot["adam.step/tok_emb.weight"] == 1 and optimizers.state_dict()["adam.step/tok_emb.weight"] == 2


@pytest.mark.parametrize(
    "change, word",
    [
        (lambda s: s.update({"muon.momentum/blocks.9.attn.c_q.weight": torch.zeros(16, 16)}), "fits no parameter"),
        (lambda s: s.update({"muon.momentum/blocks.0.resid_mix": torch.zeros(2, 16)}), "fits no parameter"),
        (lambda s: s.update({"nonsense": torch.zeros(1)}), "fits no parameter"),
        (lambda s: s.update({"adam.exp_avg/tok_emb.weight": torch.zeros(3)}), "shape"),
        (lambda s: s.pop("adam.step/tok_emb.weight"), "incomplete"),
    ],
)
def test_a_state_of_another_model_is_refused_and_changes_nothing(change, word: str) -> None:
    _, optimizers = trained(TINY, 2)
    before, damaged = optimizers.snapshot(), optimizers.snapshot()
    change(damaged)
    with pytest.raises(ValueError, match=word):
        optimizers.load_state_dict(damaged)
    after = optimizers.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
