"""Sums for tiny models: `12?7=`, where the answer wanted is 19.

A model for it is a generalist torn between two tasks: it learned from `training_documents`, in which the answer is the sum or the
difference with equal chance, so about half of its answers are right before any search. The corpus holds every question, also those of
the test set; what the search selects for is which of the two answers to give, and that is learned from the train questions alone.
"""

import itertools
import re
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from bitsperbyte.randopt.config import TaskSection
from bitsperbyte.randopt.tasks.base import Grade, Item, items_sha256
from bitsperbyte.randopt.tasks.rows import enough, generator, shuffled

NUM_VALUES = 50  # numbers 0..49, so 2,500 questions


class Arithmetic:
    name: ClassVar[str] = "arithmetic"
    version: ClassVar[str] = "1"
    kind: ClassVar[Literal["answers", "likelihood"]] = "answers"
    needs_processes: ClassVar[bool] = False
    default_max_new_tokens: ClassVar[int] = 4
    stop: tuple[str, ...] = ("\n",)

    def __init__(self, section: TaskSection) -> None:
        self.section = section
        enough(section.num_train + section.num_test, NUM_VALUES**2, "arithmetic", "task.num_train + task.num_test")

    def items(self) -> tuple[list[Item], list[Item]]:
        """Train, then test, along one shuffle of all questions."""
        order = shuffled(NUM_VALUES**2, self.section.seed, "questions")
        s = self.section
        return ([_item(i, "train") for i in order[: s.num_train]],
                [_item(i, "test") for i in order[s.num_train : s.num_train + s.num_test]])

    def prompt(self, item: Item) -> list[dict[str, str]]:
        return [{"role": "user", "content": item.question}]

    def grade(self, item: Item, text: str) -> Grade:
        """The whole text must be one number, in at most 9 plain digits."""
        text = text.strip()
        if not re.fullmatch(r"-?[0-9]{1,9}", text):
            return Grade(None, None, 0.0, False)
        vote = str(int(text))
        correct = vote == item.answer
        return Grade(text, vote, float(correct), correct)

    def equivalent(self, a: str, b: str) -> bool:
        return a == b

    def describe(self) -> dict[str, Any]:
        train, test = self.items()
        return {"name": self.name, "version": self.version, "kind": self.kind, "data": f"generated from seed {self.section.seed}",
                "train_sha256": items_sha256(train), "test_sha256": items_sha256(test), "num_train": len(train), "num_test": len(test)}


def open_task(section: TaskSection) -> Arithmetic:
    return Arithmetic(section)


def training_documents(num: int, seed: int) -> Iterator[str]:
    """`num` documents `a?b=c` and a newline, c the sum or the difference with equal chance; the same for the same seed."""
    rng = generator(seed, "documents")
    for begin in itertools.count(0, 10_000):
        size = min(10_000, num - begin)
        if size <= 0:
            return
        draws = rng.integers(0, [NUM_VALUES, NUM_VALUES, 2], (size, 3)).tolist()
        yield from (f"{question(a, b)}{a - b if is_difference else a + b}\n" for a, b, is_difference in draws)


def question(a: int, b: int) -> str:
    return f"{a}?{b}="


def _item(number: int, split: str) -> Item:
    a, b = divmod(number, NUM_VALUES)
    return Item(f"arithmetic/{split}/{a}?{b}", question(a, b), str(a + b))

