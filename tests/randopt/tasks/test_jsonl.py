"""A user's own questions: how answers compare, how the file is split, and what is said of a damaged file."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitsperbyte.randopt.config import TaskSection
from bitsperbyte.randopt.tasks.base import Item
from bitsperbyte.randopt.tasks.jsonl import Jsonl, open_task, plain_text

REPO = Path(__file__).resolve().parents[3]
EXAMPLE = REPO / "docs" / "examples" / "questions.jsonl"


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def questions(num: int, name: str = "q") -> list[dict[str, Any]]:
    return [{"question": f"{name} {i}?", "answer": i} for i in range(num)]


def refused(data: str, words: str, **settings: Any) -> None:
    with pytest.raises(ValueError, match=words):
        open_task(TaskSection(name="jsonl", data=data, **{"num_train": 1, "num_test": 2, **settings})).items()


@pytest.fixture
def math() -> Iterator[Jsonl]:
    task = open_task(TaskSection(name="jsonl", data=str(EXAMPLE), answers="math"))
    yield task
    task.close()


@pytest.mark.parametrize("answers", ["text", "number", "math"])
def test_the_example_is_a_file_to_run(answers: str) -> None:
    task = open_task(TaskSection(name="jsonl", data=str(EXAMPLE), num_train=4, num_test=8, answers=answers))
    train, test = task.items()
    assert len({item.question for item in (*train, *test)}) == 12
    for item in train:
        assert task.grade(item, f"So it is\n#### {item.answer}").correct
    assert task.needs_processes is (answers == "math")


@pytest.mark.parametrize(("text", "correct"), [("#### canberra.", True), ("It is big.\n#### **Canberra**", True),
                                               ("The answer is Canberra.", True), ("\\boxed{Canberra}", True),
                                               ("Canberra", True), ("#### Sydney\n#### Canberra", True), ("#### Sydney", False),
                                               ("It is not Canberra", False)])
def test_texts_compare_without_case_and_full_stop(text: str, correct: bool) -> None:
    task = open_task(TaskSection(name="jsonl", data=str(EXAMPLE)))
    grade = task.grade(Item("x", "?", plain_text("Canberra")), text)
    assert grade.correct is correct and grade.vote == ("canberra" if correct else grade.vote) is not None


def test_numbers_and_mathematics_compare_by_value(math: Jsonl) -> None:
    number = open_task(TaskSection(name="jsonl", data=str(EXAMPLE), answers="number"))
    assert number.grade(Item("x", "?", "1234"), "#### $1,234.00").correct
    assert number.grade(Item("x", "?", "1234"), "no").vote is None
    assert math.grade(Item("x", "?", "\\frac{\\sqrt{3}}{3}"), "\\boxed{1/\\sqrt3}").correct
    assert not math.grade(Item("x", "?", "(2,5]"), "\\boxed{[2,5)}").correct


@given(st.text(), st.sampled_from(["text", "number", "math"]))
def test_any_text_is_judged(text: str, answers: str) -> None:
    task = open_task(TaskSection(name="jsonl", data=str(EXAMPLE), answers=answers))
    grade = task.grade(Item("x", "?", "no such answer"), text)
    assert grade.correct is False or grade.vote == "no such answer"


def test_one_file_is_split_by_the_seed_and_the_test_set_comes_first(tmp_path: Path) -> None:
    data = write(tmp_path / "a.jsonl", questions(30))
    splits = [open_task(TaskSection(name="jsonl", data=data, num_train=num, num_test=10, seed=seed)).items() for num,
              seed in ((20, 0), (5, 0), (20, 1))]
    assert splits[0][1] == splits[1][1] != splits[2][1] and splits[1][0] == splits[0][0][:5]
    assert {item.question for item in (*splits[0][0], *splits[0][1])} == {f"q {i}?" for i in range(30)}
    refused(data, "asks for 31 questions, and .*a.jsonl has 30", num_train=21, num_test=10)


def test_a_file_of_its_own_for_the_test(tmp_path: Path) -> None:
    data, test_data = write(tmp_path / "a.jsonl", questions(3)), write(tmp_path / "b.jsonl", questions(4, "t"))
    train, test = open_task(TaskSection(name="jsonl", data=data, test_data=test_data, num_train=2, num_test=3)).items()
    assert [item.question for item in train] == ["q 0?", "q 1?"] and [item.question for item in test] == ["t 0?", "t 1?", "t 2?"]
    assert len({item.id for item in (*train, *test)}) == 5
    refused(data, "task.num_test asks for 5 questions, and .*b.jsonl has 4", test_data=test_data, num_test=5)
    refused(data, r"a.jsonl:1: the question 'q 0\?' stands already at .*a.jsonl:1", test_data=data)


@pytest.mark.parametrize(("rows", "words"), [
    ([*questions(4), {"question": " q  2? ", "answer": 2}], r"a.jsonl:5: the question 'q 2\?' stands already at .*a.jsonl:3: remove one"),
    ([*questions(4), {"question": "q 2?", "answer": 7}], r"a.jsonl:5: .* at .*a.jsonl:3 with another answer \('2' and '7'\)"),
    ([*questions(2), {"question": "x"}], "a.jsonl:3: no field 'answer'; the line has 'question'"),
    ([*questions(2), {"question": "x", "answer": ""}], "a.jsonl:3: the field 'answer' is empty"),
    ([*questions(2), {"question": "x", "answer": "..."}], "a.jsonl:3: nothing is left of the answer"),
    ([*questions(2), {"question": "x", "answer": ["y"]}], "a.jsonl:3: .* not list"),
    ([*questions(2), "x"], "a.jsonl:3: this line is not a JSON object"), ([], "holds no question")])
def test_a_damaged_file_is_refused_with_its_line(tmp_path: Path, rows: list[Any], words: str) -> None:
    refused(write(tmp_path / "a.jsonl", rows), words)


def test_settings_that_do_not_fit_the_file(tmp_path: Path) -> None:
    data = write(tmp_path / "a.jsonl", [{"ask": f"q{i}", "say": "yes"} for i in range(5)])
    refused(data, "no field 'question'; the line has 'ask', 'say'")
    refused(data, "the answer 'yes' is not a number; set task.answers", question_field="ask", answer_field="say", answers="number")
    refused(str(tmp_path / "none.jsonl"), "there is no file")
    with pytest.raises(ValueError, match="task.data is missing"):
        open_task(TaskSection(name="jsonl"))
    assert len(open_task(TaskSection(name="jsonl", data=data, question_field="ask", answer_field="say", num_train=2,
                                     num_test=3)).items()[1]) == 3
