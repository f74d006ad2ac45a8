"""Checkpoints that a kill at any moment cannot spoil: safetensors files that a list with hashes vouches for.

Saving goes: the new file under a temporary name, synced; `latest.json`, which names it with size and sha256, replaced
atomically; the file renamed; older files deleted. The list is the commit: a file that it does not vouch for is never
used. A kill before it leaves the old checkpoints, one after it leaves the new one, under its temporary name at worst.
"""

import hashlib
import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from bitsperbyte.run.folder import sync_directory

NUM_KEPT = 2
_FILE_NAME = re.compile(r"step_\d{8,}\.safetensors")
_LATEST = "latest.json"
_TEMPORARY = ".partial"


@dataclass(frozen=True)
class Checkpoint:
    """What one checkpoint holds. `notes` are sentences for the user about newer checkpoints that could not be used."""

    step: int
    tensors: dict[str, Tensor]
    meta: dict[str, Any]
    notes: list[str] = field(default_factory=list)


def save_checkpoint(folder: Path, step: int, tensors: dict[str, Tensor], meta: dict[str, Any]) -> Path:
    """Write `tensors` and the JSON values `meta` to FOLDER/checkpoint/step_XXXXXXXX.safetensors and return its path.

    The newest two checkpoints are kept; those of this or a later step, left from before a resume, are replaced. Raises
    OSError when the disk does not take it; the earlier checkpoints then stand as they were.
    """
    directory = Path(folder) / "checkpoint"
    path = directory / f"step_{step:08d}.safetensors"
    partial, listing = path.with_name(path.name + _TEMPORARY), directory / (_LATEST + _TEMPORARY)
    header = {"step": str(step), "meta": json.dumps(meta, allow_nan=False)}
    data = safetensors.torch.save({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, header)
    committed = False
    try:
        directory.mkdir(parents=True, exist_ok=True)
        earlier = [e for e in _read_list(directory) if e["step"] < step] if (directory / _LATEST).exists() else []
        entry = {"file": path.name, "step": step, "sha256": hashlib.sha256(data).hexdigest(), "num_bytes": len(data)}
        kept = [entry, *earlier][:NUM_KEPT]
        _write_synced(partial, data)
        sync_directory(directory)  # no list may reach the disk before the name of the file that it vouches for
        _write_synced(listing, json.dumps({**entry, "kept": kept}, indent=2).encode())
        os.replace(listing, directory / _LATEST)
        committed = True
        os.replace(partial, path)
        sync_directory(directory)
    except OSError as error:
        if not committed:
            for unfinished in (partial, listing):
                with suppress(OSError):  # what is told below is why the writing failed
                    unfinished.unlink(missing_ok=True)
        advice = "make room, go on with --resume; earlier ones are whole"
        if directory.exists() and not directory.is_dir():
            advice = "it is a file where the folder of checkpoints belongs; move it away, go on with --resume"
        raise OSError(error.errno, f"cannot write the checkpoint of step {step}, {len(data):,} bytes, to {directory} "
                      f"({error.strerror}): {advice}") from error
    names = {e["file"] for e in kept}
    for old in directory.glob("step_*.safetensors*"):
        name = old.name.removesuffix(_TEMPORARY)
        if _FILE_NAME.fullmatch(name) and name not in names:  # a kept one may have only its temporary name
            old.unlink(missing_ok=True)
    return path


def load_checkpoint(folder: Path) -> Checkpoint | None:
    """The newest checkpoint in FOLDER whose size and sha256 are right; None when none was ever completed.

    A damaged one is passed over for the one before it, which `notes` says. Raises ValueError when checkpoints were
    written but none can be used.
    """
    directory = Path(folder) / "checkpoint"
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{directory} is a file where the folder of checkpoints belongs: put the folder back, or start "
                         "again in a new run folder")
    if not (directory / _LATEST).exists():
        stray = sorted(p.name for p in directory.glob("step_*.safetensors") if _FILE_NAME.fullmatch(p.name))
        if stray:
            raise ValueError(f"{directory / _LATEST} is missing, and without its hashes {stray} cannot be trusted: "
                             "put it back, or start again in a new run folder")
        return None
    notes: list[str] = []
    for entry in _read_list(directory):
        data, problem = _read_verified(directory / entry["file"], entry)
        if data is not None:
            header_end = 8 + int.from_bytes(data[:8], "little")
            header = json.loads(data[8:header_end])["__metadata__"]
            if int(header["step"]) == entry["step"]:
                return Checkpoint(entry["step"], safetensors.torch.load(data), json.loads(header["meta"]), notes)
            problem = f"it is of step {header['step']}"
        notes.append(f"the checkpoint of step {entry['step']} is not used: {directory / entry['file']}: {problem}")
    raise ValueError(f"no checkpoint can be used: {'; '.join(notes)}. Start again in a new run folder")


def _read_list(directory: Path) -> list[dict[str, Any]]:
    """The entries of latest.json, newest first."""
    path = directory / _LATEST
    try:
        entries = json.loads(path.read_bytes())["kept"]
        if not (isinstance(entries, list) and entries):
            raise ValueError("it lists no checkpoint")
        for entry in entries:
            if not (_FILE_NAME.fullmatch(entry["file"]) and isinstance(entry["step"], int)
                    and isinstance(entry["sha256"], str) and isinstance(entry["num_bytes"], int)):
                raise ValueError(f"the entry {entry} is malformed")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}), so that no checkpoint beside it can be trusted: start again in "
                         "a new run folder") from error
    return entries


def _read_verified(path: Path, entry: dict[str, Any]) -> tuple[bytes | None, str]:
    """The bytes that the entry vouches for, under the file's own or its temporary name; else None and what is wrong."""
    problem = "the file is missing"
    for candidate in (path, path.with_name(path.name + _TEMPORARY)):
        if not candidate.is_file():
            continue
        num_bytes = candidate.stat().st_size
        if num_bytes != entry["num_bytes"]:
            problem = f"it has {num_bytes:,} bytes instead of {entry['num_bytes']:,}"
            continue
        data = candidate.read_bytes()
        if hashlib.sha256(data).hexdigest() == entry["sha256"]:
            return data, ""
        problem = "its sha256 is not the one recorded when it was written"
    return None, problem


def _write_synced(path: Path, data: bytes) -> None:
    """Write a whole file and wait until the disk has it; a part of it is not left behind."""
    try:
        with open(path, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        raise
