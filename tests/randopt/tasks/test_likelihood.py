import json
from pathlib import Path

import pytest

from bitsperbyte.randopt.config import TaskSection
from bitsperbyte.randopt.tasks.likelihood import MAX_CHARS, open_task


def write(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return str(path)


def test_train_comes_first_and_test_after_it(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", ["one", " ", "two", "three", "four"])
    train, test = open_task(TaskSection(name="likelihood", data=source, num_train=2, num_test=2)).items()
    assert [i.question for i in train] == ["one", "two"]
    assert [i.question for i in test] == ["three", "four"]


def test_a_source_of_its_own_for_the_test(tmp_path: Path) -> None:
    section = TaskSection(name="likelihood", data=write(tmp_path / "a.jsonl", ["one", "two"]), num_train=2, num_test=2,
                          test_data=write(tmp_path / "b.jsonl", ["three", "four"]))
    task = open_task(section)
    assert [i.question for i in task.items()[1]] == ["three", "four"]
    assert task.describe()["num_test"] == 2 and task.kind == "likelihood"


def test_shared_documents_and_too_few_are_refused(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.jsonl", ["one", "two"]), write(tmp_path / "b.jsonl", ["two", "three"])
    with pytest.raises(ValueError, match="in the train set and in the test set"):
        open_task(TaskSection(name="likelihood", data=a, test_data=b, num_train=2, num_test=2))
    with pytest.raises(ValueError, match="num_test is 5, and .* holds 2 documents"):
        open_task(TaskSection(name="likelihood", data=a, test_data=b, num_train=1, num_test=5))
    with pytest.raises(ValueError, match="is 4, and .* holds 2 documents"):
        open_task(TaskSection(name="likelihood", data=a, num_train=2, num_test=2))


def test_a_book_is_cut_at_white_space(tmp_path: Path) -> None:
    words = "words and more words\n" * 2000
    source = write(tmp_path / "a.jsonl", [words, "x" * (MAX_CHARS + 5), "short", "other"])
    train, _ = open_task(TaskSection(name="likelihood", data=source, num_train=2, num_test=2)).items()
    assert MAX_CHARS - 20 < len(train[0].question) <= MAX_CHARS and words[len(train[0].question)].isspace()
    assert len(train[1].question) == MAX_CHARS


def test_embedded_documents_are_the_default() -> None:
    task = open_task(TaskSection(name="likelihood", num_train=3, num_test=2))
    assert task.describe()["data"] == "embedded" and len(task.items()[0]) == 3
