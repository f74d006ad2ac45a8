import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitsperbyte.randopt.config import TaskSection
from bitsperbyte.randopt.tasks.arithmetic import open_task, training_documents


def test_questions_are_distinct_and_their_answers_are_sums() -> None:
    train, test = open_task(TaskSection(name="arithmetic", num_train=256, num_test=2244)).items()
    assert len({item.question for item in (*train, *test)}) == 2500
    for item in (*train, *test):
        a, b = item.question.removesuffix("=").split("?")
        assert item.answer == str(int(a) + int(b))


def test_more_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="2,501 questions, and arithmetic has 2,500"):
        open_task(TaskSection(name="arithmetic", num_train=257, num_test=2244))


def test_documents_are_sums_or_differences_half_and_half() -> None:
    documents = list(training_documents(20_500, seed=3))
    assert len(documents) == 20_500 and documents == list(training_documents(20_500, seed=3))
    assert documents != list(training_documents(20_500, seed=4))
    assert list(itertools.islice(training_documents(50, 3), 9)) == documents[:9]
    sums = 0
    for document in documents:
        question, _, answer = document.removesuffix("\n").partition("=")
        a, b = map(int, question.split("?"))
        assert int(answer) in (a + b, a - b)
        sums += int(answer) == a + b and b != 0
    assert 0.47 < sums / len(documents) < 0.51  # of 20,500: 0.49 expected, 0.0035 standard error


@given(st.text(max_size=12))
def test_only_a_whole_number_votes(text: str) -> None:
    task = open_task(TaskSection(name="arithmetic", num_train=1, num_test=2))
    item = task.items()[0][0]
    grade = task.grade(item, text)
    assert grade.correct is (grade.vote == item.answer) and grade.reward == float(grade.correct)
    assert task.grade(item, f" {item.answer}\n").correct and task.grade(item, f"{item.answer}9").vote != item.answer
    assert not task.grade(item, f"{item.answer} or so").correct
