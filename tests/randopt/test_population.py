"""Populations: prefix-stable, stratified, of distinct seeds uniform over 63 bits; pools and subsets drawn evenly."""

import math
from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitsperbyte.randopt import population
from bitsperbyte.randopt.population import BASE, Member, draw_pool, draw_population, draw_subsets

SEEDS = st.integers(0, 2**63 - 1)
SIGMAS = st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=5, unique=True)


@given(num=st.integers(0, 60), more=st.integers(0, 60), sigmas=SIGMAS, seed=SEEDS)
def test_a_larger_population_begins_with_the_smaller(num: int, more: int, sigmas: list[float], seed: int) -> None:
    assert draw_population(num + more, sigmas, seed)[:num] == draw_population(num, sigmas, seed)


@given(num=st.integers(1, 60), sigmas=SIGMAS, seed=SEEDS)
def test_sigmas_are_stratified_at_every_prefix(num: int, sigmas: list[float], seed: int) -> None:
    members = draw_population(num, sigmas, seed)
    counts = dict.fromkeys(sigmas, 0)
    for place, member in enumerate(members):
        assert member.index == place
        counts[member.sigma] += 1
        assert max(counts.values()) - min(counts.values()) <= ((place + 1) % len(sigmas) != 0)


def test_the_order_of_sigmas_is_random_in_each_block() -> None:
    members = draw_population(6 * 600, [1.0, 2.0, 3.0], 5)
    orders = Counter(tuple(m.sigma for m in members[i : i + 3]) for i in range(0, len(members), 3))
    assert len(orders) == 6
    assert chi_square(list(orders.values())) < 20.5  # 99.9% of chi-square with 5 degrees of freedom


def test_seeds_are_distinct_and_fill_63_bits() -> None:
    seeds = [m.seed for m in draw_population(4000, [0.1], 0)]
    assert len(set(seeds)) == 4000 and 0 <= min(seeds) and max(seeds) < 2**63
    for bit in range(63):
        share = sum(s >> bit & 1 for s in seeds) / 4000
        assert abs(share - 0.5) < 4.5 * 0.5 / math.sqrt(4000), bit  # 63 bits, 4.5 standard errors each
    others = {m.seed for m in draw_population(4000, [0.1], 1)}
    assert not others & set(seeds)


def test_a_seed_drawn_twice_is_drawn_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    real = population._draw
    monkeypatch.setattr(population, "_draw", lambda purpose, *numbers: real(purpose, *numbers) % 64 if purpose == "seed"
                        else real(purpose, *numbers))  # 32 noise seeds in all
    members = draw_population(32, [0.1, 0.2], 3)
    assert sorted(m.seed for m in members) == list(range(32))
    assert draw_population(20, [0.1, 0.2], 3) == members[:20]


def test_frozen_members() -> None:
    """A change here makes every population another one: journals of earlier runs could not be resumed or grown."""
    assert [(m.seed, m.sigma) for m in draw_population(4, [0.001, 0.002], 42)] == [
        (2662016993816714510, 0.001), (7374805130700383215, 0.002), (8031512125049876450, 0.002), (1229189992114207090, 0.001)]


def test_a_member_says_who_it_is() -> None:
    assert str(BASE) == "the base model" and str(Member(3, None, None)) == "the base model, sample 3"
    assert str(Member(3, 17, 0.001)) == "member 3 (seed 17, sigma 0.001)"


@given(size=st.integers(0, 40), num=st.integers(0, 50), seed=SEEDS)
def test_a_pool_is_drawn_without_replacement(size: int, num: int, seed: int) -> None:
    members = draw_population(size, [0.1, 0.2], 1)
    pool = draw_pool(members, num, seed)
    assert len(pool) == min(num, size) and set(pool) <= set(members)
    assert [m.index for m in pool] == sorted({m.index for m in pool})
    grown = draw_pool(draw_population(size + 5, [0.1, 0.2], 1), num, seed)
    assert set(grown) & set(members) <= set(pool), "growth lets nobody in who was left out before"


def test_every_member_is_as_likely_in_the_pool() -> None:
    members = draw_population(12, [0.1], 1)
    drawn = Counter(m.index for seed in range(2000) for m in draw_pool(members, 3, seed))
    assert chi_square([drawn[i] for i in range(12)]) < 31.3  # 99.9% with 11 degrees of freedom; less spread without replacement


@given(pool_size=st.integers(1, 12), data=st.data(), seed=SEEDS)
def test_subsets_are_distinct_and_as_many_as_there_are(pool_size: int, data: st.DataObject, seed: int) -> None:
    k, num = data.draw(st.integers(1, pool_size)), data.draw(st.integers(1, 40))
    subsets = draw_subsets(pool_size, k, num, seed)
    assert len(subsets) == len(set(subsets)) == min(num, math.comb(pool_size, k))
    assert set(subsets) <= set(combinations(range(pool_size), k))
    assert subsets == draw_subsets(pool_size, k, num, seed)


def test_every_subset_is_as_likely() -> None:
    counts = Counter(draw_subsets(5, 2, 1, seed)[0] for seed in range(3000))
    assert len(counts) == 10 and chi_square(list(counts.values())) < 27.9  # 99.9% with 9 degrees of freedom


@pytest.mark.parametrize("k", [0, 6])
def test_a_subset_beyond_the_pool_is_refused(k: int) -> None:
    with pytest.raises(ValueError, match=f"no subset of {k} can be drawn from a pool of 5: enlarge the pool"):
        draw_subsets(5, k, 20, 0)


def chi_square(counts: list[int]) -> float:
    expected = sum(counts) / len(counts)
    return sum((count - expected) ** 2 / expected for count in counts)
