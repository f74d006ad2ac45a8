"""A user's own questions and answers, one JSON object a line:

    {"question": "Which planet is closest to the Sun?", "answer": "Mercury"}
    {"question": "How many days has a leap year?", "answer": "366"}

`task.question_field` and `task.answer_field` name other fields. `task.answers` says how answers compare: `text` (case, spaces and a
trailing full stop do not matter), `number` (42 is 42.00), or `math` (by mathematical equivalence). docs/examples/questions.jsonl is an
example. Without `task.test_data` the file is split by `task.seed`.
"""

import random
import re
from pathlib import Path
from typing import Any, ClassVar, Literal

from bitsperbyte.randopt.config import TaskSection
from bitsperbyte.randopt.tasks import equivalence
from bitsperbyte.randopt.tasks.base import Grade, Item, check_disjoint, items_sha256
from bitsperbyte.randopt.tasks.boxed import last_boxed
from bitsperbyte.randopt.tasks.numbers import canonical, last_number, number
from bitsperbyte.text.corpora import iter_rows

_MARKED = re.compile(r"####\s*(.+)")
_SAID = re.compile(r"answer(?:\s+is)?\s*[:=]?\s*(.+)", re.IGNORECASE)


class Jsonl:
    name: ClassVar[str] = "jsonl"
    version: ClassVar[str] = "1"
    kind: ClassVar[Literal["answers", "likelihood"]] = "answers"
    default_max_new_tokens: ClassVar[int] = 256
    stop: tuple[str, ...] = ()

    def __init__(self, section: TaskSection) -> None:
        if section.data is None:
            raise ValueError("task.data must name a file of questions and answers, one JSON object a line")
        self.section = section
        self.needs_processes = section.answers == "math"
        rows = _read(Path(section.data), section)
        if section.test_data is None:
            wanted = section.num_train + section.num_test
            _require(wanted, len(rows), f"task.num_train + task.num_test is {wanted}", section.data)
            random.Random(f"split {section.seed}").shuffle(rows)
            train, test = rows[: section.num_train], rows[section.num_train : wanted]
        else:
            test = _read(Path(section.test_data), section)
            _require(section.num_train, len(rows), f"task.num_train is {section.num_train}", section.data)
            _require(section.num_test, len(test), f"task.num_test is {section.num_test}", section.test_data)
            train, test = rows[: section.num_train], test[: section.num_test]
        self._train = [Item(f"jsonl/train/{where}", question, answer) for where, question, answer in train]
        self._test = [Item(f"jsonl/test/{where}", question, answer) for where, question, answer in test]
        check_disjoint(self._train, self._test)

    def items(self) -> tuple[list[Item], list[Item]]:
        return self._train, self._test

    def prompt(self, item: Item) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.section.system}] if self.section.system else []
        closing = "Think it through, then give only the answer on a last line that begins with ####."
        return [*system, {"role": "user", "content": f"{item.question}\n\n{closing}"}]

    def grade(self, item: Item, text: str) -> Grade:
        answer = self._extract(text)
        vote = None if answer is None else self._vote(answer)
        if vote is None:
            return Grade(answer, None, 0.0, False)
        correct = self.equivalent(vote, self._vote(item.answer))
        return Grade(answer, vote, float(correct), correct)

    def equivalent(self, a: str, b: str) -> bool:
        return a == b or (self.section.answers == "math" and equivalence.equivalent(a, b))

    def describe(self) -> dict[str, Any]:
        s = self.section
        return {"name": self.name, "version": self.version, "kind": self.kind, "data": s.data, "test_data": s.test_data,
                "answers": s.answers, "system": s.system, "train_sha256": items_sha256(self._train),
                "test_sha256": items_sha256(self._test), "num_train": len(self._train), "num_test": len(self._test)}

    def _extract(self, text: str) -> str | None:
        """What follows the last ####, else the last \\boxed{}, else what follows the last "answer is", else the last number or line."""
        if marked := _MARKED.findall(text):
            return marked[-1].strip() or None
        if boxed := last_boxed(text):
            return boxed.strip() or None
        if self.section.answers == "number":
            found = last_number(text)
            return None if found is None else canonical(found)
        if said := _SAID.findall(text):
            return said[-1].strip() or None
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return lines[-1] if lines else None

    def _vote(self, answer: str) -> str | None:
        if self.section.answers == "number":
            found = number(answer)
            return None if found is None else canonical(found)
        if self.section.answers == "math":
            return equivalence.canonical_text(answer) or None
        return " ".join(answer.casefold().split()).strip(" .!*\"'") or None


def open_task(section: TaskSection) -> Jsonl:
    return Jsonl(section)


def _require(wanted: int, found: int, what: str, source: str) -> None:
    if wanted > found:
        raise ValueError(f"{what}, and {source} holds {found} questions: ask for fewer, or give more data")


def _read(path: Path, section: TaskSection) -> list[tuple[str, str, str]]:
    """(line number, question, answer) of each row; ValueError names the line of what is missing, empty or there twice."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}: task.data must name a .jsonl file of questions and answers")
    rows: list[tuple[str, str, str]] = []
    seen: dict[str, tuple[str, str]] = {}
    for where, row in iter_rows(path):
        question, answer = (_text(row, field, where) for field in (section.question_field, section.answer_field))
        key = " ".join(question.split())
        if key in seen:
            first, other = seen[key]
            says = "with the same answer" if other == answer else "with another answer"
            raise ValueError(f"{where}: this question stands in line {first} too, {says}: remove one of them")
        number_of_line = where.rpartition(":")[2]
        if section.answers == "number" and number(answer) is None:
            raise ValueError(f"{where}: the answer {answer[:40]!r} is no number, and task.answers is number: correct it, or take text")
        seen[key] = number_of_line, answer
        rows.append((number_of_line, question, answer))
    return rows


def _text(row: dict[str, Any], field: str, where: str) -> str:
    value = row.get(field)
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where}: the field {field!r} must hold text; it {'is missing' if field not in row else 'does not'} (other "
                         "fields: set task.question_field, task.answer_field)")
    return value.strip()
