import json
from pathlib import Path

import pytest

from bitsperbyte.__main__ import guarded, run_command
from bitsperbyte.records.schema import Record
from bitsperbyte.records.store import write_record


@pytest.fixture
def bpb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    monkeypatch.chdir(tmp_path)

    def bpb(*arguments: str) -> tuple[int, str, str]:
        code = guarded(lambda: run_command(arguments))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return bpb


def make_run(path: Path, **changes) -> None:
    score = {
        "label": "artifact",
        "text": "val",
        "window": 8,
        "documents": "across",
        "nats": 0.0,
        "num_bytes": 5,
        "num_tokens": 2,
        "bpb": 0.0,
        "nats_per_token": 0.0,
        "bytes_per_token": 2.5,
    }
    path.mkdir()
    record = Record(
        **{
            "track": "golf",
            "name": "tiny",
            "status": "finished",
            "created_utc": "2026-01-31T12:00:00+00:00",
            "seed": 1,
            "scores": [score],
            **changes,
        }
    )
    write_record(path / "record.json", record)


def test_a_run_becomes_a_row_of_the_leaderboard(bpb, tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    assert bpb("records", "render", "--check")[0] == 2  # there is no RECORDS.md yet
    assert bpb("records", "render") == (0, "wrote RECORDS.md\n", "")
    assert bpb("records", "render", "--check") == (0, "RECORDS.md is current\n", "")
    code, out, _ = bpb("records", "add", "run")
    assert code == 0 and "records/golf/2026-01-31_tiny_seed1" in out
    code, out, err = bpb("records", "render", "--check")
    assert (code, out) == (2, "") and "run `bpb records render`" in err
    assert bpb("records", "render")[0] == 0
    assert "[tiny](records/golf/2026-01-31_tiny_seed1/)" in (tmp_path / "RECORDS.md").read_text()
    (tmp_path / "RECORDS.md").write_text((tmp_path / "RECORDS.md").read_text() + "edited by hand\n")
    assert bpb("records", "render", "--check")[0] == 2


def test_list_and_show(bpb, tmp_path: Path) -> None:
    make_run(tmp_path / "run", unknown={"kept": True})
    make_run(tmp_path / "dead", status="crashed", scores=[])
    assert bpb("records", "add", "run")[0] == 0 and bpb("records", "add", "dead", "--slug", "dead")[0] == 0
    code, out, _ = bpb("records", "list")
    assert code == 0 and out.splitlines() == [
        "records/golf/2026-01-31_dead  crashed  no score  no artifact",
        "records/golf/2026-01-31_tiny_seed1  finished  0.0000 bpb (2.500 bytes/token)  no artifact",
    ]
    make_run(tmp_path / "search", track="randopt", status="crashed", scores=[])
    assert bpb("records", "add", "search")[0] == 0
    assert bpb("records", "list")[1].splitlines()[2:] == ["records/randopt/2026-01-31_tiny_seed1  crashed  no result"]
    code, out, _ = bpb("records", "show", "run")
    assert code == 0 and json.loads(out)["unknown"] == {"kept": True}


def test_mistakes_are_one_line(bpb, tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    assert bpb("records", "add", "run")[0] == 0
    for arguments, expected in [
        (("add", "run"), "never overwritten"),
        (("show", "nowhere"), "there is no record"),
        (("add", "."), "no record"),
    ]:
        code, out, err = bpb("records", *arguments)
        assert (code, out) == (2, "") and expected in err and err.count("\n") == 1


def test_a_published_run_is_imported_added_listed_and_rendered(bpb, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "train.log").write_text(
        "seed:7\nstep:1/2 train_loss:2.5 train_time:3ms step_avg:3.00ms\nval_bpb (int4 roundtrip): 2.28\n"
        "final_int8_zlib_roundtrip val_loss:2.0727 val_bpb:1.2244 eval_time:1401ms\n")
    code, out, err = bpb("records", "import", "theirs", "--state", "window=1024", "--state", "stride=none")
    assert (code, err) == (0, "") and out.startswith("imported/theirs: final_int8_zlib_roundtrip 1.2244 bpb\n")
    assert "contradicts itself: val_bpb (int4 roundtrip): 2.28" in out
    assert bpb("records", "import", "theirs")[0] == 2
    assert bpb("records", "import", "theirs", "--out", "b", "--state", "window=x")[0] == 2 and not (tmp_path / "b").exists()
    assert bpb("records", "add", "imported/theirs")[0] == 0
    code, out, _ = bpb("records", "list")
    assert code == 0 and out.rstrip().endswith("imported  final_int8_zlib_roundtrip 1.2244 bpb as published")
    assert bpb("records", "render")[0] == 0 and "Golf: published by others" in (tmp_path / "RECORDS.md").read_text()
    code, out, _ = bpb("records", "show", "imported/theirs")
    assert code == 0 and json.loads(out)["imported"]["stated"] == {"window": 1024, "stride": None}
