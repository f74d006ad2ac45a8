r"""Competition mathematics: the 500 problems of MATH-500, or some of their levels 1..5.

`task.data` is its test.jsonl ({"problem", "answer", "level", ...}) or a folder that holds it; without it the hub's
HuggingFaceH4/MATH-500 is fetched, and the commit stands in the record. All problems are in one file, so the test set is drawn first, with
`task.seed`, and the train set from what is left: for one seed and one set of levels the test set does not depend on the size of the
train set. The answer is what the last \boxed{} holds, else what stands behind the last ####, else what the text says the answer is. Answers
are equal by meaning (equivalence.py).
"""

from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

from bitsperbyte.randopt.config import TaskSection
from bitsperbyte.randopt.tasks.base import Grade, Item, check_disjoint, items_sha256
from bitsperbyte.randopt.tasks.equivalence import Equivalence
from bitsperbyte.randopt.tasks.extraction import boxed, marked, said
from bitsperbyte.randopt.tasks.latex import canonical
from bitsperbyte.randopt.tasks.rows import enough, hub_file, local_file, read_rows, shuffled, text_of

REPO, FILE = "HuggingFaceH4/MATH-500", "test.jsonl"
INSTRUCTION = "Reason step by step, and put the final answer alone inside \\boxed{}."


class Math500:
    name: ClassVar[str] = "math500"
    version: ClassVar[str] = "1"
    kind: ClassVar[Literal["answers", "likelihood"]] = "answers"
    needs_processes: ClassVar[bool] = True
    default_max_new_tokens: ClassVar[int] = 2048
    stop: tuple[str, ...] = ()

    def __init__(self, section: TaskSection) -> None:
        self.section = section
        self.equivalence = Equivalence()
        if section.levels is not None and not (section.levels and set(section.levels) <= {1, 2, 3, 4, 5}):
            raise ValueError(f"task.levels {section.levels} must name levels from 1 to 5, e.g. [4, 5]")

    @cached_property
    def _split(self) -> tuple[list[Item], list[Item], dict[str, str]]:
        s = self.section
        if s.data is None:
            path, source = hub_file(REPO, None, FILE)
        else:
            path = Path(s.data) / FILE if Path(s.data).is_dir() else Path(s.data)
            source = local_file(path) if path.is_file() else {}
        levels = sorted(set(s.levels)) if s.levels is not None else None
        items = [Item(f"math500/{i}", text_of(row, "problem", where), text_of(row, "answer", where), {"level": row.get("level")})
                 for i, (where, row) in enumerate(read_rows(path)) if levels is None or row.get("level") in levels]
        what = f"{path}" + (f" at levels {', '.join(map(str, levels))}" if levels else "")
        enough(s.num_train + s.num_test, len(items), what, "task.num_train + task.num_test")
        order = [items[i] for i in shuffled(len(items), s.seed, "math500")]
        test, train = order[: s.num_test], order[s.num_test : s.num_test + s.num_train]
        check_disjoint(train, test)
        return train, test, source

    def items(self) -> tuple[list[Item], list[Item]]:
        train, test, _ = self._split
        return train, test

    def prompt(self, item: Item) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.section.system}] if self.section.system else []
        return [*system, {"role": "user", "content": f"{item.question.strip()}\n\n{INSTRUCTION}"}]

    def grade(self, item: Item, text: str) -> Grade:
        """1 for an answer equal to the reference, else 0; a text that names no answer does not vote."""
        answer, vote = final_expression(text)
        if vote is None:
            return Grade(None, None, 0.0, False)
        correct = self.equivalent(vote, item.answer)
        return Grade(answer, vote, float(correct), correct)

    def equivalent(self, a: str, b: str) -> bool:
        return self.equivalence.equal(a, b)

    def close(self) -> None:
        """End the processes that compare answers."""
        self.equivalence.close()

    def describe(self) -> dict[str, Any]:
        train, test, source = self._split
        return {"name": self.name, "version": self.version, "kind": self.kind, "data": self.section.data or f"hub: {REPO}",
                "files": [source], "levels": self.section.levels, "seed": self.section.seed, "train_sha256": items_sha256(train),
                "test_sha256": items_sha256(test), "num_train": len(train), "num_test": len(test), "system": self.section.system}


def open_task(section: TaskSection) -> Math500:
    return Math500(section)


def final_expression(text: str) -> tuple[str | None, str | None]:
    """(answer as written, its canonical form) of the expression that a text ends with, (None, None) where it names none."""
    for answer in (*boxed(text), *marked(text), said(text)):
        if answer and (vote := canonical(answer)):
            return answer, vote
    return None, None
