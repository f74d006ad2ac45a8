"""A run folder as it stands, for whoever looks on: the run may be in progress here or on another host, have ended, or be a copy.

Nothing is written and nothing is locked. What cannot be read is a note, not the end of looking: files grow, are replaced and are cut
short while they are read. What is read may be a stranger's; it is taken for what it says and never executed.
"""

import json
import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from bitsperbyte.records.leaderboard import randopt_result
from bitsperbyte.records.schema import Record
from bitsperbyte.records.store import JOURNAL, RECORD, read_record
from bitsperbyte.run.config import read_yaml
from bitsperbyte.run.folder import CONFIG
from bitsperbyte.run.metrics import MetricsFold
from bitsperbyte.run.owner import Owner, owner_of
from bitsperbyte.run.tail import LineTail, last_lines

METRICS = "metrics.jsonl"
LOGS = {"golf": "train.log", "randopt": "run.log"}
STALE_AFTER_S = 600.0  # without a write, where the process cannot be asked: longer than a checkpoint or a final score usually takes
RECENT_STEPS = 50  # of which step time and tokens/s are medians
SMOOTHED_STEPS = 20  # of which the loss is the mean
RECENT_SEEDS = 20  # of which seeds/s and tokens/s are means
MAX_POINTS = 240  # of a curve
_MAX_NOTES = 3
_UNREADABLE = (ValueError, OverflowError, RecursionError)  # what a line that is no row of ours can raise


@dataclass(frozen=True)
class Status:
    """`name`: starting, running, stale (it says running and nothing shows that it does), or how the run ended. `ended`: nothing more will
    come unless someone resumes it."""

    name: str
    detail: str
    ended: bool


@dataclass(frozen=True)
class GolfView:
    """Of the steps that count. Times in seconds unless the name says milliseconds; None was not measured or is not known."""

    step: int
    max_steps: int | None
    tokens: int | None
    loss: float | None
    loss_mean: float | None
    loss_curve: list[tuple[float, float]]  # (last step of a group, mean loss of the group)
    val_bpb: float | None
    val_step: int | None
    val_curve: list[tuple[float, float]]
    step_ms: float | None
    tokens_per_s: float | None
    lr_scale: float | None
    learning_rates: dict[str, float]
    elapsed_s: float
    budget_s: float | None
    left_s: float | None
    num_resumes: int
    num_lost_steps: int
    bytes: dict[str, int]  # code, weights, total, cap; those that are known
    scores: dict[str, float]  # bpb by label, from the record


@dataclass(frozen=True)
class SigmaView:
    sigma: float
    num: int
    mean: float
    standard_error: float | None
    best: float
    share_above_base: float | None


@dataclass(frozen=True)
class RandOptView:
    """Of the rows in the journal."""

    phase: str | None  # of the newest row
    num_rows: dict[str, int]  # by phase
    population: int | None
    base_reward: float | None
    best: dict[str, Any] | None  # reward, seed, sigma, index
    per_sigma: list[SigmaView]
    rewards: list[float]  # of the searched seeds, sorted
    truncated_share: float | None
    seeds_per_s: float | None
    tokens_per_s: float | None
    elapsed_s: float
    left_s: float | None  # of the search
    result: str | None


@dataclass(frozen=True)
class SeedView:
    """One of the runs of `bpb golf train --seeds`."""

    name: str
    status: str
    step: int | None
    bpb: float | None  # of its artifact


@dataclass(frozen=True)
class View:
    """One look at a run folder."""

    run_dir: str
    name: str | None
    track: str | None
    status: Status
    owner: str | None
    written_s_ago: float | None
    golf: GolfView | None
    randopt: RandOptView | None
    log: list[str]
    notes: list[str] = field(default_factory=list)
    seeds: list[SeedView] = field(default_factory=list)  # of the folder that the run lies in, where that was asked for

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return _finite(asdict(self))


class RunWatch:
    """Looks at a run folder again and again, reading only what is new in the files that grow."""

    def __init__(self, run_dir: Path | str, num_log_lines: int = 12) -> None:
        self.run_dir, self.num_log_lines = Path(run_dir), num_log_lines
        self._metrics = _Rows(self.run_dir / METRICS, _Golf)
        self._journal = _Rows(self.run_dir / JOURNAL, _RandOpt)
        self._config = _Cached(self.run_dir / CONFIG, read_yaml)
        self._record = _Cached(self.run_dir / RECORD, read_record)

    def look(self) -> View:
        """Raises ValueError where there is no folder, or one that holds no run; OSError where the system refuses to read."""
        if not self.run_dir.is_dir():
            raise ValueError(f"there is no folder {self.run_dir}: give the folder of a run, the --run-dir that it was started with")
        owner = owner_of(self.run_dir)  # first: what a process wrote before it was gone is then all read below
        config, record = self._config.read(), self._record.read()
        notes = [*self._config.notes, *self._record.notes]
        if owner is None and config is None and record is None and not notes:
            raise ValueError(f"{self.run_dir} holds no run: give the folder of a run, with its {CONFIG}")
        track = self._track(owner, config, record)
        rows = {"golf": self._metrics, "randopt": self._journal}.get(track or "")
        state = rows.read() if rows else None
        log = self.run_dir / LOGS.get(track or "", LOGS["golf"])
        age_s = self._age_s([RECORD, CONFIG, METRICS, JOURNAL, log.name, "checkpoint"])
        return View(
            run_dir=str(self.run_dir), name=_text(record.name if record else (config or {}).get("name")), track=track,
            status=status_of(owner, record, age_s, has_config=config is not None), owner=str(owner) if owner else None, written_s_ago=age_s,
            golf=state.view(config or {}, record) if isinstance(state, _Golf) else None,
            randopt=state.view(config or {}, record) if isinstance(state, _RandOpt) else None,
            log=last_lines(log, self.num_log_lines), notes=[*notes, *(rows.notes if rows else [])])

    def _track(self, owner: Owner | None, config: dict[str, Any] | None, record: Record | None) -> str | None:
        if record:
            return record.track
        if owner and owner.kind in LOGS:
            return owner.kind
        sections = {"schedule": "golf", "search": "randopt"}
        return next((track for section, track in sections.items() if section in (config or {})), None)

    def _age_s(self, names: list[str]) -> float | None:
        times = []
        for name in names:
            try:
                times.append((self.run_dir / name).stat().st_mtime)
            except OSError:
                pass  # not there yet, or being replaced
        return max(0.0, time.time() - max(times)) if times else None


class SeedsWatch:
    """Looks at a folder of seed_1, seed_2, ... and at the one of them that is running, or that ran last."""

    def __init__(self, run_dir: Path | str, num_log_lines: int = 12) -> None:
        self.run_dir, self.num_log_lines = Path(run_dir), num_log_lines
        self._runs: dict[str, RunWatch] = {}

    def look(self) -> View:
        """As RunWatch.look. The process that trains the seeds has none of their folders between two of them: while it runs, more come."""
        folders = seed_folders(self.run_dir)
        for folder in folders:
            self._runs.setdefault(folder.name, RunWatch(folder, self.num_log_lines))
        owners = [owner_of(folder) for folder in folders]
        views = {folder.name: self._runs[folder.name].look() for folder in folders}
        if not views:
            raise ValueError(f"{self.run_dir} holds no run any more: it was moved or emptied")
        began_last = max(folders, key=lambda folder: _modified_s(folder / CONFIG)).name
        shown = next((view for view in views.values() if not view.status.ended), views[began_last])
        seeds = [SeedView(name, view.status.name, view.golf.step if view.golf else None, view.golf.scores.get("artifact") if view.golf else None)
                 for name, view in views.items()]
        status = shown.status
        if status.ended and (running := next((owner for owner in owners if owner and owner.runs), None)):
            status = Status("running", f"{running} is between two seeds or about to end", False)
        return replace(shown, status=status, seeds=seeds)


def open_watch(run_dir: Path | str, num_log_lines: int = 12) -> RunWatch | SeedsWatch:
    """What looks at the folder of a run, or of the runs of several seeds."""
    run_dir = Path(run_dir)
    if not (run_dir / CONFIG).exists() and seed_folders(run_dir):
        return SeedsWatch(run_dir, num_log_lines)
    return RunWatch(run_dir, num_log_lines)


def seed_folders(run_dir: Path) -> list[Path]:
    """Its folders seed_1, seed_2, ... that hold a run, by number."""
    named = [path.parent for path in run_dir.glob(f"seed_*/{CONFIG}") if path.parent.name[5:].isdecimal()]
    return sorted(named, key=lambda folder: int(folder.name[5:]))


def status_of(owner: Owner | None, record: Record | None, age_s: float | None, *, has_config: bool) -> Status:
    """What owner, record and the newest write say together. `owner` must have been asked before the record was read."""
    written = f"last written {duration(age_s)} ago" if age_s is not None else "nothing is written yet"
    if owner and owner.state == "alive":
        if not has_config:
            return Status("starting", f"{owner} has the folder and checks what the run needs", False)
        if record and record.status != "running":
            return Status("running", f"{owner} still has the folder, and its record says {record.status}", False)
        return Status("running", f"{owner}, {written}", False)
    if record and record.status != "running":
        return Status(record.status, _text(record.error) or written, True)
    if owner and owner.state == "gone":
        return Status("stale", f"{owner} is gone and left no other record: it was killed, or this is a copy; --resume goes on from what it "
                               f"saved ({written})", True)
    fresh = age_s is not None and age_s <= STALE_AFTER_S
    where = f"{owner} cannot be asked from here" if owner else "no lock file names its process"
    if fresh:
        return Status("running", f"{written}; {where}", False)
    return Status("stale", f"{written}; {where}: it was killed, or this is a copy", ended=owner is None)


# -- files ------------------------------------------------------------------------------------------------------------


class _Cached:
    """A file that is replaced as a whole, read again when it is another; while it cannot be read, what it held last."""

    def __init__(self, path: Path, read: Callable[[Path], Any]) -> None:
        self.path, self.notes = path, []
        self._read, self._seen, self._value = read, None, None

    def read(self) -> Any:
        """The content; None where there is no file."""
        try:
            found = self.path.stat()
            key = found.st_mtime_ns, found.st_size, found.st_ino
            if key != self._seen:
                self._value, self._seen, self.notes = self._read(self.path), key, []
        except (FileNotFoundError, NotADirectoryError):
            self._value, self._seen, self.notes = None, None, []
        except _UNREADABLE as error:
            self.notes = [_text(error)] if self.path.exists() else []
        return self._value


class _Rows:
    """A JSONL file that grows, folded row by row into a state. A line that is no row is noted and left out."""

    def __init__(self, path: Path, make: Callable[[], Any]) -> None:
        self._tail, self._make = LineTail(path), make
        self._begin()

    def _begin(self) -> None:
        self._state, self._num_lines, self._bad = self._make(), 0, []

    def read(self) -> Any:
        lines, restarted = self._tail.read()
        if restarted:
            self._begin()
        for line in lines:
            self._num_lines += 1
            where = f"{self._tail.path}:{self._num_lines}"
            try:
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError("it is no JSON object")
                self._state.add(row, where)
            except _UNREADABLE as error:
                self._bad.append(f"{where} is left out here: {_text(error)[:200]}")
        return self._state

    @property
    def notes(self) -> list[str]:
        more = len(self._bad) - _MAX_NOTES
        return self._bad[:_MAX_NOTES] + ([f"and {more} more lines of {self._tail.path.name}"] if more > 0 else [])


# -- golf -------------------------------------------------------------------------------------------------------------


class _Golf:
    def __init__(self) -> None:
        self._fold = MetricsFold()

    def add(self, row: dict[str, Any], where: str) -> None:
        self._fold.add(row, where)

    def view(self, config: dict[str, Any], record: Record | None) -> GolfView:
        steps, validations = self._fold.steps, self._fold.validations
        recent = steps[-RECENT_STEPS:]
        step_ms = _median([row.get("step_ms") for row in recent])
        batch_tokens = _setting(config, "train", "batch_tokens")
        last, val = steps[-1] if steps else {}, validations[-1] if validations else {}
        step, scale = int(last.get("step", 0)), _number(last.get("lr_scale"))
        budget_s, max_steps = _setting(config, "schedule", "wallclock_s"), _setting(config, "schedule", "max_steps")
        elapsed_s = self._fold.last_elapsed_s
        left = [budget_s - elapsed_s] if budget_s else []
        if max_steps and step_ms is not None:
            left.append((max_steps - step) * step_ms / 1e3)
        rates = {name: _setting(config, "optim", f"{name}_lr") for name in ("matrix", "embed", "scalar")}
        ledger = record.artifact if record else None
        sizes = {name: getattr(ledger, f"{name}_bytes") for name in ("code", "weight", "total", "cap")} if ledger else {}
        sizes.setdefault("cap", _setting(config, "artifact", "cap_bytes"))
        return GolfView(
            step=step, max_steps=int(max_steps) if max_steps else None, tokens=_number(last.get("tokens")), loss=_number(last.get("loss")),
            loss_mean=_mean([row["loss"] for row in steps[-SMOOTHED_STEPS:]]),
            loss_curve=grouped([(row["step"], row["loss"]) for row in steps]),
            val_bpb=_number(val.get("val_bpb")), val_step=_number(val.get("step")),
            val_curve=grouped([(row["step"], row["val_bpb"]) for row in validations if _number(row.get("val_bpb")) is not None]),
            step_ms=step_ms, tokens_per_s=batch_tokens / step_ms * 1e3 if batch_tokens and step_ms else None, lr_scale=scale,
            learning_rates={name: rate * scale for name, rate in rates.items() if rate is not None and scale is not None},
            elapsed_s=elapsed_s, budget_s=budget_s, left_s=max(0.0, min(left)) if left else None,
            num_resumes=self._fold.num_resumes, num_lost_steps=self._fold.num_lost_steps,
            bytes={name: int(size) for name, size in sizes.items() if size is not None},
            scores={row.label: row.bpb for row in record.scores} if record else {})


def grouped(points: list[tuple[float, float]], max_points: int = MAX_POINTS) -> list[tuple[float, float]]:
    """At most so many points: means of groups of neighbours of equal number (the last may be smaller), at the last x of each. Points that
    are not finite numbers are left out."""
    points = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    size = -(-len(points) // max_points) or 1
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [(group[-1][0], math.fsum(y for _, y in group) / len(group)) for group in groups]


# -- randopt ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Seed:
    """What is kept of a row: a journal holds every answer of every seed."""

    reward: float
    sigma: float
    seconds: float
    num_tokens: int
    num_prompts: int
    num_truncated: int


class _RandOpt:
    def __init__(self) -> None:
        self._num_rows: dict[str, int] = {}
        self._seeds: list[_Seed] = []
        self._recent: deque[_Seed] = deque(maxlen=RECENT_SEEDS)
        self._phase: str | None = None
        self._base: float | None = None
        self._best: dict[str, Any] | None = None
        self._elapsed_s = 0.0

    def add(self, row: dict[str, Any], where: str) -> None:
        if "journal" in row:
            return  # the first line: what the rows belong to
        phase, reward, seconds = row.get("phase"), _number(row.get("reward")), _number(row.get("seconds"))
        if not isinstance(phase, str) or reward is None or seconds is None:
            raise ValueError("it has no phase, reward or seconds")
        if phase == "search":
            numbers = {name: _number(row.get(name)) for name in ("sigma", "num_tokens", "num_prompts", "num_truncated")}
            if None in numbers.values():
                raise ValueError("it is a row of the search without all of its numbers")
            seed = _Seed(reward=reward, seconds=seconds, **numbers)
            self._seeds.append(seed)
            self._recent.append(seed)
            if self._best is None or reward > self._best["reward"]:
                self._best = {name: row.get(name) for name in ("reward", "sigma", "seed", "index")}
        elif phase == "base_train":
            self._base = reward
        self._phase = phase
        self._num_rows[phase] = self._num_rows.get(phase, 0) + 1
        self._elapsed_s += seconds

    def view(self, config: dict[str, Any], record: Record | None) -> RandOptView:
        population = _setting(config, "search", "population")
        busy_s = math.fsum(seed.seconds for seed in self._recent)
        rate = len(self._recent) / busy_s if busy_s > 0 else None
        missing = max(0, population - len(self._seeds)) if population else None
        num_prompts = sum(seed.num_prompts for seed in self._seeds)
        return RandOptView(
            phase=self._phase, num_rows=dict(self._num_rows), population=int(population) if population else None, base_reward=self._base,
            best=self._best, per_sigma=self._per_sigma(), rewards=sorted(seed.reward for seed in self._seeds),
            truncated_share=sum(seed.num_truncated for seed in self._seeds) / num_prompts if num_prompts else None,
            seeds_per_s=rate, tokens_per_s=sum(seed.num_tokens for seed in self._recent) / busy_s if busy_s > 0 else None,
            elapsed_s=self._elapsed_s, left_s=missing / rate if rate and missing is not None else None,
            result=randopt_result(record.randopt) if record and record.randopt else None)

    def _per_sigma(self) -> list[SigmaView]:
        by_sigma: dict[float, list[float]] = {}
        for seed in self._seeds:
            by_sigma.setdefault(seed.sigma, []).append(seed.reward)
        return [SigmaView(
            sigma=sigma, num=len(rewards), mean=math.fsum(rewards) / len(rewards),
            standard_error=statistics.stdev(rewards) / math.sqrt(len(rewards)) if len(rewards) > 1 else None, best=max(rewards),
            share_above_base=None if self._base is None else sum(r > self._base for r in rewards) / len(rewards),
        ) for sigma, rewards in sorted(by_sigma.items())]


# -- values -----------------------------------------------------------------------------------------------------------


def duration(seconds: float) -> str:
    """0.4 s, 12 s, 3 min 05 s, 2 h 07 min, 3 days 4 h."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{min(59, round(seconds))} s"
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days} day{'s' * (days > 1)} {h} h"
    return f"{hours} h {m:02d} min" if hours else f"{m} min {s:02d} s"


def _number(value: Any) -> Any:
    """A finite number as it is, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if math.isfinite(value) else None


def _setting(config: dict[str, Any], section: str, key: str) -> Any:
    values = config.get(section)
    return _number(values.get(key)) if isinstance(values, dict) else None


def _mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _median(values: list[Any]) -> float | None:
    known = [value for value in values if _number(value) is not None]
    return statistics.median(known) if known else None


def _text(value: Any) -> str | None:
    return None if value is None else " ".join(str(value).split())


def _finite(value: Any) -> Any:
    """The value with None in place of numbers that JSON cannot hold."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _modified_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0  # being moved
