"""A folder as it lies on the disk: what is found under which name, and every unreadable file as a clause and not an exception."""

from pathlib import Path
from typing import Any

import pytest

from bitsperbyte.golf.check import folder as module
from bitsperbyte.golf.check.folder import read_submission


def test_what_is_found(folder: Any) -> None:
    found = read_submission(folder.path)
    assert found.problems == [] and found.script_size == len((folder.path / "train_gpt.py").read_bytes())
    assert [(log.name, log.seed, log.named_seed) for log in found.logs] == [
        ("train_seed1337.log", 1337, 1337), ("train_seed42.log", 42, 42), ("train_seed7.log", 7, 7)]
    assert found.artifact is None and found.tokenizer is None and found.artifact_size is None


@pytest.mark.parametrize(("files", "logs"), [
    (["train.log", "requirements.txt", "README.txt"], ["train.log"]), (["train_log.txt", "notes.txt"], ["train_log.txt"]),
    (["train.log", "quant_eval.log"], ["train.log"]), (["logs/train_seed1.log"], ["logs/train_seed1.log"]),
    (["train.log", "ablations/train_x.log"], ["train.log"]), ([".ipynb_checkpoints/train-checkpoint.log"], []), (["run.log"], ["run.log"]),
])
def test_which_files_are_train_logs(files: list[str], logs: list[str], tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("seed:1\n", encoding="utf-8")
    found = read_submission(tmp_path)
    assert [log.name for log in found.logs] == logs
    assert any("no train log" in problem for problem in found.problems) == (not logs)


@pytest.mark.parametrize(("name", "seed"), [
    ("train_seed1337.log", 1337), ("train_s42.log", 42), ("seed-7.log", 7), ("train.log", None), ("train_bits8.log", None), ("log_sp1024.txt", None),
])
def test_the_seed_in_a_name(name: str, seed: int | None, tmp_path: Path) -> None:
    (tmp_path / name).write_text("step:1/2 train_loss:1.0 train_time:1ms step_avg:1.00ms\n", encoding="utf-8")
    (log,) = read_submission(tmp_path).logs
    assert log.named_seed == seed == log.seed


@pytest.mark.parametrize(("content", "problem"), [
    (b"\xff\xfe", "not UTF-8"), (b"", "empty"), (b" \n", "empty"), (b"[" * 100_000, "not JSON"), (b"3", "int"), (b'{"a": 1', "not JSON"),
])
def test_an_unreadable_file_is_a_clause(content: bytes, problem: str, folder: Any) -> None:
    (folder.path / "submission.json").write_bytes(content)
    found = read_submission(folder.path)
    assert len(found.problems) == 1 and problem in found.problems[0] and found.claims is None


def test_a_text_that_is_too_long_is_not_read(folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TEXT_BYTES", 10)
    assert "too many for a text" in read_submission(folder.path).problems[0]


@pytest.mark.parametrize("name", ["../outside.bpb", "/etc/passwd", "missing.bpb"])
def test_a_named_artifact_must_lie_in_the_folder(name: str, folder: Any) -> None:
    (folder.path.parent / "outside.bpb").write_bytes(b"x")
    folder.claim(artifact={"file": name})
    found = read_submission(folder.path)
    assert found.artifact is None and len(found.problems) == 1


def test_the_artifact_of_a_folder_that_names_none(folder: Any) -> None:
    for name, size in (("final_model.int8.ptz", 50), ("tokenizer.bin", 90), ("fineweb_val_000000.bin", 99), ("other.pt", 7)):
        (folder.path / name).write_bytes(bytes(size))
    assert read_submission(folder.path).artifact == folder.path / "final_model.int8.ptz"


def test_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, words in (("nothing", "not there"), ("file", "a file")):
        with pytest.raises(ValueError, match=words):
            read_submission(tmp_path / name)
