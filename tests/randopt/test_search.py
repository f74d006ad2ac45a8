"""The search: the whole population once, the best K, and figures by sigma that an independent computation confirms."""

import io
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from bitsperbyte.randopt.config import RandOptConfig
from bitsperbyte.randopt.engines.fake import FakeEngine
from bitsperbyte.randopt.journal import Journal
from bitsperbyte.randopt.search import SearchResult, search
from bitsperbyte.randopt.tasks.grading import Grader
from bitsperbyte.randopt.tasks.registry import open_task


def searched(config: RandOptConfig, path: Path, engine: FakeEngine | None = None, console: Console | None = None) -> SearchResult:
    task = open_task(config.task)
    with Journal.open(path, {}) as journal, Grader(task) as grader:
        return search(config, engine or FakeEngine(), task, grader, journal, task.items()[0], console or Console(quiet=True),
                      lambda text: None)


def test_the_best_by_train_reward_are_selected_ties_by_index(tmp_path: Path, config: Callable) -> None:
    found = searched(config(search={"population": 30, "top_k": 7}, controls__control_pool=7), tmp_path / "j")
    reward = {row.index: row.reward for row in found.rows}
    assert [row.index for row in found.rows] == list(range(30))
    assert len(set(reward.values())) < 30, "no tie: the test shows nothing"
    chosen = [member.index for member in found.selected]
    assert len(chosen) == 7 and chosen == sorted(chosen, key=lambda i: (-reward[i], i))
    rest = set(range(30)) - set(chosen)
    assert all((-reward[i], i) < (-reward[j], j) for i in chosen for j in rest)


def test_figures_by_sigma(tmp_path: Path, config: Callable) -> None:
    found = searched(config(search__population=13), tmp_path / "j")
    made = found.describe()
    by_sigma = {s: [r.reward for r in found.rows if r.sigma == s] for s in (0.1, 0.2)}
    assert made["sigmas"] == [0.1, 0.2] and made["size"] == 13
    for row in made["per_sigma"]:
        rewards = by_sigma[row["sigma"]]
        assert row["num"] == len(rewards) in (6, 7)
        assert row["mean"] == pytest.approx(statistics.fmean(rewards))
        assert row["sd"] == pytest.approx(statistics.stdev(rewards))
        assert row["standard_error"] == pytest.approx(statistics.stdev(rewards) / len(rewards) ** 0.5)
        assert row["share_above_base"] == sum(r > found.base_row.reward for r in rewards) / len(rewards)
    (difference,) = made["sigma_differences"]
    se = [statistics.stdev(r) / len(r) ** 0.5 for r in by_sigma.values()]
    assert (difference["a"], difference["b"]) == (0.2, 0.1)
    assert difference["difference"] == pytest.approx(statistics.fmean(by_sigma[0.2]) - statistics.fmean(by_sigma[0.1]))
    assert difference["standard_error"] == pytest.approx((se[0] ** 2 + se[1] ** 2) ** 0.5)
    assert made["best_sigma"] == max(by_sigma, key=lambda s: statistics.fmean(by_sigma[s]))


def test_one_seed_a_sigma_has_no_spread(tmp_path: Path, config: Callable) -> None:
    made = searched(config(search__population=2, search__top_k=1, search__secondary_k=[]), tmp_path / "j").describe()
    assert all(row["sd"] is row["standard_error"] is None for row in made["per_sigma"])
    assert made["sigma_differences"][0]["standard_error"] is None


def test_a_population_grows_by_its_new_seeds_alone(tmp_path: Path, config: Callable) -> None:
    searched(config(search__population=8), tmp_path / "j")
    engine = FakeEngine()
    grown = searched(config(search__population=16), tmp_path / "j", engine)
    assert sum(call[0] == "perturb" for call in engine.calls) == 8
    fresh = searched(config(search__population=16), tmp_path / "fresh")
    assert [r.reward for r in grown.rows] == [r.reward for r in fresh.rows] and grown.selected == fresh.selected


def test_progress_is_said_where_there_is_no_terminal(tmp_path: Path, config: Callable) -> None:
    shown = io.StringIO()
    searched(config(), tmp_path / "j", FakeEngine(delay_s=0.01), Console(file=shown, width=200))
    last = shown.getvalue().splitlines()[-1]
    assert "12/12 seeds" in last and "seeds/s" in last and "tok/s" in last and "best" in last and "left" in last


def test_documents_are_searched_by_their_bpb(tmp_path: Path, config: Callable) -> None:
    found = searched(config(task={"name": "likelihood", "num_train": 3, "num_test": 2, "context": 64}), tmp_path / "j")
    assert all(row.reward < 0 and len(row.nats) == 3 and row.votes == [] for row in found.rows)
