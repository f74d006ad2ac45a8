"""SIGKILL at any moment of a population: after resuming, no seed twice, none lost, and the result of a run that nobody killed."""

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bitsperbyte.records.store import read_record
from bitsperbyte.run.folder import read_jsonl

RUN = """
import sys
from pathlib import Path
from rich.console import Console
from bitsperbyte.randopt import session
from bitsperbyte.randopt.config import RandOptConfig
from bitsperbyte.randopt.engines.fake import FakeEngine

config = RandOptConfig.model_validate_json(sys.argv[2])
session.open_engine = lambda config, run_dir, say: FakeEngine(delay_s=0.02)
run_dir = Path(sys.argv[1])
session.run(config, run_dir, resume=(run_dir / "config.yaml").exists(), console=Console(quiet=True))
"""


def start(run_dir: Path, config: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", RUN, str(run_dir), config], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def journal_rows(run_dir: Path) -> int:
    path = run_dir / "journal.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill_after(process: subprocess.Popen, run_dir: Path, num_rows: int, extra_s: float) -> bool:
    """SIGKILL the run `extra_s` after its journal has `num_rows` lines; whether it was still running then."""
    while journal_rows(run_dir) < num_rows and process.poll() is None:
        time.sleep(0.002)
    time.sleep(extra_s)
    is_running = process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    return is_running


def check(tmp_path: Path, config: Callable, timeless: Callable, num_kills: int, seed: int) -> None:
    settings = config(search__population=24).model_dump_json()
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert start(whole, settings).wait() == 0
    total = journal_rows(whole)
    rng = random.Random(seed)
    num_done = 0
    for kill in range(num_kills):
        at = min(total - 2, 1 + (kill + 1) * (total - 2) // (num_kills + 1))
        num_done += kill_after(start(killed, settings), killed, at, rng.uniform(0, 0.04))
    assert num_done >= num_kills - 1, "most kills must have met a run that was still going"
    last = start(killed, settings)
    _, errors = last.communicate()
    assert last.returncode == 0, errors

    def rows(run_dir: Path) -> dict:
        found, is_torn = read_jsonl(run_dir / "journal.jsonl")
        assert not is_torn
        keys = [(row["phase"], row["index"]) for row in found[1:]]
        assert len(set(keys)) == len(keys), "a model was evaluated twice"
        return {key: timeless(row) for key, row in zip(keys, found[1:], strict=True)}

    assert rows(killed) == rows(whole)
    records = [timeless(json.loads(read_record(run_dir).model_dump_json())) for run_dir in (killed, whole)]
    assert records[0] == records[1] and records[0]["status"] == "finished"


def test_killed_a_few_times(tmp_path: Path, config: Callable, timeless: Callable) -> None:
    check(tmp_path, config, timeless, num_kills=3, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_killed_thirty_times(tmp_path: Path, config: Callable, timeless: Callable) -> None:
    check(tmp_path, config, timeless, num_kills=30, seed=2)
