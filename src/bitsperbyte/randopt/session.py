"""A RandOpt run from a config to a record: open the folder, the task and the engine; search; evaluate; record.

Every way to end leaves a record.json: finished, interrupted, crashed; a run that was killed says running. What was evaluated stands in
journal.jsonl, so `--resume` evaluates only what is missing, and a finished population can be grown.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import bitsperbyte
from bitsperbyte.randopt import noise
from bitsperbyte.randopt.cluster import require_ray
from bitsperbyte.randopt.config import RandOptConfig
from bitsperbyte.randopt.curves import Curves
from bitsperbyte.randopt.engines.base import Engine
from bitsperbyte.randopt.engines.registry import open_engine
from bitsperbyte.randopt.evaluate import evaluate
from bitsperbyte.randopt.journal import Journal
from bitsperbyte.randopt.search import search
from bitsperbyte.randopt.summary import summary
from bitsperbyte.randopt.tasks.arithmetic import Arithmetic, training_documents
from bitsperbyte.randopt.tasks.base import Task
from bitsperbyte.randopt.tasks.grading import Grader
from bitsperbyte.randopt.tasks.registry import open_task
from bitsperbyte.randopt.workers import Fleet
from bitsperbyte.records.schema import Record
from bitsperbyte.records.store import continue_record, readable_record, write_record
from bitsperbyte.run.config import LOGGER, WORKERS, config_diff, config_hash, resolved_yaml
from bitsperbyte.run.console import SteadyConsole
from bitsperbyte.run.folder import CONFIG, IDENTITY, RunFolder, check_same_config, read_identity, read_jsonl
from bitsperbyte.run.outcome import EXIT_FAILED, RunFailed
from bitsperbyte.run.provenance import collect
from bitsperbyte.run.trackers import Tracker, open_tracker, require_installed
from bitsperbyte.text.slices import Slice, ensure_slice

HELD_OUT_SEED = 2**62  # of documents that no model was trained on: a golf section's own seed is another one
RECORD, JOURNAL, LOG = "record.json", "journal.jsonl", "run.log"
IDENTITY_PARTS = ("config", "task", "slice", "versions")
# What a resumed run may be given anew: none of it changes a row of the journal. Growing is checked where it is done.
MAY_CHANGE = ("config.search.population", "config.search.secondary_k", "config.probes", "config.decode.max_sequences",
              "config.decode.memory_share", "config.model.path", "config.hardware", f"config.{LOGGER}", f"config.{WORKERS}")


def run(config: RandOptConfig, run_dir: Path, *, resume: bool = False, console: Console | None = None) -> Record:
    """Run `config` in `run_dir` to its end and return the record (also written there).

    Raises ValueError for input that cannot work (before anything is evaluated) and RunFailed, with an exit code, for a run that
    failed; the folder then holds everything so far, and `resume` goes on from there.
    """
    console = console or SteadyConsole(stderr=True)
    with RunFolder.open(run_dir, resume=resume, kind="randopt") as folder:
        return _run(config, folder, resume, console)


def _run(config: RandOptConfig, folder: RunFolder, resume: bool, console: Console) -> Record:
    began = time.perf_counter()
    require_installed(config.logger)
    require_ray(config.workers)
    task = open_task(config.task)
    train_items, test_items = task.items()  # ValueError before the folder holds a run
    held_out = _held_out(config, lambda text: console.print(text, highlight=False, markup=False, soft_wrap=True))
    identity = _identity(config, task, held_out)
    if resume:
        _check_resumable(folder.path, identity, config)
    folder.write_json_atomic(IDENTITY, identity)
    record = _new_record(config)
    with open(folder.path / LOG, "a", encoding="utf-8") as log:

        def say(text: str) -> None:
            log.write(text + "\n")
            log.flush()
            console.print(text, highlight=False, markup=False, soft_wrap=True)

        if resume:
            continue_record(record, folder.path / RECORD, say)
        write_record(folder.path / RECORD, record)
        folder.write_atomic(CONFIG, resolved_yaml(config))  # last: its presence says that the folder holds a run
        with _tracked(config, folder, record, say) as tracker, _recorded(folder, record, config, console):
            engine = _open(config, folder.path, say)
            try:
                record.provenance |= _device(engine)
                launch_s = time.perf_counter() - began
                journal = Journal.open(folder.path / JOURNAL, {"engine": _model_identity(engine), "task": identity["task"],
                                                               "noise": noise.describe(config.noise.scheme)})
                if journal.dropped_torn_bytes:
                    say(f"{JOURNAL}: a last line of {journal.dropped_torn_bytes} bytes that a kill had cut short was dropped; what it "
                        "held is evaluated again")
                with journal, Grader(task) as grader:
                    curves = Curves(tracker, journal, every_seeds=config.logger.every_steps)
                    found = search(config, engine, task, grader, journal, train_items, console, say)
                    record.randopt = evaluate(config, engine, task, grader, journal, found, test_items, held_out, folder.path,
                                              console, say)
                    curves.result(record.randopt)
                _finish(record, task, engine, launch_s, time.perf_counter() - began)
                log.write("\n".join(summary(record.randopt.model_dump())) + "\n")
            finally:
                record.provenance |= _device(engine)  # again, since workers may have joined or left
                engine.close()
    return record


@contextmanager
def _tracked(config: RandOptConfig, folder: RunFolder, record: Record, say: Callable[[str], None]) -> Iterator[Tracker]:
    """The logger of the config, closed however the run ends, and after the record is written: some wait for a network then."""
    tracker = open_tracker(config.logger, folder.path, name=f"{config.name}-seed{config.search.seed}", config=record.config, say=say)
    failed = True
    try:
        yield tracker
        failed = False
    finally:
        tracker.close(failed)


@contextmanager
def _recorded(folder: RunFolder, record: Record, config: RandOptConfig, console: Console) -> Iterator[None]:
    """Whatever ends the run, the record says so before the error goes on."""
    try:
        yield
    except RunFailed as failure:
        record.status, record.error = failure.status, str(failure)
        raise
    except KeyboardInterrupt:
        record.status, record.error = "interrupted", "stopped by the user or the system; --resume evaluates what is missing"
        raise
    except torch.OutOfMemoryError as error:
        record.status, record.error = "crashed", "out of memory"
        raise RunFailed(f"out of memory: lower decode.memory_share (now {config.decode.memory_share}), decode.score_tokens, or set "
                        "decode.max_sequences, and go on with --resume; everything so far is kept", EXIT_FAILED, "crashed") from error
    except Exception as error:
        record.status, record.error = "crashed", f"{type(error).__name__}: {error}"
        raise
    finally:
        try:
            write_record(folder.path / RECORD, record)
        except (OSError, ValueError) as error:
            if record.status == "finished":
                raise
            # said, not raised: the first error is the one that says why the run ended
            console.print(f"{RECORD} could not be brought up to date: {error}", highlight=False, markup=False, soft_wrap=True)


def _held_out(config: RandOptConfig, say: Callable[[str], None]) -> Slice | None:
    h = config.heldout
    if not h.enabled:
        return None
    # four times as many, since a slice holds each document once and these repeat
    documents = training_documents(4 * h.num_docs, HELD_OUT_SEED) if h.source == Arithmetic.name else None
    return ensure_slice(Path(h.path), h.source, h.num_docs, h.build_if_missing, documents=documents, say=say)


def _identity(config: RandOptConfig, task: Task, held_out: Slice | None) -> dict[str, Any]:
    return {"config": config.model_dump(mode="json"), "task": task.describe(), "slice": held_out.sha256 if held_out else None,
            "versions": {"bitsperbyte": bitsperbyte.__version__, "torch": torch.__version__, "transformers": version("transformers")}}


def _check_resumable(run_dir: Path, identity: dict[str, Any], config: RandOptConfig) -> None:
    saved = read_identity(run_dir, IDENTITY_PARTS)
    check_same_config(saved, identity, may_change=MAY_CHANGE)
    before = saved["config"]["search"]["population"]
    if config.search.population < before:  # a growth that was a mistake can be taken back until its first seed is evaluated
        held = _num_searched(run_dir / JOURNAL)
        if config.search.population < held:
            raise ValueError(f"a population only grows: the journal in {run_dir} holds members of the first {held}, and "
                             f"search.population {config.search.population} is fewer")
    earlier = readable_record(run_dir / RECORD)
    without = {LOGGER: None, WORKERS: None}
    if earlier and earlier.status == "finished" and not config_diff(*({**c, **without} for c in (saved["config"], identity["config"]))):
        raise ValueError(f"the run in {run_dir} is finished: see its {RECORD}, grow it with --set search.population={2 * before}, "
                         "or take another --run-dir")


def _num_searched(journal: Path) -> int:
    """The smallest population that holds every member in the journal."""
    rows = read_jsonl(journal)[0] if journal.exists() else []
    return 1 + max((row["index"] for row in rows if row.get("phase") == "search" and isinstance(row.get("index"), int)), default=-1)


def _open(config: RandOptConfig, run_dir: Path, say: Callable[[str], None]) -> Engine | Fleet:
    """The engine of the config: in this process, or as many as there are workers."""
    if config.workers.count == 0:
        return open_engine(config, run_dir, say)
    return Fleet.open(config, run_dir, say, open_engine)


def _device(engine: Engine | Fleet) -> dict[str, Any]:
    """What the record says of where the run ran."""
    facts = {"device": engine.describe()["device"]}
    return {**facts, "num_devices": engine.num_devices(), "workers": engine.summary()} if isinstance(engine, Fleet) else facts


def _model_identity(engine: Engine | Fleet) -> dict[str, Any]:
    facts = engine.describe()
    return {name: facts.get(name) for name in ("kind", "weights_sha256", "tokenizer_sha256", "dtype", "prompt_format")}


def _new_record(config: RandOptConfig) -> Record:
    facts = collect()
    return Record(track="randopt", name=config.name, status="running", created_utc=datetime.now(UTC).isoformat(timespec="seconds"),
                  command=facts["command"], config=config.model_dump(mode="json"), config_sha256=config_hash(config),
                  provenance=facts, seed=config.search.seed)


def _finish(record: Record, task: Task, engine: Engine | Fleet, launch_s: float, total_s: float) -> None:
    """Fill in what spans the phases. Seconds of a phase are those of its rows, over all attempts; launch and this_attempt are of the
    last attempt alone."""
    facts, described = engine.describe(), task.describe()
    record.data = {"source": described.get("data"), "train_sha256": described["train_sha256"], "test_sha256": described["test_sha256"],
                   "tokenizer_sha256": facts.get("tokenizer_sha256")}
    phases = {phase: figures["seconds"] for phase, figures in record.randopt.throughput.items()}
    record.phases_s = {"launch": launch_s, **phases, "this_attempt": total_s, "total": launch_s + sum(phases.values())}
    record.status = "finished"
