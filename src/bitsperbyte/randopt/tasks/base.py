"""What a task is: questions in two disjoint sets, a prompt for each, and a judgement of any answer text.

A task states `version`: it changes whenever a prompt, the extraction or the grading changes, and two results compare only where
name, version and data hash are equal.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol


@dataclass(frozen=True)
class Item:
    """One question. `id` is unique within its task and stable ("gsm8k/test/17"); `answer` is the reference answer as the data has it
    (empty for a document of the likelihood task, whose text is in `text`)."""

    id: str
    question: str
    answer: str
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Grade:
    """Judgement of one answer text. `answer`: what was extracted, None where nothing was, and then it does not vote; `vote`: the
    canonical form it votes under (equal answers may still differ here; `Task.equivalent` decides); `reward`: what the search maximises;
    `correct`: whether the answer is right, on which accuracies count."""

    answer: str | None
    vote: str | None
    reward: float
    correct: bool


class Task(Protocol):
    name: ClassVar[str]
    version: ClassVar[str]
    kind: ClassVar[Literal["answers", "likelihood"]]
    needs_processes: ClassVar[bool]  # grading waits for worker processes, which the task starts when needed and ends in `close()`
    default_max_new_tokens: ClassVar[int]
    stop: tuple[str, ...]

    def items(self) -> tuple[list[Item], list[Item]]:
        """(train, test), disjoint by question text. ValueError where more are asked for than there are, or the data is damaged."""
        ...

    def prompt(self, item: Item) -> list[dict[str, str]]:
        """Messages {"role", "content"} that put the question to a model."""
        ...

    def grade(self, item: Item, text: str) -> Grade:
        """Judge one answer text. Never raises for what a model wrote."""
        ...

    def equivalent(self, a: str, b: str) -> bool:
        """Whether two votes mean the same answer; an equivalence relation as far as the task can make it one."""
        ...

    def describe(self) -> dict[str, Any]:
        """name, version, kind, data (where from), train_sha256, test_sha256, num_train, num_test and the task's own settings."""
        ...


def items_sha256(items: Sequence[Item]) -> str:
    """sha256 over ids, questions and answers in order: what says that two runs had the same questions."""
    digest = hashlib.sha256()
    for item in items:
        digest.update(json.dumps([item.id, item.question, item.answer], ensure_ascii=False).encode() + b"\n")
    return digest.hexdigest()


def check_disjoint(train: Sequence[Item], test: Sequence[Item]) -> None:
    """ValueError where a question stands in both sets, or twice in one id space: a test on trained questions proves nothing."""
    ids = [item.id for item in (*train, *test)]
    if len(set(ids)) != len(ids):
        twice = next(name for name in ids if ids.count(name) > 1)
        raise ValueError(f"the item {twice!r} stands twice: each question needs an id of its own")
    shared = {" ".join(item.question.split()) for item in train} & {" ".join(item.question.split()) for item in test}
    if shared:
        raise ValueError(f"{len(shared)} questions are in the train set and in the test set, e.g. {min(shared)[:80]!r}: remove them "
                         "from one of the two")
