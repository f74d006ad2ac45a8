import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from bitsperbyte.metric.bpb import Score
from bitsperbyte.records.schema import ArtifactPart, Record, ScoreRow

BARE = {"track": "golf", "name": "baseline", "status": "crashed", "created_utc": "2026-01-31T12:00:00+00:00"}


def row(nats: float = 500.0, num_bytes: int = 1000, num_tokens: int = 400, **changes) -> dict:
    score = Score(nats, num_bytes, num_tokens).to_dict()
    return {
        "label": "artifact",
        "text": "val",
        "split_sha256": "ab" * 32,
        "window": 1024,
        "documents": "across",
        **score,
        **changes,
    }


def test_a_crashed_run_with_nothing_measured_is_a_record() -> None:
    record = Record(**BARE, error="OutOfMemory")
    assert record.training.num_steps is None and record.artifact is None and record.scores == []
    assert Record.model_validate_json(record.model_dump_json()) == record
    assert record.date == "2026-01-31"


def test_unknown_fields_survive_at_every_level() -> None:
    data = {
        **BARE,
        "mood": "good",
        "data": {"shards": 3},
        "training": {"stopped_by": "max_steps"},
        "artifact": {"tensors": [{"name": "w"}]},
        "scores": [row(per_document="scores.npz")],
    }
    again = json.loads(Record.model_validate(data).model_dump_json())
    assert again["mood"] == "good" and again["data"]["shards"] == 3 and again["training"]["stopped_by"] == "max_steps"
    assert again["artifact"]["tensors"] == [{"name": "w"}] and again["scores"][0]["per_document"] == "scores.npz"


@given(st.floats(1e-3, 1e12), st.integers(1, 10**12), st.integers(1, 10**12))
def test_scores_as_the_metric_gives_them_are_accepted_through_json(
    nats: float, num_bytes: int, num_tokens: int
) -> None:
    made = ScoreRow(**row(nats, num_bytes, num_tokens))
    assert ScoreRow.model_validate_json(made.model_dump_json()) == made


@pytest.mark.parametrize("name", ["bpb", "nats_per_token", "bytes_per_token", "nats", "num_bytes", "num_tokens"])
@pytest.mark.parametrize("factor", [1 + 1e-6, 0.999, 2.0])
def test_a_changed_figure_is_refused(name: str, factor: float) -> None:
    edited = row(5e8, 10**9, 4 * 10**8)
    edited[name] = type(edited[name])(edited[name] * factor)
    with pytest.raises(ValidationError, match="edited or damaged"):
        ScoreRow(**edited)


@pytest.mark.parametrize(
    "change", [{"nats": math.nan}, {"bpb": math.inf}, {"num_bytes": 0}, {"window": 0}, {"documents": "both"}]
)
def test_scores_no_text_can_have_are_refused(change: dict) -> None:
    with pytest.raises(ValidationError):
        ScoreRow(**{**row(), **change})


@pytest.mark.parametrize(
    "change",
    [
        {"status": "fine"},
        {"track": "chess"},
        {"created_utc": "yesterday"},
        {"created_utc": "2026-01-31T12:00:00"},
        {"schema_version": 2},
        {"name": ""},
    ],
)
def test_wrong_fields_are_refused(change: dict) -> None:
    with pytest.raises(ValidationError):
        Record(**{**BARE, **change})


def test_assignment_is_validated_and_dicts_become_parts() -> None:
    record = Record(**BARE)
    record.training = {"num_steps": 3, "extra": 1}
    record.artifact = {"code_bytes": 1, "weight_bytes": 2, "total_bytes": 3, "cap_bytes": 2, "margin_bytes": -1}
    record.scores.append(ScoreRow(**row()))
    assert record.training.num_steps == 3 and record.artifact.margin_bytes == -1
    assert (
        record.score("artifact").bpb == pytest.approx(500 / 1000 * math.log2(math.e)) and record.score("other") is None
    )
    with pytest.raises(ValidationError):
        record.status = "excellent"
    assert Record(**BARE).training.num_steps is None  # parts are not shared between records


@pytest.mark.parametrize("change", [{"total_bytes": 4}, {"margin_bytes": 0}])
def test_a_ledger_that_does_not_add_up_is_refused(change: dict) -> None:
    sums = {"code_bytes": 1, "weight_bytes": 2, "total_bytes": 3, "cap_bytes": 10, "margin_bytes": 7}
    ArtifactPart(**sums)
    with pytest.raises(ValidationError, match="is not"):
        ArtifactPart(**{**sums, **change})
