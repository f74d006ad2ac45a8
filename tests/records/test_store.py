import hashlib
import json
import os
from pathlib import Path

import pytest

from bitsperbyte.records import store
from bitsperbyte.records.schema import Record, ScoreRow
from bitsperbyte.records.store import add_record, iter_records, read_record, write_record
from bitsperbyte.run.folder import RunFolder

SCORE = {
    "label": "artifact",
    "text": "val",
    "window": 8,
    "documents": "across",
    "nats": 0.0,
    "num_bytes": 4,
    "num_tokens": 2,
    "bpb": 0.0,
    "nats_per_token": 0.0,
    "bytes_per_token": 2.0,
}


def make(**changes) -> Record:
    return Record(
        **{
            "track": "golf",
            "name": "baseline",
            "status": "finished",
            "created_utc": "2026-01-31T12:00:00+00:00",
            "seed": 7,
            "scores": [SCORE],
            **changes,
        }
    )


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    with RunFolder.open(tmp_path / "run", resume=False, kind="golf") as folder:
        folder.write_atomic("config.yaml", "name: baseline\n")
        folder.write_atomic("train.log", "step:1\n")
        folder.write_atomic("metrics.jsonl", "{}\n")
        folder.write_atomic("artifact.bpb", b"x" * 100)
        write_record(folder.path / "record.json", make())
    return tmp_path / "run"


def test_records_round_trip_byte_for_byte(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    write_record(path, make(mystery={"kept": [1, "ü"]}))
    text = path.read_bytes()
    write_record(path, read_record(path))
    assert path.read_bytes() == text and read_record(tmp_path) == read_record(path)
    assert json.loads(text)["mystery"] == {"kept": [1, "ü"]}


def test_what_was_changed_in_place_is_validated_on_writing(tmp_path: Path) -> None:
    record = make()
    record.scores.append(ScoreRow.model_construct(**{**SCORE, "bpb": 1.0}))
    with pytest.raises(ValueError, match=r"scores\.1.*edited or damaged"):
        write_record(tmp_path / "record.json", record)
    assert list(tmp_path.iterdir()) == []


def test_numbers_that_are_not_finite_become_null(tmp_path: Path) -> None:
    write_record(tmp_path / "record.json", make(status="diverged", training={"final_train_loss": float("nan")}))
    assert "NaN" not in (tmp_path / "record.json").read_text()
    assert read_record(tmp_path).training.final_train_loss is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "is not JSON"),
        ("", "is not JSON"),
        ("[]", "holds a list"),
        ("{}", "schema_version None"),
        ('{"schema_version": 3}', "schema_version 3"),
        ('{"schema_version": true}', "schema_version True"),
        ('{"schema_version": 0}', "schema_version 0"),
        ('{"schema_version": 2}', "track is missing"),
    ],
)
def test_files_that_are_no_record_are_refused_by_name(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "record.json").write_text(text)
    with pytest.raises(ValueError, match=expected) as caught:
        read_record(tmp_path)
    assert str(tmp_path / "record.json") in str(caught.value) and "\n" not in str(caught.value)


def test_missing_records_and_cut_records_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no record at"):
        read_record(tmp_path)
    write_record(tmp_path / "record.json", make())
    whole = (tmp_path / "record.json").read_bytes()
    for cut in range(0, len(whole) - 2, 37):
        (tmp_path / "record.json").write_bytes(whole[:cut])
        with pytest.raises(ValueError, match="is not JSON"):
            read_record(tmp_path)


def test_add_copies_evidence_and_never_overwrites(tmp_path: Path, run_dir: Path) -> None:
    root = tmp_path / "records"
    folder = add_record(run_dir, root)
    assert folder == root / "golf" / "2026-01-31_baseline_seed7"
    assert sorted(p.name for p in folder.iterdir()) == ["config.yaml", "metrics.jsonl", "record.json", "train.log"]
    assert read_record(folder) == read_record(run_dir)
    before = (folder / "record.json").read_bytes()
    with pytest.raises(ValueError, match="never overwritten: give another --slug"):
        add_record(run_dir, root)
    assert (folder / "record.json").read_bytes() == before
    assert add_record(run_dir, root, "again").name == "2026-01-31_again"
    assert [path for path, _ in iter_records(root)] == [root / "golf" / "2026-01-31_again", folder]


def test_large_evidence_is_left_out(tmp_path: Path, run_dir: Path) -> None:
    (run_dir / "metrics.jsonl").write_bytes(b"x" * (store.MAX_EVIDENCE_BYTES + 1))
    (run_dir / "train.log").write_bytes(b"x" * store.MAX_EVIDENCE_BYTES)
    assert sorted(p.name for p in add_record(run_dir, tmp_path / "r").iterdir()) == [
        "config.yaml",
        "record.json",
        "train.log",
    ]


def test_a_slug_that_begins_with_the_date_has_it_once(tmp_path: Path, run_dir: Path) -> None:
    assert add_record(run_dir, tmp_path / "records", "2026-01-31_Thing").name == "2026-01-31_Thing"
    assert add_record(run_dir, tmp_path / "records", "2026-01-30_Thing").name == "2026-01-31_2026-01-30_Thing"


@pytest.mark.parametrize("slug", ["", "../escape", "a/b", ".hidden", "a b"])
def test_slugs_that_leave_the_folder_are_refused(tmp_path: Path, run_dir: Path, slug: str) -> None:
    with pytest.raises(ValueError, match="--slug"):
        add_record(run_dir, tmp_path / "records", slug)
    assert not (tmp_path / "records").exists()


def test_a_run_in_use_is_refused(tmp_path: Path, run_dir: Path) -> None:
    with (
        RunFolder.open(run_dir, resume=True, kind="golf"),
        pytest.raises(ValueError, match=f"in use by process {os.getpid()}"),
    ):
        add_record(run_dir, tmp_path / "records")


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_adding_is_all_or_nothing(tmp_path: Path, run_dir: Path, monkeypatch, error: BaseException) -> None:
    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(type(error)):
        add_record(run_dir, tmp_path / "records")
    assert list((tmp_path / "records" / "golf").iterdir()) == [] and list(iter_records(tmp_path / "records")) == []


def test_a_damaged_record_is_not_passed_over(tmp_path: Path, run_dir: Path) -> None:
    folder = add_record(run_dir, tmp_path / "records")
    for text in ("{", "[" * 200_000, '{"seed": ' + "9" * 5000 + "}"):
        (folder / "record.json").write_text(text)
        with pytest.raises(ValueError, match="is not JSON"):
            list(iter_records(tmp_path / "records"))
    assert list(iter_records(tmp_path / "nowhere")) == []


def test_a_record_of_another_artifact_is_not_added(tmp_path: Path, run_dir: Path) -> None:
    stated = hashlib.sha256(b"x" * 100).hexdigest()
    write_record(run_dir / "record.json", make(artifact={"sha256": stated}))
    assert read_record(add_record(run_dir, tmp_path / "records", "whole")).artifact.sha256 == stated
    (run_dir / "artifact.bpb").write_bytes(b"y" * 100)
    with pytest.raises(ValueError, match=r"artifact\.bpb has sha256 .* and the record beside it is of .*: put back"):
        add_record(run_dir, tmp_path / "records", "other")
    (run_dir / "artifact.bpb").unlink()  # a record may travel without its artifact
    add_record(run_dir, tmp_path / "records", "alone")
    assert [path.name for path, _ in iter_records(tmp_path / "records")] == ["2026-01-31_alone", "2026-01-31_whole"]


# -- randopt ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def searched_dir(tmp_path: Path, answers_part: dict) -> Path:
    """The folder of a randopt run: its journal holds the selected members and six others."""
    members = {m["index"]: (m["seed"], m["sigma"], m["train_reward"]) for m in answers_part["selection"]["members"]}
    rows = [{"phase": "base_train", "index": -1, "seed": None, "sigma": None, "reward": 0.5}]
    for index in range(8):
        seed, sigma, reward = members.get(index, (100 + index, 2e-3, 0.1))
        rows.append({"phase": "search", "index": index, "seed": seed, "sigma": sigma, "reward": reward})
    with RunFolder.open(tmp_path / "search", resume=False, kind="randopt") as folder:
        for name in ("config.yaml", "run.log", "train.log"):
            folder.write_atomic(name, "x\n")
        lines = [json.dumps({"journal": 1, "identity": {}}), *map(json.dumps, rows)]
        folder.write_atomic("journal.jsonl", "\n".join(lines) + "\n")
        write_record(folder.path / "record.json", make(track="randopt", scores=[], randopt=answers_part))
    return tmp_path / "search"


def test_a_search_is_added_with_its_journal(tmp_path: Path, searched_dir: Path) -> None:
    folder = add_record(searched_dir, tmp_path / "records")
    assert folder.parent.name == "randopt"
    assert sorted(p.name for p in folder.iterdir()) == ["config.yaml", "journal.jsonl", "record.json", "run.log"]
    assert read_record(folder).randopt == read_record(searched_dir).randopt


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('"reward": 0.7', '"reward": 0.71', "does not hold the member of rank 1"),
        ('"seed": 12', '"seed": 13', "does not hold the member of rank 2"),
        ('"index": 3', '"index": 9', "does not hold the member of rank 1"),
        ('"phase": "search", "index": 5', '"phase": "test", "index": 5', "holds 7 seeds and the record beside it is of 8"),
        ('"phase": "search", "index": 5', 'phase', "line 8 is not JSON"),
    ],
)
def test_a_record_of_another_journal_is_not_added(tmp_path: Path, searched_dir: Path, old: str, new: str, expected: str) -> None:
    path = searched_dir / "journal.jsonl"
    assert path.read_text().count(old) == 1
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ValueError, match=expected):
        add_record(searched_dir, tmp_path / "records")
    assert not (tmp_path / "records").exists()
    path.unlink()  # a record may travel without its journal
    assert not (add_record(searched_dir, tmp_path / "records") / "journal.jsonl").exists()


def test_a_crashed_search_is_added_too(tmp_path: Path, searched_dir: Path) -> None:
    write_record(searched_dir / "record.json", make(track="randopt", scores=[], status="crashed", error="boom"))
    assert read_record(add_record(searched_dir, tmp_path / "records")).status == "crashed"
