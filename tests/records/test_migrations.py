"""Records of earlier versions, as they were written, read by this one."""

import json
from pathlib import Path

import pytest

from bitsperbyte.records.migrations import MIGRATIONS, migrate
from bitsperbyte.records.schema import SCHEMA_VERSION
from bitsperbyte.records.store import read_record, write_record

REPO = Path(__file__).parents[2]
# What version 1 wrote, frozen: never changed with the schema. `laps` is a field that no version knows.
V1 = """{"schema_version": 1, "track": "golf", "name": "tiny", "status": "finished", "created_utc": "2026-11-29T10:00:00+00:00",
"command": "bpb golf train tiny.yaml", "config": {"name": "tiny"}, "config_sha256": "aa", "provenance": {"commit": "abc", "laps": 3},
"seed": 1, "data": {"source": "embedded", "train_sha256": null, "val_sha256": "bb", "tokenizer_sha256": null, "tokenizer_name": "byte260",
"vocab_size": 260}, "training": {"num_steps": 6, "num_tokens": 384, "batch_tokens": 64, "num_parameters": 7892, "step_ms_p50": 5.0,
"step_ms_p95": 6.0, "train_s": 1.5, "budget_s": null, "charged_lost_s": 0.0, "lost_steps": 0, "num_resumes": 0, "peak_memory_bytes": null,
"final_train_loss": 3.3, "warmdown": null}, "artifact": {"file": "artifact.bpb", "sha256": "cc", "scheme": "int8", "codec": "zlib",
"code_bytes": 100, "weight_bytes": 900, "total_bytes": 1000, "cap_bytes": 16000000, "margin_bytes": 15999000, "payload_bytes": 950,
"bits_per_weight": 0.9}, "scores": [{"label": "artifact", "text": "validation", "split_sha256": "bb", "window": 16, "stride": null,
"documents": "across", "drop_tail": false, "nats": 1386.2943611198906, "num_bytes": 500, "num_tokens": 500, "bpb": 4.0,
"nats_per_token": 2.772588722239781, "bytes_per_token": 1.0, "seconds": 0.1}], "randopt": null, "phases_s": {"train": 1.5}, "error": null,
"notes": null, "laps": {"deep": [1, 2]}}"""  # fmt: skip


def test_a_record_of_version_1_keeps_every_figure(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(V1)
    record = read_record(path)
    assert record.schema_version == SCHEMA_VERSION
    assert record.scores[0].bpb == 4.0 and record.scores[0].per_position is None and record.imported is None
    write_record(path, record)
    before, after = json.loads(V1), json.loads(path.read_text())

    def without(made: dict, like: dict) -> dict:
        return {key: without(value, like[key]) if isinstance(value, dict) else value for key, value in made.items() if key in like}

    assert {**without(after, before), "schema_version": 1, "scores": before["scores"]} == before, "unknown fields are kept as well"
    assert without(after["scores"][0], before["scores"][0]) == before["scores"][0]
    assert read_record(path) == record


@pytest.mark.parametrize("folder", sorted(p.parent.relative_to(REPO).as_posix() for p in (REPO / "records").glob("*/*/record.json")))
def test_every_record_of_the_repository_is_read(folder: str) -> None:
    stated = json.loads((REPO / folder / "record.json").read_text(encoding="utf-8"))
    record = read_record(REPO / folder)
    assert record.schema_version == SCHEMA_VERSION and [row.bpb for row in record.scores] == [row["bpb"] for row in stated["scores"]]


def test_there_is_one_named_step_from_each_version_to_the_next() -> None:
    assert sorted(MIGRATIONS) == list(range(1, SCHEMA_VERSION))
    names = [step.__name__ for step in MIGRATIONS.values()]
    assert len(set(names)) == len(names) and "<lambda>" not in names


@pytest.mark.parametrize("version", [None, 0, SCHEMA_VERSION + 1, "1", True, 1.0])
def test_another_version_is_refused(version: object, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"reads 1 to {SCHEMA_VERSION}: use the one that wrote it"):
        migrate({"schema_version": version})
    path = tmp_path / "record.json"
    path.write_text(json.dumps({**json.loads(V1), "schema_version": version}))
    with pytest.raises(ValueError, match=r"record\.json has schema_version"):
        read_record(path)


def test_a_step_changes_nothing_in_place() -> None:
    before = json.loads(V1)
    migrate(before)
    assert before == json.loads(V1)
