"""Scalars of a run sent on to a dashboard while it runs. metrics.jsonl and journal.jsonl stay the truth; this is a copy of them.

A backend is a class with the methods of `Backend`, in a dict by name, and its package is imported when it is chosen. Whatever fails in
it is said once, ends the copy, and leaves the run alone.
"""

import importlib
import json
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, Protocol

from bitsperbyte.run.config import LoggerSection
from bitsperbyte.run.folder import write_atomic

IDS = "logger.json"  # in the run folder: the id under which each backend knows the run
EVENTS = "tensorboard"  # in the run folder: the event files


class Backend(Protocol):
    """`id` is the run's own, the same whenever it is resumed. Every method may raise whatever its package raises."""

    def __init__(self, run_dir: Path, *, id: str, project: str, name: str, config: dict[str, Any]) -> None: ...

    def log(self, step: int, values: dict[str, float]) -> None: ...

    def rewind(self, step: int) -> None:
        """What was logged after `step` counts no longer: it is made again."""

    def close(self, failed: bool) -> None: ...


class TensorBoard:
    """Event files in the run folder, written by the tensorboard package alone."""

    def __init__(self, run_dir: Path, *, id: str, project: str, name: str, config: dict[str, Any]) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._session, self._summary = event_pb2.Event, event_pb2.SessionLog, summary_pb2.Summary
        self._writer = EventFileWriter(str(run_dir / EVENTS), flush_secs=10)

    def log(self, step: int, values: dict[str, float]) -> None:
        summary = self._summary(value=[self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))

    def rewind(self, step: int) -> None:
        # readers drop what earlier files hold from the step of a START event on
        start = self._session(status=self._session.START)
        self._writer.add_event(self._event(wall_time=time.time(), step=step + 1, session_log=start))

    def close(self, failed: bool) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run on the server that `wandb login` or WANDB_MODE says. Its own step must grow, so ours is a metric, against which it draws."""

    def __init__(self, run_dir: Path, *, id: str, project: str, name: str, config: dict[str, Any]) -> None:
        import wandb

        self._run = wandb.init(project=project, name=name, id=id, resume="allow", dir=str(run_dir), config=config,
                               allow_val_change=True, save_code=False, settings=wandb.Settings(console="off"))
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log({"step": step, **values})

    def rewind(self, step: int) -> None:
        """A line that goes back to `step` and on from there: what was sent stays."""

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class Trackio:
    """A run in trackio's local store. It knows a run by its name, so the id is part of that."""

    def __init__(self, run_dir: Path, *, id: str, project: str, name: str, config: dict[str, Any]) -> None:
        import trackio

        self._trackio = trackio
        with redirect_stdout(sys.stderr):  # it prints, and what a run prints is its result
            self._run = trackio.init(project=project, name=f"{name}-{id}", config=config, resume="allow", embed=False)

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def rewind(self, step: int) -> None:
        """As with Weights & Biases, what was sent stays."""

    def close(self, failed: bool) -> None:
        with redirect_stdout(sys.stderr):
            self._trackio.finish()  # not the run's own, after which the package ends it once more at exit


BACKENDS: dict[str, type[Backend]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "trackio": Trackio}


class Tracker:
    """What a run logs to. Without a backend every call does nothing; after the first error likewise."""

    def __init__(self, backend: Backend | None = None, name: str = "none", say: Callable[[str], None] = print) -> None:
        self._backend, self._name, self._say = backend, name, say

    def log(self, step: int, values: dict[str, float | None]) -> None:
        """Values by name; those that are None were not measured and are left out."""
        if self._backend:
            with self._guarded():
                self._backend.log(step, {tag: value for tag, value in values.items() if value is not None})

    def rewind(self, step: int) -> None:
        """The run went back to `step`."""
        if self._backend:
            with self._guarded():
                self._backend.rewind(step)

    def close(self, failed: bool = False) -> None:
        """End the logger's run; closing twice does nothing."""
        if self._backend:
            with self._guarded():
                self._backend.close(failed)
            self._backend = None

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever a dashboard's client raises: a run is worth more than its curves
            self._backend = None
            self._say(_gave_up(self._name, error))


def require_installed(section: LoggerSection) -> None:
    """ValueError where the chosen logger's package cannot be imported: said before a run begins, since then it costs nothing."""
    if section.backend == "none":
        return
    try:
        importlib.import_module(section.backend)
    except ImportError as error:
        raise ValueError(f"logger.backend is {section.backend} and that package cannot be imported ({error}): "
                         f"pip install {section.backend}, or set logger.backend to none") from error


def open_tracker(section: LoggerSection, run_dir: Path, *, name: str, config: dict[str, Any], say: Callable[[str], None]) -> Tracker:
    """The logger that a config chooses, going on with the run's earlier curves where the folder knows their id. An error is said, and
    the tracker then does nothing."""
    if section.backend == "none":
        return Tracker()
    try:
        own_id = _id_of(run_dir / IDS, section.backend)
        backend = BACKENDS[section.backend](run_dir, id=own_id, project=section.project or "bitsperbyte", name=name, config=config)
    except Exception as error:  # as in Tracker: no network, no login, a full disk
        say(_gave_up(section.backend, error))
        return Tracker()
    return Tracker(backend, section.backend, say)


def _id_of(path: Path, backend: str) -> str:
    ids = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if not isinstance(ids, dict) or not all(isinstance(own, str) for own in ids.values()):
        raise ValueError(f"{path} does not hold an id for each logger: delete it, and the run's curves begin anew")
    if backend not in ids:
        ids[backend] = secrets.token_hex(4)
        write_atomic(path, json.dumps(ids, indent=2) + "\n")
    return ids[backend]


def _gave_up(name: str, error: Exception) -> str:
    reason = " ".join(str(error).split()) or type(error).__name__
    return f"logging to {name} failed and stops here; the run goes on, and its own files hold everything: {reason[:300]}"
