"""Where a result came from: the source, the command, the software and the machine."""

import hashlib
import os
import platform
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

import bitsperbyte

PACKAGES = ("bitsperbyte", "torch", "numpy", "sentencepiece", "safetensors", "zstandard", "brotli", "pydantic", "transformers",
            "tokenizers", "triton", "math-verify")
_GIT_TIMEOUT_S = 20


def collect() -> dict[str, Any]:
    """Facts for a record; nothing of the environment's variables.

    Keys: command (str), commit and dirty (None outside a checkout, then no_commit_because says why), source_sha256,
    versions (package -> version or None), python, os, cpu_model, num_cores (usable by this process), memory_bytes.
    """
    package_dir = Path(bitsperbyte.__file__).resolve().parent
    return {
        "command": command_line(sys.argv),
        **source_state(package_dir),
        "source_sha256": source_sha256(package_dir),
        "versions": {name: _version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "os": platform.platform(),
        "cpu_model": cpu_model(),
        "num_cores": num_cores(),
        "memory_bytes": psutil.virtual_memory().total,
    }


def command_line(argv: list[str]) -> str:
    """The command as a shell would read it, without the path of the interpreter or of the installed script."""
    program = Path(argv[0]).name if argv else ""
    if program == "__main__.py":
        return shlex.join(["python", "-m", Path(argv[0]).parent.name, *argv[1:]])
    return shlex.join([program, *argv[1:]])


def source_state(package_dir: Path) -> dict[str, Any]:
    """Commit of the checkout that holds `package_dir`, and whether anything under it differs from that commit.

    A package that merely lies inside some checkout (installed in an environment there) is not of that commit: the
    package must be tracked by it.
    """
    unknown: dict[str, Any] = {"commit": None, "dirty": None}
    try:
        tracked = _git(package_dir, "ls-files", "--", ".")
        if not tracked:
            return {**unknown, "no_commit_because": "the package is not tracked by the git repository around it"}
        commit = _git(package_dir, "rev-parse", "HEAD").strip()
        changes = _git(package_dir, "status", "--porcelain", "--untracked-files=all", "--", ".")
    except FileNotFoundError:
        return {**unknown, "no_commit_because": "git is not installed"}
    except subprocess.TimeoutExpired:
        return {**unknown, "no_commit_because": f"git did not answer within {_GIT_TIMEOUT_S} s"}
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or "").strip().splitlines()
        return {**unknown, "no_commit_because": lines[0] if lines else f"git failed with exit code {error.returncode}"}
    return {"commit": commit, "dirty": bool(changes)}


def source_sha256(package_dir: Path) -> str:
    """sha256 over names and contents of the package's .py files: equal code, equal hash, checkout or not."""
    digest = hashlib.sha256()
    for path in sorted(package_dir.rglob("*.py"), key=lambda p: p.relative_to(package_dir).as_posix()):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(package_dir).as_posix()}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()


def cpu_model() -> str | None:
    """The processor's name as its maker writes it, where the system tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.lower().startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or None


def num_cores() -> int:
    """Cores that this process may use, which in a container are often fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _git(directory: Path, *arguments: str) -> str:
    # a hook or an editor may have pointed git at another repository
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    done = subprocess.run(
        ["git", "--no-optional-locks", "-C", str(directory), *arguments],
        env={**environment, "LC_ALL": "C"},
        capture_output=True,
        text=True,
        check=True,
        timeout=_GIT_TIMEOUT_S,
        stdin=subprocess.DEVNULL,
    )
    return done.stdout


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return bitsperbyte.__version__ if package == "bitsperbyte" else None  # run from a source tree
