"""How `bpb` ends: one line on stderr and a documented exit code for whatever a command raises."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import bitsperbyte
from bitsperbyte.__main__ import BUG, guarded, run_command
from bitsperbyte.run.outcome import RunFailed, Terminated

REPO = Path(__file__).resolve().parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPO / "src"), "TERM": "dumb"}


def bpb(*arguments: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "bitsperbyte", *arguments],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=60,
        **options,
    )


def raising(error: BaseException):
    def command() -> int:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (RunFailed("over the cap", 1, "over_cap"), 1, "over the cap"),
        (RunFailed("stopped by SIGTERM", 143, "interrupted"), 143, "stopped by SIGTERM"),
        (ValueError("a\n  b"), 2, "a b"),
        (ValueError(), 2, "ValueError"),
        (
            FileNotFoundError(errno.ENOENT, "No such file or directory", "x.yaml"),
            2,
            "No such file or directory: x.yaml",
        ),
        (OSError(errno.ENOSPC, "cannot write x: the disk is full"), 3, "cannot write x: the disk is full"),
        (PermissionError(errno.EACCES, "Permission denied", "/root/x"), 3, "Permission denied: /root/x"),
        (OSError("plain"), 3, "plain"),
        (KeyboardInterrupt(), 130, "interrupted; everything so far is kept"),
        (Terminated(), 143, "terminated; everything so far is kept"),
    ],
)
def test_errors_become_one_line_and_a_code(
    capsys: pytest.CaptureFixture, error: BaseException, code: int, line: str
) -> None:
    assert guarded(raising(error)) == code
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"bpb: {line}\n")


@pytest.mark.parametrize("error", [KeyError("x"), RuntimeError("x"), AssertionError("x"), ZeroDivisionError("x")])
def test_our_faults_keep_their_traceback(capsys: pytest.CaptureFixture, error: Exception) -> None:
    assert guarded(raising(error)) == 1
    err = capsys.readouterr().err
    assert err.startswith("Traceback") and type(error).__name__ in err and err.endswith(f"bpb: {BUG}\n")


def test_a_command_that_ends_well_returns_its_code() -> None:
    assert guarded(lambda: 0) == 0


@pytest.mark.parametrize(
    "arguments", [["--help"], ["golf", "--help"], ["data", "--help"], ["records", "--help"], ["--version"]]
)
def test_help_and_version(capsys: pytest.CaptureFixture, arguments: list[str]) -> None:
    assert guarded(lambda: run_command(arguments)) == 0
    out = capsys.readouterr().out
    assert (out == f"bitsperbyte {bitsperbyte.__version__}\n") if arguments == ["--version"] else ("Usage" in out)


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["golf", "nonsense"],
        ["--nonsense"],
        ["golf", "train"],
        ["records", "show"],
        ["records", "show", "a", "b"],
    ],
)
def test_usage_errors_are_one_line_that_names_the_help(capsys: pytest.CaptureFixture, arguments: list[str]) -> None:
    assert guarded(lambda: run_command(arguments)) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("bpb: ") and captured.err.count("\n") == 1
    assert "--help`)" in captured.err


@pytest.mark.parametrize("arguments", [[], ["golf"], ["records"]])
def test_a_group_alone_shows_its_help(capsys: pytest.CaptureFixture, arguments: list[str]) -> None:
    assert guarded(lambda: run_command(arguments)) in (0, 2)
    captured = capsys.readouterr()
    assert "Usage" in captured.out and captured.err == ""


def test_the_process_itself(tmp_path: Path) -> None:
    done = bpb("golf", "plan", str(tmp_path / "none.yaml"))
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith("bpb: there is no config file")
    done = bpb("records", "list", "--root", str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["--version"], ["records", "list"]])
def test_a_reader_that_goes_away_is_no_traceback(tmp_path: Path, unbuffered: str, arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.run(
        [sys.executable, "-m", "bitsperbyte", *arguments],
        env={**ENVIRONMENT, "PYTHONUNBUFFERED": unbuffered},
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    os.close(writer)
    assert (process.returncode, process.stderr) == (141, "")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_unwind_the_stack(tmp_path: Path, number: int, code: int) -> None:
    program = (
        "import sys, time\nimport bitsperbyte.__main__ as entry\n"
        "def wait(arguments):\n"
        "    try:\n        print('ready', flush=True)\n        time.sleep(30)\n"
        "    finally:\n        print('cleaned up', flush=True)\n"
        "entry.run_command = wait\nentry.main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.05)
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (code, "cleaned up\n")
    assert err.startswith("bpb: ") and err.count("\n") == 1
