"""Keeps one Python process off the network, and writes down what it tried.

This file is copied beside code that is to be run without the network, and installed before that code starts; it needs nothing but the
standard library. It sees what Python itself does: code in C that opens a socket is stopped by the namespace that sandbox.py adds where
the system has one, not by this.
"""

import json
import os
import resource
import sys
from collections.abc import Callable
from typing import Any

MAX_FILE_BYTES = 1 << 31  # of any one file that the process writes, its output included
TO_ADDRESS = frozenset({"socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg"})
LOOKS_UP = frozenset({"socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr", "socket.getnameinfo"})
STARTS = frozenset({"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "pty.spawn"})


class Refused(PermissionError):
    """Raised in the code that tried."""


def judge(event: str, arguments: tuple[Any, ...], *, may_start: bool, programs: frozenset[str], packages: frozenset[str]
          ) -> tuple[str, str, bool] | None:
    """What an audit event is: (kind, description, refused), or None where it is nobody's concern.

    `may_start`: processes may be started, other than those in `programs`, which speak to the network. `packages`: what may not be
    imported, by top-level name.
    """
    if event in TO_ADDRESS:
        address = arguments[1] if len(arguments) > 1 else None
        if isinstance(address, str | bytes):
            return None  # a Unix socket: a path, not a network
        return "network", f"{event} {address}", True
    if event in LOOKS_UP:
        return "network", f"{event} {arguments[0]}", True
    if event in STARTS:
        command = arguments[1] if event != "os.system" and len(arguments) > 1 else arguments[0]
        parts = command if isinstance(command, list | tuple) else [command]
        words = [word for part in parts for word in os.fsdecode(part).split()]
        if named := programs.intersection(os.path.basename(word) for word in words):
            return "network", f"{event} {', '.join(sorted(named))}", True
        return "process", f"{event} {' '.join(words)[:200]}", not may_start
    if event == "import" and arguments[0].partition(".")[0] in packages:
        return "import", f"import {arguments[0]}", True
    return None


def install(report: str, *, may_start: bool, programs: frozenset[str], packages: frozenset[str]) -> None:
    """From now on refuse what `judge` refuses, for as long as the process lives, and append a JSON line a try to the file `report`."""
    for limit, value in ((resource.RLIMIT_FSIZE, MAX_FILE_BYTES), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(limit)[1]
        resource.setrlimit(limit, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))
    write: Callable[[int, bytes], int] = os.write
    descriptor = os.open(report, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        judged = judge(event, arguments, may_start=may_start, programs=programs, packages=packages)
        if judged is None:
            return
        kind, what, refused = judged
        write(descriptor, json.dumps({"kind": kind, "what": what, "refused": refused}).encode() + b"\n")
        if refused:
            raise Refused(f"{what}: refused while a submission is checked")

    sys.addaudithook(hook)
