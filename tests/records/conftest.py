"""A randopt part whose figures agree, for tests to change one at a time."""

import copy
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from bitsperbyte.metric.bpb import Score
from bitsperbyte.records.schema import Record
from bitsperbyte.records.store import write_record
from bitsperbyte.stats.paired import mcnemar_exact, wilson


def accuracy(num_correct: int, num: int = 200) -> dict[str, Any]:
    made = wilson(num_correct, num)
    return {"num_correct": num_correct, "num": num, "accuracy": num_correct / num, "low": made.low, "high": made.high}


def loss(nats: float, num_bytes: int = 9000, num_tokens: int = 2000) -> dict[str, Any]:
    return Score(nats, num_bytes, num_tokens).to_dict()


def mixtures(*nats: float) -> dict[str, Any]:
    scores = [loss(n) for n in nats]
    bpb = [score["bpb"] for score in scores]
    return {"k": 2, "num_mixtures": len(scores), "scores": scores, "mean_bpb": sum(bpb) / len(bpb), "low": min(bpb), "high": max(bpb)}


def difference(a: str, b: str, value: float, **more: Any) -> dict[str, Any]:
    return {"a": a, "b": b, "difference": value, "low": value - 0.05, "high": value + 0.05, **more}


def answers() -> dict[str, Any]:
    member = {"sigma": 1e-3, "num_test": 200}
    return {
        "noise": {"scheme": "rademacher"},
        "task": {"name": "gsm8k", "version": "1", "kind": "answers", "test_sha256": "cd" * 32, "num_test": 200},
        "engine": {"model": "/models/tiny", "dtype": "bfloat16"},
        "population": {"size": 8, "sigmas": [1e-3, 2e-3], "seed": 42, "best_sigma": 2e-3, "sigma_differences": [], "per_sigma": [
            {"sigma": 1e-3, "num": 4, "mean": 0.4, "sd": 0.1, "standard_error": 0.05, "share_above_base": 0.25},
            {"sigma": 2e-3, "num": 4, "mean": 0.5, "sd": 0.2, "standard_error": 0.1, "share_above_base": 0.5}]},
        "selection": {"top_k": 2, "members": [
            {**member, "rank": 1, "index": 3, "seed": 11, "train_reward": 0.7, "test_accuracy": 0.31, "test_correct": 62},
            {**member, "rank": 2, "index": 0, "seed": 12, "train_reward": 0.6, "test_accuracy": 0.3, "test_correct": 60}]},
        "base": {"train_reward": 0.5, "train_accuracy": 0.5, "test": accuracy(50)},
        "ensemble": {"k": 2, "test": accuracy(64), "num_unanswered": 3},
        "secondary": [{"k": 1, "test": accuracy(62)}],
        "controls": {
            "random_k": {"enabled": True, "k": 2, "num_subsets": 3, "accuracies": [0.3, 0.26, 0.28], "mean": 0.28, "low": 0.26, "high": 0.3},
            "base_majority": {"enabled": True, "k": 2, "test": accuracy(55), "temperature": 0.7},
            "best_single": {"enabled": True, "index": 3, "test": accuracy(62)}},
        "tests": [difference("ensemble", "base", 0.07, only_a=20, only_b=6, p_mcnemar=mcnemar_exact(20, 6)),
                  difference("ensemble", "random_k", 0.04, only_a=16, only_b=8, p_mcnemar=mcnemar_exact(16, 8))],
        "spearman": {"rho": 0.1, "low": -0.2, "high": 0.4, "num": 8},
        "throughput": {"search": {"seconds": 4.0, "seeds": 8, "seeds_per_s": 2.0, "generated_tokens_per_s": 9045.4, "prompts_per_s": 36.14}},
        "heldout": {"enabled": True, "slice": "fineweb_256.jsonl", "slice_sha256": "ef" * 32, "context": 2048, "base": loss(5000.0),
                    "mixture": loss(4990.0), "mean_member": loss(5050.0), "best_single": loss(5040.0),
                    "random_mixture": mixtures(4980.0, 5000.0),
                    "differences": [{"a": "mixture", "b": "base", "difference_bpb": loss(4990.0)["bpb"] - loss(5000.0)["bpb"],
                                     "low": -0.01, "high": 0.01}]},
    }  # fmt: skip


def likelihood() -> dict[str, Any]:
    part = answers()
    bpb = {name: loss(nats)["bpb"] for name, nats in (("base", 5000.0), ("mixture", 4900.0))}
    for member in part["selection"]["members"]:
        for name in ("test_accuracy", "test_correct", "num_test"):
            del member[name]
    part |= {
        "task": {"name": "likelihood", "version": "1", "kind": "likelihood", "test_sha256": "ab" * 32, "num_test": 64, "context": 1024},
        "base": {"train_reward": -0.8, "train_accuracy": None, "test": loss(5000.0)},
        "ensemble": {"k": 2, "test": loss(4900.0), "mean_member": loss(4950.0)},
        "secondary": [],
        "controls": {"random_k": {"enabled": True, **mixtures(4910.0, 4930.0)},
                     "base_majority": {"enabled": False, "why": "a likelihood task has no answers to vote on"},
                     "best_single": {"enabled": True, "index": 3, "test": loss(4940.0)}},
        "tests": [{"a": "mixture", "b": "base", "difference_bpb": bpb["mixture"] - bpb["base"], "low": -0.1, "high": 0.1}],
        "throughput": {"search": {"seconds": 4.0, "seeds": 8, "seeds_per_s": 2.0, "scored_tokens_per_s": 1000.0, "prompts_per_s": 128.0}},
        "heldout": {"enabled": False, "why": "heldout.enabled is off"},
    }  # fmt: skip
    return part


@pytest.fixture(params=[answers, likelihood], ids=["answers", "likelihood"])
def any_part(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param()


@pytest.fixture
def answers_part() -> dict[str, Any]:
    return answers()


@pytest.fixture
def likelihood_part() -> dict[str, Any]:
    return likelihood()


@pytest.fixture
def edited() -> Callable[[dict[str, Any], str, Any], dict[str, Any]]:
    """A copy of a part with the value at a dotted path changed by a function, or replaced."""

    def edit(part: dict[str, Any], dotted: str, change: Any) -> dict[str, Any]:
        made = copy.deepcopy(part)
        *parents, last = [int(word) if word.isdigit() else word for word in dotted.split(".")]
        place: Any = made
        for word in parents:
            place = place[word]
        place[last] = change(place[last]) if callable(change) else change
        return made

    return edit


def golf_score(nats_per_token: float, label: str = "artifact", num_tokens: int = 1000, num_bytes: int = 2500, **changes: Any) -> dict[str, Any]:
    return {"label": label, "text": "validation split of data/books", "split_sha256": "ab" * 32, "window": 1024, "stride": None,
            "documents": "across", "drop_tail": False, **Score(nats_per_token * num_tokens, num_bytes, num_tokens).to_dict(), **changes}


class GolfRuns:
    """Writes golf runs' records to folders of its own: `make("a/seed_1", 2.5, seed=1)`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def make(self, name: str, nats_per_token: float, *, seed: int | None = 1, more: Sequence[dict[str, Any]] = (), status: str = "finished",
             data: dict[str, Any] | None = None, config: dict[str, Any] | None = None, score: dict[str, Any] | None = None, **fields: Any) -> Path:
        folder = self.root / name
        folder.mkdir(parents=True)
        record = {
            "track": "golf", "name": name.partition("/")[0], "status": status, "created_utc": "2026-01-31T12:00:00+00:00", "seed": seed,
            "config": {"train": {"seed": seed}, "model": {"dim": 16}, "schedule": {"max_steps": 100}, **(config or {})},
            "data": {"tokenizer_sha256": "cd" * 32, "train_sha256": "12" * 32, "val_sha256": "ab" * 32, **(data or {})},
            "training": {"num_steps": 100, "budget_s": 240.0},
            "artifact": {"sha256": hashlib.sha256(str(folder).encode()).hexdigest(), "weight_bytes": 10, "code_bytes": 5, "total_bytes": 15},
            "scores": [golf_score(nats_per_token, **(score or {})), *more], **fields}  # fmt: skip
        write_record(folder / "record.json", Record.model_validate(record))
        return folder

    def side(self, name: str, losses: Sequence[float], **fields: Any) -> Path:
        """One run a loss, as the seeds 1, 2, ... of one folder."""
        for seed, loss_of_seed in enumerate(losses, 1):
            self.make(f"{name}/seed_{seed}", loss_of_seed, seed=seed, **fields)
        return self.root / name


@pytest.fixture
def golf_runs(tmp_path: Path) -> GolfRuns:
    return GolfRuns(tmp_path)
