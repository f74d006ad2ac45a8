"""MATH-500: the split, the levels, and answers that other scorers lose."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitsperbyte.randopt.config import TaskSection
from bitsperbyte.randopt.tasks.base import Item
from bitsperbyte.randopt.tasks.grading import Grader
from bitsperbyte.randopt.tasks.math500 import Math500, final_expression, open_task

HALF = Item("x", "?", "\\frac{1}{2}", {"level": 5})


@pytest.fixture(scope="module")
def task(shared_dir: Path) -> Iterator[Math500]:
    task = open_task(TaskSection(name="math500", data=str(shared_dir / "data/math500"), levels=[4, 5], num_train=64, num_test=192))
    yield task
    task.close()


def test_levels_4_and_5_in_64_and_192_apart(task: Math500) -> None:
    train, test = task.items()
    assert (len(train), len(test)) == (64, 192)
    assert {item.extra["level"] for item in (*train, *test)} == {4, 5}
    assert not {item.question for item in train} & {item.question for item in test}


def test_the_test_set_is_drawn_first_and_by_the_seed(task: Math500) -> None:
    data = task.section.data
    fewer = open_task(TaskSection(name="math500", data=f"{data}/test.jsonl", levels=[5, 4], num_train=5, num_test=192)).items()
    assert fewer[1] == task.items()[1] and fewer[0] == task.items()[0][:5]
    other = open_task(TaskSection(name="math500", data=data, levels=[4, 5], num_train=64, num_test=192, seed=1)).items()
    assert other[1] != task.items()[1]


def test_more_than_there_are_says_how_many_there_are(task: Math500) -> None:
    with pytest.raises(ValueError, match="asks for 263 questions, and .* at levels 4, 5 has 262"):
        open_task(TaskSection(name="math500", data=task.section.data, levels=[4, 5], num_train=71, num_test=192)).items()
    with pytest.raises(ValueError, match="has 500"):
        open_task(TaskSection(name="math500", data=task.section.data, num_train=309, num_test=192)).items()
    for levels in ([], [0], [4, 6]):
        with pytest.raises(ValueError, match="must name levels from 1 to 5"):
            open_task(TaskSection(name="math500", data=task.section.data, levels=levels))


@pytest.mark.parametrize("text", [
    "\\boxed{\\frac{1}{2}}", "\\boxed{\\frac12}", "\\boxed{1/2}", "\\boxed{0.5}", "#### 1/2", "#### 0.5.",
    "The answer is $\\frac{1}{2}$.", "\\fbox{.50}", "\\boxed{3}, no, \\boxed{\\dfrac{1}{2}}",
    "\\boxed{\\frac{1}{2}}" + " and that is all there is to say" * 40, "\\boxed{x = \\frac{1}{2}}", "\\boxed{\\frac{2}{4}}",
    "\\boxed{2^{-1}}", "\\boxed{\\sin(\\frac{\\pi}{6})}"])
def test_what_a_person_would_accept(task: Math500, text: str) -> None:
    grade = task.grade(HALF, text)
    assert grade.correct is True and grade.reward == 1.0 and grade.vote is not None


@pytest.mark.parametrize("text", ["\\boxed{2}", "\\boxed{12}", "\\boxed{1,2}", "\\boxed{\\frac{2}{1}}", "\\boxed{\\pm\\frac12}",
                                  "\\boxed{\\frac{1}{2}\\pi}", "\\boxed{\\frac12} or \\boxed{2}"])
def test_the_same_digits_are_not_the_same_answer(task: Math500, text: str) -> None:
    grade = task.grade(HALF, text)
    assert grade.correct is False and grade.reward == 0.0 and grade.vote is not None


@given(st.text() | st.lists(st.sampled_from([*"0123xy{}\\$#= \n", "\\boxed{", "####", "\\frac", "answer is "])).map("".join))
def test_any_text_has_an_answer_or_none(text: str) -> None:
    answer, vote = final_expression(text)
    assert (answer is None) == (vote is None) and vote != ""


def test_a_text_without_an_answer_does_not_vote(task: Math500) -> None:
    for text in ("", "I do not know", "\\boxed{", "\\boxed{}", "\\boxed{" + "x" * 600 + "}"):
        assert task.grade(HALF, text).vote is None


def test_the_solutions_of_the_data_set_are_graded_right_in_the_background(task: Math500, shared_dir: Path) -> None:
    lines = [json.loads(line) for line in (shared_dir / "data/math500/test.jsonl").read_text(encoding="utf-8").splitlines()]
    solutions = {line["problem"]: line["solution"] for line in lines}
    items = task.items()[1][:96]
    with Grader(task, num_workers=2) as grader:
        grades = grader.submit(items, [solutions[item.question] for item in items]).result(200)
    assert all(grade.correct for grade in grades), [item.id for item, grade in zip(items, grades, strict=True) if not grade.correct]
