"""Canonical texts, the structure of answers, and what may reach a parser."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitsperbyte.randopt.tasks.latex import canonical, is_expression, is_number, members

PIECES = st.lists(st.sampled_from([*"0123456789xyi+-*/^_=(){}[]|!., $%\\&<>", "\\frac", "\\sqrt", "\\pi", "\\left", "\\right",
                                   "\\text{", "\\{", "\\}", "\\pm", "\\cup",
                                   "\\begin{pmatrix}", "\\end{pmatrix}", "\\\\", "__", "import", "\\boxed{", "∞", "°"]),
                  max_size=25).map("".join)


@pytest.mark.parametrize(("text", "same_as"), [
    ("\\frac12", "1/2"), ("\\dfrac{1}{2}", "0.5"), ("$\\tfrac12$.", ".50"), ("\\frac{270}7\\text{ degrees}", "270/7"),
    ("137 \\frac{1}{2}", "137.5"), ("\\frac 34", "0.75"),
    ("11,\\! 111,\\! 111,\\! 100", "11111111100"), ("\\$32,\\!348", "32348"), ("90^\\circ", "90"), ("90°", "90"), ("15\\%", "15"),
    ("15\\mbox{ cm}^2", "15"),
    ("5.4 cents", "5.4"), ("864 square inches", "864"), ("\\text{Evelyn}", "evelyn"), ("\\text{(B)}", "B"),
    ("\\left( 3, \\frac{\\pi}{2} \\right)", "(3,\\frac{\\pi}{2})"),
    ("11\\sqrt2", "11\\sqrt{2}"), ("2sqrt(5)", "2\\sqrt{5}"), ("2√5", "2\\sqrt{5}"), ("x^{2}", "x^2"), ("4210_{5}", "4210_5"),
    ("\\boxed{x}", "x"), ("**x+1**", "x+1"),
    ("\\text{no solution}", "No solution.")])
def test_two_ways_to_write_one_answer(text: str, same_as: str) -> None:
    assert canonical(text) == canonical(same_as) != ""


@pytest.mark.parametrize(("a", "b"), [("3\\sqrt{2}", "\\frac32"), ("(2,5]", "[2,5)"), ("2", "2\\pi"), ("3", "\\pm 3"), ("-1", "1"),
                                      ("1,2", "12"), ("x", "2x"), ("east", "seat"),
                                      ("12", "1,2"), ("4210_5", "4210_6"), ("137\\frac12", "\\frac{1371}{2}")])
def test_different_answers_stay_different(a: str, b: str) -> None:
    assert canonical(a) != canonical(b)


@given(PIECES | st.text())
def test_canonical_is_stable_and_nothing_raises(text: str) -> None:
    made = canonical(text)
    members(made)
    is_expression(made)
    assert len(made) <= 2 * len(text) + 20
    if is_number(made):
        assert canonical(made) == made


def test_the_reference_answers_keep_their_canonical_form(shared_dir: Path) -> None:
    lines = (shared_dir / "data/math500/test.jsonl").read_text(encoding="utf-8").splitlines()
    answers = {json.loads(line)["answer"] for line in lines}
    assert len(answers) > 250
    for answer in answers:
        made = canonical(answer)
        assert made and canonical(made) == made
        parts = members(made)
        assert is_number(made) or parts or is_expression(made) or made.isalpha() or made.startswith("x\\in"), answer


@pytest.mark.parametrize(("text", "expected"), [
    ("(2,5]", ("(]", True, ["2", "5"])), ("(1,2,3)", ("()", True, ["1", "2", "3"])), ("3,5,7", ("list", False, ["3", "5", "7"])),
    ("\\{3,5\\}", ("list", False, ["3", "5"])), ("\\pm3", ("list", False, ["3", "-3"])),
    ("1\\pm\\sqrt{19}", ("list", False, ["1+\\sqrt{19}", "1-\\sqrt{19}"])),
    ("(0,9)\\cup(9,36)", ("union", False, ["(0,9)", "(9,36)"])), ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}",
        ("matrix 2", True, ["1", "2", "3", "4"])),
    ("(a+5)(b+2)", None), ("x+1", None), ("f(1,2)+1", None)])
def test_the_structure_of_an_answer(text: str, expected: tuple[str, bool, list[str]] | None) -> None:
    assert members(text) == expected


@pytest.mark.parametrize("text", ["x+1", "\\frac{\\sqrt{3}}{3}", "2\\pi", "(a+5)(b+2)", "\\cot x", "x^{10}", "5!", "\\binom{5}{2}",
                                  "x_1", "|x-2|", "\\log_2 3", "2^{n+1}"])
def test_mathematics_may_be_parsed(text: str) -> None:
    assert is_expression(canonical(text))


@pytest.mark.parametrize("text", ["__import__('os').system('ls')", "().__class__", "eval(x)", "lambda: 0", "os.system", "9^9^9",
                                  "9^{9^9}", "9^{9999}", "x^{x^{x}}", "{9^9}^9^9", "(9!)!", "5!!",
                                  "99999!", "\\input{x}", "\\write18", "\\def\\x{y}", "exec", "x" * 300, "(" * 50 + ")" * 50, "((1)",
                                  ")(", "9" * 40, "2**3", "a;b", "\"x\"", "x'", ""])
def test_hostile_and_foreign_texts_are_not_parsed(text: str) -> None:
    assert not is_expression(text)
    assert not is_expression(canonical(text)) or canonical(text) in ("2*3",)


@given(st.sampled_from(["__", "import", "system", "eval(", "getattr", "'", '"', "`", ";", ":", "@", "\x00", "\\input", "é",
                        "lambda"]), PIECES, PIECES)
def test_nothing_with_a_forbidden_part_is_an_expression(part: str, before: str, after: str) -> None:
    assert not is_expression(before + part + after)
