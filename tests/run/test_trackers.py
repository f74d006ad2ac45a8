"""Loggers: the real tensorboard read back by its own reader; wandb and trackio as fakes with the calls that their documentation gives."""

import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bitsperbyte.run import trackers
from bitsperbyte.run.config import LoggerSection
from bitsperbyte.run.trackers import BACKENDS, Tracker, open_tracker, require_installed


def opened(backend: str, run_dir: Path, say: Callable[[str], None] = print, **section: Any) -> Tracker:
    return open_tracker(LoggerSection(backend=backend, **section), run_dir, name="tiny-seed7", config={"train": {"seed": 7}}, say=say)


def no_words(text: str) -> None:
    raise AssertionError(text)


# -- tensorboard ------------------------------------------------------------------------------------------------------


def scalars(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / trackers.EVENTS), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_reads_back_every_value(tmp_path: Path) -> None:
    tracker = opened("tensorboard", tmp_path, no_words)
    for step in range(1, 301):
        tracker.log(step, {"train/loss": 1 / step, "train/step_ms": None if step % 2 else 4.0})
    tracker.log(300, {"val/bpb": 1.25})
    tracker.close()
    found = scalars(tmp_path)
    assert found["train/loss"] == [(step, pytest.approx(1 / step, rel=1e-7)) for step in range(1, 301)]
    assert found["train/step_ms"] == [(step, 4.0) for step in range(2, 301, 2)] and found["val/bpb"] == [(300, 1.25)]


def test_tensorboard_shows_what_counts_after_a_resume(tmp_path: Path) -> None:
    """Steps 7 to 10 of the first life are trained again in the second: its values stand, and none twice."""
    first = opened("tensorboard", tmp_path, no_words)
    for step in range(1, 11):
        first.log(step, {"train/loss": float(step)})
    first.close(failed=True)
    second = opened("tensorboard", tmp_path, no_words)
    second.rewind(6)
    for step in range(7, 13):
        second.log(step, {"train/loss": 100.0 + step})
    second.close()
    assert scalars(tmp_path)["train/loss"] == [(s, float(s)) for s in range(1, 7)] + [(s, 100.0 + s) for s in range(7, 13)]


# -- wandb and trackio ------------------------------------------------------------------------------------------------


class FakeRun:
    def __init__(self) -> None:
        self.logged: list[Any] = []
        self.metrics: list[Any] = []
        self.exit_code: int | None = None
        self.fails_at = 0  # the log call that raises

    def define_metric(self, name: str, *, step_metric: str) -> None:
        self.metrics.append((name, step_metric))

    def log(self, data: dict[str, Any], step: int | None = None) -> None:
        self.logged.append((step, data))
        if len(self.logged) == self.fails_at:
            raise ConnectionError("the server\nis gone")

    def finish(self, exit_code: int | None = None) -> None:
        self.exit_code = exit_code


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], types.ModuleType]:
    """fake(package) puts a module of that name in place: `inits` are the arguments of its init calls, `runs` what they returned."""

    def put(package: str) -> types.ModuleType:
        module = types.ModuleType(package)
        module.inits, module.runs = [], []

        def init(**arguments: Any) -> FakeRun:
            print("the package greets")
            module.inits.append(arguments)
            module.runs.append(FakeRun())
            return module.runs[-1]

        module.init = init
        module.finish = lambda: module.runs[-1].finish(0)
        module.Settings = lambda **settings: settings
        monkeypatch.setitem(sys.modules, package, module)
        return module

    return put


def test_wandb_is_called_as_it_documents(fake: Callable, tmp_path: Path) -> None:
    wandb = fake("wandb")
    tracker = opened("wandb", tmp_path, no_words, project="mine")
    tracker.log(10, {"train/loss": 2.0, "train/step_ms": None})
    tracker.rewind(5)
    tracker.log(6, {"train/loss": 3.0})
    tracker.close()
    tracker.close()
    [arguments], [run] = wandb.inits, wandb.runs
    assert arguments["project"] == "mine" and arguments["name"] == "tiny-seed7" and arguments["config"] == {"train": {"seed": 7}}
    assert arguments["resume"] == "allow" and arguments["dir"] == str(tmp_path) and arguments["settings"] == {"console": "off"}
    assert run.metrics == [("*", "step")], "its own step may not go back, so ours is a metric that the others are drawn over"
    assert run.logged == [(None, {"step": 10, "train/loss": 2.0}), (None, {"step": 6, "train/loss": 3.0})] and run.exit_code == 0


def test_trackio_is_called_as_it_documents_and_prints_no_result(fake: Callable, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    trackio = fake("trackio")
    tracker = opened("trackio", tmp_path, no_words)
    tracker.log(3, {"search/best": 0.5})
    tracker.close()
    [arguments], [run] = trackio.inits, trackio.runs
    [own_id] = json.loads((tmp_path / trackers.IDS).read_text()).values()
    assert arguments["name"] == f"tiny-seed7-{own_id}" and arguments["project"] == "bitsperbyte" and arguments["resume"] == "allow"
    assert run.logged == [(3, {"search/best": 0.5})] and run.exit_code == 0
    out, err = capsys.readouterr()
    assert out == "" and err == "the package greets\n"


@pytest.mark.parametrize("backend", ["wandb", "trackio"])
def test_a_resumed_run_goes_on_under_its_id_and_two_runs_never_share_one(fake: Callable, tmp_path: Path, backend: str) -> None:
    module = fake(backend)
    for name in ("a", "a", "b"):
        (tmp_path / name).mkdir(exist_ok=True)
        opened(backend, tmp_path / name, no_words).close(failed=True)
    first, again, other = ((call.get("id"), call["name"]) for call in module.inits)
    assert first == again != other
    if backend == "wandb":
        assert [run.exit_code for run in module.runs] == [1, 1, 1]


# -- what fails -------------------------------------------------------------------------------------------------------


def test_a_logger_that_fails_is_said_once_and_left(fake: Callable, tmp_path: Path) -> None:
    wandb, said = fake("wandb"), []
    tracker = opened("wandb", tmp_path, said.append)
    wandb.runs[0].fails_at = 2
    for step in range(1, 6):
        tracker.log(step, {"train/loss": 1.0})
    tracker.rewind(1)
    tracker.close()
    assert len(wandb.runs[0].logged) == 2
    assert said == ["logging to wandb failed and stops here; the run goes on, and its own files hold everything: the server is gone"]


@pytest.mark.parametrize("ids", ["{", "[1]", '{"wandb": {}}'])
def test_a_logger_that_cannot_begin_is_said_and_left(fake: Callable, tmp_path: Path, ids: str) -> None:
    wandb, said = fake("wandb"), []
    (tmp_path / trackers.IDS).write_text(ids)
    tracker = opened("wandb", tmp_path, said.append)
    tracker.log(1, {"train/loss": 1.0})
    tracker.close()
    assert len(said) == 1 and said[0].startswith("logging to wandb failed and stops here") and not wandb.inits


def test_a_tensorboard_whose_folder_is_taken_is_said_and_left(tmp_path: Path) -> None:
    (tmp_path / trackers.EVENTS).write_text("a file")
    said: list[str] = []
    tracker = opened("tensorboard", tmp_path, said.append)
    tracker.log(1, {"x": 1.0})
    tracker.close()
    assert len(said) == 1


def test_an_interrupt_is_not_a_failing_logger(fake: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = fake("wandb")
    tracker = opened("wandb", tmp_path, no_words)

    def interrupted(data: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(wandb.runs[0], "log", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tracker.log(1, {"x": 1.0})


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_a_missing_package_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    monkeypatch.setitem(sys.modules, backend, None)  # importing it raises ImportError
    with pytest.raises(ValueError, match=f"logger.backend is {backend} and that package .* pip install {backend}, or set logger.backend to none"):
        require_installed(LoggerSection(backend=backend))
    require_installed(LoggerSection())


def test_without_a_backend_nothing_is_written(tmp_path: Path) -> None:
    tracker = opened("none", tmp_path, no_words)
    tracker.log(1, {"x": 1.0})
    tracker.rewind(0)
    tracker.close()
    assert not list(tmp_path.iterdir())


def test_every_backend_that_a_config_may_name_exists() -> None:
    named = LoggerSection.model_fields["backend"].annotation.__args__
    assert {"none", *BACKENDS} == set(named)
