"""GSM8K: what a person would accept as the answer is accepted; the faults of other scorers each have a case."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitsperbyte.randopt.config import TaskSection
from bitsperbyte.randopt.tasks.gsm8k import extract, open_task


def written(folder: Path, train: list[str], test: list[str]) -> str:
    for split, answers in (("train", train), ("test", test)):
        rows = [{"question": f"{split} question {i}?", "answer": f"Because.\n#### {answer}"} for i, answer in enumerate(answers)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


@pytest.mark.parametrize("text", [
    "#### 1234", "#### 1,234.", "#### $1,234", "#### \\$1234", "#### 1234.00", "####1234", "#### **1234**", "the answer is 1234.",
    "so we get \\boxed{1234}", "\\boxed{1,234}", "first #### 7\nno:\n#### 1234", "#### 1234 dollars", "#### 1234\n" + "and so on. " * 100,
    "It is 1,234", "Answer: $1,234.00.", "1234 = 1234",
])
def test_what_a_person_would_accept(text: str, tmp_path: Path) -> None:
    task = open_task(TaskSection(name="gsm8k", data=written(tmp_path, ["1,234"], ["5", "6"]), num_train=1, num_test=2))
    grade = task.grade(task.items()[0][0], text)
    assert grade.correct and grade.vote == "1234" and grade.reward == 1.0


@pytest.mark.parametrize("text", ["", "no idea", "####", "#### none\n"])
def test_no_answer_does_not_vote(text: str) -> None:
    assert extract(text) is None


def test_zero_is_an_answer() -> None:
    assert extract("there were 7, now #### 0") == "0"


@pytest.mark.parametrize("text", ["#### 1235", "#### 123.4", "the answer is 12, not 34", "#### -1234"])
def test_another_number_is_wrong(text: str) -> None:
    assert extract(text) not in ("1234", None)


@given(st.text(max_size=200))
def test_any_text_is_judged(text: str) -> None:
    assert extract(text) is None or isinstance(extract(text), str)


def test_the_real_data(shared_dir: Path) -> None:
    task = open_task(TaskSection(name="gsm8k", data=str(shared_dir / "gsm8k"), num_train=7473, num_test=1319))
    train, test = task.items()
    assert (len(train), len(test)) == (7473, 1319)
    rows = [json.loads(line) for line in (shared_dir / "gsm8k" / "test.jsonl").read_text().splitlines()]
    assert all(task.grade(item, row["answer"]).correct for item, row in zip(test, rows, strict=True))
    assert task.prompt(test[0])[-1]["content"].startswith(rows[0]["question"])


def test_more_than_there_are_and_damaged_data_are_refused(tmp_path: Path) -> None:
    data = written(tmp_path, ["1"], ["2", "3"])
    with pytest.raises(ValueError, match="task.num_test is 9, and GSM8K's test split here holds 2"):
        open_task(TaskSection(name="gsm8k", data=data, num_train=1, num_test=9))
    (tmp_path / "train.jsonl").write_text('{"question": "q", "answer": "no mark here at all"}\n')
    with pytest.raises(ValueError, match="question 0 of GSM8K's train split"):
        open_task(TaskSection(name="gsm8k", data=data, num_train=1, num_test=2))
    with pytest.raises(ValueError, match="there is no .*train.jsonl"):
        open_task(TaskSection(name="gsm8k", data=str(tmp_path / "none"), num_train=1, num_test=2))


def test_a_question_in_both_splits_is_refused(tmp_path: Path) -> None:
    data = written(tmp_path, ["1"], ["2", "3"])
    text = (tmp_path / "train.jsonl").read_text()
    (tmp_path / "test.jsonl").write_text(text + (tmp_path / "test.jsonl").read_text())
    with pytest.raises(ValueError, match="in the train set and in the test set"):
        open_task(TaskSection(name="gsm8k", data=data, num_train=1, num_test=2))
