"""Grade-school word problems with a number as the answer.

`task.data` is a folder with train.jsonl and test.jsonl of {"question", "answer"}, where the answer ends in `#### N`; without it the
hub's openai/gsm8k is fetched, and the commit stands in the record. The questions are the first of each file, in the file's order.
The final number is read as a person reads it (numbers.py), anywhere in the text.
"""

from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

from bitsperbyte.randopt.config import TaskSection
from bitsperbyte.randopt.tasks.base import Grade, Item, check_disjoint, items_sha256
from bitsperbyte.randopt.tasks.numbers import final_number, number_text, parse_number
from bitsperbyte.randopt.tasks.rows import enough, hub_file, local_file, read_rows, text_of
from bitsperbyte.text.corpora import read_parquet

REPO, FOLDER = "openai/gsm8k", "main"
INSTRUCTION = "Work it out step by step. Write the result alone on the last line, in the form\n#### <number>"


class Gsm8k:
    name: ClassVar[str] = "gsm8k"
    version: ClassVar[str] = "1"
    kind: ClassVar[Literal["answers", "likelihood"]] = "answers"
    needs_processes: ClassVar[bool] = False
    default_max_new_tokens: ClassVar[int] = 512
    stop: tuple[str, ...] = ()

    def __init__(self, section: TaskSection) -> None:
        self.section = section
        if section.data is not None and not Path(section.data).is_dir():
            raise ValueError(f"task.data {section.data} is not a folder: name one with train.jsonl and test.jsonl, or leave it out for "
                             f"the hub's {REPO}")

    @cached_property
    def _split(self) -> tuple[list[Item], list[Item], list[dict[str, str]]]:
        train, train_source = self._read("train", self.section.num_train)
        test, test_source = self._read("test", self.section.num_test)
        check_disjoint(train, test)
        return train, test, [train_source, test_source]

    def _read(self, split: str, num: int) -> tuple[list[Item], dict[str, str]]:
        if self.section.data is None:
            path, source = hub_file(REPO, FOLDER, split)
        else:
            path = Path(self.section.data) / f"{split}.jsonl"
            source = local_file(path) if path.is_file() else {}
        if path.suffix == ".parquet":
            pairs = zip(read_parquet(path, "question"), read_parquet(path, "answer"), strict=True)
            rows = [(f"{path}:{row}", question, answer) for row, (question, answer) in enumerate(pairs, 1)]
        else:
            rows = [(where, text_of(row, "question", where), text_of(row, "answer", where)) for where, row in read_rows(path)]
        enough(num, len(rows), str(path), f"task.num_{split}")
        return [Item(f"gsm8k/{split}/{i}", question, _reference(where, answer))
                for i, (where, question, answer) in enumerate(rows[:num])], source

    def items(self) -> tuple[list[Item], list[Item]]:
        """The first questions of the train file and of the test file."""
        train, test, _ = self._split
        return train, test

    def prompt(self, item: Item) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.section.system}] if self.section.system else []
        return [*system, {"role": "user", "content": f"{item.question.strip()}\n\n{INSTRUCTION}"}]

    def grade(self, item: Item, text: str) -> Grade:
        """1 for the right number, else 0; a text without any number does not vote."""
        value = final_number(text)
        if value is None:
            return Grade(None, None, 0.0, False)
        correct = value == Fraction(item.answer)
        return Grade(number_text(value), number_text(value), float(correct), correct)

    def equivalent(self, a: str, b: str) -> bool:
        return a == b

    def describe(self) -> dict[str, Any]:
        train, test, sources = self._split
        return {"name": self.name, "version": self.version, "kind": self.kind, "data": self.section.data or f"hub: {REPO}",
                "files": sources, "train_sha256": items_sha256(train), "test_sha256": items_sha256(test), "num_train": len(train),
                "num_test": len(test), "system": self.section.system}


def open_task(section: TaskSection) -> Gsm8k:
    return Gsm8k(section)


def _reference(where: str, answer: str) -> str:
    value = parse_number(answer.rpartition("####")[2]) if "####" in answer else None
    if value is None:
        raise ValueError(f"{where}: the answer does not end in '#### ' and a number")
    return number_text(value)
