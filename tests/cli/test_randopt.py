"""bpb randopt: each command through the command line, on models small enough for a test."""

import json
from pathlib import Path

import pytest

from bitsperbyte.__main__ import guarded, run_command

REPO = Path(__file__).resolve().parents[2]
SMOKE = str(REPO / "configs" / "randopt" / "smoke_cpu.yaml")
TINY = ["--set", "model.golf.num_docs=2000", "--set", "model.golf.settings.schedule.max_steps=8", "--set", "search.population=6",
        "--set", "search.top_k=2", "--set", "search.secondary_k=[1]", "--set", "task.num_train=12", "--set", "task.num_test=16",
        "--set", "controls.control_pool=4", "--set", "heldout.num_docs=8", "--set", "heldout.random_mixtures=2"]


def bpb(*arguments: str) -> int:
    return guarded(lambda: run_command(["randopt", *arguments]))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_run_grow_and_export(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert bpb("run", SMOKE, *TINY, "--probe-top", "1") == 0
    out = capfd.readouterr().out
    for words in ("smoke_cpu, seed 42: finished", "ensemble of 2", "control: random ensembles of 2", "probe: rank 1 alone", "held-out"):
        assert words in out
    assert json.loads((here / "runs" / "smoke_cpu" / "record.json").read_text())["status"] == "finished"

    assert bpb("run", SMOKE, *TINY, "--probe-top", "1") == 2
    assert "already holds a run" in capfd.readouterr().err
    assert bpb("run", SMOKE, *TINY, "--probe-top", "1", "--resume", "--set", "search.population=8") == 0
    assert "population of 8" in capfd.readouterr().out

    assert bpb("export", "runs/smoke_cpu/record.json", "--rank", "1", "--out", "best") == 0
    assert list((here / "best").glob("*.safetensors"))
    capfd.readouterr()
    assert bpb("export", "runs/smoke_cpu/record.json", "--rank", "99", "--out", "other") == 2
    assert capfd.readouterr().err.count("\n") == 1 and not (here / "other").exists()


def test_plan_says_what_fits(capfd: pytest.CaptureFixture[str]) -> None:
    config = str(REPO / "configs" / "randopt" / "standard_8xh100_qwen72b.yaml")
    assert bpb("plan", config, "--json") == 0
    assert json.loads(capfd.readouterr().out)
    assert bpb("plan", config) == 0
    assert "seeds/s" in capfd.readouterr().out


@pytest.mark.parametrize(("arguments", "sentence"), [
    (["run", SMOKE, "--set", "search.populaton=3"], "did you mean search.population"),
    (["run", SMOKE, "--set", "model.golf=null"], "set one of model.path, model.golf"),
    (["run", "nowhere.yaml"], "there is no config file"),
    (["run", SMOKE, "--set", "model.golf=null", "--set", "model.path=no/such/folder", "--set", "heldout.enabled=false"], "no/such/folder"),
    (["export", "nowhere", "--out", "x"], "there is no record"),
])
def test_bad_input_is_one_sentence(here: Path, arguments: list[str], sentence: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert bpb(*arguments) == 2
    said = capfd.readouterr().err.strip().splitlines()
    assert sentence in said[-1] and said[-1].startswith("bpb: ") and "Traceback" not in "\n".join(said)
