"""Countdown: formulas are parsed, never evaluated, and judged as an independent evaluator judges them."""

import ast
import itertools
import operator
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitsperbyte.randopt.config import TaskSection
from bitsperbyte.randopt.tasks.base import Item
from bitsperbyte.randopt.tasks.countdown import MAX_QUESTIONS, Countdown, final_formula, formula_value, open_task, parse

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def by_python(text: str) -> Fraction | None:
    """The value as Python's own grammar reads the formula; the reference."""

    def value(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant):
            return Fraction(node.value)
        if isinstance(node, ast.UnaryOp):
            assert isinstance(node.op, ast.USub)
            return -value(node.operand)
        assert isinstance(node, ast.BinOp)
        return OPERATORS[type(node.op)](value(node.left), value(node.right))

    try:
        return value(ast.parse(text, mode="eval").body)
    except ZeroDivisionError:
        return None


def formulas() -> st.SearchStrategy[str]:
    numbers = st.integers(0, 99).map(str)
    return st.recursive(numbers, lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*/"), inner).map(" ".join), inner.map("({})".format), inner.map("-{}".format)),
                        max_leaves=8)


def solvable(numbers: list[int], target: int) -> bool:
    """By brute force over all orders and operations."""

    def reachable(values: tuple[Fraction, ...]) -> set[Fraction]:
        if len(values) == 1:
            return set(values)
        found: set[Fraction] = set()
        for i, j in itertools.permutations(range(len(values)), 2):
            rest = tuple(v for k, v in enumerate(values) if k not in (i, j))
            a, b = values[i], values[j]
            for made in (a + b, a - b, a * b, *([a / b] if b else [])):
                found |= reachable((*rest, made))
        return found

    return Fraction(target) in reachable(tuple(map(Fraction, numbers)))


@pytest.fixture
def task() -> Countdown:
    return open_task(TaskSection(name="countdown", num_train=20, num_test=20))


@given(formulas())
def test_formulas_have_the_value_that_python_gives_them(text: str) -> None:
    found, expected = parse(text), by_python(text)
    assert (found and found[0]) == expected
    if found:
        assert sorted(found[1].elements()) == sorted(int(token) for token in "".join(c if c.isdigit() else " " for c in text).split())


@given(st.text(max_size=80))
def test_any_text_is_judged(text: str) -> None:
    item = Item("x", "", "24", {"numbers": [2, 3, 4], "target": 24})
    grade = open_task(TaskSection(name="countdown", num_train=1, num_test=2)).grade(item, text)
    assert grade.correct <= (grade.vote == "24")


@pytest.mark.parametrize("text", ["2*3*4 ** 5", "__import__('os')", "2*3*4)", "(2*3*4", "2 3 4", "2*3*4 or so", "", "+2*3*4",
                                  "2.0*3*4",
                                  "(" * 500 + "2*3*4" + ")" * 500])
def test_what_is_no_formula_does_not_vote(text: str, task: Countdown) -> None:
    grade = task.grade(Item("x", "", "24", {"numbers": [2, 3, 4], "target": 24}), f"<answer>{text}</answer>")
    assert (grade.vote, grade.correct, grade.reward) == (None, False, 0.0)


@pytest.mark.parametrize(("text", "value"), [
    ("2*3*4", 24), ("2*3*4 = 24", 24), ("24 = 2*3*4", 24), ("2 × 3 × 4", 24), ("2 \\times 3 \\times 4.", 24),
    ("(4-2)/3", Fraction(2, 3)),
    ("2 x 3 x 4", 24), ("\\frac{2 \\cdot 3}{4}", Fraction(3, 2)), ("\\left(2+3\\right)*4", 20), ("(2+4)*3 = 6*3 = 18", 18),
    ("2*3*4 = 25", 24),
    ("2*3*4 = 4*3*2", None), ("2*3", None), ("2*3*4*1", None), ("2*2*3*4", None), ("4/(2-2)*3", None),
    ("2*3*4 = twenty-four", None),
])
def test_exactly_the_numbers_on_exactly_one_side(text: str, value: Fraction | None) -> None:
    assert formula_value(text, [2, 3, 4]) == value


@pytest.mark.parametrize(("text", "formula"), [
    ("<answer>1+2</answer> no: <answer>3*4</answer>", "3*4"), ("#### 1+2\n#### 3*4", "3*4"), ("so \\boxed{3*4}", "3*4"),
    ("first\n\n 3*4 \n", "3*4"),
    ("#### 3*4\nas asked: #### <formula>", "3*4"), ("Final answer: 3*4", "3*4"), (" \n", None)])
def test_the_last_formula_counts(text: str, formula: str | None) -> None:
    assert final_formula(text) == formula


def test_an_invalid_last_answer_is_not_replaced_by_an_earlier_one(task: Countdown) -> None:
    grade = task.grade(Item("x", "", "24", {"numbers": [2, 3, 4], "target": 24}), "#### 2*3*4\nor rather\n#### 24")
    assert (grade.vote, grade.correct) == (None, False)


def test_the_reward_is_the_accuracy_and_nothing_for_the_form(task: Countdown) -> None:
    item = Item("x", "", "24", {"numbers": [2, 3, 4], "target": 24})
    assert [task.grade(item, text).reward for text in ("#### 2*3*4", "<think>a</think>\n<answer>2+3+4</answer>", "2*3*4 = 24")] == [1,
        0, 1]


def test_every_question_can_be_solved_and_none_is_there_twice(task: Countdown) -> None:
    train, test = task.items()
    assert len({(*item.extra["numbers"], item.extra["target"]) for item in (*train, *test)}) == 40
    assert all(solvable(item.extra["numbers"], item.extra["target"]) for item in (*train, *test))


def test_the_test_set_does_not_depend_on_the_train_set(task: Countdown) -> None:
    longer = open_task(TaskSection(name="countdown", num_train=60, num_test=30))
    assert longer.items()[1][:20] == task.items()[1]
    other = open_task(TaskSection(name="countdown", num_train=20, num_test=20, seed=1))
    assert {i.question for i in other.items()[0]}.isdisjoint({i.question for i in task.items()[0]})


def test_more_than_are_generated_is_refused() -> None:
    with pytest.raises(ValueError, match="20,001 questions"):
        open_task(TaskSection(name="countdown", num_train=MAX_QUESTIONS - 1, num_test=2))


def test_the_verifier_needs_no_reference_answer(task: Countdown) -> None:
    item = Item("x", "", "24", {"numbers": [2, 3, 4], "target": 24})
    for text, passes in [("2*3*4", True), ("2+3+4", False)]:
        grade = task.grade(item, text)
        assert task.verifier(item, grade.vote) is passes is grade.correct
