"""Where the answer is found in a text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitsperbyte.randopt.tasks.extraction import MAX_ANSWER_CHARS, boxed, closing_brace, last_line, marked, said

TEXTS = st.lists(st.sampled_from([*"#{}\\$.*abx01 \n", "\\boxed{", "\\fbox {", "####", "answer is ", "\\("])).map("".join)


@given(TEXTS | st.text())
def test_nothing_raises_and_what_is_found_stands_in_the_text(text: str) -> None:
    for found in (*marked(text), *boxed(text), said(text), last_line(text)):
        assert found is None or found and found in text


@given(st.recursive(st.text("ab1 "), lambda inner: st.lists(inner).map(lambda parts: "".join(f"{{{part}}}" for part in parts)),
                    max_leaves=8),
       st.text("ab {", max_size=5))
def test_the_content_of_a_box_is_taken_whole_however_nested(content: str, after: str) -> None:
    text = "first \\boxed{0} then \\boxed{" + content + "}" + after
    assert list(boxed(text)) == [*([content.strip()] if content.strip() else []), "0"]


@pytest.mark.parametrize("text", ["so \\boxed{\\frac{1}{2}}.", "so \\fbox{\\frac{1}{2}}",
                                  "\\boxed{3} or rather $\\boxed {\\frac{1}{2}}$" + "x" * 3000,
                                  "\\boxed{\\frac{1}{2}} and \\boxed{\\frac{1}{", "\\boxed{\\frac{1}{2}}, as asked in \\boxed{}"])
def test_the_last_whole_box_counts_wherever_it_stands(text: str) -> None:
    assert next(boxed(text)) == "\\frac{1}{2}"


def test_a_box_without_braces_holds_one_sign() -> None:
    assert list(boxed("\\boxed 5 or \\boxed{6}")) == ["6", "5"]


def test_escaped_braces_do_not_close_a_box() -> None:
    assert list(boxed("\\boxed{\\{1, 2\\}}")) == ["\\{1, 2\\}"]
    assert closing_brace("{" + "x" * MAX_ANSWER_CHARS + "y}", 0) is None


@pytest.mark.parametrize(("text", "found"), [
    ("#### 42", ["42"]), ("a\n####42\nb", ["42"]), ("#### 1\n#### 2 ", ["2", "1"]), ("so **#### 42**", ["42"]), ("####", []),
    ("#### 7\n#### \n", ["7"]), ("#### " + "9" * (MAX_ANSWER_CHARS + 1), [])])
def test_what_stands_behind_the_marks(text: str, found: list[str]) -> None:
    assert list(marked(text)) == found


@pytest.mark.parametrize(("text", "found"), [
    ("The answer is 42.", "42"), ("The answer is 4.2. Good.", "4.2"), ("**Answer:** $x^2$ and so on", "x^2"),
    ("Final answer:\n\\(\\frac12\\)", "\\frac12"),
    ("The answer to the question is $\\$5$.", "\\$5"), ("answer is 1. No: the answer is 2", "2"), ("nothing here", None),
    ("The answer is", None)])
def test_what_a_text_says_that_the_answer_is(text: str, found: str | None) -> None:
    assert said(text) == found
