"""Run a stranger's Python script in a scratch folder without the network, within a time limit, and say what it tried.

Two layers. Inside the process an audit hook (network_guard.py) refuses sockets and, without the second layer, other processes; it names
each try. Around it, where the system allows it without privileges, a network namespace of its own, which code in C cannot leave either.
The files of this user stay within the script's reach: this is a guard against what a submission may not do, not against malice.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from bitsperbyte.golf.check import network_guard
from bitsperbyte.golf.check.inspection import NETWORK_PROGRAMS
from bitsperbyte.run.folder import write_atomic

KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CUDA_HOME")
OUTPUT_BYTES = 1 << 22  # of the output's end that is read
NAMESPACES = (("--net",), ("--user", "--map-current-user", "--net"), ("--user", "--map-root-user", "--net"))
NOT_TO_IMPORT = frozenset({"bitsperbyte"})  # a submission has to do without the package that made it


@dataclass(frozen=True)
class Outcome:
    """How a run ended. `code`: exit status, None when the time limit ended it; `output`: the end of stdout and stderr together;
    `network`, `processes`, `imports`: what was tried, in words (processes and imports only those refused)."""

    code: int | None
    output: str
    seconds: float
    isolation: str
    network: list[str]
    processes: list[str]
    imports: list[str]


def namespace_command() -> list[str]:
    """The command that puts another into a network namespace without a network; empty where this system does not allow it."""
    program = shutil.which("unshare")
    for options in NAMESPACES if program else ():
        done = subprocess.run([program, *options, "true"], stdin=subprocess.DEVNULL, capture_output=True, timeout=30)
        if done.returncode == 0:
            return [program, *options]
    return []


def run_offline(arguments: Sequence[str], cwd: Path, scratch: Path, *, limit_s: float, variables: Mapping[str, str] | None = None,
                prefix: Sequence[str] | None = None) -> Outcome:
    """Run `python *arguments` in `cwd` without a network, with few variables of the environment and those in `variables`; `scratch` is
    an existing empty folder for what this needs. `prefix` is namespace_command()'s answer, asked for where None."""
    prefix = namespace_command() if prefix is None else list(prefix)
    guard, report, output = scratch / "guard", scratch / "tried.jsonl", scratch / "output.txt"
    guard.mkdir()
    shutil.copyfile(network_guard.__file__, guard / "network_guard.py")
    write_atomic(guard / "sitecustomize.py", "import network_guard\n\n" + (
        f"network_guard.install({str(report)!r}, may_start={bool(prefix)}, programs=frozenset({sorted(NETWORK_PROGRAMS)}), "
        f"packages=frozenset({sorted(NOT_TO_IMPORT)}))\n"))
    home = scratch / "home"
    home.mkdir()
    environment = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    environment |= dict(variables or {})
    environment |= {"HOME": str(home), "TMPDIR": str(home), "PYTHONPATH": str(guard), "PYTHONNOUSERSITE": "1", "PYTHONUNBUFFERED": "1",
                    "PYTHONDONTWRITEBYTECODE": "1", "PYTHONIOENCODING": "utf-8", "HF_HUB_OFFLINE": "1"}
    started = time.monotonic()
    with output.open("wb") as sink:
        process = subprocess.Popen([*prefix, sys.executable, *arguments], cwd=cwd, env=environment, stdin=subprocess.DEVNULL, stdout=sink,
                                   stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code: int | None = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    tried = [row for line in _tail(report).splitlines() if (row := _row(line)) is not None] if report.exists() else []
    by_kind = {kind: list(dict.fromkeys(row["what"] for row in tried if row["kind"] == kind and row["refused"]))
               for kind in ("network", "process", "import")}
    return Outcome(code, _tail(output), time.monotonic() - started, "a network namespace and an audit hook" if prefix else "an audit hook",
                   by_kind["network"], by_kind["process"], by_kind["import"])


def _row(line: str) -> dict[str, Any] | None:
    """A line of the guard's report; None for what is none: the script can write to that file too."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and {"kind", "what", "refused"} <= set(row) and isinstance(row["what"], str) else None


def _end(process: subprocess.Popen) -> None:
    """End the process and everything it started that is still there."""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    try:
        os.killpg(process.pid, signal.SIGKILL)  # its own session, so the group is its own
    except ProcessLookupError:
        pass  # all of it ended by itself
    for child in family:
        try:
            child.kill()
        except psutil.NoSuchProcess:
            pass
    process.wait()


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - OUTPUT_BYTES))
        return file.read().decode("utf-8", errors="replace")
