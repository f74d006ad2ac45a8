"""Two sides of a comparison: the records that each stands on, whether they are independent, and in what the sides differ beside the result."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitsperbyte.records.leaderboard import hardware
from bitsperbyte.records.schema import Record
from bitsperbyte.records.store import RECORD, read_record
from bitsperbyte.run.config import LOGGER, WORKERS, config_diff

SEED_KEYS = ("train.seed", "search.seed")
_IGNORED = {"name", *SEED_KEYS}  # of a config, beside the logger: what changes nothing about a run, or is meant to differ


@dataclass(frozen=True)
class Run:
    """A record, and the folder that it lies in."""

    folder: Path
    record: Record

    def __str__(self) -> str:
        return str(self.folder)


@dataclass(frozen=True)
class Side:
    """All runs of one side, in the order given; `arguments` as the user wrote them."""

    name: str
    arguments: tuple[str, ...]
    runs: tuple[Run, ...]


def read_sides(pairs: Sequence[Path], a: Sequence[Path] = (), b: Sequence[Path] = ()) -> tuple[Side, Side]:
    """The sides of `A B [A2 B2 ...]` and of further `a`, `b`, each a record.json, a folder that holds one, or a folder of seed_* runs.

    Raises ValueError for an odd number in `pairs`, a side without a run, tracks that differ, and what `read_record` refuses.
    """
    if len(pairs) % 2:
        raise ValueError(f"{len(pairs)} run{'s' if len(pairs) > 1 else ''} in a row {'do' if len(pairs) > 1 else 'does'} not pair up: give "
                         "A B [A2 B2 ...] in turn, or name each with --a and --b")
    arguments = {"A": (*pairs[0::2], *a), "B": (*pairs[1::2], *b)}
    for name, paths in arguments.items():
        if not paths:
            raise ValueError(f"side {name} has no run: give A B [A2 B2 ...] in turn, or name each with --a and --b")
    sides = [Side(name, tuple(map(str, paths)), tuple(run for path in paths for run in _runs(path))) for name, paths in arguments.items()]
    tracks = {run.record.track: str(run) for side in sides for run in side.runs}
    if len(tracks) > 1:
        raise ValueError(f"{tracks['golf']} is a golf run and {tracks['randopt']} a randopt run: runs compare within a track")
    return sides[0], sides[1]


def _runs(path: Path) -> Iterator[Run]:
    if path.is_dir() and not (path / RECORD).is_file():
        seeds = sorted((p for p in path.glob("seed_*") if p.is_dir()), key=lambda p: (_number(p.name), p.name))
        for folder in seeds:
            if not (folder / RECORD).is_file():
                raise ValueError(f"{folder} has no {RECORD}, so it is running or was killed: let it end, or name the runs that count one by "
                                 "one and say which was left out")
            yield Run(folder, read_record(folder))
        if seeds:
            return
    record = read_record(path)
    yield Run(path if path.is_dir() else path.parent, record)


def _number(name: str) -> int:
    digits = re.sub(r"\D", "", name)
    return int(digits) if digits else 0


def check_independent(side: Side) -> None:
    """ValueError where a run counts twice: the same record or artifact, or one seed of one config, whose runs share start and data."""
    for i, later in enumerate(side.runs):
        for earlier in side.runs[:i]:
            if same := same_run(earlier, later):
                raise ValueError(f"side {side.name} counts one run twice, {earlier} and {later}: {same}; runs of a side must be independent, "
                                 "so leave one out")
            seed = later.record.seed
            if seed is not None and seed == earlier.record.seed and not config_differences(earlier.record, later.record):
                raise ValueError(f"side {side.name} has seed {seed} twice, {earlier} and {later}: runs of one config and seed share their start "
                                 "and the order of their data, so they are not independent; train another seed")


def same_run(a: Run, b: Run) -> str | None:
    """Why two runs are one and the same, if they are."""
    if (a.folder / RECORD).resolve() == (b.folder / RECORD).resolve() and a.record == b.record:
        return "they are one record"
    if a.record == b.record:
        return "their records are equal"
    hashes = [run.record.artifact.sha256 if run.record.artifact else None for run in (a, b)]
    return "their artifacts are equal, byte for byte" if hashes[0] is not None and hashes[0] == hashes[1] else None


def config_differences(a: Record, b: Record) -> list[str]:
    """In what two runs were set up differently, by dotted key, beside name, seed, logger and workers."""
    lines = config_diff(a.config, b.config)
    return [line for line in lines if line.partition(":")[0] not in _IGNORED and line.partition(":")[0].partition(".")[0] not in (LOGGER, WORKERS)]


def warnings_of(a: Side, b: Side) -> list[str]:
    """What else differs between the sides or within one, as sentences: then a difference of results need not be the config's."""
    found = []
    for what, value_of in _FACTS:
        sides = [_distinct(side, value_of) for side in (a, b)]
        if sides[0] != sides[1]:
            found.append(f"{what} differs: A {_listed(sides[0])}; B {_listed(sides[1])}")
        elif len(sides[0]) > 1:
            found.append(f"{what} differs within the sides: {_listed(sides[0])}")
    for side in (a, b):
        first = side.runs[0]
        for run in side.runs[1:]:
            if lines := config_differences(first.record, run.record):
                found.append(f"side {side.name} is not one recipe: {first} and {run} differ in {'; '.join(lines)}")
        for run in side.runs:
            found += _about(side, run)
    if all(run.record.config for side in (a, b) for run in side.runs) and not config_differences(a.runs[0].record, b.runs[0].record):
        found.append("A and B do not differ in their settings: any difference comes from seeds and from what is listed here")
    return found


def _about(side: Side, run: Run) -> Iterator[str]:
    record = run.record
    if record.status == "over_cap":
        yield f"{run} ({side.name}) is over the cap: the challenge would not take it"
    elif record.status not in ("finished", "imported"):
        yield f"{run} ({side.name}) is {record.status}, not finished"
    devices = {(attempt.get("device"), attempt.get("num_devices")) for attempt in record.provenance.get("attempts") or []}
    if len(devices) > 1:
        yield f"{run} ({side.name}) was resumed on other hardware: {_listed(sorted({f'{n} x {d}' for d, n in devices}))}"
    if record.provenance.get("dirty"):
        yield f"{run} ({side.name}) ran on changes that no commit holds"
    if record.imported is not None:
        yield f"{run} ({side.name}) is imported: its figures are what its author published, and nothing here can check them"


def _budget(record: Record) -> Any:
    seconds = record.training.budget_s
    schedule = record.config.get("schedule")
    steps = schedule.get("max_steps") if isinstance(schedule, dict) else None
    return f"{seconds:g} s" if seconds is not None else f"{steps} steps" if steps is not None else None


def _code(record: Record) -> Any:
    return _short(record.provenance.get("source_sha256") or record.provenance.get("commit"))


def _torch(record: Record) -> Any:
    versions = record.provenance.get("versions")
    return versions.get("torch") if isinstance(versions, dict) else None


def _short(digest: Any) -> str | None:
    return f"{digest[:12]}" if isinstance(digest, str) and digest else None


# what should be equal for a difference to be the config's; None is unknown
_FACTS: tuple[tuple[str, Callable[[Record], Any]], ...] = (
    ("the budget", _budget),
    ("the hardware", lambda record: hardware(record) or None),
    ("the code", _code),
    ("torch", _torch),
    ("the training data", lambda record: _short(record.data.train_sha256)),
    ("the cap", lambda record: record.artifact.cap_bytes if record.artifact else None),
)


def _distinct(side: Side, value_of: Callable[[Record], Any]) -> list[Any]:
    return sorted({value_of(run.record) for run in side.runs}, key=lambda value: (value is None, str(value)))


def _listed(values: Sequence[Any]) -> str:
    return ", ".join("unknown" if value is None else f"{value:,}" if isinstance(value, int) else str(value) for value in values)
