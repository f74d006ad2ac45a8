"""Switching weights: exact, in place, checked, and saying what it does."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from bitsperbyte.randopt import noise, perturb
from bitsperbyte.randopt.layout import Layout, LiveTensor, Piece
from bitsperbyte.randopt.noise import SCHEMES
from bitsperbyte.randopt.perturb import Perturber, checksums, select


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embed = nn.Embedding(11, 13)
        self.layers = nn.ModuleList(nn.Linear(13, 13) for _ in range(2))
        self.norm = nn.LayerNorm(13)
        self.head = nn.Linear(13, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.ones(13))
        self.weight_scale = nn.Parameter(torch.ones(3))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self.to(dtype)
        self.norm.float()


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).numpy().tobytes()


def state(model: nn.Module) -> dict[str, bytes]:
    return {name: bits(tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


def expected_state(model: nn.Module, seed: int, sigma: float, scheme: str) -> dict[str, bytes]:
    """Of a model whose weights are the base."""
    weights = {name: p for name, p in model.named_parameters() if name != "weight_scale"}
    found = {name: bits(noise.perturbed_reference(p, name, seed, sigma, scheme=scheme)) for name, p in weights.items()}
    return {**state(model), **found}


SWITCHES = st.lists(st.tuples(st.integers(0, 2**64 - 1), st.sampled_from([0.001, 0.05, 3.0, 1e4])), min_size=1, max_size=5)


@given(switches=SWITCHES, scheme=st.sampled_from(list(SCHEMES)), dtype=st.sampled_from(noise.LIVE_DTYPES))
@settings(max_examples=25, deadline=None)
def test_a_switch_depends_on_its_seed_alone_and_reset_restores_every_byte(
    switches: list[tuple[int, float]], scheme: str, dtype: torch.dtype
) -> None:
    model = Model(dtype)
    before, pointers = state(model), [p.data_ptr() for p in model.parameters()]
    expected = [expected_state(model, *switch, scheme) for switch in switches]
    perturber = Perturber(Layout.of_module(model), scheme=scheme, verify_every=2)
    for switch, right in zip(switches, expected, strict=True):
        perturber.perturb(*switch)
        assert state(model) == right
    perturber.reset()
    assert state(model) == before
    assert [p.data_ptr() for p in model.parameters()] == pointers
    perturber.verify_base()


def test_pinned_is_plain_memory_on_a_cpu_and_gives_the_same() -> None:
    model = Model()
    right = expected_state(model, 8, 0.1, "rademacher")
    perturber = Perturber(Layout.of_module(model), base="pinned")
    for seed in (7, 8):
        perturber.perturb(seed, 0.1)
    assert state(model) == right and perturber.describe()["exact"] is True


def test_excluded_tensors_and_what_is_no_weight_stay_the_base() -> None:
    model = Model()
    before = state(model)
    perturber = Perturber(Layout.of_module(model), include=["layers.*", "norm.*"], exclude=["*.bias"])
    perturber.perturb(1, 0.5)
    changed = {name for name, value in state(model).items() if value != before[name]}
    assert changed == {"layers.0.weight", "layers.1.weight", "norm.weight"}
    assert perturber.num_perturbed == 2 * 13 * 13 + 13
    described = perturber.describe()
    assert described["num_tensors"] == 3 and described["skipped"] == {"weight_scale": "a quantisation scale"}
    assert described["scheme"] == "rademacher" and described["known_answer"] == SCHEMES["rademacher"].known_answer
    assert described["writer"] == "torch" and described["include"] == ["layers.*", "norm.*"] and described["exclude"] == ["*.bias"]


def test_patterns_that_match_nothing_name_what_is_near() -> None:
    names = ["model.layers.0.weight", "model.layers.0.bias", "lm_head.weight"]
    assert select(names, ["*"], ["*bias"]) == ["model.layers.0.weight", "lm_head.weight"]
    with pytest.raises(ValueError, match="no tensor of the model matches the pattern 'lm_haed.*'; the nearest names are lm_head.w"):
        select(names, ["*"], ["lm_haed.*"])
    with pytest.raises(ValueError, match="nothing is left to perturb"):
        select(names, ["*bias"], ["model.*"])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_relative_sigma_is_in_units_of_each_tensors_rms(scheme: str) -> None:
    model = Model()
    base = {name: p.detach().clone() for name, p in model.named_parameters()}
    perturber = Perturber(Layout.of_module(model), scheme=scheme, sigma="relative")
    for name, rms in perturber.rms.items():
        assert rms == np.float32(math.sqrt((base[name].double() ** 2).mean().item()))
    perturber.perturb(3, 0.2)
    for name, parameter in model.named_parameters():
        if name != "weight_scale":
            right = noise.perturbed_reference(base[name], name, 3, 0.2 * perturber.rms[name], scheme=scheme)
            assert bits(parameter) == bits(right), name
    assert perturber.describe()["rms"] == perturber.rms and set(perturber.rms) == set(base) - {"weight_scale"}


def test_a_shard_needs_the_rms_of_the_whole_tensor() -> None:
    whole = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    halves = [Layout((LiveTensor("w", whole[:, c : c + 4].clone(), (Piece("w", (6, 8), 0, 6, c, c + 4, 0, 4),)),), {}) for c in (0, 4)]
    with pytest.raises(ValueError, match="RMS of the whole tensor w, of which this layout holds 24 of 48"):
        Perturber(halves[0], sigma="relative")
    with pytest.raises(ValueError, match="leave out w"):
        Perturber(halves[0], sigma="relative", rms={"v": 1.0})
    rms = math.sqrt((whole.double() ** 2).mean())
    for half in halves:
        Perturber(half, sigma="relative", rms={"w": rms}).perturb(2, 0.3)
    right = noise.perturbed_reference(whole, "w", 2, 0.3 * float(np.float32(rms)))
    assert torch.equal(torch.cat([half.tensors[0].tensor for half in halves], dim=1), right)


def test_without_a_base_it_is_flagged_inexact_and_the_weights_come_back_roughly() -> None:
    model = Model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    right = expected_state(model, 0, 0.01, "rademacher")
    perturber = Perturber(Layout.of_module(model), base="none")
    assert perturber.describe()["exact"] is False and perturber.describe()["base"] == "none"
    perturber.verify_base()
    perturber.perturb(0, 0.01)
    assert state(model) == right
    for seed in range(1, 4):
        perturber.perturb(seed, 0.01)
    perturber.reset()
    drift = [(p.detach() - before[name]).abs().max().item() for name, p in model.named_parameters()]
    assert 0 < max(drift) < 0.05
    perturber.verify_base()  # there is nothing to compare with any more


@pytest.mark.parametrize("element", [0, 5, 168])
def test_a_changed_base_is_noticed_at_the_next_check(element: int) -> None:
    model = Model()
    perturber = Perturber(Layout.of_module(model), verify_every=3)
    perturber.perturb(1, 0.1)
    perturber._base[1].view(-1)[element] *= -1
    perturber.perturb(2, 0.1)
    perturber.perturb(3, 0.1)
    with pytest.raises(RuntimeError, match=r"copy of the base weights changed since loading, in 1 of 7 tensors \(layers.0.weight\)"):
        perturber.perturb(4, 0.1)
    with pytest.raises(RuntimeError, match="copy of the base"):
        perturber.verify_base()


def test_live_weights_that_are_not_the_base_after_a_reset_are_noticed() -> None:
    model = Model()
    perturber = Perturber(Layout.of_module(model))
    perturber.perturb(1, 0.1)
    perturber.verify_base()
    perturber.reset()
    with torch.no_grad():
        model.norm.bias[3] += 1
    with pytest.raises(RuntimeError, match=r"live weights after a reset changed .*\(norm.bias\)"):
        perturber.verify_base()
    perturber.reset()
    perturber.verify_base()


def test_weights_that_were_moved_are_refused() -> None:
    model = Model()
    perturber = Perturber(Layout.of_module(model))
    model.norm.double()
    for switch in (lambda: perturber.perturb(1, 0.1), perturber.reset):
        with pytest.raises(RuntimeError, match="the weights of norm.weight were moved in memory"):
            switch()


def test_types_sigmas_and_seeds_without_a_definition_are_refused() -> None:
    model = Model()
    model.norm.double()
    with pytest.raises(ValueError, match="norm.weight is torch.float64: load the model in one of these types, or exclude"):
        Perturber(Layout.of_module(model))
    perturber = Perturber(Layout.of_module(model), exclude=["norm.*"])
    for sigma in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="finite number of at least 0"):
            perturber.perturb(1, sigma)
    for seed in (-1, 2**64):
        with pytest.raises(ValueError, match="does not fit in 64 bits"):
            perturber.perturb(seed, 0.1)


def test_another_noise_than_the_defined_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "_ROUNDS", 9)
    with pytest.raises(RuntimeError, match="its known answer differs"):
        Perturber(Layout.of_module(Model()))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_effective_rms_is_that_of_what_was_written(scheme: str) -> None:
    model = Model()
    with torch.no_grad():
        model.layers[1].weight *= 1000  # where bfloat16 swallows the change
    base = {name: p.detach().double() for name, p in model.named_parameters()}
    perturber = Perturber(Layout.of_module(model), scheme=scheme)
    rows = {row["name"]: row for row in perturber.effective_rms(0.01, 4)}
    assert {name: row["num_elements"] for name, row in rows.items()} == {
        "embed.weight": 143, "layers.*.weight": 338, "layers.*.bias": 26, "norm.weight": 13, "norm.bias": 13}  # fmt: skip
    assert all(torch.equal(p.detach().double(), base[name]) for name, p in model.named_parameters())
    perturber.perturb(4, 0.01)
    for group, row in rows.items():
        names = [n for n in base if n.replace(".0.", ".*.").replace(".1.", ".*.") == group]
        old = torch.cat([base[n].flatten() for n in names])
        new = torch.cat([p.detach().double().flatten() for n, p in model.named_parameters() if n in names])
        drawn = np.concatenate([noise.noise(n, 4, 0, base[n].numel(), scheme) for n in names]).astype(np.float64) * np.float32(0.01)
        assert row["base_rms"] == pytest.approx((old**2).mean().sqrt().item(), rel=1e-12)
        assert row["effective_rms"] == pytest.approx(((new - old) ** 2).mean().sqrt().item(), rel=1e-12)
        assert row["requested_rms"] == pytest.approx(math.sqrt((drawn**2).mean()), rel=1e-6)
        assert row["share_unchanged"] == pytest.approx((new == old).double().mean().item(), rel=1e-12)
    share = {name: row["share_unchanged"] for name, row in rows.items()}
    assert share["layers.*.weight"] > 0.45 > share["norm.weight"]  # half of them are a thousand times larger


def test_seconds_of_a_switch_are_the_mean_of_the_switches() -> None:
    perturber = Perturber(Layout.of_module(Model()))
    assert perturber.switch_s() == 0.0
    perturber.perturb(1, 0.1)
    assert 0 < perturber.switch_s() < 10


@given(num=st.integers(1, 70_000), flips=st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 15)), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_checksums_see_flipped_bits(num: int, flips: list[tuple[int, int]]) -> None:
    tensor = torch.arange(num, dtype=torch.int32).to(torch.int16)
    (before,) = checksums([tensor.view(torch.bfloat16)])
    changed = tensor.numpy().copy().view(np.uint16)
    for place, bit in set((place % num, bit) for place, bit in flips):
        changed[place] ^= 1 << bit
    assert checksums([torch.from_numpy(changed.view(np.int16)).view(torch.bfloat16)]) != [before]


def test_checksums_see_order_and_do_not_depend_on_how_memory_is_cut() -> None:
    tensor = torch.randn(3 * perturb._ROW + 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    swapped = tensor.clone()
    swapped[[0, 2 * perturb._ROW]] = swapped[[2 * perturb._ROW, 0]]
    shifted = torch.cat([torch.zeros(1, dtype=torch.bfloat16), tensor])[1:]  # begins in the middle of a word
    assert checksums([tensor]) == checksums([shifted]) == checksums([tensor.view(1, -1)]) != checksums([swapped])
    assert checksums([torch.zeros(4)]) != checksums([torch.ones(4)])
    strided = torch.randn(8, 10)[:, :7]
    assert checksums([strided]) == checksums([strided.contiguous()])
    column = torch.randn(8, 10).bfloat16()[:, :1]
    assert checksums([column]) == checksums([column.flatten()])


def test_figures_do_not_depend_on_the_number_of_threads() -> None:
    """Relative sigmas and the record's noise are the same in a worker of one thread as in a process of many."""
    module = nn.Module()
    module.weight = nn.Parameter(torch.randn(300_007, generator=torch.Generator().manual_seed(1)), requires_grad=False)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            perturber = Perturber(Layout.of_module(module), scheme="binomial", sigma="relative", base="device")
            found.append((perturber.rms, perturber.effective_rms(0.01, 5)))
    finally:
        torch.set_num_threads(before)
    assert all(figures == found[0] for figures in found)
