"""Who has a folder open, by looking alone."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from bitsperbyte.run import owner
from bitsperbyte.run.folder import LOCK, RunFolder
from bitsperbyte.run.owner import Owner, owner_of

HOLD = """
import sys, time
from bitsperbyte.run.folder import RunFolder
folder = RunFolder.open(sys.argv[1], resume=False, kind="golf")
print("open", flush=True)
time.sleep(60)
"""


def started(run_dir: Path) -> subprocess.Popen:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(run_dir)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "open\n"
    return process


def test_a_process_owns_its_folder_until_it_is_killed_and_no_copy_of_it(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = started(run_dir)
    try:
        assert owner_of(run_dir) == Owner(process.pid, socket.gethostname(), "golf", "alive", True)
        shutil.copytree(run_dir, tmp_path / "copy")
        assert owner_of(tmp_path / "copy").state == "gone", "the process has another file open"
        process.send_signal(signal.SIGKILL)
        while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
            pass  # nobody has waited for it yet, so its number still stands
        assert owner_of(run_dir).state == "gone"
    finally:
        process.kill()
        process.wait()
    assert owner_of(run_dir).state == "gone"


def test_looking_leaves_the_folder_free_and_as_it_was(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path / "run", resume=False, kind="golf") as folder:
        folder.write_atomic("config.yaml", "name: x\n")
    before = {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in (tmp_path / "run").iterdir()}
    found = owner_of(tmp_path / "run")
    assert (found.state, found.runs) == ("gone", True), "closed, though its process, this one, still runs"
    assert {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in (tmp_path / "run").iterdir()} == before


def test_another_host_cannot_be_asked(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text(json.dumps({"kind": "randopt", "pid": os.getpid(), "host": "node17"}))
    found = owner_of(tmp_path)
    assert (found.state, found.kind, str(found)) == ("elsewhere", "randopt", f"process {os.getpid()} on node17")


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "{}", '{"pid": "x", "host": "h"}', '{"pid": -1, "host": "h"}', '{"pid": 0, "host": "h"}',
                                  '{"pid": 1e300, "host": "h"}', '{"pid": 99999999999999999999, "host": "h"}', '{"pid": null}', "\udcff"])
def test_a_lock_file_that_says_nothing_names_nobody(tmp_path: Path, text: str) -> None:
    (tmp_path / LOCK).write_bytes(text.encode(errors="surrogateescape"))
    assert owner_of(tmp_path) is None


def test_no_lock_file_no_folder_and_a_file_name_nobody(tmp_path: Path) -> None:
    assert owner_of(tmp_path) is None and owner_of(tmp_path / "gone") is None
    (tmp_path / "file").touch()
    assert owner_of(tmp_path / "file") is None


def test_where_open_files_cannot_be_listed_the_start_of_the_process_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's process: it owns the folder if it began before the lock file was written, else its number was given again."""

    def refused(path: str) -> list[str]:
        raise PermissionError(path)

    lock = tmp_path / LOCK
    lock.write_text(json.dumps({"kind": "golf", "pid": os.getpid(), "host": socket.gethostname()}))
    monkeypatch.setattr(owner.os, "listdir", refused)
    assert owner_of(tmp_path).state == "alive"
    began_s = psutil.Process().create_time()
    os.utime(lock, (began_s - 100, began_s - 100))
    assert owner_of(tmp_path).state == "gone"
