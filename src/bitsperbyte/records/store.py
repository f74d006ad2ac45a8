"""Records on disk: read and written one by one, and collected under records/<track>/<date>_<slug>/."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bitsperbyte.records.migrations import migrate
from bitsperbyte.records.schema import Record
from bitsperbyte.run.config import error_sentences
from bitsperbyte.run.folder import lock_holder, read_jsonl, write_atomic

RECORD, ARTIFACT = "record.json", "artifact.bpb"
JOURNAL = "journal.jsonl"
# What else is evidence, by track. metrics.jsonl and journal.jsonl of a long run are large, and the record holds what was drawn from them.
EVIDENCE = {"golf": ("config.yaml", "train.log", "metrics.jsonl"), "randopt": ("config.yaml", "run.log", JOURNAL)}
IMPORTED_EVIDENCE = ("train.log", "metrics.jsonl", "submission.json", "results.json", "top_k_seeds.json", "args.json", "published_record.json")
MAX_EVIDENCE_BYTES = 2 * 2**20


def read_record(path: Path | str) -> Record:
    """The record at `path`, a file or a folder that holds record.json.

    Raises ValueError, naming the file and each field at fault, for what is missing, damaged, of a newer version, or
    states a score that its own nats and bytes contradict.
    """
    path = _record_file(Path(path))
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}): restore it, or run again") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds a {type(data).__name__} where a record, a JSON object, belongs")
    try:
        data = migrate(data)
    except ValueError as error:
        raise ValueError(f"{path} {error}") from error
    try:
        return Record.model_validate(data)
    except ValidationError as error:
        raise ValueError(f"{path}: {'; '.join(error_sentences(error))}") from error


def write_record(path: Path | str, record: Record) -> None:
    """Write the record as one whole file, validated once more: lists in it may have been changed in place."""
    text = record_json(record)
    try:
        Record.model_validate_json(text)
    except ValidationError as error:
        raise ValueError(f"the record for {path} is not valid: {'; '.join(error_sentences(error))}") from error
    write_atomic(path, text)


def record_json(record: Record) -> str:
    """The record's text: indented, fields in the schema's order, numbers that are not finite as null."""
    return record.model_dump_json(indent=2) + "\n"


def readable_record(path: Path | str) -> Record | None:
    """The record at `path` if there is one and it is whole. A run can be resumed without it: a new one is written."""
    try:
        return read_record(path) if Path(path).exists() else None
    except ValueError:
        return None


def continue_record(record: Record, path: Path | str, say: Callable[[str], None]) -> None:
    """Carry over from the record at `path` when the run began, and on what each attempt ran: a run begun on eight GPUs and ended on
    one is not a run on one."""
    earlier = readable_record(path)
    if earlier is None:
        say(f"{path} is missing or damaged: it is written anew")
        return

    def attempt(of: Record) -> dict[str, Any]:
        names = ("commit", "dirty", "device", "num_devices", "source_sha256")
        return {"command": of.command, **{name: of.provenance.get(name) for name in names}}

    record.created_utc = earlier.created_utc
    attempts = earlier.provenance.get("attempts") or [attempt(earlier)]
    record.provenance = {**record.provenance, "attempts": [*attempts, attempt(record)]}


def iter_records(root: Path | str = "records") -> Iterator[tuple[Path, Record]]:
    """(folder, record) of each record under `root`, in the order of their paths; nothing where there is no such folder.

    Raises ValueError at a record that cannot be read: a leaderboard without it would look complete.
    """
    for path in sorted(Path(root).glob(f"*/*/{RECORD}")):
        if not path.parent.name.startswith("."):
            yield path.parent, read_record(path)


def add_record(run_dir: Path | str, root: Path | str = "records", slug: str | None = None) -> Path:
    """Copy a run's record, config and log to `root`/<track>/<date>_<slug>/ and return that folder.

    The slug is the run's name and seed unless given. The folder appears whole or not at all. Raises ValueError for a
    run that is still in use, has no record or one of another artifact or journal than the folder's, or whose place is taken: an earlier
    record is never overwritten.
    """
    run_dir = Path(run_dir)
    if holder := lock_holder(run_dir):
        raise ValueError(f"{run_dir} is in use by {holder}: add the record when the run has ended")
    record = read_record(run_dir)
    _check_artifact(run_dir / ARTIFACT, record)
    _check_journal(run_dir / JOURNAL, record)
    if slug is None:
        slug = record.name if record.seed is None else f"{record.name}_seed{record.seed}"
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", slug):
        raise ValueError(
            f"the slug {slug!r} must begin with a letter or digit and hold only those, '.', '_' and '-': give --slug"
        )
    is_dated = slug.startswith(f"{record.date}_")  # as the folders of public submissions are
    folder = Path(root) / record.track / (slug if is_dated else f"{record.date}_{slug}")
    if folder.exists():
        raise ValueError(f"{folder} exists, and records are never overwritten: give another --slug")
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True)
    try:
        write_record(partial / RECORD, record)
        for name in IMPORTED_EVIDENCE if record.imported else EVIDENCE[record.track]:
            source = run_dir / name
            if source.is_file() and source.stat().st_size <= MAX_EVIDENCE_BYTES:
                write_atomic(partial / name, source.read_bytes())
        os.rename(partial, folder)  # refuses a folder that someone else filled meanwhile
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return folder


def _check_artifact(path: Path, record: Record) -> None:
    """ValueError where the record states the hash of another artifact than the one that lies beside it."""
    stated = record.artifact.sha256 if record.artifact else None
    if stated is None or not path.is_file():
        return
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != stated:
        raise ValueError(
            f"{path} has sha256 {found[:16]}... and the record beside it is of {stated[:16]}...: put back the artifact "
            "that was recorded, or run again"
        )


def _check_journal(path: Path, record: Record) -> None:
    """ValueError where the journal beside a finished randopt run's record is not the one that the record was made of."""
    if record.randopt is None or not path.is_file():
        return
    rows, _ = read_jsonl(path)
    searched = {row.get("index"): (row.get("seed"), row.get("sigma"), row.get("reward")) for row in rows if row.get("phase") == "search"}
    if len(searched) != record.randopt.population.size:
        raise ValueError(f"{path} holds {len(searched)} seeds and the record beside it is of {record.randopt.population.size}: resume the run "
                         "to its end, or put back its journal")
    for member in record.randopt.selection.members:
        if searched.get(member.index) != (member.seed, member.sigma, member.train_reward):
            raise ValueError(f"{path} does not hold the member of rank {member.rank} as the record beside it states it: one of the two was "
                             "changed after the run; restore it, or run again")


def _record_file(path: Path) -> Path:
    file = path / RECORD if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"there is no record at {file}: give a record.json, or the folder of a run that has one")
    return file
