"""Who has a run folder open, found by looking alone: the lock is not tried, since even a shared one, held for a moment, would refuse a
run that starts in that moment."""

import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from bitsperbyte.run.folder import LOCK

_MAX_PID = 2**31  # of any system's process ids


@dataclass(frozen=True)
class Owner:
    """The process that wrote the lock file, and whether it still has the folder: "alive", "gone", or "elsewhere", on a host that cannot
    be asked from here. A process that is gone from the folder may still run: `runs` (False where it cannot be asked)."""

    pid: int
    host: str
    kind: str | None
    state: Literal["alive", "gone", "elsewhere"]
    runs: bool

    def __str__(self) -> str:
        return f"process {self.pid}" + (f" on {self.host}" if self.state == "elsewhere" else "")


def owner_of(run_dir: Path | str) -> Owner | None:
    """Who owns the folder or owned it last; None where no lock file says so. Writes nothing, locks nothing."""
    lock = Path(run_dir) / LOCK
    try:
        written = json.loads(lock.read_bytes())
        pid, host, kind = int(written["pid"]), str(written["host"]), written.get("kind")
        if not 0 < pid < _MAX_PID:  # no program of ours wrote that
            return None
        found = lock.stat()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError, KeyError, TypeError):  # absent, or its owner has not written yet
        return None
    if host != socket.gethostname():
        return Owner(pid, host, kind, "elsewhere", False)
    runs = _runs(pid, found)
    return Owner(pid, host, kind, "alive" if runs and _holds(pid, found) else "gone", runs)


def _runs(pid: int, lock: os.stat_result) -> bool:
    """Whether the process that wrote the lock file runs: its number is given again after a while, to one that began later than it wrote."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() <= lock.st_mtime + 1.0
    except psutil.NoSuchProcess:
        return False


def _holds(pid: int, lock: os.stat_result) -> bool:
    """Whether the process, which runs, has this very file open: a folder may be copied with its lock while the original is in use."""
    descriptors = f"/proc/{pid}/fd"
    try:
        return any(_is_file(os.path.join(descriptors, name), lock) for name in os.listdir(descriptors))
    except (FileNotFoundError, PermissionError):  # another system, another user's process, or one that ended meanwhile
        return psutil.pid_exists(pid)


def _is_file(path: str, file: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.stat(path), file)
    except OSError:
        return False  # closed meanwhile, or a pipe that is gone
