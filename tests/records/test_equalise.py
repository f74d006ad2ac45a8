import json
from typing import Any

import pytest

from bitsperbyte.records.compare import compare_golf
from bitsperbyte.records.equalise import explain
from bitsperbyte.records.sides import read_sides

from .conftest import golf_score

BOTH = ("artifact", "artifact")


def test_equal_evaluations_need_nothing(golf_runs) -> None:
    made = explain(*read_sides([golf_runs.make("a", 2.5), golf_runs.make("b", 2.4)]), BOTH)
    assert (made.differs, made.commands, made.notes) == (None, [], []) and made.compare.endswith("/b --label artifact")


@pytest.mark.parametrize(("evaluation", "options", "label"), [
    ({"stride": 64}, "--window 1024 --stride 64", "w1024_s64"), ({"window": 512}, "--window 512", "w512"),
    ({"documents": "isolated", "stride": 64}, "--window 1024 --stride 64 --isolated", "w1024_s64_isolated"),
    ({"drop_tail": True}, "--window 1024 --drop-tail", "w1024_drop_tail")])
def test_the_command_scores_b_as_a_was_scored(golf_runs, evaluation: dict[str, Any], options: str, label: str) -> None:
    a = golf_runs.make("a", 2.5, score=evaluation)
    b = golf_runs.make("b", 2.4, more=[golf_score(2.3, "taken", window=2)])
    (b / "artifact.bpb").write_bytes(b"")
    made = explain(*read_sides([a, b]), BOTH)
    assert made.commands == [f"bpb golf eval {b} {options} --label {label}"]
    assert made.compare == f"bpb records compare {a} {b} --label-a artifact --label-b {label}" and made.notes == []


def test_a_label_that_is_taken_is_not_given_away(golf_runs) -> None:
    a = golf_runs.make("a", 2.5, score={"stride": 64})
    b = golf_runs.side("b", [2.4, 2.3], more=[golf_score(2.3, "w1024_s64", window=2), golf_score(2.3, "w1024_s64_2", window=2)])
    made = explain(*read_sides([], [a], [b / "seed_1", b / "seed_2"]), BOTH)
    assert [command.rpartition(" ")[2] for command in made.commands] == ["w1024_s64_3"] * 2
    assert made.compare.startswith(f"bpb records compare --a {a} --b {b}/seed_1 --b {b}/seed_2 ") and len(made.notes) == 2
    assert "no artifact.bpb" in made.notes[0]


def test_another_text_is_named_as_it_was_given(golf_runs) -> None:
    a = golf_runs.make("a", 2.5, score={"split_sha256": "55" * 32, "text": "held out.jsonl"})
    shards = golf_runs.make("shards", 2.5, data={"val_sha256": "66" * 32}, score={"split_sha256": "66" * 32, "text": "validation split of data/web"})
    b = golf_runs.make("b", 2.4)
    assert f"{b} --text 'held out.jsonl' --window 1024" in explain(*read_sides([a, b]), BOTH).commands[0]
    assert f"{b} --data data/web --window 1024" in explain(*read_sides([shards, b]), BOTH).commands[0]
    assert f"{shards} --data data/books --window" in explain(*read_sides([b, shards]), BOTH).commands[0]


def test_the_beginning_of_a_split_cannot_be_scored_alone_so_all_are_scored_anew(golf_runs) -> None:
    a, b = golf_runs.make("a", 2.5, score={"split_sha256": "ab" * 32 + ":first-500"}), golf_runs.make("b", 2.4)
    made = explain(*read_sides([a, b]), BOTH)
    assert made.commands == [f"bpb golf eval {run} --window 1024 --label w1024" for run in (a, b)] and made.compare.endswith("--label w1024")
    assert any("eval.max_tokens" in note for note in made.notes)


def test_other_tokenizers_need_one_text(golf_runs) -> None:
    other = {"tokenizer_sha256": "ee" * 32, "val_sha256": "99" * 32}
    a = golf_runs.make("a", 2.5, score={"drop_tail": True})
    b = golf_runs.make("b", 3.4, data=other, score={"split_sha256": "99" * 32, "num_tokens": 700})
    made = explain(*read_sides([a, b]), BOTH)
    assert made.commands == [f"bpb golf eval {run} --text FILE --window 1024 --label w1024" for run in (a, b)]
    assert any("FILE stands for one text" in note for note in made.notes)
    text = {"text": "t.jsonl", "split_sha256": "77" * 32, "drop_tail": True}
    c, d = golf_runs.make("c", 2.5, score=text), golf_runs.make("d", 3.4, data=other, score=text)
    with pytest.raises(ValueError, match="another tail"):
        compare_golf(*read_sides([c, d]))
    assert explain(*read_sides([c, d]), BOTH).commands == [f"bpb golf eval {run} --text t.jsonl --window 1024 --label w1024" for run in (c, d)]


def test_an_imported_run_cannot_be_scored(golf_runs) -> None:
    a, b = golf_runs.make("a", 2.5), golf_runs.make("b", 2.4)
    record = json.loads((b / "record.json").read_text())
    (b / "record.json").write_text(json.dumps({**record, "status": "imported", "scores": [], "imported": {
        "source": "train.log", "scores": [{"label": "artifact", "bpb": 1.2}]}}))
    made = explain(*read_sides([b, a]), BOTH)
    assert "does not say the text" in made.differs and "cannot be scored here" in made.notes[0]
    assert not any(str(b) in command for command in made.commands)
    made = explain(*read_sides([b, b]), BOTH)
    assert made.commands == [] and "no run states an evaluation in full" in made.notes[-1]
