"""`bpb records import`: runs that others made, read from what they published, as records with the status `imported`.

A figure in such a record stands in one of its files. What no file says is None, unless the person who imports it states it, and then it is
kept apart (`stated`). What cannot be read, and what contradicts itself, is listed (`unread`).
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import bitsperbyte
from bitsperbyte.records.import_golf import read_golf
from bitsperbyte.records.import_randopt import is_randopt, read_randopt
from bitsperbyte.records.published import Published
from bitsperbyte.records.schema import Record
from bitsperbyte.records.store import IMPORTED_EVIDENCE, RECORD, write_record
from bitsperbyte.run.folder import write_atomic

MAX_FILE_BYTES = 64 * 2**20  # the longest log seen has 2 MB
LOGS = (".log", ".txt")
_NOT_LOGS = re.compile(r"requirements|readme|license|notice|command", re.IGNORECASE)
# a file name that says less than its folder's does
_NO_NAME = re.compile(r"(?:train|submission|results|top_k_seeds|record|log)(?:[_-]?(?:seed|s)?[_-]?\d*)?$", re.IGNORECASE)
_STATES = ("text", "split_sha256", "window", "stride", "documents", "drop_tail")


@dataclass(frozen=True)
class Source:
    """One file to import, as bytes and text."""

    path: Path
    data: bytes

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def text(self) -> str:
        return self.data.decode("utf-8", errors="replace")

    @property
    def facts(self) -> dict[str, Any]:
        return {"name": self.name, "sha256": hashlib.sha256(self.data).hexdigest(), "bytes": len(self.data)}


@dataclass
class Unit:
    """Files that speak of the same runs: a folder's, or those that were named together."""

    name: str
    source: str
    logs: list[Source] = field(default_factory=list)
    tables: list[tuple[Source, dict[str, Any]]] = field(default_factory=list)


def import_runs(paths: Sequence[Path | str], out: Path | str, *, name: str | None = None, state: Sequence[str] = ()) -> list[tuple[Path, Record]]:
    """Write one record folder under `out` for each run that the files tell of, and return them.

    A folder is read with its train logs and its .json files; files that are named one by one belong together. Several logs are several runs.
    Either every folder appears whole or none does. Raises ValueError for files that hold no result, for a statement that is not
    understood, and where a folder of that name exists.
    """
    stated = read_state(state)
    paths = [Path(path) for path in paths]
    units = [_folder(path) for path in paths if path.is_dir()]
    files = [path for path in paths if not path.is_dir()]
    if files:
        speaks = len(files) == 1 and not _NO_NAME.match(files[0].stem)
        units.append(_unit(files, files[0].stem if speaks else files[0].resolve().parent.name, ", ".join(map(str, files))))
    if not units:
        raise ValueError("there is nothing to import: give a folder of a submission, train logs, a submission.json, or RandOpt's results.json")
    if name is not None and len(units) > 1:
        raise ValueError(f"--name is for one run or one folder, and {len(units)} are given: import them one by one")
    made: list[tuple[str, Record, list[Source]]] = []
    for unit in units:
        made += _records(unit, name, stated)
    folders = [Path(out) / slug for slug, _, _ in made]
    if len(set(folders)) < len(folders):
        raise ValueError(f"several runs would be named {next(f.name for f in folders if folders.count(f) > 1)}: import them one by one with --name")
    for folder in folders:
        if folder.exists():
            raise ValueError(f"{folder} exists, and nothing is overwritten: give another --out or --name, or remove it")
    _write(folders, made)
    return [(folder, record) for folder, (_, record, _) in zip(folders, made, strict=True)]


def read_state(state: Sequence[str]) -> dict[str, Any]:
    """`window=1024 stride=64 documents=across drop_tail=false text=... split_sha256=...` as a record keeps it; stride=none says that windows
    do not overlap. ValueError for anything else."""
    stated: dict[str, Any] = {}
    for item in state:
        key, equals, value = item.partition("=")
        if not equals or key not in _STATES or not value:
            raise ValueError(f"--state {item!r} is not understood: give one of {', '.join(_STATES)} with its value, e.g. window=1024")
        if key in stated:
            raise ValueError(f"--state gives {key} twice")
        if key in ("window", "stride"):
            if key == "stride" and value == "none":
                stated[key] = None
                continue
            if not value.isascii() or not value.isdigit() or int(value) < 1:
                raise ValueError(f"--state {key} is {value!r}, and must be a whole number of tokens" + (", or none" if key == "stride" else ""))
            stated[key] = int(value)
        elif key == "documents" and value not in ("across", "isolated"):
            raise ValueError(f"--state documents is {value!r}, and must be across or isolated")
        elif key == "drop_tail":
            if value not in ("true", "false"):
                raise ValueError(f"--state drop_tail is {value!r}, and must be true or false")
            stated[key] = value == "true"
        else:
            stated[key] = value
    return stated


def _folder(path: Path) -> Unit:
    """A submission's folder: its logs and its .json files; those of RandOpt one folder below too."""
    files = [p for p in sorted(path.iterdir()) if p.is_file() and not p.name.startswith(".")]
    if (path / "model_saves").is_dir():
        files += sorted((path / "model_saves").glob("*.json"))
    if any(p.name == RECORD and _is_own_record(p) for p in files):
        raise ValueError(f"{path} holds a record of this software: `bpb records add` takes it as it is")
    logs = [p for p in files if p.suffix in LOGS and not _NOT_LOGS.search(p.name)]
    tables = [p for p in files if p.suffix == ".json"]
    return _unit([*logs, *tables], path.resolve().name, str(path), optional=True)


def _is_own_record(path: Path) -> bool:
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(data, dict) and "schema_version" in data and "track" in data


def _unit(paths: Sequence[Path], name: str, source: str, optional: bool = False) -> Unit:
    """`optional`: files of a folder that was given whole; one among them that holds no table is left out."""
    unit = Unit(name, source)
    for path in paths:
        if not path.exists():
            raise ValueError(f"there is no file {path}")
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"{path} has {path.stat().st_size:,} bytes, and no log or table of a run has more than {MAX_FILE_BYTES:,}")
        found = Source(path, path.read_bytes())
        if path.suffix != ".json":
            if path.suffix in (".pkl", ".pt", ".bin", ".bpb", ".ptz", ".npz", ".zip", ".gz"):
                raise ValueError(f"{path} is neither a log nor a table: give the train log, submission.json or results.json")
            unit.logs.append(found)
            continue
        try:
            table = json.loads(found.data, parse_constant=_refuse)
        except (UnicodeDecodeError, ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not JSON ({error})") from error
        if isinstance(table, dict):
            unit.tables.append((found, table))
        elif not optional:
            raise ValueError(f"{path} holds a {type(table).__name__} where an object with a run's figures belongs")
    return unit


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _records(unit: Unit, name: str | None, stated: dict[str, Any]) -> list[tuple[str, Record, list[Source]]]:
    randopt = [(source, table) for source, table in unit.tables if is_randopt(table)]
    if randopt:
        published = [read_randopt([(source.name, table) for source, table in unit.tables])]
        used = [[source for source, _ in unit.tables]]
    else:
        published, used = [], []
        tables = [(source, table) for source, table in unit.tables if source.name == "submission.json"] or unit.tables
        if len(tables) > 1:
            names = ", ".join(source.name for source, _ in tables)
            raise ValueError(f"{unit.source} holds {len(tables)} tables ({names}): name the files of the run one by one")
        table = tables[0] if tables else None
        if not unit.logs and table is None:
            raise ValueError(f"{unit.source} holds no train log and no table of a run: give a folder with train.log or submission.json")
        facts = (table[0].name, table[0].text) if table else None
        for made, log in read_golf([(source.name, source.text) for source in unit.logs], facts):
            sources = [source for source in unit.logs if source.name == log]
            published.append(made)
            used.append([*sources, *([table[0]] if table else [])])
    if not any(made.says_something for made in published):
        raise ValueError(f"no result of a run can be read in {unit.source}: give its train log, submission.json or results.json")
    kept = [(made, sources) for made, sources in zip(published, used, strict=True) if made.says_something]
    return [_record(unit, made, sources, name, stated, several=len(kept) > 1) for made, sources in kept]


def _record(unit: Unit, made: Published, sources: Sequence[Source], name: str | None, stated: dict[str, Any],
            several: bool) -> tuple[str, Record, list[Source]]:
    called = name or unit.name
    end = "" if not several else f"_seed{made.seed}" if made.seed is not None else f"_{Path(sources[0].name).stem}"
    slug = re.sub(r"[^A-Za-z0-9._-]+", "_", called).strip("._-")[:100] + end
    if not re.match(r"[A-Za-z0-9]", slug):
        raise ValueError(f"a folder cannot be named after {called!r}: give --name")
    unread = list(made.unread)
    for score in made.scores:
        for key, value in stated.items():
            if (said := score.get(key)) is not None and said != value:
                unread.append(f"{key} is stated as {value}, and the files say {said} of {score['label']}")
    now = datetime.now(UTC).isoformat(timespec="seconds")
    undated = None if made.created_utc else "the files do not say when the run was made: its date is that of the import"
    record = Record.model_validate({
        "track": made.track, "name": called, "status": "imported", "created_utc": made.created_utc or now, "seed": made.seed,
        "provenance": {"imported_utc": now, "imported_by": f"bitsperbyte {bitsperbyte.__version__}", **made.provenance},
        "data": made.data, "training": made.training, "artifact": made.artifact, "notes": undated,
        "imported": {"source": unit.source, "files": [source.facts for source in sources], "scores": made.scores, "figures": made.figures,
                     "stated": stated, "unread": unread}})
    return slug, record, [*sources, *([_metrics_source(made.metrics)] if made.metrics else [])]


def _metrics_source(rows: Sequence[dict[str, Any]]) -> Source:
    return Source(Path("metrics.jsonl"), "".join(json.dumps(row) + "\n" for row in rows).encode())


def _write(folders: Sequence[Path], made: Sequence[tuple[str, Record, list[Source]]]) -> None:
    """All folders beside their places first; then each takes its place. What is made is taken back when one fails."""
    partial = [folder.with_name(f".{folder.name}.{os.getpid()}.partial") for folder in folders]
    placed: list[Path] = []
    try:
        for place, (_, record, sources) in zip(partial, made, strict=True):
            place.mkdir(parents=True)
            write_record(place / RECORD, record)
            for source in sources:
                write_atomic(place / _kept_as(source), source.data)
        for place, folder in zip(partial, folders, strict=True):
            os.rename(place, folder)  # refuses a folder that someone else filled meanwhile
            placed.append(folder)
    except BaseException:
        for folder in [*partial, *placed]:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _kept_as(source: Source) -> str:
    """The name of a file's copy: a train log is train.log, so that what reads a run's folder finds it."""
    if source.path.suffix in LOGS or source.name not in IMPORTED_EVIDENCE and source.path.suffix != ".json":
        return "train.log"
    return source.name if source.name != RECORD else "published_record.json"
