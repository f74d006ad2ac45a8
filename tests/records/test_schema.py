import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from bitsperbyte.metric.bpb import Score
from bitsperbyte.records.schema import AccuracyPart, ArtifactPart, LossPart, RandOptPart, Record, ScoreRow

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
        {"schema_version": 1},
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


# -- randopt ----------------------------------------------------------------------------------------------------------


def test_a_randopt_part_round_trips_with_what_it_does_not_know(any_part: dict) -> None:
    any_part["mood"] = {"good": True}
    any_part["ensemble"]["votes"] = "votes.npz"
    record = Record(**{**BARE, "track": "randopt", "randopt": any_part})
    again = Record.model_validate_json(record.model_dump_json())
    assert again == record and json.loads(record.model_dump_json())["randopt"]["mood"] == {"good": True}
    assert again.randopt.ensemble.model_extra["votes"] == "votes.npz"
    kind = LossPart if any_part["task"]["kind"] == "likelihood" else AccuracyPart
    assert all(type(result) is kind for result in again.randopt.results().values())


def test_assigning_a_dict_makes_a_part_and_checks_it(answers_part: dict, edited) -> None:
    record = Record(**{**BARE, "track": "randopt"})
    assert record.randopt is None
    record.randopt = answers_part
    assert record.randopt.ensemble.test.num_correct == 64
    with pytest.raises(ValidationError):
        record.randopt = edited(answers_part, "ensemble.test.num_correct", 65)


COMMON = [
    ("population.size", lambda n: n + 1),
    ("population.best_sigma", 1e-3),
    ("population.best_sigma", 5e-3),
    ("population.per_sigma.0.mean", 0.9),
    ("population.per_sigma.0.standard_error", lambda x: x / 2),
    ("population.per_sigma.1.share_above_base", 0.55),
    ("selection.top_k", 1),
    ("selection.members.1.rank", 1),
    ("selection.members.1.index", 3),
    ("selection.members.1.train_reward", 0.9),
    ("ensemble.k", 3),
    ("controls.random_k.low", lambda x: x - 1e-4),
    ("controls.random_k.high", lambda x: x - 1e-4),
    ("controls.random_k.k", None),
    ("controls.random_k.enabled", False),  # without saying why
    ("controls.best_single.test", None),
    ("tests.0.low", 9.0),
]
OF_ANSWERS = [
    ("base.test.num_correct", 51),
    ("base.test.num", 201),
    ("base.test.accuracy", lambda x: x + 1e-6),
    ("ensemble.test.low", lambda x: x + 1e-6),
    ("ensemble.test.high", 1.0),
    ("ensemble.test.num_correct", 201),
    ("secondary.0.test.accuracy", 0.99),
    ("controls.base_majority.test.accuracy", 0.99),
    ("selection.members.0.test_accuracy", 0.99),
    ("controls.random_k.accuracies.0", 0.31),
    ("controls.random_k.accuracies", []),
    ("controls.random_k.num_subsets", 4),
    ("controls.random_k.mean", lambda x: x - 1e-6),
    ("tests.0.difference", lambda x: x + 1e-6),
    ("tests.0.difference_bpb", 0.1),
    ("tests.0.p_mcnemar", lambda p: p / 2),
    ("tests.0.only_a", 21),
    ("heldout.base.nats", lambda x: x * 1.001),
    ("heldout.mixture.bpb", lambda x: x - 1e-3),
    ("heldout.random_mixture.mean_bpb", lambda x: x - 1e-6),
    ("heldout.random_mixture.num_mixtures", 3),
    ("heldout.differences.0.difference_bpb", lambda x: x - 1e-6),
]
OF_LIKELIHOOD = [
    ("base.test.bpb", lambda x: x - 1e-6),
    ("ensemble.test.num_tokens", 2001),
    ("controls.random_k.mean_bpb", lambda x: x - 1e-6),
    ("controls.random_k.scores.1.nats", lambda x: x - 1),
    ("controls.base_majority.why", None),
    ("tests.0.difference_bpb", lambda x: x - 1e-6),
]


@pytest.mark.parametrize(("dotted", "change"), COMMON)
def test_an_edited_figure_of_any_part_is_refused(any_part: dict, edited, dotted: str, change) -> None:
    RandOptPart(**any_part)
    with pytest.raises(ValidationError):
        RandOptPart(**edited(any_part, dotted, change))


@pytest.mark.parametrize(("dotted", "change"), OF_ANSWERS)
def test_an_edited_figure_of_answers_is_refused(answers_part: dict, edited, dotted: str, change) -> None:
    with pytest.raises(ValidationError):
        RandOptPart(**edited(answers_part, dotted, change))


@pytest.mark.parametrize(("dotted", "change"), OF_LIKELIHOOD)
def test_an_edited_figure_of_a_likelihood_is_refused(likelihood_part: dict, edited, dotted: str, change) -> None:
    with pytest.raises(ValidationError):
        RandOptPart(**edited(likelihood_part, dotted, change))


def test_results_of_other_questions_and_texts_are_refused(answers_part: dict, likelihood_part: dict, edited) -> None:
    other = {"num_correct": 0, "num": 100, "accuracy": 0.0, "low": 0.0, "high": AccuracyPart(**_none_of(100)).high}
    with pytest.raises(ValidationError, match="different questions or text"):
        RandOptPart(**edited(answers_part, "controls.base_majority.test", other))
    longer = Score(5000.0, 9001, 2000).to_dict()
    with pytest.raises(ValidationError, match="different questions or text"):
        RandOptPart(**edited(likelihood_part, "controls.best_single.test", longer))
    with pytest.raises(ValidationError, match="different text"):
        RandOptPart(**edited(answers_part, "heldout.best_single", longer))


def _none_of(num: int) -> dict:
    z2 = 1.959963984540054**2  # Wilson's upper end for no successes is z^2 / (n + z^2)
    return {"num_correct": 0, "num": num, "accuracy": 0.0, "low": 0.0, "high": z2 / (num + z2)}


def test_a_mixture_cannot_be_worse_than_its_mean_member(answers_part: dict, edited) -> None:
    worse = Score(5051.0, 9000, 2000).to_dict()
    made = edited(edited(answers_part, "heldout.mixture", worse), "heldout.differences", [])
    with pytest.raises(ValidationError, match="worse than its mean member"):
        RandOptPart(**made)


def test_controls_that_did_not_run_say_why(answers_part: dict, edited) -> None:
    off = {"enabled": False, "why": "turned off: controls.random_k"}
    made = answers_part
    for name in ("random_k", "base_majority", "best_single"):
        made = edited(made, f"controls.{name}", off)
    made = edited(made, "heldout.random_mixture", off)
    part = RandOptPart(**made)
    assert not part.controls.random_k.enabled and set(part.results()) == {"base", "ensemble"}


def test_a_sigma_with_one_member_has_no_spread(answers_part: dict, edited) -> None:
    one = {"sigma": 2e-3, "num": 1, "mean": 0.5, "sd": None, "standard_error": None, "share_above_base": 1.0}
    part = RandOptPart(**edited(edited(answers_part, "population.per_sigma.1", one), "population.size", 5))
    assert part.population.per_sigma[1].sd is None


# -- by position, by item, imported -----------------------------------------------------------------------------------


def positions(**change: Any) -> dict[str, Any]:
    made = row()
    half = made["num_tokens"] // 2
    mean = made["nats"] / made["num_tokens"]
    return {"edges": [0, 1, 2], "nats_per_token": [mean, None, mean], "num_tokens": [half, 0, made["num_tokens"] - half], **change}


def test_the_loss_by_position_must_add_up_to_the_score() -> None:
    good = ScoreRow(**row(per_position=positions()))
    assert ScoreRow.model_validate(good.model_dump()) == good
    for change in ({"nats_per_token": [1.0, None, 1.0]}, {"num_tokens": [1, 0, 1]}, {"edges": [0, 2, 1]}, {"edges": [0, 1]},
                   {"nats_per_token": [None, None, 1.0]}):
        with pytest.raises(ValidationError, match="position"):
            ScoreRow(**row(per_position=positions(**change)))


def test_the_answers_by_question_must_add_up_to_the_accuracies(answers_part: dict[str, Any]) -> None:
    part = answers_part

    def marks(name: str) -> str:
        return "1" * part[name]["test"]["num_correct"] + "0" * (part[name]["test"]["num"] - part[name]["test"]["num_correct"])

    good = {"base": marks("base"), "ensemble": marks("ensemble"), "another": "01" * 100}
    assert RandOptPart(**part, items={"correct": good}).items.correct == good
    for change, fault in (({"base": marks("ensemble")}, "right answers of base"), ({"base": "2" * 200}, "0 and 1"), ({"base": "01"}, "each item"),
                          ({"base": "0" * 9, "ensemble": "0" * 9, "another": "0" * 9}, "number of questions")):
        with pytest.raises(ValidationError, match=fault):
            RandOptPart(**part, items={"correct": good | change})


def test_the_nats_by_document_must_add_up_to_the_loss(likelihood_part: dict[str, Any]) -> None:
    part = likelihood_part
    base, mixture = part["base"]["test"], part["ensemble"]["test"]
    num_bytes = [base["num_bytes"] - 10, 10]
    good = {"base": [base["nats"] - 1.0, 1.0], "mixture": [mixture["nats"] - 2.0, 2.0]}
    assert RandOptPart(**part, items={"nats": good, "num_bytes": num_bytes}).items.nats == good
    for nats, sizes, fault in ((good | {"base": [1.0, 1.0]}, num_bytes, "by document of base"), (good, [1, 2], "bytes of the test documents"),
                               (good | {"mixture": [1.0]}, num_bytes, "each item")):
        with pytest.raises(ValidationError, match=fault):
            RandOptPart(**part, items={"nats": nats, "num_bytes": sizes})


def test_the_nats_by_held_out_document_must_add_up_to_the_loss(answers_part: dict[str, Any]) -> None:
    held = answers_part["heldout"]
    num_bytes = [held["base"]["num_bytes"] - 10, 10]
    good = {"base": [held["base"]["nats"] - 1.0, 1.0], "mixture": [held["mixture"]["nats"] - 2.0, 2.0]}

    def kept(nats: dict[str, list[float]], sizes: list[int]) -> RandOptPart:
        return RandOptPart(**answers_part | {"heldout": {**held, "items": {"nats": nats, "num_bytes": sizes}}})

    assert kept(good, num_bytes).heldout.items.nats == good
    for nats, sizes, fault in ((good | {"mixture": [1.0, 1.0]}, num_bytes, "by document of mixture"), (good, [1, 2], "of the held-out documents")):
        with pytest.raises(ValidationError, match=fault):
            kept(nats, sizes)


def test_an_imported_run_states_what_was_published_and_no_more() -> None:
    published = {"source": "challenge_log", "scores": [{"label": "final", "bpb": 1.2244, "digits": 4}], "unread": ["no seed"]}
    record = Record(**BARE | {"status": "imported"}, imported=published)
    assert record.imported.scores[0].window is None and Record.model_validate_json(record.model_dump_json()) == record
    with pytest.raises(ValidationError):
        Record(**BARE, imported={"source": "challenge_log", "scores": [{"label": "final", "bpb": float("nan")}]})
