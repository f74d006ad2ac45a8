"""Quantisation: the challenge's payload sizes, an independent derivation of its rules, error bounds as properties."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitsperbyte.golf.model import ModelConfig, state_shapes
from bitsperbyte.golf.quantize import (
    SCHEMES,
    Scheme,
    dequantize,
    fp_bytes,
    payload_bytes,
    quantize,
    row_quantile,
    to_fp16_scale,
)


def recurrent(num_blocks: int, dim: int) -> ModelConfig:
    order = (*range(num_blocks), *reversed(range(num_blocks)))
    return ModelConfig(dim=dim, order=order, skips=tuple((j, 2 * num_blocks - 1 - j) for j in range(num_blocks)))


BASELINE, V2, V5, V6 = ModelConfig(), recurrent(4, 768), recurrent(4, 512), recurrent(6, 576)
ALL_INTEGERS = {
    name: Scheme(name, s.bits, s.embedding_bits, 0, s.scale_floor, s.clip_quantile, s.clip_fractions, s.stored_scale)
    for name, s in SCHEMES.items()
}


def matrix(seed: int, rows: int, columns: int, log_scale: float, tail: float = 0.0) -> torch.Tensor:
    """Rows of spreads around e^log_scale; with `tail`, some values far outside, and one row of zeros."""
    draw = torch.Generator().manual_seed(seed)
    w = torch.randn(rows, columns, generator=draw) * torch.exp(log_scale + torch.randn(rows, 1, generator=draw))
    w = torch.where(torch.rand(rows, columns, generator=draw) < tail, 20 * w, w)
    w[0] = 0
    return w


@pytest.mark.parametrize("model, expected", [(BASELINE, 17_178_912), (V5, 7_932_032), (V6, 14_637_248)])
def test_payload_of_the_challenge(model: ModelConfig, expected: int) -> None:
    assert payload_bytes(model, "reference_int8") == expected
    assert payload_bytes(state_shapes(model), "reference_int8") == expected


@pytest.mark.parametrize("model, ratio", [(BASELINE, 3.91), (V2, 3.89), (V5, 3.84), (V6, 3.89)])
def test_payload_ratio_of_the_seed(model: ModelConfig, ratio: float) -> None:
    assert round(fp_bytes(model) / payload_bytes(model, "reference_int8"), 2) == ratio


def test_payload_of_int6_counts_three_quarters_of_a_byte() -> None:
    blocks = sum(
        math.prod(s) for n, s in state_shapes(BASELINE).items() if n.startswith("blocks") and n.endswith(".weight")
    )
    assert payload_bytes(BASELINE, "int8") - payload_bytes(BASELINE, "int6") == blocks // 4


@pytest.mark.parametrize("scheme", SCHEMES)
def test_payload_is_what_quantising_gives(scheme: str) -> None:
    model = ModelConfig(vocab_size=300, dim=64, order=(0, 1), skips=((0, 1),), tie_embeddings=False)
    tensors = quantize({n: torch.randn(s) for n, s in state_shapes(model).items()}, scheme)
    counted = 0
    for t in tensors:
        counted += math.ceil(t.values.numel() * t.storage.bits / 8) + (0 if t.scales is None else t.scales.numel() * 2)
    assert payload_bytes(model, scheme) == counted


def test_what_is_kept_in_which_type() -> None:
    tensors = {t.name: t for t in quantize({n: torch.zeros(s) for n, s in state_shapes(V5).items()}, "reference_int8")}
    assert {t.values.dtype for n, t in tensors.items() if not n.endswith(".weight")} == {torch.float32}
    assert {t.values.dtype for n, t in tensors.items() if n.endswith(".weight")} == {torch.int8}
    small = quantize({"blocks.0.mlp.fc.weight": torch.ones(256, 256)}, "reference_int8")[0]
    assert small.values.dtype == torch.float16 and small.scales is None  # 65,536 elements are not more than 65,536
    state = {"tok_emb.weight": torch.randn(128, 64), "blocks.0.mlp.fc.weight": torch.randn(128, 64)}
    assert [(t.storage.bits, int(t.values.abs().max())) for t in quantize(state, "int6")] == [(8, 127), (6, 31)]


def reference_rows(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The challenge's rule row by row, in float64 from sorted values, rounding aside: (exact ratio w / scale, scale).
    Only the quantile's rank is in float32: torch has it so, and the two largest values may lie far apart."""
    ratios, scales = [], []
    for row in w.astype(np.float64):
        ordered, rank = np.sort(np.abs(row)), float(np.float32(0.9999984) * np.float32(len(row) - 1))
        low = math.floor(rank)
        clip = ordered[low] + (rank - low) * (ordered[min(low + 1, len(row) - 1)] - ordered[low])
        scales.append(max(clip / 127, 1 / 127))
        ratios.append(np.clip(row, -clip, clip) / scales[-1])
    return np.array(ratios), np.array(scales)


@pytest.mark.parametrize("log_scale", [-4.0, 0.0, 3.0])
def test_reference_int8_against_a_derivation_in_float64(log_scale: float) -> None:
    w = matrix(1, 300, 257, log_scale, tail=0.01)
    got = quantize({"blocks.0.mlp.fc.weight": w}, "reference_int8")[0]
    ratios, scales = reference_rows(w.numpy())
    assert got.scales is not None and np.array_equal(got.scales.numpy(), scales.astype(np.float16))
    # float32 against float64 may differ only where the exact ratio is a tie to within float32's precision
    wrong = got.values.numpy() != np.clip(np.round(ratios), -127, 127)
    assert np.abs(np.abs(ratios[wrong]) % 1 - 0.5).max(initial=0) < 1e-3
    assert wrong.mean() < 1e-3


def test_the_floor_costs_levels_only_in_the_reference() -> None:
    w = {"blocks.0.mlp.fc.weight": torch.randn(300, 300, generator=torch.Generator().manual_seed(0)) * 0.03}
    assert int(quantize(w, "reference_int8")[0].values.abs().max()) < 25
    assert int(quantize(w, "int8")[0].values.abs().max()) == 127


@given(
    seed=st.integers(0, 99),
    rows=st.integers(1, 9),
    columns=st.integers(1, 700),
    q=st.floats(0.5, 1.0) | st.just(0.9999984),
)
@settings(max_examples=60, deadline=None)
def test_row_quantile_equals_torch(seed: int, rows: int, columns: int, q: float) -> None:
    w = matrix(seed, rows, columns, 0.0).abs()
    assert torch.equal(row_quantile(w, q), torch.quantile(w, q, dim=1))


@given(seed=st.integers(0, 999), rows=st.integers(1, 8), columns=st.integers(2, 300), log_scale=st.floats(-14, 8))
@settings(max_examples=100, deadline=None)
def test_error_is_at_most_half_a_step_where_nothing_is_clipped(
    seed: int, rows: int, columns: int, log_scale: float
) -> None:
    w = matrix(seed, rows, columns, log_scale)
    for name, whole in (("int8", 127), ("int6", 31)):
        unclipped = Scheme("test", ALL_INTEGERS[name].bits, 8, 0)
        tensor = quantize({"w": w}, unclipped)[0]
        error = (dequantize([tensor])["w"] - w).abs()
        step = torch.where(w.abs().amax(1) > 0, tensor.scales.float(), 0.0)  # type: ignore[union-attr]
        # the scale's rounding to float16 (2^-11 of itself) adds up over `whole` steps
        assert bool((error <= step[:, None] * (0.5 + whole * 2.0**-11 + 1e-4)).all())


@given(
    seed=st.integers(0, 999), columns=st.integers(2, 300), log_scale=st.floats(-8, 4), tail=st.sampled_from([0.0, 0.02])
)
@settings(max_examples=60, deadline=None)
def test_the_search_for_a_clip_never_loses_to_the_maximum(
    seed: int, columns: int, log_scale: float, tail: float
) -> None:
    w = {"w": matrix(seed, 6, columns, log_scale, tail)}
    searched = dequantize(quantize(w, ALL_INTEGERS["int6"]))["w"]
    plain = dequantize(quantize(w, Scheme("plain", 6, 8, 0)))["w"]
    lost, kept = ((searched - w["w"]).double() ** 2).sum(1), ((plain - w["w"]).double() ** 2).sum(1)
    assert bool((lost <= kept * (1 + 1e-4)).all())


def test_the_search_gains_on_heavy_tails() -> None:
    w = {"w": matrix(3, 64, 512, 0.0, tail=0.0)}
    w["w"][:, 0] = 1.5 * w["w"].abs().amax(1)
    errors = [
        ((dequantize(quantize(w, s))["w"] - w["w"]) ** 2).sum()
        for s in (ALL_INTEGERS["int6"], Scheme("plain", 6, 8, 0))
    ]
    assert errors[0] < 0.95 * errors[1]


@given(
    seed=st.integers(0, 999),
    columns=st.integers(2, 600),
    log_scale=st.floats(-14, 6),
    scheme=st.sampled_from([*SCHEMES]),
)
@settings(max_examples=100, deadline=None)
def test_dequantised_weights_quantise_to_the_same_integers(
    seed: int, columns: int, log_scale: float, scheme: str
) -> None:
    first = quantize({"w": matrix(seed, 6, columns, log_scale)}, ALL_INTEGERS[scheme])
    again = quantize(dequantize(first), ALL_INTEGERS[scheme])
    # Below float16's normal range a scale has too few digits to be found again; the values still agree to half a step.
    normal = first[0].scales >= 2.0**-14  # type: ignore[operator]
    assert torch.equal(first[0].values[normal], again[0].values[normal])
    error = (dequantize(first)["w"] - dequantize(again)["w"]).abs()
    assert bool((error <= again[0].scales.float()[:, None]).all())  # type: ignore[union-attr]


def test_scales_below_float16s_range_round_up_and_zero_rows_stay_zero() -> None:
    tiny = torch.tensor([0.0, 1e-12, 2.0**-24, 1.5 * 2.0**-24, 3e-6, 0.01])
    stored = to_fp16_scale(tiny).float()
    assert stored[0] == 0 and bool((stored[1:5] >= tiny[1:5]).all()) and bool((stored[1:] > 0).all())
    w = torch.full((4, 40), 1e-9)
    w[0] = 0
    for scheme in ALL_INTEGERS.values():
        back = dequantize(quantize({"w": w}, scheme))["w"]
        assert bool(torch.isfinite(back).all()) and float(back.abs().max()) <= 2.0**-24


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["blocks.0.mlp.fc.weight", "blocks.0.attn_scale"])
def test_weights_that_are_not_finite_are_refused_by_name(scheme: str, bad: float, name: str) -> None:
    w = torch.zeros(300, 300) if name.endswith("weight") else torch.zeros(300)
    w.view(-1)[17] = bad
    with pytest.raises(ValueError, match=f"{name}.*not finite"):
        quantize({name: w}, scheme)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_values_beyond_float16_are_refused_by_name(scheme: str) -> None:
    with pytest.raises(ValueError, match="mlp.fc.weight holds values above"):
        quantize({"blocks.0.mlp.fc.weight": torch.full((300, 300), 1e9)}, scheme)
    with pytest.raises(ValueError, match="small holds values above"):
        quantize({"small": torch.full((3,), 1e5)}, scheme)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="unknown quantisation scheme 'int9'.*int6"):
        payload_bytes(BASELINE, "int9")
    with pytest.raises(ValueError, match="ids has dtype torch.int64"):
        quantize({"ids": torch.zeros(3, dtype=torch.int64)}, "int8")
    with pytest.raises(ValueError, match="big has shape"):
        quantize({"big": torch.zeros(50, 50, 50)}, "int8")


def test_quantising_leaves_the_state_alone_and_shares_nothing() -> None:
    state = {"blocks.0.attn_scale": torch.ones(8), "tok_emb.weight": torch.ones(300, 300)}
    tensors = quantize(state, "int8")
    for tensor in dequantize(tensors).values():
        tensor.zero_()
    assert all(bool((t == 1).all()) for t in state.values()) and bool((tensors[0].values == 1).all())
