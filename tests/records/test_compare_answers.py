import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats as scipy_stats

from bitsperbyte.records.compare_answers import compare_randopt
from bitsperbyte.records.schema import Record
from bitsperbyte.records.sides import read_sides
from bitsperbyte.records.store import write_record

from .conftest import accuracy, loss

RNG = np.random.default_rng(3)
SIZES = [140] * 60 + [600]  # bytes of 61 documents: 9,000 in all


def marks(num_correct: int, seed: int) -> str:
    right = np.zeros(200, int)
    right[np.random.default_rng(seed).permutation(200)[:num_correct]] = 1
    return "".join(map(str, right))


class Searches:
    """Writes records of finished searches: `make("a", ensemble="0110...")` with its other figures those of a fixture."""

    def __init__(self, root: Path, part: dict[str, Any]) -> None:
        self.root, self.part = root, part

    def make(self, name: str, *, seed: int = 42, items: dict[str, Any] | None = None, task: dict[str, Any] | None = None,
             config: dict[str, Any] | None = None, **changes: Any) -> Path:
        part = {**self.part, "tests": [], **changes}
        part["task"] = {**part["task"], **(task or {})}
        kept = (items or {}).get("correct", {})
        for label, own in kept.items():
            place = part["controls"] if label in part["controls"] else part
            if label in place:
                place[label] = {**place[label], "test": accuracy(own.count("1"))}
        record = Record(track="randopt", name=name, status="finished", created_utc="2026-01-31T12:00:00+00:00", seed=seed,
                        config={"search": {"seed": seed}, **(config or {"run": name})}, randopt={**part, "items": items})
        (self.root / name).mkdir()
        write_record(self.root / name / "record.json", record)
        return self.root / name


@pytest.fixture
def searches(tmp_path: Path, answers_part: dict[str, Any]) -> Searches:
    return Searches(tmp_path, answers_part)


def test_two_runs_are_paired_by_question(searches: Searches) -> None:
    one, other = marks(50, 1), marks(64, 2)
    a, b = searches.make("a", items={"correct": {"ensemble": one}}), searches.make("b", items={"correct": {"ensemble": other}})
    made = compare_randopt(*read_sides([a, b]))
    [test] = made.tests
    table = [[sum((x, y) == (p, q) for x, y in zip(one, other, strict=True)) for q in "01"] for p in "01"]
    assert (test.neither, test.only_b, test.only_a, test.both) == (*table[0], *table[1]) and test.num_items == 200
    assert test.p_mcnemar == pytest.approx(scipy_stats.binomtest(test.only_b, test.only_a + test.only_b).pvalue)
    assert (test.value_a, test.value_b, test.gain) == (0.25, 0.32, pytest.approx(0.07))
    difference = np.array([int(y) - int(x) for x, y in zip(one, other, strict=True)])
    half = 1.96 * difference.std() / math.sqrt(200)  # the bootstrap's interval of a mean, in the normal approximation
    assert (test.interval.low, test.interval.high) == (pytest.approx(0.07 - half, abs=0.011), pytest.approx(0.07 + half, abs=0.011))
    swapped = compare_randopt(*read_sides([b, a])).tests[0]
    assert (swapped.gain, swapped.only_a, swapped.p_mcnemar) == (-test.gain, test.only_b, test.p_mcnemar)
    assert json.loads(json.dumps(made.to_dict(), allow_nan=False))["tests"][0]["only_a"] == test.only_a
    assert any("another search seed" in note for note in made.notes) and made.over_runs is None


def test_several_runs_a_side_are_paired_by_share_and_tested_over_seeds(searches: Searches) -> None:
    paths = [searches.make(f"{side}{seed}", seed=seed, items={"correct": {"ensemble": marks(num, 10 * num + seed)}}, config={"side": side})
             for side, nums in (("a", (50, 54, 52)), ("b", (64, 66, 69))) for seed, num in enumerate(nums)]
    made = compare_randopt(*read_sides([], paths[:3], paths[3:]))
    assert made.tests[0].p_mcnemar is None and made.tests[0].gain == pytest.approx((199 - 156) / 600)
    expected = scipy_stats.ttest_ind([64, 66, 69], [50, 54, 52], equal_var=False)
    assert made.over_runs.p_two_sided == pytest.approx(expected.pvalue) and made.over_runs.difference > 0
    assert "Over the runs of each side, the difference is more" in made.verdict[-1]


@pytest.mark.parametrize(("change", "expected"), [
    ({"task": {"test_sha256": "ee" * 32}}, "the test set .* is"), ({"task": {"version": "2"}}, "task's version is 1 in .* and 2 in"),
    ({"task": {"name": "math500"}}, "the task is gsm8k in"), ({"task": {"system": "Be brief."}}, "system message of the prompt is not stated"),
    ({"engine": {"prompt_format": "plain"}}, "form of the prompt is not stated in .* and plain"),
    ({"task": {"test_sha256": None}}, "does not say which test set")])
def test_other_questions_or_prompts_are_refused(searches: Searches, change: dict[str, Any], expected: str) -> None:
    items = {"correct": {"ensemble": marks(50, 1)}}
    with pytest.raises(ValueError, match=expected):
        compare_randopt(*read_sides([searches.make("a", items=items), searches.make("b", items=items, **change)]))


def test_items_of_other_names_are_refused(searches: Searches) -> None:
    names = [f"q{i}" for i in range(200)]
    a = searches.make("a", items={"ids": names, "correct": {"ensemble": marks(50, 1)}})
    b = searches.make("b", items={"ids": names[::-1], "correct": {"ensemble": marks(50, 1)}})
    with pytest.raises(ValueError, match="their items differ, or stand in another order"):
        compare_randopt(*read_sides([a, b]))


def test_what_a_record_does_not_hold_says_what_can_be_done(searches: Searches) -> None:
    a = searches.make("a", items={"correct": {"ensemble": marks(50, 1), "base": marks(50, 2)}})
    with pytest.raises(ValueError, match="no result 'best_single' item by item; it has ensemble, base"):
        compare_randopt(*read_sides([a, searches.make("b", items={"correct": {"ensemble": marks(50, 1)}})]), ("best_single", "ensemble"))
    old = searches.make("old")
    with pytest.raises(ValueError, match="no journal.jsonl lies beside it"):
        compare_randopt(*read_sides([a, old]))
    right = [mark == "1" for mark in marks(50, 9)]
    rows = [{"journal": 1}, {"phase": "base_test", "index": -1, "correct": right}]
    (old / "journal.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match="--label base, or .* --resume"):
        compare_randopt(*read_sides([a, old]))
    made = compare_randopt(*read_sides([a, old]), ("base", "base"))
    assert made.tests[0].value_b == 0.25 and made.tests[0].only_b == sum(r and m == "0" for r, m in zip(right, marks(50, 2), strict=True))
    with pytest.raises(ValueError, match="holds no results of best_single"):
        compare_randopt(*read_sides([a, old]), ("base", "best_single"))
    (old / "journal.jsonl").write_text(json.dumps(rows[1] | {"correct": [not r for r in right]}) + "\n")
    with pytest.raises(ValueError, match="does not hold the results of base that the record beside it states"):
        compare_randopt(*read_sides([a, old]), ("base", "base"))
    dead = searches.root / "dead"
    dead.mkdir()
    write_record(dead / "record.json", Record(track="randopt", name="dead", status="interrupted", created_utc="2026-01-31T12:00:00+00:00"))
    with pytest.raises(ValueError, match=r"dead \(interrupted\) has no result: resume it"):
        compare_randopt(*read_sides([a, dead]))


def test_two_results_of_one_run_compare_and_one_with_itself_does_not(searches: Searches) -> None:
    a = searches.make("a", items={"correct": {"ensemble": marks(64, 1), "base": marks(50, 2)}})
    assert compare_randopt(*read_sides([a, a]), ("base", "ensemble")).tests[0].gain == pytest.approx(0.07)
    with pytest.raises(ValueError, match="does not compare with itself"):
        compare_randopt(*read_sides([a, a]))


def split_loss(total: float, seed: int) -> list[float]:
    shares = np.array(SIZES) * np.random.default_rng(seed).uniform(0.8, 1.2, len(SIZES))
    return (shares / shares.sum() * total).tolist()


def test_documents_are_paired_by_bits_per_byte(tmp_path: Path, likelihood_part: dict[str, Any]) -> None:
    searches = Searches(tmp_path, likelihood_part)
    kept = {"nats": {"base": split_loss(5000.0, 1), "mixture": split_loss(4900.0, 2)}, "num_bytes": SIZES}
    a = searches.make("a", items=kept)
    b = searches.make("b", items={"nats": {"mixture": split_loss(4900.0, 3)}, "num_bytes": SIZES})
    made = compare_randopt(*read_sides([a, a]), ("base", "ensemble"))
    assert made.labels == ("base", "mixture") and made.tests[0].p_mcnemar is None
    assert made.tests[0].gain == pytest.approx(loss(5000.0)["bpb"] - loss(4900.0)["bpb"])
    assert (made.tests[0].value_a, made.rows[1]["bpb"]) == (pytest.approx(loss(5000.0)["bpb"]), pytest.approx(loss(4900.0)["bpb"]))
    equal = compare_randopt(*read_sides([a, b])).tests[0]
    assert equal.gain == pytest.approx(0.0, abs=1e-12) and equal.interval.low < 0 < equal.interval.high
    other = searches.make("other", items={"nats": {"mixture": kept["nats"]["mixture"]}, "num_bytes": [*SIZES[:-2], 160, 580]})
    with pytest.raises(ValueError, match="bytes of the test documents differ"):
        compare_randopt(*read_sides([a, other]))


def test_held_out_text_is_paired_where_both_kept_it(searches: Searches) -> None:
    correct = {"correct": {"ensemble": marks(64, 1), "base": marks(50, 2)}}
    held = searches.part["heldout"]
    kept = {"nats": {"base": split_loss(held["base"]["nats"], 1), "mixture": split_loss(held["mixture"]["nats"], 1)}, "num_bytes": SIZES}
    a, b = (searches.make(name, items=correct, heldout={**held, "items": kept}) for name in ("a", "b"))
    questions, text = compare_randopt(*read_sides([a, b]), ("base", "ensemble")).tests
    assert questions.what == "test questions" and text.what == "held-out documents" and text.num_items == len(SIZES)
    assert text.gain == pytest.approx(held["base"]["bpb"] - held["mixture"]["bpb"]) and text.interval.low > 0
    for change, expected in [({"items": kept, "context": 512}, "the slices or their windows differ"), ({}, "not every record keeps the nats"),
                             ({"enabled": False}, "not every run scored it")]:
        c = searches.make(f"c_{len(expected)}", items=correct, heldout={**held, **change})
        made = compare_randopt(*read_sides([a, c]))
        assert len(made.tests) == 1 and any(expected in note for note in made.notes)


def test_what_moves_a_result_beside_the_test_is_warned_about(searches: Searches) -> None:
    items = {"correct": {"ensemble": marks(50, 1)}}
    a = searches.make("a", items=items, config={"task": {"max_new_tokens": 64}})
    b = searches.make("b", items=items, config={"task": {"max_new_tokens": 256}}, engine={**searches.part["engine"], "weights_sha256": "ff" * 32})
    found = "\n".join(compare_randopt(*read_sides([a, b])).warnings)
    assert "the limit of an answer's tokens differs: 64, 256" in found and "the model differs: unknown, ffffffffffff" in found
