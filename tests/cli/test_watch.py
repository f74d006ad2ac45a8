"""bpb watch, as typed: one look where stdout is no terminal, and frames until the run has ended where it is one."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bitsperbyte.__main__ import guarded, run_command

CONFIG = {"name": "tiny", "schedule": {"wallclock_s": 100.0, "max_steps": 40}, "train": {"batch_tokens": 1000}}


def make_run(folder: Path, status: str, num_steps: int = 12) -> Path:
    from bitsperbyte.records.schema import Record
    from bitsperbyte.records.store import write_record

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(json.dumps(CONFIG))
    rows = [{"step": s, "loss": 5 - s / 10, "elapsed_s": s / 10, "step_ms": 100.0, "lr_scale": 1.0, "tokens": 1000 * s}
            for s in range(1, num_steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_record(folder / "record.json", Record(track="golf", name="tiny", status=status, created_utc="2026-01-31T12:00:00+00:00"))
    return folder


def bpb(capsys: pytest.CaptureFixture, *arguments: object) -> tuple[int, str, str]:
    code = guarded(lambda: run_command([str(a) for a in arguments]))
    return code, *capsys.readouterr()


def test_without_a_terminal_one_look_is_printed(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "running")
    for options in ((), ("--once",)):
        code, out, err = bpb(capsys, "watch", run, *options)
        assert (code, err) == (0, "") and "tiny" in out and "12 of 40" in out
    code, out, _ = bpb(capsys, "watch", run, "--json")
    made = json.loads(out)
    assert code == 0 and made["golf"]["step"] == 12 and made["track"] == "golf"


def test_what_is_no_run_is_refused_in_one_sentence(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "none", tmp_path / "empty"):
        code, out, err = bpb(capsys, "watch", path)
        assert code == 2 and out == "" and err.startswith("bpb: ") and err.count("\n") == 1


def test_in_a_terminal_it_follows_the_run_to_its_end(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "running")
    main, side = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    process = subprocess.Popen([sys.executable, "-m", "bitsperbyte", "watch", str(run), "--interval", "0.1"], stdin=side, stdout=side,
                               stderr=subprocess.PIPE, env=environment)
    os.close(side)
    seen, deadline, ended = "", time.monotonic() + 60, False
    try:
        while time.monotonic() < deadline:
            try:
                seen += os.read(main, 65_536).decode(errors="replace")
            except OSError:  # the other side has closed
                break
            if "12 of 40" in seen and not ended:
                make_run(run, "finished", 40)
                ended = True
        assert process.wait(timeout=20) == 0, process.stderr.read()
    finally:
        process.kill()
        os.close(main)
    assert ended and "40 of 40" in seen and "finished" in seen


def test_leaving_is_no_failure(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "running")
    main, side = pty.openpty()
    process = subprocess.Popen([sys.executable, "-m", "bitsperbyte", "watch", str(run), "--interval", "0.1"], stdin=side, stdout=side,
                               stderr=subprocess.PIPE, env={**os.environ, "TERM": "xterm"})
    os.close(side)
    seen = b""
    while b"tiny" not in seen:
        seen += os.read(main, 65_536)
    process.send_signal(signal.SIGINT)
    try:
        while os.read(main, 65_536):
            pass
    except OSError:
        pass
    assert process.wait(timeout=20) == 130 and process.stderr.read() == b""
    os.close(main)
