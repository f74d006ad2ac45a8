"""The definition of the noise: published answers, frozen vectors, an independent implementation, exact rounding."""

import hashlib
import json
import math
from decimal import Decimal, getcontext
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitsperbyte.randopt import noise
from bitsperbyte.randopt.layout import Piece
from bitsperbyte.randopt.noise import LIVE_DTYPES, SCHEMES, Target, TorchWriter

NAME = "model.layers.0.self_attn.q_proj.weight"
VECTORS = json.loads((Path(__file__).parent / "noise_vectors.json").read_text(encoding="utf-8"))
SEEDS = st.integers(0, 2**64 - 1)
PLACES = st.one_of(st.integers(0, 1000), st.integers(2**32 - 300, 2**32 + 300), st.integers(2**45, 2**45 + 1000))


def philox_from_the_paper(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 in plain integers, after figure 2 and table 3 of Salmon et al. (2011)."""
    left, right, first, second = [counter[0], counter[2]], [counter[1], counter[3]], *key
    for number in range(10):
        keys = [(k + number * weyl) % 2**32 for k, weyl in ((first, 0x9E3779B9), (second, 0xBB67AE85))]
        products = [left[0] * 0xD2511F53, left[1] * 0xCD9E8D57]
        left = [products[1] // 2**32 ^ right[0] ^ keys[0], products[0] // 2**32 ^ right[1] ^ keys[1]]
        right = [products[1] % 2**32, products[0] % 2**32]
    return [left[0], right[0], left[1], right[1]]


def z_from_the_definition(name: str, seed: int, index: int, scheme: str) -> float:
    identity = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    block = index // (128 if scheme == "rademacher" else 4)
    counter = [block % 2**32, block // 2**32, identity % 2**32, identity // 2**32]
    words = philox_from_the_paper(counter, [seed % 2**32, seed // 2**32])
    if scheme == "rademacher":
        return 1.0 if words[index % 128 // 32] & 1 << index % 32 else -1.0
    return float(np.float32((bin(words[index % 4]).count("1") - 16) / math.sqrt(8)))


def hexadecimal(words: np.ndarray) -> list[str]:
    return [f"{word:08x}" for word in words]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_published_answers(counter: str, key: str, words: str) -> None:
    low, high = (int(part, 16) for part in key.split())
    numbers = [int(part, 16) for part in counter.split()]
    assert hexadecimal(noise.philox(np.array([numbers], dtype=np.uint32), high << 32 | low)[0]) == words.split()
    assert hexadecimal(np.array(philox_from_the_paper(numbers, [low, high]))) == words.split()


def test_the_documented_signs() -> None:
    assert noise.noise(NAME, 12345, 0, 8).tolist() == [-1, 1, 1, -1, 1, -1, 1, 1]
    assert noise.tensor_id(NAME) == int.from_bytes(hashlib.sha256(NAME.encode()).digest()[:8], "little")


@pytest.mark.parametrize("case", VECTORS["blocks"], ids=lambda case: case["name"])
def test_frozen_words_of_an_independent_library(case: dict) -> None:
    identity, block = noise.tensor_id(case["name"]), case["block"]
    counter = np.array([[block % 2**32, block >> 32, identity % 2**32, identity >> 32]], dtype=np.uint32)
    assert hexadecimal(noise.philox(counter, case["seed"])[0]) == case["words"]
    signs = noise.noise(case["name"], case["seed"], 128 * block, 128 * block + 128)
    assert [sign > 0 for sign in signs] == [bool(int(word, 16) >> bit & 1) for word in case["words"] for bit in range(32)]


@pytest.mark.parametrize("case", VECTORS["perturbed"], ids=lambda case: f"{case['scheme']}-{case['dtype']}")
def test_frozen_perturbed_weights(case: dict) -> None:
    base, expected = ([float.fromhex(x) for x in case[key]] for key in ("base", "perturbed"))
    weights = torch.tensor(base, dtype=torch.float64).to(getattr(torch, case["dtype"]))
    assert weights.double().tolist() == base
    found = noise.perturbed_reference(
        weights, case["name"], case["seed"], case["sigma"], scheme=case["scheme"], offset=case["offset"]
    )
    assert found.dtype == weights.dtype and found.double().tolist() == expected


@given(name=st.text(max_size=20), seed=SEEDS, begin=PLACES, num=st.integers(1, 9), scheme=st.sampled_from(list(SCHEMES)))
@settings(max_examples=60, deadline=None)
def test_the_definition_by_hand(name: str, seed: int, begin: int, num: int, scheme: str) -> None:
    expected = [z_from_the_definition(name, seed, begin + i, scheme) for i in range(num)]
    found = noise.noise(name, seed, begin, begin + num, scheme)
    assert found.dtype == np.float32 and found.tolist() == expected


@given(seed=SEEDS, begin=PLACES, cut=st.integers(0, 700), num=st.integers(1, 700), scheme=st.sampled_from(list(SCHEMES)))
@settings(max_examples=60, deadline=None)
def test_torch_equals_numpy_and_a_part_is_a_part_of_the_whole(seed: int, begin: int, cut: int, num: int, scheme: str) -> None:
    whole = noise.noise(NAME, seed, begin, begin + cut + num, scheme)
    assert np.array_equal(noise.noise(NAME, seed, begin + cut, begin + cut + num, scheme), whole[cut:])
    levels = torch.from_numpy(noise.scaled_levels(scheme, 1.0))
    found = noise.scaled_noise(noise.tensor_id(NAME), seed, begin + cut, begin + cut + num, scheme, levels)
    assert np.array_equal(found.numpy(), whole[cut:])


def test_the_frozen_table_is_the_exact_one_rounded() -> None:
    getcontext().prec = 60
    table = np.array(SCHEMES["binomial"].levels)
    assert len(table) == 33 and np.array_equal(table, np.array([(n - 16) / math.sqrt(8) for n in range(33)]).astype(np.float32))
    for n, z in enumerate(table):
        exact = Fraction(Decimal(n - 16) / Decimal(8).sqrt())
        for neighbour in (np.nextafter(np.float32(z), np.float32(-99)), np.nextafter(np.float32(z), np.float32(99))):
            assert abs(Fraction(float(z)) - exact) <= abs(Fraction(float(neighbour)) - exact)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_sum_is_not_fused_and_rounds_to_even(scheme: str) -> None:
    """Against exact rationals, on sums of which fusing or rounding half away would change some."""
    generator = torch.Generator().manual_seed(1)
    base = torch.randn(4000, generator=generator).bfloat16()
    sigma, products = 0.0123, noise.scaled_levels(scheme, 0.0123)
    z = noise.noise(NAME, 3, 0, 4000, scheme)
    product = np.float32(sigma) * z
    assert set(product.tolist()) <= set(products.tolist())
    exact_sums = base.double().numpy() + product.astype(np.float64)  # of two float32, exact in float64 at these magnitudes
    found = noise.perturbed_reference(base.float(), NAME, 3, sigma, scheme=scheme).numpy()
    assert np.array_equal(found, exact_sums.astype(np.float32))
    if scheme == "binomial":
        fused = (base.double().numpy() + np.float64(np.float32(sigma)) * z.astype(np.float64)).astype(np.float32)
        assert not np.array_equal(found, fused)
    # halves: bfloat16 has steps of 2**-7 above 1, and half a step goes to the even neighbour
    ties = torch.tensor([1.0, 1.0 + 2**-7, 1.0 + 2**-6, 1.0 + 3 * 2**-7], dtype=torch.bfloat16)
    signs = noise.noise(NAME, 3, 0, 4)
    rounded = noise.perturbed_reference(ties, NAME, 3, 2**-8).double().numpy()
    steps = (ties.double().numpy() - 1) * 2**7 + signs * 0.5
    assert ((rounded - 1) * 2**7 == np.round(steps))[steps > 0].all() and (steps > 0).sum() >= 3


@pytest.mark.parametrize("scheme", SCHEMES)
def test_known_answer_is_the_frozen_one(scheme: str) -> None:
    assert noise.known_answer(scheme) == SCHEMES[scheme].known_answer
    assert noise.describe(scheme) == {"scheme": scheme, "version": 1, "known_answer": SCHEMES[scheme].known_answer}


def test_long_ranges_are_computed_in_parts_that_agree() -> None:
    for scheme, step in (("rademacher", 2**15 * 128), ("binomial", 2**15 * 4)):
        around = noise.noise(NAME, 6, step - 5, step + 400, scheme)
        assert np.array_equal(noise.noise(NAME, 6, 3, step + 400, scheme)[step - 8 :], around)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_moments_and_independence(scheme: str) -> None:
    num = 400_000
    draws = [noise.noise(*key, 0, num, scheme) for key in ((NAME, 1), (NAME, 2), (NAME.replace("0", "1"), 1))]
    for z in draws:
        assert abs(z.mean()) < 5 / math.sqrt(num) and abs((z**2).mean() - 1) < 0.02
        assert abs((z[:-1] * z[1:]).mean()) < 5 / math.sqrt(num)
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert abs((draws[i] * draws[j]).mean()) < 5 / math.sqrt(num)


def test_uniform_draws_are_philox_words_of_their_own_streams() -> None:
    draws = noise.uniforms(11, 3, 0, 40_000)
    assert draws.dtype == np.float64 and 0 < draws.min() and draws.max() < 1 and abs(draws.mean() - 0.5) < 0.01
    assert np.array_equal(noise.uniforms(11, 3, 4321, 4330), draws[4321:4330])
    assert not np.array_equal(noise.uniforms(11, 4, 0, 10), draws[:10]) and not np.array_equal(noise.uniforms(12, 3, 0, 10), draws[:10])
    identity = noise.tensor_id("<uniform draws of stream 3>")
    words = philox_from_the_paper([2, 0, identity % 2**32, identity >> 32], [11, 0])
    assert draws[8:12].tolist() == [(word + 0.5) / 2**32 for word in words]


def rectangles() -> st.SearchStrategy[tuple]:
    def of_shape(shape: tuple[int, int]) -> st.SearchStrategy[tuple]:
        pairs = [st.tuples(st.integers(0, n - 1), st.integers(1, n)).filter(lambda p: p[0] < p[1]) for n in shape]
        return st.tuples(st.just(shape), *pairs)

    return st.tuples(st.integers(1, 40), st.integers(1, 300)).flatmap(of_shape)


@given(rectangle=rectangles(), dtype=st.sampled_from(LIVE_DTYPES), scheme=st.sampled_from(list(SCHEMES)), strided=st.booleans())
@settings(max_examples=40, deadline=None)
def test_the_torch_writer_equals_the_reference_on_any_rectangle(
    rectangle: tuple, dtype: torch.dtype, scheme: str, strided: bool
) -> None:
    shape, rows, cols = rectangle
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    base = whole[slice(*rows), slice(*cols)]
    base = base.t().contiguous().t() if strided else base.contiguous()
    live = torch.empty_strided(base.shape, base.stride(), dtype=dtype).fill_(torch.nan)
    piece = Piece(NAME, shape, *rows, *cols, 0, base.stride(0), base.stride(1))
    writer = TorchWriter([Target(piece, live, base)], scheme)
    writer.write(5, writer.prepare(noise.scaled_levels(scheme, 0.02)[None]))
    assert bits(live) == bits(noise.perturbed_reference(whole, NAME, 5, 0.02, scheme=scheme)[slice(*rows), slice(*cols)])


def test_refusals() -> None:
    for seed in (-1, 2**64):
        with pytest.raises(ValueError, match="does not fit in 64 bits"):
            noise.noise(NAME, seed, 0, 4)
    with pytest.raises(ValueError, match="no noise scheme 'gauss': choose one of rademacher, binomial"):
        noise.noise(NAME, 1, 0, 4, "gauss")
    for sigma in (math.nan, math.inf, 1e39):
        with pytest.raises(ValueError, match="finite float32"):
            noise.scaled_levels("rademacher", sigma)
