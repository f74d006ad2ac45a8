"""A fleet on a Ray of this machine: the results of one engine, whatever happens to the workers; refusals in one sentence."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bitsperbyte.randopt import session, workers
from bitsperbyte.randopt.config import RandOptConfig
from bitsperbyte.randopt.engines.base import Sampling
from bitsperbyte.randopt.engines.fake import FakeEngine
from bitsperbyte.randopt.engines.registry import open_engine
from bitsperbyte.randopt.jobs import Job, in_turn
from bitsperbyte.randopt.population import BASE, draw_population
from bitsperbyte.randopt.worker import Worker, versions
from bitsperbyte.randopt.workers import Fleet, left_with_node, why_lost
from bitsperbyte.records.schema import Record
from bitsperbyte.records.store import read_record
from bitsperbyte.run.folder import read_jsonl
from bitsperbyte.run.outcome import RunFailed

NUM_CPUS = 2


@pytest.fixture(scope="module", autouse=True)
def ray_here() -> Iterator[None]:
    """A Ray of two processors in this process, which a fleet finds and leaves as it is."""
    import ray

    ray.init(address="local", num_cpus=NUM_CPUS, num_gpus=0, include_dashboard=False, log_to_driver=False, logging_level="ERROR",
             object_store_memory=2**27, _node_ip_address="127.0.0.1")
    yield
    ray.shutdown()


def misbehaving(folder: Path, at: int, what: str, times: int = 1) -> Callable[..., FakeEngine]:
    """An engine that misbehaves at the `at`th member of population 42, in whichever process, `times` times in all."""
    seed = draw_population(at + 1, [0.1, 0.2], 42)[at].seed

    def opener(config: RandOptConfig, run_dir: Path, say: Callable[[str], None]) -> FakeEngine:
        def on_call(call: tuple[Any, ...]) -> None:
            if call[0] != "generate" or call[1] is None or call[1][0] != seed:
                return
            done = len(list(folder.glob("misbehaved_*")))
            if done < times:
                (folder / f"misbehaved_{done}").touch()
                if what == "die":
                    os._exit(1)
                elif what == "hang":
                    time.sleep(3600)
                else:
                    raise {"break": RuntimeError("the kernel broke"), "refuse": ValueError("the prompt is too long")}[what]

        return FakeEngine(delay_s=0.005, on_call=on_call)

    return opener


def uneven(config: RandOptConfig, run_dir: Path, say: Callable[[str], None]) -> FakeEngine:
    """Seeds take very different times, so that they finish in another order than they began."""
    engine = FakeEngine()
    engine.on_call = lambda call: time.sleep(0.001 * (call[1][0] % 40)) if call[0] == "generate" and call[1] else None
    return engine


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Record]:
    def go(config: RandOptConfig, opener: Callable[..., Any] | None = None, folder: str = "run", resume: bool = False) -> Record:
        # a lambda goes to the workers as it is; a function of this module would have to be imported there
        monkeypatch.setattr(session, "open_engine", lambda config, run_dir, say: opener(config, run_dir, say) if opener else FakeEngine())
        return session.run(config, tmp_path / folder, resume=resume, console=Console(quiet=True))

    return go


@pytest.fixture(autouse=True)
def by_value() -> Iterator[None]:
    """Functions of this file reach the workers as code, since they cannot import it."""
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def rows_of(run_dir: Path, timeless: Callable) -> dict[tuple[str, int], Any]:
    found, is_torn = read_jsonl(run_dir / "journal.jsonl")
    keys = [(row["phase"], row["index"]) for row in found[1:]]
    assert not is_torn and len(set(keys)) == len(keys), "a model stands in the journal twice"
    return {key: timeless(row) for key, row in zip(keys, found[1:], strict=True)}


def same_as_one_engine(run: Callable, tmp_path: Path, timeless: Callable, config: RandOptConfig, record: Record, folder: str = "run") -> None:
    whole = run(config.model_copy(update={"workers": config.workers.model_copy(update={"count": 0})}), folder=f"{folder}_alone")
    assert rows_of(tmp_path / folder, timeless) == rows_of(tmp_path / f"{folder}_alone", timeless)
    assert timeless(record.model_dump(mode="json")) == timeless(whole.model_dump(mode="json")) and record.status == "finished"


def test_a_fleet_gives_the_record_of_one_engine(run: Callable, config: Callable, timeless: Callable, tmp_path: Path, slice_path: Path) -> None:
    settings = config(search__population=30, workers={"count": 2}, probes__top=2,
                      heldout={"path": str(slice_path), "source": str(tmp_path / "source.jsonl"), "num_docs": 3, "context": 64})
    record = run(settings, uneven)
    same_as_one_engine(run, tmp_path, timeless, settings, record)
    order = [index for phase, index in rows_of(tmp_path / "run", timeless) if phase == "search"]
    assert order != sorted(order), "nothing finished out of order, so this shows nothing"
    assert record.provenance["workers"]["most_workers"] == 2 and record.provenance["num_devices"] == 2
    assert record.config_sha256 == read_record(tmp_path / "run_alone").config_sha256


@pytest.mark.parametrize("what", ["die", "hang"])
def test_a_lost_worker_is_replaced_and_nothing_of_its_work_is_lost(run: Callable, config: Callable, timeless: Callable, tmp_path: Path,
                                                                   what: str) -> None:
    settings = config(search__population=16, workers={"count": 2, "timeout_s": 2.0})
    record = run(settings, misbehaving(tmp_path, 5, what))
    assert record.provenance["workers"]["lost"] == 1 and (tmp_path / "misbehaved_0").exists()
    why = {"die": "its worker process has died", "hang": r"has not answered for \d+ s \(workers.timeout_s\)"}[what]
    assert re.search(rf"worker \d \(.*, process \d+\) .*{why}.*member 5 .* will be run again", (tmp_path / "run" / "run.log").read_text())
    same_as_one_engine(run, tmp_path, timeless, settings, record)


def test_a_member_that_kills_every_worker_ends_the_run_and_is_named(run: Callable, config: Callable, timeless: Callable,
                                                                    tmp_path: Path) -> None:
    settings = config(workers={"count": 2, "max_failures": 2})
    # a worker that dies at once may take the answer of the member before with it, which the loss then counts against
    with pytest.raises(RunFailed, match=r"2 workers were lost at member [45] \(seed .* more memory .* --resume"):
        run(settings, misbehaving(tmp_path, 5, "die", times=3))
    assert read_record(tmp_path / "run").status == "crashed"
    same_as_one_engine(run, tmp_path, timeless, settings, run(settings, resume=True))


def test_errors_of_an_engine_are_those_of_one_engine(run: Callable, config: Callable, tmp_path: Path) -> None:
    settings = config(workers={"count": 1})
    with pytest.raises(RunFailed, match="member 5 .* failed in search: the kernel broke; .* --resume") as failed:
        run(settings, misbehaving(tmp_path, 5, "break"), "broke")
    assert (failed.value.code, failed.value.status) == (1, "crashed")
    with pytest.raises(ValueError, match="^the prompt is too long$"):
        run(settings, misbehaving(tmp_path, 5, "refuse", times=2), "refused")
    assert run(settings, folder="broke", resume=True).status == "finished"


def test_a_model_that_cannot_be_loaded_is_refused_as_without_workers(config: Callable, tmp_path: Path) -> None:
    missing = tmp_path / "no.gguf"
    with pytest.raises(ValueError, match="there is no file .*no.gguf: check model.path"):
        Fleet.open(config(model={"path": str(missing)}, workers={"count": 1}), tmp_path, print, open_engine)


def test_a_worker_with_other_weights_is_turned_away(config: Callable, tmp_path: Path) -> None:
    def opener(config: RandOptConfig, run_dir: Path, say: Callable[[str], None]) -> FakeEngine:
        class Other(FakeEngine):
            def describe(self):
                return {**FakeEngine.describe(self), "weights_sha256": "0" * 64}

        try:
            (run_dir / "first").touch(exist_ok=False)
        except FileExistsError:
            return Other()
        return FakeEngine(delay_s=0.05)

    said: list[str] = []
    fleet = Fleet.open(config(workers={"count": 2}), tmp_path, said.append, opener)
    job = Job("search", prompts=fleet.encode([[{"role": "user", "content": "12?30="}]]))
    members = draw_population(100, [0.1], 1)
    done = list(fleet.run(job, members, lambda member: Sampling(4)))
    assert sorted(d.member.index for d in done) == list(range(100))
    assert fleet.summary()["most_workers"] == 1 and fleet.describe()["weights_sha256"] != "0" * 64
    assert [line for line in said if "is turned away" in line and "weights_sha256: 000000000000... and not" in line]
    fleet.close()


def test_a_transformers_model_gives_the_same_bits_in_every_worker(config: Callable, tiny_llama: Path, tmp_path: Path,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens and nats of the base and of members, and the noise that rounding left."""
    monkeypatch.chdir(tiny_llama.parent)  # Ray's processes began elsewhere
    settings = config(model={"path": tiny_llama.name, "device": "cpu"}, workers={"count": 2})
    engine = open_engine(settings, tmp_path, lambda line: None)
    prompts = engine.encode([[{"role": "user", "content": f"{i}?{i + 3}="}] for i in range(5)])
    members = [BASE, *draw_population(12, [0.01, 0.05], 3)]
    fleet = Fleet.open(settings, tmp_path, lambda line: None, open_engine)
    assert fleet.encode([[{"role": "user", "content": "0?3="}]]) == prompts[:1]
    for job in (Job("search", prompts=prompts), Job("heldout", texts=["words of a document " * 9, "ä"], context=32)):
        alone = {d.member: d for d in in_turn(engine, job, members, lambda member: Sampling(8))}
        spread = {d.member: d for d in fleet.run(job, members, lambda member: Sampling(8))}
        assert spread.keys() == alone.keys()
        for member, done in spread.items():
            assert done.answers == alone[member].answers
            assert all((a.nats == b.nats).all() and (a.num_bytes == b.num_bytes).all()
                       for a, b in zip(done.documents, alone[member].documents, strict=True))
    assert fleet.describe() == engine.describe()
    assert fleet.effective_rms(0.01, 7) == engine.effective_rms(0.01, 7)
    fleet.reset()
    fleet.verify_base()
    fleet.close()


def test_fewer_workers_than_asked_for_are_said_and_used_or_refused(config: Callable, tmp_path: Path) -> None:
    def opener(config: RandOptConfig, run_dir: Path, say: Callable[[str], None]) -> FakeEngine:
        return FakeEngine()

    said: list[str] = []
    fleet = Fleet.open(config(workers={"count": 5}), tmp_path, said.append, opener)
    fleet.close()
    assert said[0] == f"{NUM_CPUS} workers of 1 CPU each of the 5 that were asked for; others join if there is room later"
    with pytest.raises(ValueError, match="5 workers of 1 CPU each were asked for, and this machine has room for 2: .* or set workers.when_fewer"):
        Fleet.open(config(workers={"count": 5, "when_fewer": "refuse"}), tmp_path, said.append, opener)
    with pytest.raises(ValueError, match="1 worker of 9 CPUs each were asked for, and this machine has room for 0"):
        Fleet.open(config(workers={"count": None, "cpus_each": 9}), tmp_path, said.append, opener)
    with pytest.raises(ValueError, match="2 workers of 1 GPU and 1 CPU each were asked for, and this machine has room for 0"):
        Fleet.open(config(model={"path": "fake", "device": "cuda"}, workers={"count": 2}), tmp_path, said.append, opener)


def test_a_worker_with_other_code_is_refused(config: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "versions", lambda: {**versions(), "torch": "1.0"})
    with pytest.raises(ValueError, match="its code is not this process's .torch: .* and not 1.0.: install the same version"):
        Fleet.open(config(workers={"count": 1}), tmp_path, print, lambda config, run_dir, say: FakeEngine())


def test_an_error_of_ray_is_told_in_its_own_line() -> None:
    from ray.exceptions import ActorUnavailableError, RayActorError

    died = RayActorError(error_msg="The actor died unexpectedly before finishing this task.\n\tpid: 7\nThe actor is dead because its node has "
                                   "died. Node Id: 3f. Some common causes include: (1) a storm")
    assert why_lost(died) == "its node has died. Node Id: 3f" and left_with_node(died, True)
    killed = RayActorError(error_msg="The actor died.\nThe actor is dead because its worker process has died. Code 2. Some common causes: x")
    assert why_lost(killed) == "its worker process has died. Code 2" and not left_with_node(killed, True)
    unreachable = ActorUnavailableError("The actor is unavailable.", b"0" * 16)
    assert left_with_node(unreachable, False) and not left_with_node(unreachable, True)
    unborn = RayActorError(error_msg="The actor died because of an error raised in its creation task, C\n ^^\nModuleNotFoundError: No module 'b'")
    assert why_lost(unborn) == "ModuleNotFoundError: No module 'b'"


def test_a_model_made_first_must_lie_where_the_worker_looks(config: Callable, tmp_path: Path) -> None:
    settings = config(model={"golf": {"settings": {}}}, workers={"count": 1})
    with pytest.raises(ValueError, match=f"the model that the run made is not in {tmp_path} on .*: .* put the run folder on a file system"):
        Worker().open(settings.model_dump_json(), str(tmp_path), os.getcwd(), open_engine, 1)


def test_without_ray_one_sentence_says_what_to_do_and_leaves_no_folder(run: Callable, config: Callable, tmp_path: Path,
                                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"workers.count asks for 2 workers, and Ray cannot be imported .*: pip install 'bitsperbyte\[ray\]', or"):
        run(config(workers={"count": 2}))
    assert not (tmp_path / "run").exists()
    assert run(config(), folder="alone").status == "finished"


def test_one_engine_never_imports_ray() -> None:
    code = "import sys; from bitsperbyte.randopt import session, workers, cluster, worker; print('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
