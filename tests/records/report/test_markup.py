"""HTML of values: escaped, sourced, and tables whose columns are aligned by what they hold."""

import html
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitsperbyte.records.report.markup import UNKNOWN, Cell, attribute, escaped, interval, number, shown, table, text
from bitsperbyte.records.report.sources import Value


@given(st.text(max_size=60))
def test_any_text_is_one_line_of_text(words: str) -> None:
    made = escaped(words)
    assert not set("<>\"'") & set(made) and made.isprintable()
    assert html.unescape(made).split() == "".join(c if c.isprintable() else " " for c in words).split()
    assert re.fullmatch(r'"[^"<>]*"', attribute(words))


@given(st.floats(allow_nan=True, allow_infinity=True) | st.none())
def test_what_is_not_known_is_no_number(value: float | None) -> None:
    made = shown(Value(value, "0:record.json#/x"), ".3f")
    is_known = value is not None and math.isfinite(value)
    assert (made == UNKNOWN) != is_known and ("data-source" in made) == is_known
    assert ("unit" in number(Value(value, "x"), unit="unit").html) == is_known


def test_a_minus_is_a_minus_and_a_scale_is_said() -> None:
    made = shown(Value(-0.125, "s"), "+.1f", scale=100)
    assert made == '<span data-source="s" data-scale="100">\N{MINUS SIGN}12.5</span>'
    assert 'title="abcdef"' in text(Value("abcdef", "s"), length=3) and ">abc<" in text(Value("abcdef", "s"), length=3)
    assert interval(Value(None, "a"), Value(1.0, "b"), ".1f") == ""


@pytest.mark.parametrize(("column", "is_flush"), [
    ([Cell("1", True), Cell("22", True)], True), ([Cell("1", True), ""], True), ([Cell("1", True), "words"], False), (["a", "b"], False),
    (["", ""], False)])
def test_a_column_of_numbers_alone_is_flush_right_with_its_head(column: list[Cell | str], is_flush: bool) -> None:
    made = table(["name", "figure"], [["x", column[0]], ["y", column[1]]])
    assert made.count('class="number"') == (3 if is_flush else 0)
    assert table(["name", "figure"], []).count("<tr>") == 1


def test_long_names_keep_a_width() -> None:
    assert 'class="scroll named"' in table([""], [["<code>members that vote</code>", "1"]])
    assert 'class="scroll"' in table([""], [["<span data-source='a long source'>A</span>", "1"]])
