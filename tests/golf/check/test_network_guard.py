"""What the guard refuses: judged by audit event, and in a process of its own, where installing is for ever."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bitsperbyte.golf.check import network_guard
from bitsperbyte.golf.check.network_guard import judge

PROGRAMS = frozenset({"curl", "pip"})


@pytest.mark.parametrize(("event", "arguments", "expected"), [
    ("socket.connect", (None, ("10.0.0.1", 80)), ("network", True)), ("socket.bind", (None, ("", 0)), ("network", True)),
    ("socket.connect", (None, "/tmp/socket"), None), ("socket.getaddrinfo", ("example.org", 80), ("network", True)),
    ("os.system", (b"curl x",), ("network", True)), ("subprocess.Popen", ("sh", ["sh", "-c", "exec curl x"]), ("network", True)),
    ("subprocess.Popen", ("ls", ["ls", "-l"]), ("process", False)), ("os.posix_spawn", ("/bin/ls", ["ls"], None), ("process", False)),
    ("subprocess.Popen", (sys.executable, [sys.executable, "-m", "pip"]), ("network", True)), ("open", ("file", "r", 0), None),
    ("import", ("numpy", None), None), ("import", ("secret.part", None), ("import", True)), ("exec", (None,), None),
])
def test_judgements(event: str, arguments: tuple, expected: tuple[str, bool] | None) -> None:
    judged = judge(event, arguments, may_start=True, programs=PROGRAMS, packages=frozenset({"secret"}))
    assert (judged and (judged[0], judged[2])) == expected


def test_without_a_namespace_no_process_may_start() -> None:
    assert judge("os.system", (b"ls",), may_start=False, programs=PROGRAMS, packages=frozenset()) == ("process", "os.system ls", True)


def test_an_installed_guard_refuses_and_reports(tmp_path: Path) -> None:
    report = tmp_path / "tried.jsonl"
    program = (
        "import sys, runpy\n"
        f"guard = runpy.run_path({network_guard.__file__!r})\n"
        f"guard['install']({str(report)!r}, may_start=False, programs=frozenset({{'curl'}}), packages=frozenset({{'telnetlib'}}))\n"
        "import socket, os\n"
        "for tried in (lambda: socket.create_connection(('127.0.0.1', 9)), lambda: socket.getaddrinfo('example.org', 80),\n"
        "              lambda: os.system('true'), lambda: __import__('telnetlib')):\n"
        "    try:\n"
        "        tried()\n"
        "    except PermissionError as error:\n"
        "        print('stopped', error)\n")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.count("stopped") == 4, done.stdout + done.stderr
    rows = [json.loads(line) for line in report.read_text(encoding="utf-8").splitlines()]
    assert all(row["refused"] for row in rows) and {row["kind"] for row in rows} == {"network", "process", "import"}
