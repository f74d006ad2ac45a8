"""Every task that a config may name opens and keeps the protocol."""

import typing
from pathlib import Path

import pytest

from bitsperbyte.randopt.config import TaskSection
from bitsperbyte.randopt.tasks.base import items_sha256
from bitsperbyte.randopt.tasks.registry import TASKS, open_task

REPO = Path(__file__).resolve().parents[3]


def section(name: str, shared_dir: Path) -> TaskSection:
    data = {"gsm8k": shared_dir / "data/gsm8k", "math500": shared_dir / "data/math500",
            "jsonl": REPO / "docs/examples/questions.jsonl"}
    return TaskSection(name=name, data=str(data[name]) if name in data else None, num_train=3, num_test=4, system="Be brief.")


def test_the_dict_names_what_the_config_names() -> None:
    assert set(TASKS) == set(typing.get_args(TaskSection.model_fields["name"].annotation))


@pytest.mark.parametrize("name", TASKS)
def test_a_task_describes_itself_and_gives_the_same_items_each_time(name: str, shared_dir: Path) -> None:
    task = open_task(section(name, shared_dir))
    train, test = task.items()
    assert (len(train), len(test)) == (3, 4)
    again = open_task(section(name, shared_dir))
    assert again.items() == (train, test) and again.describe() == task.describe()
    described = task.describe()
    assert described["name"] == name == task.name
    assert (described["train_sha256"], described["test_sha256"]) == (items_sha256(train), items_sha256(test))
    assert (described["num_train"], described["num_test"], described["kind"]) == (3, 4, task.kind)
    assert described["version"] and described["data"]


@pytest.mark.parametrize("name", [name for name in TASKS if name != "likelihood"])
def test_a_prompt_puts_the_question_and_never_the_answer(name: str, shared_dir: Path) -> None:
    task = open_task(section(name, shared_dir))
    for item in task.items()[0]:
        messages = task.prompt(item)
        assert messages[-1]["role"] == "user" and item.question.strip() in messages[-1]["content"]
        without = messages[-1]["content"].replace(item.question.strip(), "")
        assert not any(char.isdigit() for char in without)
        assert [m["content"] for m in messages[:-1]] in ([], ["Be brief."])
