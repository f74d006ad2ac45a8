"""A submission folder as it lies on the disk: what is there, what is missing, what cannot be read. Nothing in it is run or trusted.

Links are not followed, since a stranger's could lead anywhere.
"""

import hashlib
import json
import re
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

from bitsperbyte.golf.check.claims import Claims, read_claims
from bitsperbyte.run.train_log import TrainLog, parse_train_log

SCRIPT, README, FACTS = "train_gpt.py", "README.md", "submission.json"
MAX_TEXT_BYTES = 1 << 26  # of one text file
ARTIFACT_ENDINGS = (".bpb", ".ptz", ".pt", ".pth", ".bin", ".zst", ".xz", ".lzma", ".br", ".npz", ".safetensors", ".zlib", ".gz")
NOT_LOGS = re.compile(r"(requirements|readme|license|notes?|results)", re.IGNORECASE)
SEED_IN_NAME = re.compile(r"(?:seed|(?<![a-z])s)[_-]?(\d{1,18})(?!\d)", re.IGNORECASE)


@dataclass(frozen=True)
class LogFile:
    """A train log. `seed` is what the log itself says, or else its name; `named_seed` what its name says."""

    name: str
    sha256: str
    text: str
    log: TrainLog
    seed: int | None
    named_seed: int | None


@dataclass
class Submission:
    """`problems` is what the folder lacks or what cannot be read, a clause each. `script_size` and the like are bytes on the disk."""

    path: Path
    problems: list[str] = field(default_factory=list)
    script: str | None = None
    script_size: int | None = None
    claims: Claims | None = None
    logs: list[LogFile] = field(default_factory=list)
    missing_logs: list[str] = field(default_factory=list)  # that submission.json names
    artifact: Path | None = None
    tokenizer: Path | None = None

    @property
    def artifact_size(self) -> int | None:
        return self.artifact.stat().st_size if self.artifact else None


def read_submission(path: Path) -> Submission:
    """Everything of the folder that the checks look at. ValueError only where there is no such folder."""
    if not path.is_dir():
        raise ValueError(f"{path} is {'a file' if path.exists() else 'not there'}: give the folder of a submission")
    found = Submission(path)
    source = _read_text(found, SCRIPT)
    if source is not None:
        found.script, found.script_size = source, (path / SCRIPT).stat().st_size
    readme = next((p.name for p in sorted(path.iterdir()) if p.name.lower() == README.lower()), README)
    _read_text(found, readme)
    text = _read_text(found, FACTS)
    if text is not None:
        found.claims = _parse_facts(found, text)
    found.logs = _read_logs(found)
    found.artifact = _named_file(found, "artifact") or _likely_artifact(path)
    found.tokenizer = _named_file(found, "tokenizer")
    return found


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_text(found: Submission, name: str) -> str | None:
    path = found.path / name
    if path.is_symlink():
        found.problems.append(f"{name} is a link, and a submission holds its own files")
    elif not path.is_file():
        found.problems.append(f"{name} is missing")
    elif path.stat().st_size > MAX_TEXT_BYTES:
        found.problems.append(f"{name} has {path.stat().st_size:,} bytes, too many for a text")
    else:
        try:
            text = path.read_bytes().decode("utf-8")
        except OSError as error:
            found.problems.append(f"{name} cannot be read ({error.strerror})")
        except UnicodeDecodeError as error:
            found.problems.append(f"{name} is not UTF-8 text (byte {error.start:,})")
        else:
            if text.strip():
                return text
            found.problems.append(f"{name} is empty")
    return None


def _parse_facts(found: Submission, text: str) -> Claims | None:
    try:
        facts = json.loads(text, parse_float=Decimal, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        found.problems.append(f"{FACTS} is not JSON ({error})")
        return None
    if not isinstance(facts, dict):
        found.problems.append(f"{FACTS} holds a {type(facts).__name__} where a JSON object belongs")
        return None
    return read_claims(facts)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _read_logs(found: Submission) -> list[LogFile]:
    """The train logs: those that submission.json names, or else the folder's *.log and *.txt, or else those one folder below."""
    names = _named_logs(found.claims)
    found.missing_logs = [name for name in names if not (found.path / name).is_file()]
    found.problems += [f"{name}, which {FACTS} names, is missing" for name in found.missing_logs]
    names = [name for name in names if (found.path / name).is_file()] or _likely_logs(found.path)
    logs = []
    for name in names:
        text = _read_text(found, name)
        if text is not None:
            log = parse_train_log(text)
            match = SEED_IN_NAME.search(Path(name).stem)
            named = int(match[1]) if match else None
            logs.append(LogFile(name, sha256_of(found.path / name), text, log, log.seed if log.seed is not None else named, named))
    if not names and not found.missing_logs:
        found.problems.append("there is no train log (train.log, or train_seed<N>.log for each seed)")
    return logs


def _named_logs(claims: Claims | None) -> list[str]:
    if claims is None:
        return []
    names = [result.get("log") for result in claims.by_seed.values()]
    return [name for name in names if isinstance(name, str) and name and Path(name).name == name]


def _likely_logs(path: Path) -> list[str]:
    for pattern in ("*", "*/*"):
        files = [p for p in sorted(path.glob(pattern)) if p.is_file() and p.suffix in (".log", ".txt") and not NOT_LOGS.search(p.name)
                 and not p.relative_to(path).parts[0].startswith(".")]
        logs = [p for p in files if p.suffix == ".log" or re.search(r"train|seed|log|run", p.name, re.IGNORECASE)]
        trained = [p for p in logs if re.search(r"train|seed", p.name, re.IGNORECASE)] or logs
        if trained:
            return [p.relative_to(path).as_posix() for p in trained]
    return []


def _named_file(found: Submission, key: str) -> Path | None:
    """The file of the folder that submission.json names under key.file."""
    name = found.claims.text(key, "file") if found.claims else None
    if name is None:
        return None
    path = found.path / name
    if Path(name).name != name or path.is_symlink():
        found.problems.append(f"{FACTS} names {name!r} as its {key}, and a submission holds its own files")
    elif not path.is_file():
        found.problems.append(f"{name}, which {FACTS} names, is missing")
    else:
        return path
    return None


def _likely_artifact(path: Path) -> Path | None:
    """The largest file with an ending of packed weights; tokenizers and shards of tokens are none."""
    files = [p for p in path.iterdir() if p.is_file() and not p.is_symlink() and p.name.endswith(ARTIFACT_ENDINGS)
             and not re.search(r"tokenizer|fineweb|_train_|_val_", p.name, re.IGNORECASE)]
    return max(files, key=lambda p: (p.stat().st_size, p.name), default=None)
