"""Countdown: combine given numbers by + - * / to reach a target, each number exactly once.

Formulas are read by a parser of our own over fractions, never evaluated as text. A vote is the value of a formula that uses exactly the
numbers. Since the target stands in the prompt, a verifier is legal at test time: `verifier` says so of one answer, and the share of
questions where any member's answer passes it is reported apart from the vote.
"""

import random
import re
from fractions import Fraction
from typing import Any, ClassVar, Literal

from bitsperbyte.randopt.config import TaskSection
from bitsperbyte.randopt.tasks.base import Grade, Item, check_disjoint, items_sha256
from bitsperbyte.randopt.tasks.boxed import last_boxed

MAX_FORMULA_CHARS = 200
MAX_DEPTH = 30
MAX_TARGET = 999
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_TOKEN = re.compile(r"\s*(\d+|[-+*/()])")
_SIGNS = str.maketrans({"×": "*", "x": "*", "X": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "[": "(", "]": ")"})


class Countdown:
    name: ClassVar[str] = "countdown"
    version: ClassVar[str] = "1"
    kind: ClassVar[Literal["answers", "likelihood"]] = "answers"
    needs_processes: ClassVar[bool] = False
    default_max_new_tokens: ClassVar[int] = 1024
    stop: tuple[str, ...] = ()

    def __init__(self, section: TaskSection) -> None:
        self.section = section
        num_train, num_test = section.num_train, section.num_test
        questions = _questions(num_train + num_test, section.seed)
        made = [Item(f"countdown/{'train' if i < num_train else 'test'}/{i}", _put(numbers, target), str(target),
                     {"numbers": numbers, "target": target}) for i, (numbers, target) in enumerate(questions)]
        self._train, self._test = made[:num_train], made[num_train:]
        check_disjoint(self._train, self._test)

    def items(self) -> tuple[list[Item], list[Item]]:
        return self._train, self._test

    def prompt(self, item: Item) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.section.system}] if self.section.system else []
        return [*system, {"role": "user", "content": item.question}]

    def grade(self, item: Item, text: str) -> Grade:
        """Valid is a formula of exactly the numbers; right is one whose value is the target. Anything else does not vote."""
        answer = extract(text)
        value = None if answer is None else formula_value(answer, item.extra["numbers"])
        if value is None:
            return Grade(answer, None, 0.0, False)
        correct = value == item.extra["target"]
        return Grade(answer, str(value), float(correct), correct)

    def equivalent(self, a: str, b: str) -> bool:
        return a == b  # both are a fraction in lowest terms

    def verifier(self, item: Item, vote: str) -> bool:
        """Whether a vote, the value of a valid formula, is the target: known to whoever has read the question."""
        return Fraction(vote) == item.extra["target"]

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "version": self.version, "kind": self.kind, "data": f"generated from seed {self.section.seed}",
                "train_sha256": items_sha256(self._train), "test_sha256": items_sha256(self._test), "num_train": len(self._train),
                "num_test": len(self._test), "system": self.section.system}


def open_task(section: TaskSection) -> Countdown:
    return Countdown(section)


def extract(text: str) -> str | None:
    """The last <answer>...</answer>, else the last \\boxed{}, else the last line that is not empty; None where there is nothing."""
    if tagged := _ANSWER.findall(text):
        return tagged[-1].strip() or None
    if boxed := last_boxed(text):
        return boxed.strip() or None
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else None


def formula_value(text: str, numbers: list[int]) -> Fraction | None:
    """The value of a formula that uses exactly `numbers`, or of the one side of an equation that does; None for anything else."""
    text = text.strip().strip("$`").rstrip(".").replace("\\times", "*").replace("\\cdot", "*").replace("\\div", "/").translate(_SIGNS)
    sides = text.split("=")
    if len(text) > MAX_FORMULA_CHARS or len(sides) > 2:
        return None
    values = [value for value, used in map(parse, sides) if value is not None and sorted(used) == sorted(numbers)]
    if len(values) != 1 or any(parse(side)[0] is None for side in sides):
        return None
    return values[0]


def parse(text: str) -> tuple[Fraction | None, list[int]]:
    """(value, the whole numbers used) of a formula of + - * / and parentheses; (None, []) where it is none, or divides by zero."""
    tokens: list[str] = []
    position = 0
    text = text.rstrip()
    while position < len(text):
        found = _TOKEN.match(text, position)
        if found is None:
            return None, []
        tokens.append(found[1])
        position = found.end()
    parser = _Parser(tokens)
    try:
        value = parser.total(0)
    except (_NotAFormula, ZeroDivisionError):
        return None, []
    return (value, parser.used) if parser.place == len(tokens) else (None, [])


class _NotAFormula(Exception):
    pass


class _Parser:
    """Recursive descent: a total of products of factors; a factor is a number, a total in parentheses, or either with a minus."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens, self.place, self.used = tokens, 0, list[int]()

    def total(self, depth: int) -> Fraction:
        value = self.product(depth)
        while (sign := self.peek()) in ("+", "-"):
            self.place += 1
            other = self.product(depth)
            value = value + other if sign == "+" else value - other
        return value

    def product(self, depth: int) -> Fraction:
        value = self.factor(depth)
        while (sign := self.peek()) in ("*", "/"):
            self.place += 1
            other = self.factor(depth)
            value = value * other if sign == "*" else value / other
        return value

    def factor(self, depth: int) -> Fraction:
        token = self.peek()
        if token is None or depth > MAX_DEPTH:
            raise _NotAFormula
        self.place += 1
        if token == "-":
            return -self.factor(depth + 1)
        if token == "(":
            value = self.total(depth + 1)
            if self.peek() != ")":
                raise _NotAFormula
            self.place += 1
            return value
        if not token.isdigit():
            raise _NotAFormula
        self.used.append(int(token))
        return Fraction(self.used[-1])

    def peek(self) -> str | None:
        return self.tokens[self.place] if self.place < len(self.tokens) else None


def _put(numbers: list[int], target: int) -> str:
    listed = ", ".join(map(str, numbers))
    return (f"You have the numbers {listed}. Write a formula with the value {target} that takes each of them exactly once and "
            "otherwise only +, -, *, / and parentheses. Reason first, then give the formula alone between <answer> and </answer>.")


def _questions(num: int, seed: int) -> list[tuple[list[int], int]]:
    """`num` different questions, each with a solution by construction; a longer list begins with a shorter one."""
    rng = random.Random(f"countdown {seed}")
    found: dict[tuple[tuple[int, ...], int], None] = {}
    while len(found) < num:
        numbers = [rng.randint(1, 99) for _ in range(rng.choice((3, 4)))]
        target = _reachable(numbers, rng)
        if target is not None:
            found[tuple(sorted(numbers)), target] = None
    return [(list(numbers), target) for numbers, target in found]


def _reachable(numbers: list[int], rng: random.Random) -> int | None:
    """A whole number within 1..999 that random operations make of all the numbers, or None where this try made none."""
    values = [Fraction(n) for n in numbers]
    while len(values) > 1:
        a = values.pop(rng.randrange(len(values)))
        b = values.pop(rng.randrange(len(values)))
        sign = rng.choice("++--**/")
        if sign == "/" and b == 0:
            return None
        values.append(a + b if sign == "+" else a - b if sign == "-" else a * b if sign == "*" else a / b)
    value = values[0]
    return int(value) if value.denominator == 1 and 1 <= value <= MAX_TARGET and value not in numbers else None
