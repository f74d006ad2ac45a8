"""A run folder that survives being killed at any moment: one owner at a time, whole files, whole lines.

A whole file is written beside its place, synced and renamed, so that its presence means it is complete. A line is
appended with one write; a line that a kill cut short is dropped when the file is opened again.
"""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import socket
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import Any

from bitsperbyte.run.config import config_diff

CONFIG = "config.yaml"  # written last by a run that begins: its presence says that the folder holds a run
IDENTITY = "identity.json"  # config, data and versions: what a resumed run must find unchanged
LOCK = ".lock"
_TEMPORARY = ".partial"
_PARTS = ("checkpoint", "metrics.jsonl", "record.json")  # written only after config.yaml
_MAX_DIFFERENCES = 10


def write_atomic(path: Path | str, data: str | bytes) -> None:
    """Replace the file at `path` by `data`, wholly or not at all, and wait until the disk has it.

    Raises OSError with a sentence when the disk or the system refuses; the old file then stands and no part is left
    behind.
    """
    path = Path(path)
    raw = data.encode() if isinstance(data, str) else data
    partial = path.with_name(f".{path.name}.{os.getpid()}{_TEMPORARY}")
    try:
        with open(partial, "wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise _explained(error, path, "write") from error
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def read_jsonl(path: Path | str) -> tuple[list[dict[str, Any]], bool]:
    """The rows of a JSONL file, and whether a last line without a newline (its writer died) was dropped.

    Raises ValueError naming the line for any other line that is not a JSON object.
    """
    *lines, tail = Path(path).read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{path} line {number} is not JSON ({error}): the file was damaged after it was written"
            ) from error
        if not isinstance(row, dict):
            raise ValueError(f"{path} line {number} holds a {type(row).__name__} where a JSON object belongs")
        rows.append(row)
    return rows, bool(tail)


class JsonlWriter:
    """Appends JSON objects, one a line, each with one write that SIGKILL cannot undo.

    `dropped_torn_bytes` is the length of a last line without a newline that opening cut off; 0 when there was none.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._descriptor: int | None = None
        try:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            size = os.fstat(self._descriptor).st_size
            whole = _end_of_last_line(self._descriptor, size)
            self.dropped_torn_bytes = size - whole
            if self.dropped_torn_bytes:
                os.ftruncate(self._descriptor, whole)
                os.fsync(self._descriptor)
        except OSError as error:
            self.close()
            raise _explained(error, self.path, "open") from error

    def append(self, obj: dict[str, Any], sync: bool = True) -> None:
        """Append one row; with `sync`, return only when the disk has it (a power cut cannot undo it).

        Raises ValueError for a row that JSON cannot hold, and OSError with a sentence when the disk refuses: the row is
        then taken back whole, so the file still ends in a whole line.
        """
        if self._descriptor is None:
            raise ValueError(f"{self.path} is closed: no row can be appended")
        try:
            line = json.dumps(obj, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        except (TypeError, ValueError) as error:
            raise ValueError(f"a row for {self.path} cannot be written as JSON: {error}") from error
        begin = os.fstat(self._descriptor).st_size
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
            if sync:
                os.fsync(self._descriptor)
        except BaseException as error:
            with contextlib.suppress(OSError):  # the error that counts is the first
                os.ftruncate(self._descriptor, begin)
            if isinstance(error, OSError):
                raise _explained(error, self.path, "append to") from error
            raise

    def close(self) -> None:
        """Close the file; closing twice does nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> "JsonlWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class RunFolder:
    """A locked run folder; use `RunFolder.open(...)` as a context manager."""

    def __init__(self, path: Path, kind: str, descriptor: int, created: bool) -> None:
        self.path, self.kind = path, kind
        self._descriptor: int | None = descriptor
        self._created = created

    @classmethod
    def open(cls, path: Path | str, *, resume: bool, kind: str) -> "RunFolder":
        """Lock a folder for a run of `kind` ("golf"): a new or empty one, or with `resume` one that holds such a run.

        The lock is the system's (flock): it ends with the process, however that ends. Raises ValueError for a folder
        that is in use, holds a run (without `resume`), holds none (with `resume`), or holds files of something else.
        """
        path = Path(path)
        if path.exists() and not path.is_dir():
            raise ValueError(f"{path} is a file, and a run needs a folder: give another --run-dir")
        existed = path.exists()
        parts = [name for name in _PARTS if (path / name).exists()]
        if parts and not (path / CONFIG).exists():
            raise ValueError(f"{path} holds parts of a run ({', '.join(parts)}) and no {CONFIG}: restore {CONFIG} from "
                             "record.json, or take another --run-dir")
        if resume and not (path / CONFIG).exists():
            raise ValueError(f"{path} holds no run to resume (no {CONFIG}): start it without --resume")
        if existed and _owner_at(path / LOCK).get("kind") != kind:
            _refuse_foreign(path, resume)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            raise ValueError(f"{path}: a part of this path is a file, so no folder can be made there") from error
        descriptor, before = _lock(path)
        folder = cls(path, kind, descriptor, created=not existed)
        try:
            if (path / CONFIG).exists():
                if not resume:
                    raise ValueError(
                        f"{path} already holds a run: go on with it by --resume, or give another --run-dir"
                    )
                if before.get("kind", kind) != kind:
                    raise ValueError(
                        f"{path} holds a {before['kind']} run and cannot be resumed as {kind}: give another --run-dir"
                    )
            _write_owner(descriptor, kind)
            for stray in path.glob(f".*{_TEMPORARY}"):
                stray.unlink(missing_ok=True)  # left by a process that was killed between writing and renaming
        except BaseException:
            folder.close()
            raise
        return folder

    def write_atomic(self, name: str, data: str | bytes) -> None:
        """Write the file `name` of this folder as `write_atomic` does."""
        write_atomic(self.path / name, data)

    def write_json_atomic(self, name: str, obj: Any) -> None:
        """Write `obj` as indented JSON. Raises ValueError for what JSON cannot hold, such as nan."""
        self.write_atomic(name, json.dumps(obj, indent=2, ensure_ascii=False, allow_nan=False) + "\n")

    def close(self) -> None:
        """Release the lock. A folder in which nothing was begun leaves no trace."""
        if self._descriptor is None:
            return
        if sorted(p.name for p in self.path.iterdir()) == [LOCK]:
            (self.path / LOCK).unlink()
            if self._created:
                self.path.rmdir()
        os.close(self._descriptor)
        self._descriptor = None

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def lock_holder(path: Path | str) -> str | None:
    """Who has the run folder open, in words ("process 123"), or None when nobody has."""
    lock = Path(path) / LOCK
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        return _owner_in_words(_read_owner(descriptor))
    finally:
        os.close(descriptor)


def check_same_config(saved: dict[str, Any], new: dict[str, Any], *, may_change: Collection[str] = ()) -> None:
    """Refuse (ValueError, the difference shown) to resume under settings other than those saved.

    `may_change` holds dotted keys that may differ; a section's key covers everything in it.
    """
    saved, new = (
        json.loads(json.dumps(saved)),
        json.loads(json.dumps(new)),
    )  # as JSON keeps them: no tuples, no int keys
    differences = [
        line
        for line in config_diff(saved, new)
        if not any(line.startswith((f"{key}:", f"{key}.")) for key in may_change)
    ]
    if differences:
        shown = "; ".join(differences[:_MAX_DIFFERENCES])
        more = f"; and {len(differences) - _MAX_DIFFERENCES} more" if len(differences) > _MAX_DIFFERENCES else ""
        raise ValueError(
            f"--resume continues a run only as it was begun, and this differs (begun with -> now): {shown}{more}. "
            "Put it back, or start a new run in another --run-dir"
        )


def read_identity(run_dir: Path | str, parts: Collection[str]) -> dict[str, Any]:
    """What a run was started with (identity.json), which must hold `parts`; ValueError names a missing or damaged file."""
    path = Path(run_dir) / IDENTITY
    try:
        identity = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing: {run_dir} is not a whole run folder") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}): restore it from a copy of the run, or start a new run") from error
    missing = set(parts) - set(identity) if isinstance(identity, dict) else set(parts)
    if missing:
        raise ValueError(f"{path} is damaged: it lacks the run's {', '.join(sorted(missing))}")
    return identity


def require_disk_space(path: Path | str, num_bytes: int, what: str) -> None:
    """Raise OSError when the disk under `path` (which need not exist yet) has less than `num_bytes` free for `what`."""
    free_bytes = _free_bytes(Path(path))
    if free_bytes < num_bytes:
        raise OSError(
            errno.ENOSPC,
            f"the disk of {path} has {free_bytes:,} bytes free, and {what} needs {num_bytes:,}: make room or "
            "take another disk",
        )


def _refuse_foreign(path: Path, resume: bool) -> None:
    """A folder without a lock of this kind of run must be empty, or hold a run (copied without its lock)."""
    strangers = sorted(p.name for p in path.iterdir() if p.name != LOCK or not p.is_file())
    if strangers and CONFIG not in strangers:
        shown = ", ".join(strangers[:3]) + (", ..." if len(strangers) > 3 else "")
        raise ValueError(f"{path} holds files that are not of a run ({shown}): give an empty or new --run-dir")
    if strangers and not resume:
        raise ValueError(f"{path} already holds a run: go on with it by --resume, or give another --run-dir")


def _lock(path: Path) -> tuple[int, dict[str, Any]]:
    """An open, locked descriptor of the lock file, and what the owner before had written in it."""
    lock = path / LOCK
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = _owner_in_words(_read_owner(descriptor))
            os.close(descriptor)
            raise ValueError(f"{path} is in use by {owner}: wait for it, stop it, or give another --run-dir") from error
        except OSError as error:
            os.close(descriptor)
            raise OSError(
                error.errno, f"the file system of {path} cannot lock ({error.strerror}): put the run on a local disk"
            ) from error
        try:
            if os.path.samestat(os.fstat(descriptor), os.stat(lock)):
                return descriptor, _read_owner(descriptor)
        except FileNotFoundError:
            pass  # its last owner removed it between our open and our lock: take a new one
        os.close(descriptor)


def _write_owner(descriptor: int, kind: str) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps({"kind": kind, "pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)


def _read_owner(descriptor: int) -> dict[str, Any]:
    """What the lock file says; empty while its owner has not written yet."""
    try:
        owner = json.loads(os.pread(descriptor, 4096, 0))
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}


def _owner_at(lock: Path) -> dict[str, Any]:
    """What a lock file says, locked or not; empty for one that is absent or that another program made."""
    if not lock.is_file():
        return {}
    descriptor = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _read_owner(descriptor)
    finally:
        os.close(descriptor)


def _owner_in_words(owner: dict[str, Any]) -> str:
    if "pid" not in owner:
        return "another process"
    host = owner.get("host")
    return f"process {owner['pid']}" + (f" on {host}" if host and host != socket.gethostname() else "")


def _end_of_last_line(descriptor: int, size: int, block_bytes: int = 65_536) -> int:
    end = size
    while end > 0:
        begin = max(0, end - block_bytes)
        found = os.pread(descriptor, end - begin, begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        end = begin
    return 0


def _free_bytes(path: Path) -> int:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def _explained(error: OSError, path: Path, action: str) -> OSError:
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        reason = f"the disk is full, {_free_bytes(path):,} bytes free; make room and go on with --resume"
    return OSError(error.errno, f"cannot {action} {path}: {reason}")


def sync_directory(directory: Path) -> None:
    """Make a rename in the directory survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
