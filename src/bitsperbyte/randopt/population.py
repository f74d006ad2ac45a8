"""Which seeds and sigmas a search evaluates, and every other draw of members.

Each draw is SHA-256 of what it is for, the run's seed and its own number, so that a member depends on its index alone: a population of
512 begins with the population of 64. Hashes, and not a generator of a library, because a library may change its streams.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations


@dataclass(frozen=True)
class Member:
    """One model of the population: base + sigma * noise(seed). `seed` and `sigma` are None for the base model itself."""

    index: int
    seed: int | None
    sigma: float | None

    def __str__(self) -> str:
        if self.seed is None:
            return "the base model" if self.index < 0 else f"the base model, sample {self.index}"
        return f"member {self.index} (seed {self.seed}, sigma {self.sigma:g})"


BASE = Member(-1, None, None)


def draw_population(num: int, sigmas: Sequence[float], seed: int) -> list[Member]:
    """The first `num` members under `seed`: distinct noise seeds, uniform below 2**63, and stratified sigmas.

    Every run of len(sigmas) members holds each sigma once, in a random order of its own, so that at any `num` the counts of two sigmas
    differ by one at most, and at a multiple of len(sigmas) not at all.
    """
    members: list[Member] = []
    taken: set[int] = set()
    order: list[float] = []
    for index in range(num):
        block, place = divmod(index, len(sigmas))
        if place == 0:
            order = [sigmas[i] for i in _shuffled(len(sigmas), "sigma", seed, block)]
        attempt = 0
        while (noise_seed := _draw("seed", seed, index, attempt) >> 1) in taken:
            attempt += 1
        taken.add(noise_seed)
        members.append(Member(index, noise_seed, order[place]))
    return members


def draw_pool(population: Sequence[Member], num: int, seed: int) -> list[Member]:
    """`num` members drawn uniformly without replacement, by index; the whole population where it has no more than that.

    A population that grows keeps those of its pool that no newcomer displaces, so that less is evaluated again.
    """
    drawn = sorted(population, key=lambda member: (_draw("pool", seed, member.index), member.index))[:num]
    return sorted(drawn, key=lambda member: member.index)


def draw_subsets(pool_size: int, k: int, num_subsets: int, seed: int) -> list[tuple[int, ...]]:
    """`num_subsets` distinct random subsets of k positions in range(pool_size), each ascending.

    Where fewer exist (C(pool_size, k) < num_subsets), each of them once: the caller says how many there were. ValueError for k beyond
    the pool.
    """
    if not 1 <= k <= pool_size:
        raise ValueError(f"no subset of {k} can be drawn from a pool of {pool_size}: enlarge the pool or take a smaller ensemble")
    if math.comb(pool_size, k) <= num_subsets:
        return list(combinations(range(pool_size), k))
    subsets: dict[tuple[int, ...], None] = {}
    attempt = 0
    while len(subsets) < num_subsets:
        subsets[tuple(sorted(_shuffled(pool_size, "subset", seed, k, attempt)[:k]))] = None
        attempt += 1
    return list(subsets)


def _draw(purpose: str, *numbers: int) -> int:
    """A 64-bit number, uniform over purposes and numbers."""
    text = "/".join(["bitsperbyte", "population", "1", purpose, *map(str, numbers)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def _shuffled(num: int, purpose: str, *numbers: int) -> list[int]:
    """range(num) in a random order, each order equally likely."""
    return sorted(range(num), key=lambda i: (_draw(purpose, *numbers, i), i))
