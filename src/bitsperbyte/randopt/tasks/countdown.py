"""Make a target out of given numbers: each exactly once, with + - * / and parentheses.

The questions are generated: numbers are joined two at a time by random operations until one is left, so every target can be reached.
An answer is read by the parser below, over exact fractions; nothing is ever evaluated. It votes under the value of its formula, if
that uses exactly the numbers; a formula that does not is invalid and has no vote. `correct`, and the reward, is whether the value is the target:
nothing is added for the form (the share of answers with a vote says how many kept it).

The question states the target, so a right answer can be told from a wrong one without a reference: `verifier` does that, and what a
choice by it reaches is reported apart from the vote.
"""

import re
from collections import Counter
from fractions import Fraction
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np

from bitsperbyte.randopt.config import TaskSection
from bitsperbyte.randopt.tasks.base import Grade, Item, check_disjoint, items_sha256
from bitsperbyte.randopt.tasks.extraction import boxed, last_line, marked
from bitsperbyte.randopt.tasks.rows import enough, generator

MAX_QUESTIONS = 20_000
TARGETS = (10, 100)  # from, below
LARGEST_NUMBER = 99
MAX_FORMULA_CHARS = 300
MAX_DEPTH = 40

_TOKEN = re.compile(r"\s*([0-9]{1,9}(?![0-9.])|[-+*/()]|\\frac|[{}])")
_SIGNS = {"\\times": "*", "\\cdot": "*", "\\div": "/", "\\left": "", "\\right": "", "\\dfrac": "\\frac", "\\tfrac": "\\frac",
          "\\,": "", "\\!": "", "$": "", "×": "*", "x": "*", "X": "*", "·": "*", "⋅": "*", "∙": "*", "÷": "/", "−": "-", "–": "-",
          "[": "(", "]": ")"}
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class Countdown:
    name: ClassVar[str] = "countdown"
    version: ClassVar[str] = "1"
    kind: ClassVar[Literal["answers", "likelihood"]] = "answers"
    needs_processes: ClassVar[bool] = False
    default_max_new_tokens: ClassVar[int] = 1024
    stop: tuple[str, ...] = ()

    def __init__(self, section: TaskSection) -> None:
        self.section = section
        enough(section.num_train + section.num_test, MAX_QUESTIONS, "countdown", "task.num_train + task.num_test")

    @cached_property
    def _split(self) -> tuple[list[Item], list[Item]]:
        """Test questions and train questions come from streams of their own; the train set leaves out what the test set has."""
        s = self.section
        seen: set[tuple[tuple[int, ...], int]] = set()
        test = _draw(s.num_test, generator(s.seed, "countdown test"), "test", seen)
        train = _draw(s.num_train, generator(s.seed, "countdown train"), "train", seen)
        check_disjoint(train, test)
        return train, test

    def items(self) -> tuple[list[Item], list[Item]]:
        return self._split

    def prompt(self, item: Item) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.section.system}] if self.section.system else []
        return [*system, {"role": "user", "content": item.question}]

    def grade(self, item: Item, text: str) -> Grade:
        numbers = [int(number) for number in item.extra["numbers"]]
        answer = final_formula(text)
        value = formula_value(answer, numbers) if answer else None
        if value is None:
            return Grade(None, None, 0.0, False)
        correct = value == int(item.answer)
        return Grade(answer, str(value), float(correct), correct)

    def equivalent(self, a: str, b: str) -> bool:
        return a == b

    def verifier(self, item: Item, vote: str) -> bool:
        """Whether a vote solves the question, judged by the question alone."""
        return vote == str(item.extra["target"])

    def describe(self) -> dict[str, Any]:
        train, test = self._split
        return {"name": self.name, "version": self.version, "kind": self.kind, "data": f"generated from seed {self.section.seed}",
                "train_sha256": items_sha256(train), "test_sha256": items_sha256(test), "num_train": len(train), "num_test": len(test),
                "system": self.section.system}


def open_task(section: TaskSection) -> Countdown:
    return Countdown(section)


def final_formula(text: str) -> str | None:
    r"""The text's answer: in the last answer tags, else after the last ####, else in the last \boxed{}, else its last line. It is the answer
    also where it turns out invalid; only what has no digit (the instruction repeated) is passed over."""
    found = [answer for answer in (*reversed(_TAGGED.findall(text)), *marked(text), *boxed(text)) if re.search("[0-9]", answer)]
    line = last_line(text)
    return found[0] if found else re.sub(r"^.*\b[Aa]nswer\b[^0-9(]*", "", line) if line else None


def formula_value(answer: str, numbers: list[int]) -> Fraction | None:
    """The value of a formula that uses exactly `numbers`, None for any other text. In an equation exactly one side must do so, and the
    others must be formulas too."""
    text = answer.strip().strip("*`").strip()
    if len(text) > MAX_FORMULA_CHARS:
        return None
    for sign, plain in _SIGNS.items():
        text = text.replace(sign, plain)
    sides = [parse(side) for side in text.rstrip(".").split("=")]
    if any(side is None for side in sides):
        return None
    using = [value for value, used in sides if used == Counter(numbers)]
    return using[0] if len(using) == 1 else None


def parse(text: str) -> tuple[Fraction, Counter[int]] | None:
    """(value, how often each number is used) of a formula; None for any other text, and where it divides by zero."""
    tokens, end = [], 0
    while match := _TOKEN.match(text, end):
        tokens.append(match[1])
        end = match.end()
    if text[end:].strip() or not tokens:
        return None
    parser = _Parser(tokens)
    try:
        value = parser.sum(0)
    except (_NotAFormula, ZeroDivisionError):
        return None
    return (value, parser.used) if parser.at == len(tokens) else None


class _NotAFormula(Exception):
    pass


class _Parser:
    """Recursive descent: sum = product {+- product}; product = factor {*/ factor}; factor = -factor | number | (sum) | \\frac{sum}{sum}."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens, self.at = tokens, 0
        self.used: Counter[int] = Counter()

    def sum(self, depth: int) -> Fraction:
        value = self.product(depth)
        while sign := self._take("+", "-"):
            right = self.product(depth)
            value = value + right if sign == "+" else value - right
        return value

    def product(self, depth: int) -> Fraction:
        value = self.factor(depth)
        while sign := self._take("*", "/"):
            right = self.factor(depth)
            value = value * right if sign == "*" else value / right
        return value

    def factor(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise _NotAFormula
        if self._take("-"):
            return -self.factor(depth + 1)
        if self._take("("):
            return self._inside(")", depth)
        if self._take("\\frac"):
            top = self._group(depth)
            return top / self._group(depth)
        if self.at < len(self.tokens) and self.tokens[self.at].isdigit():
            number = int(self.tokens[self.at])
            self.at += 1
            self.used[number] += 1
            return Fraction(number)
        raise _NotAFormula

    def _group(self, depth: int) -> Fraction:
        if not self._take("{"):
            raise _NotAFormula
        return self._inside("}", depth)

    def _inside(self, closing: str, depth: int) -> Fraction:
        value = self.sum(depth + 1)
        if not self._take(closing):
            raise _NotAFormula
        return value

    def _take(self, *wanted: str) -> str | None:
        if self.at < len(self.tokens) and self.tokens[self.at] in wanted:
            self.at += 1
            return self.tokens[self.at - 1]
        return None


def _draw(num: int, rng: np.random.Generator, split: str, seen: set[tuple[tuple[int, ...], int]]) -> list[Item]:
    items: list[Item] = []
    while len(items) < num:
        numbers = rng.integers(1, LARGEST_NUMBER + 1, rng.integers(3, 5)).tolist()
        target = _reached(list(numbers), rng)
        key = (tuple(sorted(numbers)), target)
        if target is None or target in numbers or key in seen:
            continue
        seen.add(key)
        listed = ", ".join(map(str, numbers))
        question = (f"Use each of the numbers {listed} exactly once, with +, -, *, / and parentheses, to make {target}. Think step by "
                    f"step. Write the formula alone on the last line, in the form\n#### <formula>")
        items.append(Item(f"countdown/{split}/{len(items)}", question, str(target), {"numbers": numbers, "target": target}))
    return items


def _reached(values: list[int], rng: np.random.Generator) -> int | None:
    """The whole number that joining `values` at random comes to, None where it is no target."""
    while len(values) > 1:
        i, j = rng.choice(len(values), 2, replace=False).tolist()
        a, b, sign = values[i], values[j], "+-*/"[int(rng.integers(4))]
        values = [value for k, value in enumerate(values) if k not in (i, j)]
        if sign == "/" and (b == 0 or a % b):
            return None
        values.append(a + b if sign == "+" else a - b if sign == "-" else a * b if sign == "*" else a // b)
    return values[0] if TARGETS[0] <= values[0] < TARGETS[1] else None
