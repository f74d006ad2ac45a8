import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bitsperbyte.run import folder as folder_module
from bitsperbyte.run.folder import (
    JsonlWriter,
    RunFolder,
    check_same_config,
    lock_holder,
    read_identity,
    read_jsonl,
    require_disk_space,
    write_atomic,
)

HOLD = """
import sys, time
from bitsperbyte.run.folder import RunFolder
with RunFolder.open(sys.argv[1], resume=sys.argv[2] == "resume", kind="golf") as folder:
    folder.write_atomic("config.yaml", "name: x\\n")
    print("locked", flush=True)
    time.sleep(60)
"""


def begin(path: Path, kind: str = "golf") -> None:
    with RunFolder.open(path, resume=False, kind=kind) as folder:
        folder.write_atomic("config.yaml", "name: x\n")


def names(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir())


# -- the folder -----------------------------------------------------------------------------------------------------


def test_fresh_folder_is_made_with_its_parents(tmp_path: Path) -> None:
    begin(tmp_path / "a" / "b")
    assert names(tmp_path / "a" / "b") == [".lock", "config.yaml"]


def test_folder_with_a_run_needs_resume(tmp_path: Path) -> None:
    begin(tmp_path / "r")
    with pytest.raises(ValueError, match="already holds a run: go on with it by --resume"):
        RunFolder.open(tmp_path / "r", resume=False, kind="golf")
    with RunFolder.open(tmp_path / "r", resume=True, kind="golf") as folder:
        assert (folder.path / "config.yaml").read_text() == "name: x\n"


def test_a_run_copied_without_its_lock_is_still_a_run(tmp_path: Path) -> None:
    begin(tmp_path / "r")
    (tmp_path / "r" / ".lock").unlink()
    with pytest.raises(ValueError, match="already holds a run"):
        RunFolder.open(tmp_path / "r", resume=False, kind="golf")
    RunFolder.open(tmp_path / "r", resume=True, kind="golf").close()


def test_resume_needs_a_run_of_the_same_kind(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no run to resume"):
        RunFolder.open(tmp_path / "r", resume=True, kind="golf")
    assert not (tmp_path / "r").exists()
    begin(tmp_path / "r", kind="randopt")
    with pytest.raises(ValueError, match="holds a randopt run and cannot be resumed as golf"):
        RunFolder.open(tmp_path / "r", resume=True, kind="golf")
    RunFolder.open(tmp_path / "r", resume=True, kind="randopt").close()  # the refusal did not change the owner's kind


def test_foreign_folder_and_file_are_refused_untouched(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"not of a run \(cat.jpg\)"):
        RunFolder.open(tmp_path / "photos", resume=False, kind="golf")
    assert names(tmp_path / "photos") == ["cat.jpg"]
    with pytest.raises(ValueError, match="is a file"):
        RunFolder.open(tmp_path / "photos" / "cat.jpg", resume=False, kind="golf")
    with pytest.raises((ValueError, NotADirectoryError)):
        RunFolder.open(tmp_path / "photos" / "cat.jpg" / "run", resume=False, kind="golf")


@pytest.mark.parametrize("content", ["", "{}", '{"kind": "other"}', "not json"])
def test_a_lock_of_another_program_does_not_make_a_folder_ours(tmp_path: Path, content: str) -> None:
    (tmp_path / ".lock").write_text(content)
    (tmp_path / "cat.jpg").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"not of a run \(cat.jpg\)"):
        RunFolder.open(tmp_path, resume=False, kind="golf")
    assert names(tmp_path) == [".lock", "cat.jpg"] and (tmp_path / ".lock").read_text() == content


@pytest.mark.parametrize("part", ["checkpoint", "metrics.jsonl", "record.json"])
@pytest.mark.parametrize("resume", [False, True])
def test_a_run_that_lost_its_config_is_not_started_anew(tmp_path: Path, part: str, resume: bool) -> None:
    begin(tmp_path / "r")
    (tmp_path / "r" / "config.yaml").unlink()
    (tmp_path / "r" / part).mkdir()
    with pytest.raises(ValueError, match=rf"parts of a run \({part}\) .*restore config.yaml from record.json"):
        RunFolder.open(tmp_path / "r", resume=resume, kind="golf")
    assert names(tmp_path / "r") == [".lock", part]


def test_a_start_that_fails_early_leaves_nothing_and_one_cut_short_may_start_again(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), RunFolder.open(tmp_path / "r", resume=False, kind="golf"):
        raise ZeroDivisionError
    assert not (tmp_path / "r").exists()
    (tmp_path / "mine").mkdir()
    RunFolder.open(tmp_path / "mine", resume=False, kind="golf").close()
    assert names(tmp_path / "mine") == []  # a folder that was there stays
    with RunFolder.open(tmp_path / "r", resume=False, kind="golf") as folder:
        folder.write_atomic("identity.json", "{}")  # killed before config.yaml
    begin(tmp_path / "r")
    assert "config.yaml" in names(tmp_path / "r")


def hold(path: Path, resume: bool) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path), "resume" if resume else "new"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "locked\n"
    return process


def test_locked_folder_names_the_process_and_a_killed_one_frees_it(tmp_path: Path) -> None:
    process = hold(tmp_path / "r", resume=False)
    try:
        assert lock_holder(tmp_path / "r") == f"process {process.pid}"
        for resume in (True, False):
            with pytest.raises(ValueError, match=f"in use by process {process.pid}|already holds a run"):
                RunFolder.open(tmp_path / "r", resume=resume, kind="golf")
        with pytest.raises(ValueError, match=f"in use by process {process.pid}"):
            RunFolder.open(tmp_path / "r", resume=True, kind="golf")
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    assert lock_holder(tmp_path / "r") is None
    with RunFolder.open(tmp_path / "r", resume=True, kind="golf"):
        assert lock_holder(tmp_path / "r") == f"process {os.getpid()}"
        with pytest.raises(ValueError, match=f"in use by process {os.getpid()}"):
            RunFolder.open(tmp_path / "r", resume=True, kind="golf")


def test_lock_file_replaced_while_waiting_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between open and flock the last owner may delete the file: locking the deleted one would let two in."""
    path = tmp_path / "r"
    path.mkdir()
    flock, calls = folder_module.fcntl.flock, []

    def delete_first(descriptor: int, flags: int) -> None:
        calls.append(descriptor)
        if len(calls) == 1:
            (path / ".lock").unlink()
        flock(descriptor, flags)

    monkeypatch.setattr(folder_module.fcntl, "flock", delete_first)
    with RunFolder.open(path, resume=False, kind="golf"):
        monkeypatch.undo()
        assert len(calls) == 2 and lock_holder(path) == f"process {os.getpid()}"


def test_unlockable_file_system_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, flags: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(folder_module.fcntl, "flock", refuse)
    with pytest.raises(OSError, match="cannot lock"):
        RunFolder.open(tmp_path / "r", resume=False, kind="golf")


# -- whole files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()],
)
def test_a_write_that_fails_leaves_the_old_file_and_no_part(
    tmp_path: Path, monkeypatch, step: str, error: BaseException
) -> None:
    path = tmp_path / "record.json"
    write_atomic(path, "old")

    def fail(*arguments: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, step, fail)
        with pytest.raises(type(error)) as caught:
            write_atomic(path, "new")
    if isinstance(error, OSError):
        assert str(path) in str(caught.value) and caught.value.errno == error.errno
    if getattr(error, "errno", None) == errno.ENOSPC:
        assert "the disk is full" in str(caught.value) and "bytes free" in str(caught.value)
    assert path.read_text() == "old" and names(tmp_path) == ["record.json"]


def test_a_kill_between_write_and_rename_leaves_the_old_file_and_resume_sweeps_up(tmp_path: Path) -> None:
    begin(tmp_path / "r")
    code = (
        "import os, signal, sys\n"
        "from bitsperbyte.run.folder import write_atomic\n"
        "os.replace = lambda *a: os.kill(os.getpid(), signal.SIGKILL)\n"
        "write_atomic(sys.argv[1], 'new')"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "r" / "config.yaml")])
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / "r" / "config.yaml").read_text() == "name: x\n" and len(names(tmp_path / "r")) == 3
    RunFolder.open(tmp_path / "r", resume=True, kind="golf").close()
    assert names(tmp_path / "r") == [".lock", "config.yaml"]


def test_json_of_a_folder_is_whole_and_finite(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path / "r", resume=False, kind="golf") as folder:
        folder.write_json_atomic("a.json", {"ü": [1, None]})
        with pytest.raises(ValueError):
            folder.write_json_atomic("a.json", {"x": float("nan")})
        assert json.loads((folder.path / "a.json").read_text(encoding="utf-8")) == {"ü": [1, None]}


# -- whole lines ----------------------------------------------------------------------------------------------------

ROWS = [{"step": 1, "loss": 2.5}, {"step": 2, "text": "ü\n|"}, {"step": 3}]


def test_a_file_cut_at_any_byte_keeps_every_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with JsonlWriter(path) as writer:
        for row in ROWS:
            writer.append(row)
    whole = path.read_bytes()
    assert read_jsonl(path) == (ROWS, False)
    ends = [0, *(i + 1 for i, byte in enumerate(whole) if byte == ord("\n"))]
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        kept = max(i for i, end in enumerate(ends) if end <= cut)
        assert read_jsonl(path) == (ROWS[:kept], cut not in ends)
        with JsonlWriter(path) as writer:
            assert writer.dropped_torn_bytes == cut - ends[kept]
            writer.append({"event": "resume"}, sync=False)
        assert read_jsonl(path) == ([*ROWS[:kept], {"event": "resume"}], False)


def test_a_torn_line_longer_than_a_read_block_is_found(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    for prefix in (b"", b'{"a": 1}\n'):
        path.write_bytes(prefix + b"x" * 200_000)
        with JsonlWriter(path) as writer:
            assert writer.dropped_torn_bytes == 200_000
        assert path.read_bytes() == prefix


@pytest.mark.parametrize("sync", [True, False])
def test_a_full_disk_takes_the_half_line_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: bool) -> None:
    path = tmp_path / "m.jsonl"
    write = os.write
    with JsonlWriter(path) as writer:
        writer.append(ROWS[0])

        def fill_up(descriptor: int, data: memoryview) -> int:
            if len(data) > 5:
                return write(descriptor, data[:5])
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "write", fill_up)
            with pytest.raises(OSError, match=r"m\.jsonl: the disk is full, [\d,]+ bytes free") as caught:
                writer.append(ROWS[2], sync=sync)
        assert caught.value.errno == errno.ENOSPC
        assert read_jsonl(path) == (ROWS[:1], False)
        writer.append(ROWS[1])
    assert read_jsonl(path) == (ROWS[:2], False)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_really_full_device_is_said() -> None:
    with pytest.raises(OSError, match="/dev/full"), JsonlWriter("/dev/full") as writer:
        writer.append({"a": 1})


def test_rows_that_json_cannot_hold_and_closed_files_are_refused(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "m.jsonl")
    for row in ({"x": float("inf")}, {"x": object()}):
        with pytest.raises(ValueError, match="cannot be written as JSON"):
            writer.append(row)
    writer.close()
    writer.close()
    with pytest.raises(ValueError, match="is closed"):
        writer.append({})
    assert (tmp_path / "m.jsonl").read_bytes() == b""


@pytest.mark.parametrize("line", [b"{broken", b"[1]", b"", b"\xff"])
def test_damage_before_the_end_names_the_line(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "m.jsonl").write_bytes(b'{"a": 1}\n' + line + b'\n{"a": 2}\n')
    with pytest.raises(ValueError, match=r"m\.jsonl line 2"):
        read_jsonl(tmp_path / "m.jsonl")


def test_rows_survive_a_kill_right_after_append(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "from bitsperbyte.run.folder import JsonlWriter\n"
        "w = JsonlWriter(sys.argv[1])\n"
        "for i in range(50): w.append({'i': i}, sync=False)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "m.jsonl")])
    assert read_jsonl(tmp_path / "m.jsonl") == ([{"i": i} for i in range(50)], False)


# -- checks before a run -------------------------------------------------------------------------------------------


def test_resume_under_other_settings_shows_at_most_ten_differences() -> None:
    check_same_config({"a": (1, 2)}, {"a": [1, 2]})  # a saved file has lists for tuples
    with pytest.raises(ValueError, match=r"train\.seed: 1 -> 2") as caught:
        check_same_config({"train": {"seed": 1, "x": 0}}, {"train": {"seed": 2, "x": 0}})
    assert "train.x" not in str(caught.value)
    many = {f"k{i:02}": i for i in range(13)}
    with pytest.raises(ValueError, match="and 3 more") as caught:
        check_same_config(many, dict.fromkeys(many, -1))
    assert str(caught.value).count("->") == 11  # ten differences and the legend


def test_keys_that_may_change_on_resume() -> None:
    saved, new = {"log": {"every": 1}, "logs": 1}, {"log": {"every": 2}, "logs": 1}
    check_same_config(saved, new, may_change=["log"])
    check_same_config(saved, new, may_change=["log.every"])
    with pytest.raises(ValueError, match="logs: 1 -> 2"):
        check_same_config(saved, {"log": {"every": 1}, "logs": 2}, may_change=["log"])


def test_disk_space_is_asked_of_the_disk_that_will_be_used(tmp_path: Path) -> None:
    require_disk_space(tmp_path / "not" / "yet", 1, "a byte")
    with pytest.raises(OSError, match=r"bytes free, and two exabytes needs 2,000,000,000,000,000,000") as caught:
        require_disk_space(tmp_path / "not" / "yet", 2 * 10**18, "two exabytes")
    assert caught.value.errno == errno.ENOSPC


def test_appends_are_quick_without_sync(tmp_path: Path) -> None:
    began = time.perf_counter()
    with JsonlWriter(tmp_path / "m.jsonl") as writer:
        for i in range(2000):
            writer.append({"step": i}, sync=False)
    assert time.perf_counter() - began < 2.0  # 1 ms a row would show in every step of a small model


@pytest.mark.parametrize("text", ["{", "[]", '{"config": 1}', "[" * 200_000, '{"a": ' + "9" * 5000 + "}"])
def test_a_damaged_identity_is_said(tmp_path: Path, text: str) -> None:
    (tmp_path / "identity.json").write_text(text)
    with pytest.raises(ValueError, match=r"identity\.json is damaged"):
        read_identity(tmp_path, ("config", "data"))
