r"""A user's own questions and answers.

`task.data` is a file of JSON lines; docs/examples/questions.jsonl is an example. An answer may be a text or a number:

    {"question": "How many days has a leap year?", "answer": "366"}
    {"question": "What is the capital of Australia?", "answer": "Canberra"}

`task.question_field` and `task.answer_field` name other fields. `task.answers` says how answers are compared: `text` (letter case, spacing
and a full stop aside), `number` (exactly, however it is written) or `math` (by meaning, see equivalence.py). The prompt is the question
and a sentence on where the answer is to stand: after #### (text, number) or in \boxed{} (math). A text without that mark is read as
a person would: its last number; what it says the answer is; else its last line.

The test questions come from `task.test_data`, or the file is split: the test set is drawn first with `task.seed`, then the train set. A
question that stands twice is refused, with both lines, whether the answers agree or not: it could be trained on and tested.
"""

from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

from bitsperbyte.randopt.config import TaskSection
from bitsperbyte.randopt.tasks.base import Grade, Item, items_sha256
from bitsperbyte.randopt.tasks.equivalence import Equivalence
from bitsperbyte.randopt.tasks.extraction import boxed, last_line, marked, said
from bitsperbyte.randopt.tasks.latex import canonical
from bitsperbyte.randopt.tasks.math500 import final_expression
from bitsperbyte.randopt.tasks.numbers import final_number, number_text, parse_number
from bitsperbyte.randopt.tasks.rows import enough, local_file, read_rows, shuffled, text_of

INSTRUCTIONS = {"text": "Write the final answer alone on the last line, in the form\n#### <answer>",
                "number": "Write the final number alone on the last line, in the form\n#### <number>",
                "math": "Put the final answer alone inside \\boxed{}."}


class Jsonl:
    name: ClassVar[str] = "jsonl"
    version: ClassVar[str] = "1"
    kind: ClassVar[Literal["answers", "likelihood"]] = "answers"
    default_max_new_tokens: ClassVar[int] = 512
    stop: tuple[str, ...] = ()

    def __init__(self, section: TaskSection) -> None:
        if section.data is None:
            raise ValueError("task.data is missing: the task jsonl needs a file of JSON lines with questions and answers")
        self.section = section
        self.answers = section.answers
        self.needs_processes = section.answers == "math"
        self.equivalence = Equivalence()

    @cached_property
    def _split(self) -> tuple[list[Item], list[Item], list[dict[str, str]]]:
        s = self.section
        path = Path(s.data)
        seen: dict[str, tuple[str, str]] = {}
        items = self._read(path, "jsonl", seen)
        if s.test_data is not None:
            test = self._read(Path(s.test_data), "jsonl/test", seen)
            enough(s.num_train, len(items), str(path), "task.num_train")
            enough(s.num_test, len(test), s.test_data, "task.num_test")
            return items[: s.num_train], test[: s.num_test], [local_file(path), local_file(Path(s.test_data))]
        enough(s.num_train + s.num_test, len(items), str(path), "task.num_train + task.num_test")
        order = [items[i] for i in shuffled(len(items), s.seed, "jsonl")]
        return order[s.num_test : s.num_test + s.num_train], order[: s.num_test], [local_file(path)]

    def _read(self, path: Path, name: str, seen: dict[str, tuple[str, str]]) -> list[Item]:
        items = []
        for where, row in read_rows(path):
            question = text_of(row, self.section.question_field, where)
            answer = self._reference(text_of(row, self.section.answer_field, where), where)
            key = " ".join(question.split())
            if key in seen:
                other, other_answer = seen[key]
                but = "" if answer == other_answer else f" with another answer ({other_answer!r} and {answer!r})"
                raise ValueError(f"{where}: the question {key[:60]!r} stands already at {other}{but}: remove one of the two lines")
            seen[key] = (where, answer)
            items.append(Item(f"{name}/{where.rpartition(':')[2]}", question, answer))
        if not items:
            raise ValueError(f"{path} holds no question")
        return items

    def _reference(self, answer: str, where: str) -> str:
        """The answer as it is compared. ValueError where it cannot be what `task.answers` says."""
        if self.answers == "number":
            value = parse_number(answer)
            if value is None:
                raise ValueError(f"{where}: the answer {answer[:60]!r} is not a number; set task.answers to text or math")
            return number_text(value)
        made = canonical(answer) if self.answers == "math" else plain_text(answer)
        if not made:
            raise ValueError(f"{where}: nothing is left of the answer {answer[:60]!r} to compare with")
        return made

    def items(self) -> tuple[list[Item], list[Item]]:
        train, test, _ = self._split
        return train, test

    def prompt(self, item: Item) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.section.system}] if self.section.system else []
        return [*system, {"role": "user", "content": f"{item.question.strip()}\n\n{INSTRUCTIONS[self.answers]}"}]

    def grade(self, item: Item, text: str) -> Grade:
        """1 for the reference answer, else 0; a text that names no answer does not vote."""
        if self.answers == "number":
            value = final_number(text)
            vote = answer = None if value is None else number_text(value)
        elif self.answers == "math":
            answer, vote = final_expression(text)
        else:
            answer = next((a for a in (*marked(text), *boxed(text), said(text), last_line(text)) if a and plain_text(a)), None)
            vote = plain_text(answer) if answer else None
        if vote is None:
            return Grade(None, None, 0.0, False)
        correct = self.equivalent(vote, item.answer)
        return Grade(answer, vote, float(correct), correct)

    def equivalent(self, a: str, b: str) -> bool:
        return self.equivalence.equal(a, b) if self.answers == "math" else a == b

    def close(self) -> None:
        """End the processes that compare mathematical answers."""
        self.equivalence.close()

    def describe(self) -> dict[str, Any]:
        train, test, sources = self._split
        return {"name": self.name, "version": self.version, "kind": self.kind, "answers": self.answers,
                "data": " and ".join(source["path"] for source in sources), "files": sources, "seed": self.section.seed,
                "train_sha256": items_sha256(train), "test_sha256": items_sha256(test), "num_train": len(train), "num_test": len(test),
                "system": self.section.system}


def open_task(section: TaskSection) -> Jsonl:
    return Jsonl(section)


def plain_text(text: str) -> str:
    """Without letter case, emphasis, quotes, a final full stop and extra spaces."""
    return " ".join(text.split()).strip("*_`\"'").rstrip(".!").strip("*_`\"' ").casefold()
