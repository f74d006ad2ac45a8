"""Runs as processes, killed and stopped: what is resumed ends bit for bit as if nothing had happened."""

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bitsperbyte.golf.config import GolfConfig
from bitsperbyte.golf.session import train
from bitsperbyte.run.metrics import read_metrics

CHANGES = {"schedule": {"max_steps": 120}, "train": {"checkpoint_every_steps": 3}, "eval": {"every_steps": 20}}

# Runs the command, and kills itself with SIGKILL ahead of a chosen call of a function of os: sys.argv is NAME, how many calls
# to let pass, a part of the path that a call must name to count ("" counts every call), and the command's arguments.
KILL_AT = """
import os, signal, sys
name, remaining, part = sys.argv[1], int(sys.argv[2]), sys.argv[3]
original = getattr(os, name)
def wrapped(*arguments, **named):
    global remaining
    if part in str(arguments[-1]):
        if remaining == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        remaining -= 1
    return original(*arguments, **named)
setattr(os, name, wrapped)
sys.argv = ["bitsperbyte", *sys.argv[4:]]
from bitsperbyte.__main__ import main
main()
"""


@pytest.fixture(scope="module")
def config(tiny: Callable) -> GolfConfig:
    return tiny(CHANGES)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, config: GolfConfig) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    train(config, folder)
    return folder


def num_rows(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for_rows(process, run_dir: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while num_rows(run_dir) < count and process.poll() is None:
        assert time.monotonic() < deadline, "the run does not get on"
        time.sleep(0.002)


def kill_while_training(command, rng: random.Random, resume: bool) -> None:
    process = command.start(resume=resume)
    wait_for_rows(process, command.run_dir, num_rows(command.run_dir) + rng.randrange(1, 40))
    time.sleep(rng.random() * 0.03)
    process.kill()
    assert process.wait(60) == -signal.SIGKILL, process.stderr.read()


def kill_at_call(command, name: str, let_pass: int, part: str, resume: bool) -> None:
    process = command.start(resume=resume, through=("-c", KILL_AT, name, str(let_pass), part))
    _, errors = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL, errors


def assert_as_uninterrupted(run_dir: Path, uninterrupted: Path, losses: Callable) -> None:
    assert losses(run_dir) == losses(uninterrupted)
    assert (run_dir / "artifact.bpb").read_bytes() == (uninterrupted / "artifact.bpb").read_bytes()
    found, expected = (read_metrics(folder / "metrics.jsonl").validations for folder in (run_dir, uninterrupted))
    assert [(v["step"], v["val_loss"]) for v in found] == [(v["step"], v["val_loss"]) for v in expected]


def test_killed_in_training_in_a_checkpoint_and_in_the_artifact(command: Callable, config: GolfConfig, uninterrupted: Path,
                                                                losses: Callable, record_of: Callable) -> None:
    run = command(CHANGES)
    kill_while_training(run, random.Random(time.time_ns()), resume=False)
    assert record_of(run.run_dir)["status"] == "running", "a killed run stays a run"
    elapsed = [read_metrics(run.run_dir / "metrics.jsonl").last_elapsed_s]
    kill_at_call(run, "replace", 6, "latest.json", resume=True)
    elapsed.append(read_metrics(run.run_dir / "metrics.jsonl").last_elapsed_s)
    assert list((run.run_dir / "checkpoint").glob("*.partial")), "it died in the middle of saving"
    kill_at_call(run, "replace", 0, "artifact.bpb", resume=True)
    elapsed.append(read_metrics(run.run_dir / "metrics.jsonl").last_elapsed_s)
    assert not (run.run_dir / "artifact.bpb").exists()
    record = train(config, run.run_dir, resume=True)
    assert_as_uninterrupted(run.run_dir, uninterrupted, losses)
    assert record.status == "finished" and record.training.num_resumes == 3
    assert record.training.lost_steps > 0 and record.training.charged_lost_s > 0
    assert elapsed == sorted(elapsed) and record.training.train_s >= elapsed[-1], "no second is given back"
    assert not list(run.run_dir.glob(".*.partial")) and not list((run.run_dir / "checkpoint").glob("*.partial"))


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(50))
def test_killed_at_any_moment(command: Callable, config: GolfConfig, uninterrupted: Path, losses: Callable, seed: int) -> None:
    """One or two kills of varied kinds, then to the end."""
    rng = random.Random(seed)
    run = command(CHANGES)
    for _ in range(rng.choice([1, 1, 2])):
        resume = (run.run_dir / "config.yaml").exists()
        kind = rng.choice(["training", "training", "replace", "fsync", "write", "checkpoint", "artifact", "record"])
        if kind == "training":
            kill_while_training(run, rng, resume)
        elif kind in ("replace", "fsync", "write"):
            kill_at_call(run, kind, rng.randrange(40), "", resume)
        elif kind == "checkpoint":
            kill_at_call(run, "replace", rng.randrange(8), rng.choice(["latest.json", "step_"]), resume)
        else:
            kill_at_call(run, "replace", 0 if kind == "artifact" else rng.randrange(2), f"{kind}.", resume)
            break  # nothing may be left to train, where a second kill would find nothing to hit
    train(config, run.run_dir, resume=(run.run_dir / "config.yaml").exists())
    assert_as_uninterrupted(run.run_dir, uninterrupted, losses)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_exit_codes_of_signals(command: Callable, config: GolfConfig, uninterrupted: Path, losses: Callable, record_of: Callable,
                               number: int, code: int) -> None:
    run = command(CHANGES)
    process = run.start()
    wait_for_rows(process, run.run_dir, 10)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    assert f"stopped by {signal.Signals(number).name} at step" in errors and "Traceback" not in errors
    assert record_of(run.run_dir)["status"] == "interrupted"
    record = train(config, run.run_dir, resume=True)
    assert_as_uninterrupted(run.run_dir, uninterrupted, losses)
    assert record.training.lost_steps == 0 and record.training.charged_lost_s == 0
