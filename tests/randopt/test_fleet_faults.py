"""Whole runs on a Ray cluster of two nodes on this machine, a transformers model in each worker: workers, a node and the run itself
are killed at random, and the journal and the record are those of one engine that nobody disturbed."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest

from bitsperbyte.randopt.engines.base import Sampling
from bitsperbyte.randopt.engines.fake import FakeEngine
from bitsperbyte.randopt.jobs import Job
from bitsperbyte.randopt.population import draw_population
from bitsperbyte.randopt.workers import Fleet
from bitsperbyte.records.store import read_record
from bitsperbyte.run.config import resolved_yaml
from bitsperbyte.run.folder import read_jsonl

DELAY_S = 0.3  # of each model, in the runs that are disturbed
# a node that does not answer is declared dead sooner than in a cluster of many machines
HEALTH = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 500, "health_check_timeout_ms": 2000, "health_check_failure_threshold": 4}
NODE = {"num_gpus": 0, "object_store_memory": 2**27}


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head without room for workers."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={**NODE, "num_cpus": 0, "include_dashboard": False, "_system_config": HEALTH})
    yield made
    made.shutdown()


def workers_of(raylets: list[psutil.Process]) -> list[psutil.Process]:
    """Processes of these nodes in which a worker of a fleet lives."""
    found = []
    for raylet in raylets:
        try:
            found += [child for child in raylet.children(recursive=True) if child.name().startswith("ray::Worker")
                      or " ".join(child.cmdline()).startswith("ray::Worker")]
        except psutil.NoSuchProcess:
            continue
    return found


def raylets_of(cluster: Any) -> list[psutil.Process]:
    return [psutil.Process(node.all_processes["raylet"][0].process.pid) for node in cluster.list_all_nodes()]


# `bpb` with arguments, its engines so many seconds slower for each model, so that there is time to kill them
SLOW_BPB = """
import sys, time
from bitsperbyte import __main__ as entry
from bitsperbyte.randopt import session
from bitsperbyte.randopt.engines.registry import open_engine

delay_s = float(sys.argv.pop(1))

def slow(config, run_dir, say):
    engine = open_engine(config, run_dir, say)
    generate = engine.generate
    engine.generate = lambda *arguments: (time.sleep(delay_s), generate(*arguments))[1]
    return engine

session.open_engine = slow
entry.main()
"""


class Run:
    """`bpb randopt run` in a process (group) of its own."""

    begun: ClassVar[list[subprocess.Popen]] = []

    def __init__(self, config: Path, run_dir: Path, delay_s: float = 0.0) -> None:
        self.run_dir = run_dir
        resume = ["--resume"] if (run_dir / "config.yaml").exists() else []
        self.process = subprocess.Popen(
            [sys.executable, "-c", SLOW_BPB, str(delay_s), "randopt", "run", str(config), "--run-dir", str(run_dir), *resume],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True)
        self.begun.append(self.process)

    def num_rows(self) -> int:
        path = self.run_dir / "journal.jsonl"
        return path.read_bytes().count(b"\n") - 1 if path.exists() else 0

    def until_rows(self, num: int, timeout_s: float = 200) -> bool:
        """Wait for so many rows; False where the run ended before."""
        until = time.monotonic() + timeout_s
        while self.num_rows() < num:
            if self.process.poll() is not None:
                return False
            assert time.monotonic() < until, f"{self.num_rows()} of {num} rows after {timeout_s} s"
            time.sleep(0.005)
        return True

    def end(self, timeout_s: float = 300) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, errors


@pytest.fixture(autouse=True)
def no_run_outlives_its_test() -> Iterator[None]:
    yield
    while Run.begun:
        process = Run.begun.pop()
        if process.poll() is None:
            process.kill()
            process.communicate()


@pytest.fixture
def settings(config: Callable, tiny_llama: Path, slice_path: Path, tmp_path: Path) -> Callable[..., Path]:
    """settings(name, **sections): the path of a config whose votes are what a random model writes, so that equal votes are equal tokens."""
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps({"question": f"Question {i}?", "answer": "x"}) + "\n" for i in range(24)))

    def make(name: str, **sections: Any) -> Path:
        made = config(**{"model": {"path": str(tiny_llama), "device": "cpu"}, "noise": {"sigmas": [0.01, 0.03]},
                         "task": {"name": "jsonl", "data": str(questions), "num_train": 12, "num_test": 12, "max_new_tokens": 24},
                         "heldout": {"path": str(slice_path), "source": str(tmp_path / "source.jsonl"), "num_docs": 3, "context": 64}, **sections})
        path = tmp_path / f"{name}.yaml"
        path.write_text(resolved_yaml(made))
        return path

    return make


def check_same(run_dir: Path, alone: Path, timeless: Callable) -> None:
    def rows(folder: Path) -> dict:
        found, is_torn = read_jsonl(folder / "journal.jsonl")
        keys = [(row["phase"], row["index"]) for row in found[1:]]
        assert not is_torn and len(set(keys)) == len(keys), "a model stands in the journal twice"
        return {key: timeless(row) for key, row in zip(keys, found[1:], strict=True)}

    assert rows(run_dir) == rows(alone)
    assert len({vote for row in rows(alone).values() for vote in row["votes"]}) > 50, "votes of random text differ, or this shows little"
    records = [timeless(json.loads(read_record(folder).model_dump_json())) for folder in (run_dir, alone)]
    assert records[0] == records[1] and records[0]["status"] == "finished"


def faults(cluster: Any, settings: Callable, timeless: Callable, tmp_path: Path, *, population: int, events: Sequence[str], node_cpus: int,
           seed: int) -> None:
    """A run of `population` seeds on two nodes of `node_cpus` workers each, in which each of `events` happens, in a random
    order at random moments: a worker is killed or frozen, a node or the run itself is killed; a new node joins, the run is resumed."""
    sections = {"search": {"population": population, "top_k": 3, "secondary_k": [2]}}
    alone = Run(settings("alone", **sections), tmp_path / "alone")
    workers = {"count": None, "address": cluster.address, "timeout_s": 6.0, "start_timeout_s": 60.0, "max_failures": 10}
    config = settings("fleet", **sections, workers=workers)
    rng = random.Random(seed)
    nodes = [cluster.add_node(**NODE, num_cpus=node_cpus) for _ in range(2)]
    events = rng.sample(events, len(events))
    run, killed = Run(config, tmp_path / "fleet", DELAY_S), []
    for number, event in enumerate(events):
        if not run.until_rows(1 + (number + 1) * (population - 1) // (len(events) + 1)):
            break
        time.sleep(rng.uniform(0, 0.05))
        if event == "run":
            run.process.kill()
            run.end()
            run = Run(config, tmp_path / "fleet", DELAY_S)
        elif event == "node":
            cluster.remove_node(nodes.pop(0), allow_graceful=False)
            nodes.append(cluster.add_node(**NODE, num_cpus=node_cpus))
        else:
            found = workers_of(raylets_of(cluster))
            if not found:
                continue
            # by turns the oldest, which is at work, and any of them, which may still be loading its model
            victim = min(found, key=lambda worker: worker.create_time()) if number % 2 == 0 else rng.choice(found)
            victim.send_signal(signal.SIGKILL if event == "worker" else signal.SIGSTOP)
        killed.append(event)
    code, errors = run.end()
    log = (tmp_path / "fleet" / "run.log").read_text()
    assert code == 0, errors + log
    assert alone.end()[0] == 0 and run.num_rows() == alone.num_rows()
    assert len(killed) >= len(events) - 1, f"most must have met a run that was still going: {killed} of {events}"
    assert log.count("run again") >= len(events) // 2, log  # of a worker that was at work
    check_same(tmp_path / "fleet", tmp_path / "alone", timeless)


def test_a_node_may_join_and_leave_a_running_population(cluster: Any, config: Callable, tmp_path: Path) -> None:
    import ray

    first = cluster.add_node(**NODE, num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    said: list[str] = []
    try:
        fleet = Fleet.open(config(workers={"count": 2, "timeout_s": 60}), tmp_path, said.append,
                           lambda config, run_dir, say: FakeEngine(delay_s=0.02))
        assert "1 worker of 1 CPU each of the 2 that were asked for" in said[0]
        members = draw_population(100_000, [0.1], 0)
        done = fleet.run(Job("search", prompts=[[49]]), members, lambda member: Sampling(4))
        indices = [next(done).member.index for _ in range(10)]
        cluster.add_node(**NODE, num_cpus=1)
        while fleet.summary()["most_workers"] < 2:
            indices.append(next(done).member.index)
        cluster.remove_node(first, allow_graceful=False)
        while fleet.summary()["lost"] < 1:
            indices.append(next(done).member.index)
        indices += [next(done).member.index for _ in range(10)]
        done.close()
        assert len(set(indices)) == len(indices) and set(range(len(indices) - 10)) < set(indices), "none twice, none left behind"
        assert "will be run again" in said[-1]
        fleet.close()
    finally:
        ray.shutdown()


def test_a_few_kills(cluster: Any, settings: Callable, timeless: Callable, tmp_path: Path) -> None:
    faults(cluster, settings, timeless, tmp_path, population=36, events=["worker", "node", "run"], node_cpus=1, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_many_kills_in_two_hundred_seeds(cluster: Any, settings: Callable, timeless: Callable, tmp_path: Path) -> None:
    faults(cluster, settings, timeless, tmp_path, population=200, events=["worker"] * 9 + ["freeze"] * 2 + ["node"] * 2 + ["run"] * 2,
           node_cpus=2, seed=2)


def begin_own(config: Path, run_dir: Path, num_rows: int) -> tuple[Run, list[psutil.Process]]:
    """A run with a Ray of its own, past so many rows, and the processes it began."""
    run = Run(config, run_dir, DELAY_S)
    assert run.until_rows(num_rows)
    begun = psutil.Process(run.process.pid).children(recursive=True)
    assert any(child.name().startswith("raylet") for child in begun) and len(workers_of(begun)) == 2
    return run, begun


def check_gone(begun: list[psutil.Process]) -> None:
    """All of them are, but for Ray's own agents, which hold no model and take up to two minutes."""
    agents = [process for process in begun if process.is_running() and process.name().endswith("Agent")]
    _, alive = psutil.wait_procs([process for process in begun if process not in agents], timeout=30)
    assert not alive


def test_ctrl_c_ends_a_run_with_all_its_workers(settings: Callable, tmp_path: Path) -> None:
    run, begun = begin_own(settings("own", workers={"count": 2}, search={"population": 60, "top_k": 3}), tmp_path / "own", 4)
    os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does: the run, Ray and the workers all get it
    code, errors = run.end(60)
    assert code == 130 and errors.strip().splitlines()[-1] == "bpb: interrupted; everything so far is kept", errors
    assert "Traceback" not in errors and read_record(tmp_path / "own").status == "interrupted"
    check_gone(begun)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_terminated_and_killed_with_a_ray_of_its_own_and_resumed(settings: Callable, timeless: Callable, tmp_path: Path) -> None:
    sections = {"search": {"population": 60, "top_k": 3, "secondary_k": [2]}}
    config = settings("own", **sections, workers={"count": 2})
    for number, (stop, expected) in enumerate([(signal.SIGTERM, 143), (signal.SIGKILL, -9), (signal.SIGKILL, -9)]):
        run, begun = begin_own(config, tmp_path / "own", 8 * (number + 1))
        run.process.send_signal(stop)
        code, errors = run.end(60)
        assert code == expected, errors
        check_gone(begun)
    assert Run(config, tmp_path / "own").end()[0] == 0
    assert Run(settings("alone", **sections), tmp_path / "alone").end()[0] == 0
    check_same(tmp_path / "own", tmp_path / "alone", timeless)
