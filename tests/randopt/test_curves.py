"""What a run's logger gets to see, against the journal and the record."""

from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from bitsperbyte.randopt import session
from bitsperbyte.randopt.curves import Curves
from bitsperbyte.randopt.engines.fake import FakeEngine
from bitsperbyte.randopt.journal import Journal, Row
from bitsperbyte.run.folder import read_jsonl
from bitsperbyte.run.trackers import Tracker


class Memory:
    """A tracker that keeps what it gets."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float | None]]] = []

    def log(self, step: int, values: dict[str, float | None]) -> None:
        self.logged.append((step, values))

    def of(self, tag: str) -> list[tuple[int, float]]:
        return [(step, values[tag]) for step, values in self.logged if values.get(tag) is not None]


def row(index: int, reward: float, phase: str = "search", seconds: float = 0.5) -> Row:
    answers = [reward] * 4, [reward > 0.5] * 4, ["x"] * 4
    return Row(phase, index, 100 + index, 0.1, reward, *answers, [], [], 4, 8, 10, 1, 0.0, 0.1, 0.0, seconds)


def test_each_seed_is_a_step_and_a_resumed_run_goes_on_with_its_number(tmp_path: Path) -> None:
    rewards = [0.25, 0.75, 0.5, 1.0, 0.0]
    memory = Memory()
    for indices in ([0, 1], [2, 3, 4]):
        with Journal.open(tmp_path / "journal.jsonl", {"engine": 1}) as journal:
            Curves(memory, journal, every_seeds=1)
            for i in indices:
                journal.append(row(i, rewards[i]))
    assert memory.of("search/reward") == list(enumerate(rewards, 1))
    assert memory.of("search/best") == [(n, max(rewards[:n])) for n in range(1, 6)]
    assert memory.of("search/seeds_per_s")[-1] == (5, 2.0) and memory.of("search/tokens_per_s")[-1] == (5, 20.0)
    assert memory.of("search/truncated_share")[0] == (1, 0.25)


def test_every_nth_seed_and_rows_without_seconds(tmp_path: Path) -> None:
    memory = Memory()
    with Journal.open(tmp_path / "journal.jsonl", {"engine": 1}) as journal:
        Curves(memory, journal, every_seeds=3)
        journal.append(row(-1, 0.5, "base_train"))
        for i in range(7):
            journal.append(row(i, i / 10, seconds=0.0))
        journal.append(row(4, 0.5, "test"))
    assert [step for step, _ in memory.of("search/reward")] == [1, 3, 6] and memory.of("search/best")[-1] == (6, 0.5)
    assert memory.of("base_train/reward") == [(0, 0.5)] and memory.of("test/reward") == [(1, 0.5)] and not memory.of("search/seeds_per_s")


@pytest.mark.parametrize("task", [{"name": "arithmetic", "num_train": 12, "num_test": 16},
                                  {"name": "likelihood", "num_train": 3, "num_test": 4, "context": 16}])
def test_a_run_logs_its_journal_and_its_result(config: Callable, tmp_path: Path, slice_path: Path, monkeypatch: pytest.MonkeyPatch,
                                               task: dict) -> None:
    if task["name"] == "likelihood":
        task = {**task, "data": str(tmp_path / "texts")}
        (tmp_path / "texts").mkdir()
        for i in range(8):
            (tmp_path / "texts" / f"{i}.txt").write_text(f"text number {i} of the likelihood task, long enough to be scored\n" * 3)
    memory = Memory()
    memory.close = lambda failed: memory.logged.append((-1, {"failed": failed}))
    monkeypatch.setattr(session, "open_engine", lambda config, run_dir, say: FakeEngine())
    monkeypatch.setattr(session, "open_tracker", lambda section, run_dir, **facts: memory)
    settings = config(task=task, heldout={"path": str(slice_path), "source": str(tmp_path / "source.jsonl"), "num_docs": 3, "context": 64})
    part = session.run(settings, tmp_path / "run", console=Console(quiet=True)).randopt
    rows = read_jsonl(tmp_path / "run" / "journal.jsonl")[0][1:]
    for phase in ("search", "test", "heldout"):
        assert [reward for _, reward in memory.of(f"{phase}/reward")] == [r["reward"] for r in rows if r["phase"] == phase]
    key = "accuracy" if task["name"] == "arithmetic" else "bpb"
    for name, result in part.results().items():
        assert memory.of(f"result/{name}_{key}") == [(12, getattr(result, key))]
    assert {"base", "ensemble", "best_single"} <= set(part.results())
    random_k = part.controls.random_k
    assert memory.of(f"result/random_k_{key}") == [(12, random_k.mean if key == "accuracy" else random_k.mean_bpb)]
    assert memory.of("result/ensemble_heldout_bpb") == [(12, part.heldout.mixture.bpb)]
    assert memory.logged[-1] == (-1, {"failed": False}), "closed once, at the end"


def test_a_logger_that_fails_costs_nothing_of_the_run(config: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def log(self, step: int, values: dict[str, float]) -> None:
            raise ConnectionError("the network is gone")

    monkeypatch.setattr(session, "open_engine", lambda config, run_dir, say: FakeEngine())
    monkeypatch.setattr(session, "open_tracker", lambda section, run_dir, *, say, **facts: Tracker(Broken(), "wandb", say))
    assert session.run(config(), tmp_path / "run", console=Console(quiet=True)).status == "finished"
    assert (tmp_path / "run" / "run.log").read_text().count("logging to wandb failed and stops here; the run goes on") == 1
