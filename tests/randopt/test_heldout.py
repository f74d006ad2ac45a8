import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitsperbyte.randopt.engines.base import DocumentNats
from bitsperbyte.randopt.heldout import Likelihood, Mixture, compare, likelihoods, mean_likelihood


def corpus(num_members: int, lengths: list[int], seed: int = 0, spread: float = 1.0) -> dict[int, list[DocumentNats]]:
    """Members -1 (the base), 0, 1, ... over documents of `lengths` tokens: equal bytes, nats around those of the base."""
    rng = np.random.default_rng(seed)
    num_bytes = [rng.integers(0, 9, n) for n in lengths]
    nats = [rng.gamma(2.0, 1.0, n) for n in lengths]
    return {member: [DocumentNats(np.abs(n + spread * (member >= 0) * rng.normal(size=len(n))), b)
                     for n, b in zip(nats, num_bytes, strict=True)] for member in range(-1, num_members)}


shapes = st.tuples(st.integers(1, 5), st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(sum), st.integers(0, 99))


@given(shapes)
def test_a_mixture_is_the_mean_of_the_members_probabilities(shape: tuple[int, list[int], int]) -> None:
    members = corpus(*shape)
    made = likelihoods(members.__getitem__, [], {"all": range(shape[0])})[1]["all"]
    for document in range(len(shape[1])):
        p = np.mean([np.exp(-members[m][document].nats) for m in range(shape[0])], axis=0)
        assert made.nats[document] == pytest.approx(-np.log(p).sum(), rel=1e-12, abs=1e-12)
        assert made.num_bytes[document] == members[0][document].num_bytes.sum()
    assert made.num_tokens == sum(shape[1])


@given(shapes)
def test_a_mixture_is_never_worse_than_its_mean_member(shape: tuple[int, list[int], int]) -> None:
    members = corpus(*shape)
    alone, mixed = likelihoods(members.__getitem__, range(shape[0]), {"all": range(shape[0])})
    mean = mean_likelihood(list(alone.values()))
    assert (mixed["all"].nats <= mean.nats + 1e-9).all()
    assert mean.score.nats == pytest.approx(np.mean([a.score.nats for a in alone.values()]), rel=1e-12)
    least = sum(np.min([members[m][d].nats for m in range(shape[0])], axis=0).sum() for d in range(len(shape[1])))
    assert mixed["all"].score.nats >= least - 1e-9  # nor better than the best member at every token


@given(st.lists(st.floats(0, 50), min_size=1, max_size=8), st.integers(1, 33))
def test_equal_members_give_that_member_to_the_last_bit(nats: list[float], k: int) -> None:
    mixture = Mixture()
    for _ in range(k):
        mixture.add(np.array(nats))
    assert mixture.nats().tolist() == nats


def test_a_mixture_holds_where_probabilities_underflow() -> None:
    mixture = Mixture()
    for nats in ([2000.0, 0.0], [2000.0 + math.log(3), 1e6], [5000.0, 0.0]):
        mixture.add(np.array(nats))
    # (e^-2000 + e^-2000 / 3 + ~0) / 3 and (1 + ~0 + 1) / 3
    assert mixture.nats() == pytest.approx([2000 - math.log(4 / 9), -math.log(2 / 3)], rel=1e-14)


def test_neither_the_order_of_a_group_nor_other_groups_change_a_bit() -> None:
    members = corpus(6, [30, 20])
    one = likelihoods(members.__getitem__, [], {"a": [4, 1, 3]})[1]["a"]
    other = likelihoods(members.__getitem__, [-1, 5], {"b": [0, 1, 2, 5], "a": [1, 3, 4]})[1]["a"]
    assert one.nats.tolist() == other.nats.tolist()


def test_each_member_is_loaded_once() -> None:
    members, loaded = corpus(4, [3]), []

    def load(index: int) -> list[DocumentNats]:
        loaded.append(index)
        return members[index]

    likelihoods(load, [-1, 0], {"a": [0, 1], "b": [1, 3]})
    assert loaded == [-1, 0, 1, 3]


@pytest.mark.parametrize("change", ["bytes", "split", "tokens"])
def test_members_that_scored_other_tokens_are_an_error(change: str) -> None:
    members = corpus(2, [4, 4])
    nats, num_bytes = (np.concatenate([getattr(d, name) for d in members[1]]) for name in ("nats", "num_bytes"))
    if change == "bytes":
        num_bytes[0] += 1
    cut = 3 if change == "split" else 4
    last = 7 if change == "tokens" else 8
    members[1] = [DocumentNats(nats[:cut], num_bytes[:cut]), DocumentNats(nats[cut:last], num_bytes[cut:last])]
    with pytest.raises(AssertionError, match="scored other tokens"):
        likelihoods(members.__getitem__, [], {"all": [0, 1]})


@settings(max_examples=20)
@given(st.integers(0, 1000))
def test_differences_are_of_the_two_scores_and_skip_documents_without_bytes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_bytes = np.array([0, 40, 30, 20, 50])
    nats = rng.random((2, 5)) * num_bytes
    a, b = Likelihood(nats[0], num_bytes, 60), Likelihood(nats[1], num_bytes, 60)
    made = a.minus(b)
    assert made["difference_bpb"] == pytest.approx(a.score.bpb - b.score.bpb, abs=1e-12)
    back = b.minus(a)
    assert (made["low"], made["high"]) == (pytest.approx(-back["high"]), pytest.approx(-back["low"]))
    with pytest.raises(AssertionError, match="different documents"):
        a.minus(Likelihood(nats[1], num_bytes + 1, 60))


# -- the figures of one text ------------------------------------------------------------------------------------------

LENGTHS = [300, 200, 250, 100]


def figures(members: dict[int, list[DocumentNats]], subsets: list[tuple[int, ...]] | None = None) -> dict:
    subsets = [(0, 1, 2), (3, 4, 5), (0, 4, 5)] if subsets is None else subsets
    return compare(members.__getitem__, -1, {3: [5, 1, 2], 2: [5, 1]}, 3, subsets, "these documents")[0]


def test_sides_by_document_add_up_to_the_figures() -> None:
    members = corpus(6, LENGTHS)
    made, sides = compare(members.__getitem__, -1, {3: [5, 1, 2]}, 3, [(0, 1, 2), (3, 4, 5)], "these documents")
    assert set(sides) == {"base", "mixture", "mean_member", "best_single", "random_mixture"}
    for name, side in sides.items():
        stated = made[name]["mean_bpb"] if name == "random_mixture" else made[name]["bpb"]
        assert len(side.nats) == len(LENGTHS) and side.score.bpb == pytest.approx(stated, rel=1e-12)
    assert sides["base"].nats.tolist() == pytest.approx([d.nats.sum() for d in members[-1]])


def test_figures_follow_from_the_members() -> None:
    members = corpus(6, LENGTHS)
    made = figures(members)
    num_bytes = sum(d.num_bytes.sum() for d in members[0])

    def bpb(group: tuple[int, ...]) -> float:
        p = np.mean([np.exp(-np.concatenate([d.nats for d in members[m]])) for m in group], axis=0)
        return -np.log2(p).sum() / num_bytes

    assert made["base"]["bpb"] == pytest.approx(bpb((-1,))) and made["best_single"]["bpb"] == pytest.approx(bpb((5,)))
    assert made["mixture"]["bpb"] == pytest.approx(bpb((5, 1, 2))) and made["secondary"][0]["k"] == 2
    assert made["secondary"][0]["mixture"]["bpb"] == pytest.approx(bpb((5, 1)))
    assert made["mean_member"]["bpb"] == pytest.approx(np.mean([bpb((m,)) for m in (5, 1, 2)]))
    drawn = [bpb(group) for group in [(0, 1, 2), (3, 4, 5), (0, 4, 5)]]
    assert [s["bpb"] for s in made["random_mixture"]["scores"]] == pytest.approx(drawn)
    assert made["random_mixture"]["mean_bpb"] == pytest.approx(np.mean(drawn))
    assert (made["random_mixture"]["low"], made["random_mixture"]["high"]) == (pytest.approx(min(drawn)), pytest.approx(max(drawn)))
    for row in made["differences"]:
        a, b = ({**made["random_mixture"], "bpb": made["random_mixture"]["mean_bpb"]} if name == "random_mixture" else made[name]
                for name in (row["a"], row["b"]))
        assert row["difference_bpb"] == pytest.approx(a["bpb"] - b["bpb"], abs=1e-12)
        assert row["low"] <= row["difference_bpb"] <= row["high"]
    assert {(row["a"], row["b"]) for row in made["differences"]} >= {("mixture", "base"), ("mixture", "random_mixture")}


def test_members_equal_to_the_base_gain_nothing() -> None:
    made = figures(corpus(6, LENGTHS, spread=0.0))
    assert made["mixture"]["nats"] == made["base"]["nats"]
    assert all(row["difference_bpb"] == pytest.approx(0, abs=1e-12) for row in made["differences"])


def test_a_mixture_that_only_vote_explains_is_no_better_than_random_ones() -> None:
    """Members that all scatter alike around the base: the mixture beats its mean member, and not the random mixtures."""
    made = {(row["a"], row["b"]): row for row in figures(corpus(6, [400] * 30, spread=0.5))["differences"]}
    assert made["mixture", "mean_member"]["high"] < 0
    assert made["mixture", "random_mixture"]["low"] < 0 < made["mixture", "random_mixture"]["high"]


def test_without_random_subsets_nothing_is_said_of_them() -> None:
    made = figures(corpus(6, LENGTHS), [])
    assert "random_mixture" not in made and not any("random_mixture" in (row["a"], row["b"]) for row in made["differences"])


def test_bytes_that_belong_to_other_text_are_refused() -> None:
    members = corpus(6, LENGTHS)
    wrong = {m: [DocumentNats(d.nats, d.num_bytes * 10) for d in documents] for m, documents in members.items()}
    with pytest.raises(ValueError, match="these documents: .* bytes a token"):
        figures(wrong)
