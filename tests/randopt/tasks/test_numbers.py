"""Numbers as a person reads them."""

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitsperbyte.randopt.tasks.numbers import MAX_DIGITS, final_number, number_text, numbers, parse_number


@pytest.mark.parametrize("text", ["42", "42.", "42.00", "$42", "\\$42", "$42$", "$\\$42$", "**42**", "42%", "42\\%", " 42 ", "042",
                                  "84/2", "€42", "+42", "4.2e1",
                                  "\\frac{84}{2}", "41 2/2", "$ 42"])
def test_ways_to_write_42(text: str) -> None:
    assert parse_number(text) == 42


@pytest.mark.parametrize(("text", "value"), [
    ("1,234", 1234), ("1{,}234", 1234), ("10,\\!080", 10080), ("1,234,567.5", Fraction("1234567.5")), ("-3", -3), ("−3", -3),
    ("-$3", -3),
    ("$-3", -3), (".5", Fraction(1, 2)), ("-1/2", Fraction(-1, 2)), ("2 1/2", Fraction(5, 2)), ("137\\frac{1}{2}", Fraction(275, 2)),
    ("\\frac12", Fraction(1, 2)),
    ("-\\frac{3}{4}", Fraction(-3, 4))])
def test_other_numbers(text: str, value: Fraction) -> None:
    assert parse_number(text) == value


@pytest.mark.parametrize("text", ["", "-", "$", "forty", "1/0", "1,23", "1 2", "x2", "2x", "1..2", "\\frac{1}{0}",
                                  "9" * (MAX_DIGITS + 1), "1e999", "٤٢", "2\\pi"])
def test_what_is_no_number(text: str) -> None:
    assert parse_number(text) is None


@given(st.fractions(max_denominator=10**6))
def test_a_number_is_read_back_from_a_vote(value: Fraction) -> None:
    assert parse_number(number_text(value)) == value


@given(st.integers(-10**12, 10**12), st.sampled_from(["#### {}", "#### {}.", "#### ${}", "#### \\${}", "\\boxed{{{}}}", "it is {}.",
                                                      "**{}**", "a {} b", "({})"]))
def test_a_final_number_is_found_with_commas_and_decimals(value: int, form: str) -> None:
    for written in (f"{value}", f"{value:,}", f"{value:,}.00"):
        assert final_number("Of 17 and 18,\n" + form.format(written)) == value


@pytest.mark.parametrize(("text", "value"), [
    ("#### 42\nThat was question 1 of 3.", 42), ("#### 3 + 4 = 7", 7), ("#### 42 apples in 3 boxes", 42), ("#### 1\n#### 2", 2),
    ("#### 5\n#### <number>", 5),
    ("\\boxed{5} of 7", 5), ("10-12", 12), ("from 3 to 4 cm^2", 4), ("#### 9" + " and so on" * 100, 9), ("none", None),
    ("#### none, but 3 before\n", 3),
    ("- 5\n- 6", 6), ("\\boxed{42\\text{ apples}}", 42), ("in step2 it is 8", 8),
    ("The answer is 3/4.", Fraction(3, 4)), ("#### 3/4.", Fraction(3, 4)), ("it is 1 1/2. Done", Fraction(3, 2))])
def test_the_number_that_a_person_would_take(text: str, value: Fraction | int | None) -> None:
    assert final_number(text) == value


@given(st.text() | st.text("0123456789.,/-+$\\%eE {}frac#=\n"))
def test_no_text_raises(text: str) -> None:
    parse_number(text)
    final_number(text)
    assert all(isinstance(value, Fraction) for value in numbers(text))


@pytest.mark.parametrize("unit", ["1", " ", "1 ", "1,111", "$", "-", "1/", "\\frac", "####", "\\boxed{", "{,}", ".1"])
def test_long_texts_take_no_long_time(unit: str) -> None:
    begin = time.process_time()
    final_number("5" + unit * 5_000)
    assert time.process_time() - begin < 2
