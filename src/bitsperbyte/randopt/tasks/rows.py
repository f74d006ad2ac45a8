"""Questions from files: JSON lines with the line's number in every complaint, and the hub's data sets at a pinned commit."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bitsperbyte.text import hub
from bitsperbyte.text.corpora import iter_rows


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """("FILE:LINE", row) of each line of a JSON lines file. ValueError where there is no such file, or a line is no JSON object."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}: a task's questions are read from a file of JSON lines")
    yield from iter_rows(path)


def text_of(row: dict[str, Any], field: str, where: str) -> str:
    """A field as text: a string, or a number as JSON writes it. ValueError where it is missing, empty or of another type."""
    if field not in row:
        raise ValueError(f"{where}: no field {field!r}; the line has {', '.join(map(repr, list(row)[:8])) or 'none'}")
    value = row[field]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where}: the field {field!r} is {value}, which is no number to ask or answer with: write what is meant, in quotes")
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = json.dumps(value)
    if not isinstance(value, str):
        raise ValueError(f"{where}: the field {field!r} must be a text or a number, not {type(value).__name__}")
    if not value.strip():
        raise ValueError(f"{where}: the field {field!r} is empty")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where}: the field {field!r} holds half of a surrogate pair, which is not text") from None
    return value


def hub_file(repo: str, folder: str | None, beginning: str) -> tuple[Path, dict[str, str]]:
    """The one file of a hub data set whose name starts with `beginning`, and what pins it: repo, commit, path, sha256."""
    commit = hub.resolve_revision(repo, None)
    found = [file for file in hub.list_files(repo, commit, folder)
             if file.path.rpartition("/")[2].startswith(beginning) and file.path.endswith((".parquet", ".jsonl"))]
    if len(found) != 1:
        raise ValueError(f"{repo} has {len(found)} files named {beginning}* at {commit}, and one is needed: set task.data to a folder")
    path, sha256 = hub.fetch(repo, commit, found[0])
    return path, {"repo": repo, "commit": commit, "path": found[0].path, "sha256": sha256}


def local_file(path: Path) -> dict[str, str]:
    """What pins a file of this machine."""
    return {"path": str(path), "sha256": hub.file_sha256(path)}


def shuffled(num: int, seed: int, purpose: str) -> list[int]:
    """0..num-1 in an order that depends on the seed and on what it is for."""
    return generator(seed, purpose).permutation(num).tolist()


def generator(seed: int, purpose: str) -> np.random.Generator:
    """Random numbers of a task: the same for the same seed and purpose on every machine."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, *purpose.encode()])))


def enough(wanted: int, there_are: int, what: str, settings: str) -> None:
    """ValueError where more questions are asked for than there are."""
    if wanted > there_are:
        raise ValueError(f"{settings} asks for {wanted:,} questions, and {what} has {there_are:,}: ask for fewer")
