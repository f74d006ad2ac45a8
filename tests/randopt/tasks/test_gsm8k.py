"""GSM8K: what a person would accept as the answer is accepted; the faults of other scorers each have a case."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitsperbyte.randopt.config import TaskSection
from bitsperbyte.randopt.tasks.base import Item
from bitsperbyte.randopt.tasks.gsm8k import Gsm8k, open_task
from bitsperbyte.text import hub

ITEM = Item("x", "How many?", "1234")


def rows(split: str, answers: list[str]) -> list[dict[str, str]]:
    return [{"question": f"{split} question {i}?", "answer": f"Because.\n#### {answer}"} for i, answer in enumerate(answers)]


def written(folder: Path, train: list[str], test: list[str]) -> str:
    for split, answers in (("train", train), ("test", test)):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(split, answers)))
    return str(folder)


@pytest.fixture
def task() -> Gsm8k:
    return open_task(TaskSection(name="gsm8k", num_train=1, num_test=2))


@pytest.mark.parametrize("text", [
    "#### 1234", "#### 1,234.", "#### $1,234", "#### \\$1234", "#### 1234.00", "####1234", "#### **1234**", "the answer is 1234.",
    "so we get \\boxed{1234}", "\\boxed{1,234}", "first #### 7\nno:\n#### 1234", "#### 1234 dollars",
    "#### 1234\n" + "and so on. " * 100,
    "It is 1,234", "Answer: $1,234.00.", "1234 = 1234", "\\boxed{\\$1{,}234}", "#### 1000 + 234 = 1234",
])
def test_what_a_person_would_accept(text: str, task: Gsm8k) -> None:
    grade = task.grade(ITEM, text)
    assert grade.correct and grade.vote == "1234" and grade.reward == 1.0


@pytest.mark.parametrize("text", ["", "no idea", "####", "#### none\n"])
def test_no_answer_does_not_vote(text: str, task: Gsm8k) -> None:
    grade = task.grade(ITEM, text)
    assert (grade.answer, grade.vote, grade.reward, grade.correct) == (None, None, 0.0, False)


@pytest.mark.parametrize(("text", "vote"), [("#### 1235", "1235"), ("#### 1234.5", "2469/2"), ("1234, not 34", "34"),
                                            ("#### -1234", "-1234"), ("now #### 0", "0")])
def test_another_number_votes_and_is_wrong(text: str, vote: str, task: Gsm8k) -> None:
    grade = task.grade(ITEM, text)
    assert (grade.vote, grade.correct) == (vote, False)


@given(st.text(max_size=200))
def test_any_text_is_judged(text: str) -> None:
    grade = open_task(TaskSection(name="gsm8k")).grade(ITEM, text)
    assert grade.correct is (grade.vote == "1234") and grade.reward == float(grade.correct)


def test_the_real_data(shared_dir: Path) -> None:
    folder = shared_dir / "data" / "gsm8k"
    task = open_task(TaskSection(name="gsm8k", data=str(folder), num_train=7473, num_test=1319))
    train, test = task.items()
    assert (len(train), len(test)) == (7473, 1319)
    lines = [json.loads(line) for line in (folder / "test.jsonl").read_text(encoding="utf-8").splitlines()]
    assert all(task.grade(item, line["answer"]).correct for item, line in zip(test, lines, strict=True))
    assert task.prompt(test[0])[-1]["content"].startswith(lines[0]["question"])
    shorter = open_task(TaskSection(name="gsm8k", data=str(folder), num_train=5, num_test=7))
    assert shorter.items() == (train[:5], test[:7])


def test_more_than_there_are_and_damaged_data_are_refused(tmp_path: Path) -> None:
    data = written(tmp_path, ["1"], ["2", "3"])
    with pytest.raises(ValueError, match="task.num_test asks for 9 questions, and .*test.jsonl has 2: ask for fewer"):
        open_task(TaskSection(name="gsm8k", data=data, num_train=1, num_test=9)).items()
    (tmp_path / "train.jsonl").write_text('{"question": "q", "answer": "no mark here at all"}\n')
    with pytest.raises(ValueError, match="train.jsonl:1: the answer does not end in"):
        open_task(TaskSection(name="gsm8k", data=data, num_train=1, num_test=2)).items()
    (tmp_path / "train.jsonl").unlink()
    with pytest.raises(ValueError, match="there is no file .*train.jsonl"):
        open_task(TaskSection(name="gsm8k", data=data, num_train=1, num_test=2)).items()
    with pytest.raises(ValueError, match="is not a folder"):
        open_task(TaskSection(name="gsm8k", data=str(tmp_path / "none"), num_train=1, num_test=2))


def test_a_question_in_both_splits_is_refused(tmp_path: Path) -> None:
    data = written(tmp_path, ["1"], ["2", "3"])
    text = (tmp_path / "train.jsonl").read_text()
    (tmp_path / "test.jsonl").write_text(text + (tmp_path / "test.jsonl").read_text())
    with pytest.raises(ValueError, match="in the train set and in the test set"):
        open_task(TaskSection(name="gsm8k", data=data, num_train=1, num_test=2)).items()


def test_the_hubs_files_are_pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = "c" * 40
    for split, answers in (("train", ["1", "2"]), ("test", ["3", "4"])):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows(split, answers)), tmp_path / f"{split}-0.parquet")
    files = [hub.HubFile(f"main/{split}-0.parquet", 1, None) for split in ("test", "train")]
    monkeypatch.setattr(hub, "resolve_revision", lambda repo, revision: commit)
    monkeypatch.setattr(hub, "list_files", lambda repo, at, folder: files if (repo, at, folder) == ("openai/gsm8k", commit,
        "main") else [])
    monkeypatch.setattr(hub, "fetch", lambda repo, at, file: (tmp_path / Path(file.path).name, f"hash of {file.path}"))
    task = open_task(TaskSection(name="gsm8k", num_train=2, num_test=2))
    assert [item.answer for items in task.items() for item in items] == ["1", "2", "3", "4"]
    described = task.describe()
    assert [(source["commit"], source["sha256"]) for source in described["files"]] == [
        (commit, "hash of main/train-0.parquet"), (commit, "hash of main/test-0.parquet")]


def test_an_offline_machine_gets_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ValueError, match="127.0.0.1:9"):
        open_task(TaskSection(name="gsm8k", num_train=1, num_test=2)).items()
