"""A run and its record: refusals, resumption, growth, and what a crash leaves."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bitsperbyte.randopt import session
from bitsperbyte.randopt.config import RandOptConfig
from bitsperbyte.randopt.engines.fake import FakeEngine
from bitsperbyte.records.schema import Record
from bitsperbyte.records.store import read_record
from bitsperbyte.run.config import config_hash, load_config
from bitsperbyte.run.folder import read_jsonl
from bitsperbyte.run.outcome import RunFailed


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Record]:
    def go(config: RandOptConfig, engine: FakeEngine | None = None, folder: str = "run", resume: bool = False) -> Record:
        monkeypatch.setattr(session, "open_engine", lambda config, run_dir, say: engine or FakeEngine())
        return session.run(config, tmp_path / folder, resume=resume, console=Console(quiet=True))

    return go


def stop_at(kind: str, number: int, error: BaseException) -> FakeEngine:
    """An engine whose `number`th call of `kind` raises."""
    count = 0

    def on_call(call: tuple[Any, ...]) -> None:
        nonlocal count
        count += call[0] == kind
        if call[0] == kind and count == number:
            raise error

    return FakeEngine(on_call=on_call)


def test_a_run_ends_with_a_record_of_everything(run: Callable, config: Callable, tmp_path: Path, slice_path: Path) -> None:
    engine = FakeEngine()
    record = run(config(heldout={"path": str(slice_path), "source": str(tmp_path / "source.jsonl"), "num_docs": 3, "context": 64},
                        probes__top=2), engine)
    assert record == read_record(tmp_path / "run") and record.status == "finished" and engine.closed
    part = record.randopt.model_dump()
    assert part["ensemble"]["k"] == 3 and part["base"]["test"]["num"] == 16
    assert {"random_k", "base_majority", "best_single"} == set(part["controls"]) and all(c["enabled"] for c in part["controls"].values())
    assert part["heldout"]["num_docs"] == 3 and part["heldout"]["mixture"]["bpb"] <= part["heldout"]["mean_member"]["bpb"]
    assert len(part["probes"]) == 2 and all(probe["bpb"] > 0 for probe in part["probes"])
    for phase in ("launch", "base_train", "search", "base_test", "test", "base_sample", "heldout", "total"):
        assert record.phases_s[phase] >= 0
    rows, _ = read_jsonl(tmp_path / "run" / "journal.jsonl")
    keys = [(row["phase"], row["index"]) for row in rows[1:]]
    assert len(keys) == len(set(keys)) and keys.count(("base_train", -1)) == 1


def test_the_same_run_again_gives_the_same_record_but_for_times(run: Callable, config: Callable, timeless: Callable) -> None:
    first, second = (run(config(), folder=name).model_dump(mode="json") for name in ("a", "b"))
    assert timeless(first) == timeless(second)
    other = run(config(search__seed=1), folder="c").model_dump(mode="json")
    assert timeless(other)["randopt"]["selection"] != timeless(first)["randopt"]["selection"]


@pytest.mark.parametrize(("kind", "number"), [("generate", 1), ("perturb", 5), ("generate", 12), ("perturb", 15), ("generate", 23),
                                              ("score", 3)])
def test_interrupted_anywhere_and_resumed_is_the_same(run: Callable, config: Callable, timeless: Callable, tmp_path: Path,
                                                      slice_path: Path, kind: str, number: int) -> None:
    settings = config(heldout={"path": str(slice_path), "source": str(tmp_path / "source.jsonl"), "num_docs": 3, "context": 64})
    with pytest.raises(KeyboardInterrupt):
        run(settings, stop_at(kind, number, KeyboardInterrupt()), "stopped")
    assert read_record(tmp_path / "stopped").status == "interrupted"
    resumed = run(settings, folder="stopped", resume=True).model_dump(mode="json")
    assert timeless(resumed) == timeless(run(settings, folder="whole").model_dump(mode="json"))
    assert len(resumed["provenance"]["attempts"]) == 2


def test_a_crash_is_recorded_and_can_be_resumed(run: Callable, config: Callable, tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="member 4 .* failed in search: the kernel broke"):
        run(config(), stop_at("perturb", 5, RuntimeError("the kernel broke")))
    record = read_record(tmp_path / "run")
    assert record.status == "crashed" and "the kernel broke" in record.error
    assert run(config(), resume=True).status == "finished"


def test_a_folder_with_a_run_is_refused_without_resume(run: Callable, config: Callable) -> None:
    run(config())
    with pytest.raises(ValueError, match="already holds a run"):
        run(config())
    with pytest.raises(ValueError, match="is finished: see its record.json, grow it with --set search.population=24"):
        run(config(), resume=True)


def test_a_population_grows_but_does_not_shrink(run: Callable, config: Callable, timeless: Callable) -> None:
    run(config())
    with pytest.raises(ValueError, match="a population only grows: .* holds members of the first 12, and search.population 10 is"):
        run(config(search__population=10), resume=True)
    engine = FakeEngine()
    grown = run(config(search__population=20), engine, resume=True).model_dump(mode="json")
    fresh = run(config(search__population=20), folder="fresh").model_dump(mode="json")
    assert timeless(grown["randopt"]["selection"]) == timeless(fresh["randopt"]["selection"])
    assert timeless(grown["randopt"]["controls"]) == timeless(fresh["randopt"]["controls"])
    assert grown["config"]["search"]["population"] == 20


def test_a_growth_by_mistake_is_taken_back_and_loses_nothing(run: Callable, config: Callable, timeless: Callable, tmp_path: Path) -> None:
    small = run(config()).model_dump(mode="json")
    with pytest.raises(KeyboardInterrupt):
        run(config(search__population=100_000), stop_at("perturb", 1, KeyboardInterrupt()), resume=True)
    assert read_record(tmp_path / "run").status == "interrupted"
    assert timeless(run(config(), resume=True).model_dump(mode="json")) == timeless(small)


def test_resuming_under_other_settings_is_refused_with_the_difference(run: Callable, config: Callable) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(config(), stop_at("perturb", 3, KeyboardInterrupt()))
    with pytest.raises(ValueError, match="config.noise.scheme: \"rademacher\" -> \"binomial\""):
        run(config(noise__scheme="binomial"), resume=True)
    assert run(config(), resume=True).status == "finished"


def test_another_model_at_the_same_path_is_refused(run: Callable, config: Callable) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(config(), stop_at("perturb", 3, KeyboardInterrupt()))

    class Other(FakeEngine):
        def describe(self) -> dict[str, Any]:
            return {**super().describe(), "weights_sha256": "0" * 64}

    with pytest.raises(ValueError, match="engine.weights_sha256"):
        run(config(), Other(), resume=True)


def test_bad_input_leaves_no_folder(run: Callable, config: Callable, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="arithmetic has 2,500: ask for fewer"):
        run(config(task__num_test=2500))
    with pytest.raises(ValueError, match="there is no such slice"):
        run(config(heldout={"path": str(tmp_path / "no.jsonl"), "build_if_missing": False}))
    assert not (tmp_path / "run").exists()


def test_controls_that_are_off_say_so(run: Callable, config: Callable) -> None:
    record = run(config(controls={"control_pool": 6, "random_k": False, "base_majority": False, "best_single": False}))
    controls = record.randopt.model_dump()["controls"]
    assert all(not control["enabled"] and control["why"] for control in controls.values())
    assert json.dumps(controls)


def test_documents_instead_of_questions(run: Callable, config: Callable) -> None:
    part = run(config(task={"name": "likelihood", "num_train": 3, "num_test": 3, "context": 64})).randopt.model_dump()
    assert part["ensemble"]["test"]["bpb"] <= part["ensemble"]["mean_member"]["bpb"]
    assert part["controls"]["base_majority"]["enabled"] is False


def test_only_the_logger_changed_is_the_same_run(run: Callable, config: Callable, tmp_path: Path) -> None:
    """It may change on --resume, the saved config says which it is, and a finished run stays finished."""
    with pytest.raises(KeyboardInterrupt):
        run(config(), stop_at("perturb", 3, KeyboardInterrupt()))
    logged = config(logger={"backend": "tensorboard"})
    record = run(logged, resume=True)
    assert record.config["logger"]["backend"] == "tensorboard" and list((tmp_path / "run" / "tensorboard").iterdir())
    assert load_config(tmp_path / "run" / "config.yaml", RandOptConfig) == logged
    assert record.config_sha256 == config_hash(config()) == config_hash(logged)
    with pytest.raises(ValueError, match="is finished"):
        run(config(), resume=True)


def test_a_logger_that_is_not_installed_is_refused_before_the_folder_exists(run: Callable, config: Callable, tmp_path: Path,
                                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="logger.backend is wandb and that package cannot be imported .*: pip install wandb"):
        run(config(logger={"backend": "wandb"}))
    assert not (tmp_path / "run").exists()
