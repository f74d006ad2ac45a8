import json
from collections import Counter
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from scipy import stats as scipy_stats

from bitsperbyte.randopt.config import RandOptConfig
from bitsperbyte.randopt.engines.base import Generation, Sampling
from bitsperbyte.randopt.engines.fake import FakeEngine
from bitsperbyte.randopt.evaluate import evaluate
from bitsperbyte.randopt.journal import Journal, Row
from bitsperbyte.randopt.search import search
from bitsperbyte.randopt.summary import summary
from bitsperbyte.randopt.tasks.base import Grade, Item
from bitsperbyte.randopt.tasks.grading import Grader
from bitsperbyte.records.schema import RandOptPart
from bitsperbyte.text.slices import Slice

DOCUMENTS = tuple("".join(chr(97 + (i * j) % 26) for j in range(40 + 30 * i)) for i in range(6))
HELD_OUT = Slice(Path("somewhere/slice.jsonl"), DOCUMENTS, "ab" * 32, {"source": "embedded"})


class Sums:
    """`a + b`; `042` and `42` are equal answers, and an answer below 10 cannot be read."""

    name, version, kind, needs_processes, default_max_new_tokens, stop = "sums", "1", "answers", False, 8, ()

    def prompt(self, item: Item) -> list[dict[str, str]]:
        return [{"role": "user", "content": item.question}]

    def grade(self, item: Item, text: str) -> Grade:
        vote = text if text.isdigit() and int(text) >= 10 else None
        correct = vote is not None and int(vote) == int(item.answer)
        return Grade(vote, vote, float(correct), correct)

    def equivalent(self, a: str, b: str) -> bool:
        return int(a) == int(b)

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "version": self.version, "kind": self.kind}


class Documents(Sums):
    kind = "likelihood"


class Padding(FakeEngine):
    """Some members write a leading zero."""

    def generate(self, prompt_ids: list[list[int]], sampling: Sampling) -> list[Generation]:
        made = super().generate(prompt_ids, sampling)
        pads = self.live is not None and self.live[0] % 2
        return [replace(g, text="0" + g.text) if pads else g for g in made]


def questions(name: str, num: int) -> list[Item]:
    rng = np.random.default_rng(len(name))
    pairs = rng.integers(0, 50, (num, 2))
    return [Item(f"{name}/{i}", f"{a} + {b}", str(a + b)) for i, (a, b) in enumerate(pairs)]


def documents(name: str, num: int) -> list[Item]:
    return [Item(f"{name}/{i}", f"{name} {i} " * (5 + i), "") for i in range(num)]


def configured(**changes: Any) -> RandOptConfig:
    config = {"model": {"path": "none"}, "task": {"name": "arithmetic", "context": 64}, "noise": {"sigmas": [0.1, 0.2]},
              "search": {"population": 24, "seed": 3, "top_k": 4, "secondary_k": [2, 7]},
              "controls": {"control_pool": 10, "temperature": 0.5}, "heldout": {"context": 64}, "probes": {"top": 3}}
    for name, value in changes.items():
        section, _, key = name.partition("__")
        config[section] = {**config[section], key: value}
    return RandOptConfig(**config)


class Ran:
    """One evaluation of a fake engine in `folder`: the record's part, the journal and what was said."""

    def __init__(self, folder: Path, config: RandOptConfig, task: Sums | None = None, engine: FakeEngine | None = None,
                 held_out: Slice | None = HELD_OUT) -> None:
        folder.mkdir(exist_ok=True)
        self.engine, self.said, self.config = engine or Padding(), [], config
        task = task or Sums()
        items = documents if task.kind == "likelihood" else questions
        self.test_items = items("test", 40)
        console = Console(quiet=True)
        with Journal.open(folder / "journal.jsonl", {"test": 1}) as self.journal, Grader(task) as grader:
            self.found = search(config, self.engine, task, grader, self.journal, items("train", 12), console, self.said.append)
            self.part = evaluate(config, self.engine, task, grader, self.journal, self.found, self.test_items, held_out, folder,
                                 console, self.said.append)

    def row(self, phase: str, index: int) -> Row:
        row = self.journal.get(phase, index)
        assert row is not None, (phase, index)
        return row

    def calls(self, name: str) -> list[tuple]:
        return [call for call in self.engine.calls if call[0] == name]


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return Ran(tmp_path_factory.mktemp("answers"), configured())


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return Ran(tmp_path_factory.mktemp("documents"), configured(task__name="likelihood"), Documents())


def without_times(part: Any) -> Any:
    if isinstance(part, dict):
        return {key: without_times(value) for key, value in part.items() if key != "seconds" and not key.endswith("_s")}
    return [without_times(value) for value in part] if isinstance(part, list) else part


def voted(rows: list[Row], items: list[Item]) -> list[bool]:
    """The majority by its definition, straight from the journal: numbers that occur most often, ties to the first row."""
    right = []
    for i, item in enumerate(items):
        numbers = [int(row.votes[i]) for row in rows if row.votes[i] is not None]
        most = max(Counter(numbers).values(), default=0)
        winner = next((n for n in numbers if numbers.count(n) == most), None)
        right.append(winner == int(item.answer))
    return right


def check_accuracy(part: dict[str, Any], right: list[bool]) -> None:
    low, high = scipy_stats.binomtest(sum(right), len(right)).proportion_ci(method="wilson")
    assert part == {"num_correct": sum(right), "num": len(right), "accuracy": sum(right) / len(right),
                    "low": pytest.approx(low), "high": pytest.approx(high)}


# -- votes ------------------------------------------------------------------------------------------------------------


def ranking(ran: Ran) -> list[int]:
    return sorted(range(24), key=lambda index: (-ran.row("search", index).reward, index))


def test_ensembles_follow_from_the_journal(answered: Ran) -> None:
    part, order = answered.part, ranking(answered)
    check_accuracy(part["ensemble"]["test"], voted([answered.row("test", i) for i in order[:4]], answered.test_items))
    assert part["ensemble"]["k"] == 4 and [row["k"] for row in part["secondary"]] == [2, 7]
    for row in part["secondary"]:
        check_accuracy(row["test"], voted([answered.row("test", i) for i in order[: row["k"]]], answered.test_items))
    check_accuracy(part["base"]["test"], answered.row("base_test", -1).correct)
    members = part["selection"]["members"]
    assert [row["index"] for row in members] == order[:4] and [row["rank"] for row in members] == [1, 2, 3, 4]
    for row in members:
        member = answered.found.population[row["index"]]
        assert (row["seed"], row["sigma"]) == (member.seed, member.sigma)
        assert row["train_reward"] == answered.row("search", member.index).reward
        assert row["test_accuracy"] == np.mean(answered.row("test", member.index).correct)
    votes = {vote for i in order[:4] for vote in answered.row("test", i).votes}
    assert None in votes and any(vote.startswith("0") for vote in votes if vote), "the test must see unread and padded answers"


def test_answers_by_question_follow_from_the_journal(answered: Ran) -> None:
    part, order = answered.part, ranking(answered)
    marks = {name: [mark == "1" for mark in text] for name, text in part["items"]["correct"].items()}
    assert set(marks) == {"ensemble", "base", "base_majority", "best_single"}
    assert marks["ensemble"] == voted([answered.row("test", i) for i in order[:4]], answered.test_items)
    assert marks["base"] == list(answered.row("base_test", -1).correct)
    assert marks["best_single"] == list(answered.row("test", order[0]).correct)
    assert marks["base_majority"] == voted([answered.row("base_sample", i) for i in range(4)], answered.test_items)
    assert part["items"]["ids"] == [item.id for item in answered.test_items]
    RandOptPart.model_validate(part)
    for name, text in part["items"]["correct"].items():
        flipped = {**part["items"]["correct"], name: ("1" if text[0] == "0" else "0") + text[1:]}
        with pytest.raises(ValueError, match=f"right answers of {name}"):
            RandOptPart.model_validate({**part, "items": {**part["items"], "correct": flipped}})


def test_controls_follow_from_the_journal(answered: Ran) -> None:
    controls = answered.part["controls"]
    samples = [answered.row("base_sample", i) for i in range(4)]
    check_accuracy(controls["base_majority"]["test"], voted(samples, answered.test_items))
    assert controls["base_majority"]["generated_tokens"] == sum(row.num_tokens for row in samples)
    ensemble_tokens = sum(answered.row("test", i).num_tokens for i in ranking(answered)[:4])
    assert controls["base_majority"]["ensemble_generated_tokens"] == ensemble_tokens
    assert len({tuple(row.votes) for row in samples}) == 4, "each sample must draw for itself"
    best = ranking(answered)[0]
    assert controls["best_single"]["index"] == best
    check_accuracy(controls["best_single"]["test"], answered.row("test", best).correct)
    random_k = controls["random_k"]
    pool = [row["index"] for row in random_k["pool"]]
    assert len(set(pool)) == 10 and random_k["num_subsets"] == len(random_k["accuracies"]) == 20 and random_k["warning"] is None
    possible = set()  # of 210 subsets
    for subset in combinations(sorted(pool), 4):
        possible.add(np.mean(voted([answered.row("test", i) for i in subset], answered.test_items)))
    assert set(random_k["accuracies"]) <= possible and len(set(random_k["accuracies"])) > 3
    assert random_k["mean"] == pytest.approx(np.mean(random_k["accuracies"]))
    assert (random_k["low"], random_k["high"]) == (min(random_k["accuracies"]), max(random_k["accuracies"]))
    headline = answered.part["ensemble"]["test"]["accuracy"]
    assert random_k["share_at_least_ensemble"] == np.mean([a >= headline for a in random_k["accuracies"]])


def test_tests_compare_the_ensemble_item_by_item(answered: Ran) -> None:
    part, order = answered.part, ranking(answered)
    mine = np.array(voted([answered.row("test", i) for i in order[:4]], answered.test_items))
    others = {"base": answered.row("base_test", -1).correct, "best_single": answered.row("test", order[0]).correct,
              "base_majority": voted([answered.row("base_sample", i) for i in range(4)], answered.test_items)}
    tests = {row["b"]: row for row in part["tests"]}
    assert set(tests) == {*others, "random_k"} and all(row["a"] == "ensemble" for row in part["tests"])
    for name, other in others.items():
        row = tests[name]
        assert row["difference"] == pytest.approx(mine.mean() - np.mean(other), abs=1e-12)
        only_a, only_b = (mine & ~np.array(other)).sum(), (~mine & np.array(other)).sum()
        assert (row["only_a"], row["only_b"]) == (only_a, only_b)
        assert row["p_mcnemar"] == pytest.approx(scipy_stats.binomtest(only_a, only_a + only_b).pvalue if only_a + only_b else 1.0)
    random_k = part["controls"]["random_k"]
    assert tests["random_k"]["difference"] == pytest.approx(mine.mean() - random_k["mean"], abs=1e-12)
    median = sorted(random_k["accuracies"])[10]
    assert tests["random_k"]["only_a"] - tests["random_k"]["only_b"] == round((mine.mean() - median) * 40)
    assert all(row["low"] <= row["difference"] <= row["high"] for row in part["tests"])


def test_spearman_is_over_the_pool(answered: Ran) -> None:
    made, pool = answered.part["spearman"], answered.part["controls"]["random_k"]["pool"]
    expected = scipy_stats.spearmanr([row["train_reward"] for row in pool], [row["test_accuracy"] for row in pool]).statistic
    assert made["rho"] == pytest.approx(expected) and made["num"] == 10 and made["low"] < made["rho"] < made["high"]


def test_each_model_answers_the_test_set_once(answered: Ran) -> None:
    part = answered.part
    needed = {*ranking(answered)[:7], *(row["index"] for row in part["controls"]["random_k"]["pool"])}
    assert [row.index for row in answered.journal.rows("test")] == sorted(needed)
    on_test = [call for call in answered.calls("generate") if call[2] == 40]
    assert len(on_test) == len(needed) + 1 + 4  # members, base, samples of the base
    sampled = [call[3] for call in on_test if call[3].temperature > 0]
    assert len({s.seed for s in sampled}) == 4 and {(s.temperature, s.top_p) for s in sampled} == {(0.5, 1.0)}
    assert all(call[1] is None for call in on_test if call[3].temperature > 0), "samples are of the base"
    assert answered.engine.live is None and answered.calls("verify_base")


def test_probes_stand_alone(answered: Ran) -> None:
    probes = answered.part["probes"]
    assert [(row["rank"], row["index"]) for row in probes] == list(enumerate(ranking(answered)[:3], 1))
    for row in probes:
        check_accuracy(row["test"], answered.row("test", row["index"]).correct)
        held = answered.row("heldout", row["index"])
        assert row["bpb"] == pytest.approx(sum(held.nats) * np.log2(np.e) / sum(held.num_bytes))


def test_held_out_nats_by_document_follow_from_the_journal(answered: Ran) -> None:
    items, order = answered.part["heldout"]["items"], ranking(answered)
    base, best = answered.row("heldout", -1), answered.row("heldout", order[0])
    assert items["num_bytes"] == base.num_bytes
    assert items["nats"]["base"] == pytest.approx(base.nats, rel=1e-9) and items["nats"]["best_single"] == pytest.approx(best.nats, rel=1e-9)
    assert sum(items["nats"]["mixture"]) == pytest.approx(answered.part["heldout"]["mixture"]["nats"])


def test_phases_count_what_their_rows_count(answered: Ran) -> None:
    throughput, truncation = answered.part["throughput"], answered.part["truncation"]
    assert set(throughput) == {"base_train", "search", "base_test", "test", "base_sample", "heldout"}
    for phase, figures in throughput.items():
        rows = answered.journal.rows(phase)
        tokens = "scored_tokens" if phase == "heldout" else "generated_tokens"
        assert figures["seeds"] == len(rows) and figures["prompts"] == sum(row.num_prompts for row in rows)
        assert figures[tokens] == sum(row.num_tokens for row in rows)
        assert figures[f"{tokens}_per_s"] == pytest.approx(figures[tokens] / sum(row.seconds for row in rows))
    assert set(truncation) == set(throughput) - {"heldout"} and set(truncation.values()) == {0.0}


def test_truncated_answers_are_counted(tmp_path: Path) -> None:
    part = Ran(tmp_path / "run", configured(task__max_new_tokens=2), held_out=None).part
    assert 0.5 < part["truncation"]["test"] <= 1  # two digits and an end need three tokens


def test_switch_says_what_rounding_left(answered: Ran) -> None:
    switch = answered.part["switch"]
    assert [row["sigma"] for row in switch["effective_rms"]] == [0.1, 0.2]
    for row in switch["effective_rms"]:
        assert row["seed"] == next(m.seed for m in answered.found.population if m.sigma == row["sigma"])
        assert row["groups"][0]["requested_rms"] == row["sigma"]
    switches = [row.switch_s for phase in ("search", "test", "heldout") for row in answered.journal.rows(phase) if row.index >= 0]
    assert switch["mean_s"] == pytest.approx(np.mean(switches), rel=1e-12)  # of seeds alone: the base is no switch to a seed


# -- what may be off or small -----------------------------------------------------------------------------------------


def test_controls_can_be_turned_off_and_the_record_says_so(tmp_path: Path) -> None:
    turned_off = configured(controls__random_k=False, controls__base_majority=False, controls__best_single=False)
    off = Ran(tmp_path / "run", turned_off, held_out=None)
    for name in ("random_k", "base_majority", "best_single"):
        assert off.part["controls"][name] == {"enabled": False, "why": f"turned off: controls.{name}"}
    assert [row["b"] for row in off.part["tests"]] == ["base"]
    assert off.part["spearman"]["enabled"] is off.part["heldout"]["enabled"] is False
    assert [row.index for row in off.journal.rows("test")] == sorted(ranking(off)[:7]) and not off.journal.rows("base_sample")
    assert off.part["probes"][0]["bpb"] is None and not off.calls("score")


def test_random_mixtures_need_the_pool(tmp_path: Path) -> None:
    part = Ran(tmp_path / "run", configured(controls__random_k=False)).part
    assert part["heldout"]["random_mixture"] == {"enabled": False, "why": "turned off: controls.random_k"}
    assert not any("random_mixture" in (row["a"], row["b"]) for row in part["heldout"]["differences"])


def test_an_ensemble_of_one_is_the_best_single_member(tmp_path: Path) -> None:
    part = Ran(tmp_path / "run", configured(search__top_k=1, search__secondary_k=[], controls__control_pool=30)).part
    assert part["ensemble"]["test"] == part["controls"]["best_single"]["test"]
    row = next(row for row in part["tests"] if row["b"] == "best_single")
    assert (row["difference"], row["only_a"], row["only_b"], row["p_mcnemar"]) == (0.0, 0, 0, 1.0)
    assert len(part["controls"]["random_k"]["pool"]) == 24  # the whole population is no more than that
    assert part["heldout"]["mixture"] == part["heldout"]["best_single"] == part["heldout"]["mean_member"]


def test_a_pool_that_allows_one_ensemble_is_said(tmp_path: Path) -> None:
    part = Ran(tmp_path / "run", configured(search__population=4, search__secondary_k=[])).part
    random_k = part["controls"]["random_k"]
    assert random_k["num_subsets"] == 1 and random_k["sd"] is None and "no spread" in random_k["warning"]
    assert "no spread" in part["heldout"]["warning"]


def test_a_verifier_is_reported_apart_from_the_vote(tmp_path: Path, answered: Ran) -> None:
    class Verified(Sums):
        def verifier(self, item: Item, answer: str) -> bool:
            return int(answer) == sum(map(int, item.question.split(" + ")))

    ran = Ran(tmp_path / "run", configured(), Verified(), held_out=None)
    made = ran.part["verifier"]
    order, items = ranking(ran), range(len(ran.test_items))
    any_right = [any(ran.row("test", i).correct[j] for i in order[:4]) for j in items]
    any_sample = [any(ran.row("base_sample", i).correct[j] for i in range(4)) for j in items]
    check_accuracy(made["ensemble"], any_right)
    check_accuracy(made["base_samples"], any_sample)
    assert made["k"] == 4 and made["ensemble"]["accuracy"] > ran.part["ensemble"]["test"]["accuracy"]
    assert made["tests"][0]["difference"] == pytest.approx(np.mean(any_right) - np.mean(any_sample))
    assert ran.part["ensemble"] == answered.part["ensemble"] and "verifier" not in answered.part
    assert any("best of 4 samples by verifier" in line and f"{np.mean(any_sample):.4f}" in line for line in summary(ran.part))


# -- documents --------------------------------------------------------------------------------------------------------


def mixed_bpb(ran: Ran, members: list[int], texts: list[str]) -> float:
    """By probabilities, from the engine itself."""
    engine, p = FakeEngine(), []
    for index in members:
        member = ran.found.population[index]
        engine.perturb(member.seed, member.sigma)
        p.append(np.exp(-np.concatenate([d.nats for d in engine.score(texts, 64)])))
    return float(-np.log2(np.mean(p, axis=0)).sum() / sum(len(t.encode()) - 1 for t in texts))


def test_a_likelihood_task_mixes_on_its_test_documents(scored: Ran) -> None:
    part, order, texts = scored.part, ranking(scored), [item.question for item in scored.test_items]
    assert part["ensemble"]["test"]["bpb"] == pytest.approx(mixed_bpb(scored, order[:4], texts), rel=1e-9)
    assert [row["test"]["bpb"] for row in part["secondary"]] == pytest.approx([mixed_bpb(scored, order[:k], texts) for k in (2, 7)])
    assert part["controls"]["best_single"]["test"]["bpb"] == pytest.approx(mixed_bpb(scored, order[:1], texts))
    alone = [mixed_bpb(scored, [i], texts) for i in order[:4]]
    assert part["ensemble"]["mean_member"]["bpb"] == pytest.approx(np.mean(alone))
    assert [row["test_bpb"] for row in part["selection"]["members"]] == pytest.approx(alone)
    random_k = part["controls"]["random_k"]
    assert random_k["num_mixtures"] == len(random_k["scores"]) == 20 and random_k["low"] < random_k["mean_bpb"] < random_k["high"]
    assert random_k["share_at_most_ensemble"] == np.mean([s["bpb"] <= part["ensemble"]["test"]["bpb"] for s in random_k["scores"]])
    assert part["controls"]["base_majority"]["enabled"] is False and "no answers" in part["controls"]["base_majority"]["why"]
    tests = {(row["a"], row["b"]): row for row in part["tests"]}
    row = tests["mixture", "base"]
    assert row["difference_bpb"] == pytest.approx(part["ensemble"]["test"]["bpb"] - part["base"]["test"]["bpb"], abs=1e-12)
    assert tests["mixture", "random_mixture"]["difference_bpb"] == pytest.approx(
        part["ensemble"]["test"]["bpb"] - random_k["mean_bpb"], abs=1e-12)


def test_nats_by_document_follow_from_the_journal(scored: Ran) -> None:
    items, order = scored.part["items"], ranking(scored)
    base, best = scored.row("base_test", -1), scored.row("test", order[0])
    assert items["num_bytes"] == base.num_bytes and items["ids"] == [item.id for item in scored.test_items]
    assert items["nats"]["base"] == pytest.approx(base.nats, rel=1e-9) and items["nats"]["best_single"] == pytest.approx(best.nats, rel=1e-9)
    mean = np.mean([scored.row("test", i).nats for i in order[:4]], axis=0)
    assert items["nats"]["mean_member"] == pytest.approx(mean) and (np.array(items["nats"]["mixture"]) <= mean + 1e-9).all()
    assert len(items["nats"]["random_mixture"]) == len(scored.test_items)
    RandOptPart.model_validate(scored.part)


def test_spearman_of_documents_is_positive_where_reward_foretells(scored: Ran) -> None:
    made, pool = scored.part["spearman"], scored.part["controls"]["random_k"]["pool"]
    rho = scipy_stats.spearmanr([row["train_reward"] for row in pool], [row["test_bpb"] for row in pool]).statistic
    assert made["rho"] == pytest.approx(-rho) and made["rho"] > 0.5 and "minus test bpb" in made["of"]
    assert scored.part["truncation"] == {}


def test_held_out_text_is_scored_by_every_ensemble(answered: Ran) -> None:
    held, order = answered.part["heldout"], ranking(answered)
    assert held["mixture"]["bpb"] == pytest.approx(mixed_bpb(answered, order[:4], list(DOCUMENTS)), rel=1e-9)
    assert held["secondary"][1]["mixture"]["bpb"] == pytest.approx(mixed_bpb(answered, order[:7], list(DOCUMENTS)), rel=1e-9)
    assert (held["slice"], held["slice_sha256"], held["context"], held["documents"], held["num_docs"]) == (
        "slice.jsonl", "ab" * 32, 64, "isolated", 6)
    assert len(held["random_mixture"]["scores"]) == 5
    assert held["mixture"]["num_bytes"] == sum(len(d.encode()) - 1 for d in DOCUMENTS)


def test_a_window_longer_than_the_models_context_is_cut_and_said(tmp_path: Path) -> None:
    class Short(FakeEngine):
        def describe(self) -> dict[str, Any]:
            return {**super().describe(), "context": 32}

    ran = Ran(tmp_path / "run", configured(), engine=Short())
    assert ran.part["heldout"]["context"] == 32 and {call[3] for call in ran.calls("score")} == {32}
    assert any("windows of 32 tokens" in line for line in ran.said)


# -- the whole --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", [Sums(), Documents()])
def test_a_second_run_gives_the_same_but_for_times(tmp_path: Path, task: Sums) -> None:
    parts = [Ran(tmp_path / name, configured(), task).part for name in ("a", "b")]
    assert without_times(parts[0]) == without_times(parts[1])
    assert json.loads(json.dumps(parts[0], allow_nan=False)) == parts[0]
    RandOptPart.model_validate(parts[0])  # every figure follows from those beside it


def test_a_grown_population_gives_what_it_would_have_given_at_once(tmp_path: Path, answered: Ran) -> None:
    small = Ran(tmp_path / "run", configured(search__population=12))
    grown = Ran(tmp_path / "run", configured())
    assert without_times(grown.part) == without_times(answered.part)
    assert len(grown.calls("generate")) < len(answered.calls("generate")) - 12 + 1
    assert {row.index for row in small.journal.rows("test")} & {row.index for row in answered.journal.rows("test")}


@pytest.mark.parametrize("stop_at", [26, 35, 44, 53, 59])
def test_an_evaluation_that_was_stopped_goes_on_without_running_a_model_twice(tmp_path: Path, answered: Ran, stop_at: int) -> None:
    class Stopped(KeyboardInterrupt):
        pass

    def stop(call: tuple) -> None:
        seen.append(call)
        if sum(c[0] in ("generate", "score") for c in seen) == stop_at:
            raise Stopped

    seen: list[tuple] = []
    with pytest.raises(Stopped):
        Ran(tmp_path / "run", configured(), engine=Padding(on_call=stop))
    again = Ran(tmp_path / "run", configured())
    assert without_times(again.part) == without_times(answered.part)
    total = [c for c in (*answered.calls("generate"), *answered.calls("score"))]
    resumed = [c for c in (*again.calls("generate"), *again.calls("score"))]
    assert len(total) - stop_at < len(resumed) <= len(total) - stop_at + 3  # the one that was stopped, and what it held back
