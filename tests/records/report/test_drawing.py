"""Figures: texts of a file stay texts, colours follow the page, the same input gives the same bytes."""

import re
import warnings
import xml.etree.ElementTree as ElementTree

import pytest

from bitsperbyte.records.report.drawing import DARK, LIGHT, NARROW, PLACEHOLDERS, WIDE, Canvas, Plot, colour_rules, letter, shortened
from bitsperbyte.records.report.sources import Value
from bitsperbyte.records.report.thin import limits


def plot(names: list[str]) -> Plot:
    def draw(canvas: Canvas) -> None:
        [axis] = canvas.panels(1)
        top = limits([(range(40), [100.0, *([series] * 39)]) for series in range(len(names))])
        for series in range(len(names)):
            canvas.line(axis, range(40), [100.0, *([series] * 39)], series, top=top)
        axis.set_xlabel("step")
        canvas.legend([Value(name, f"{place}:record.json#/name") for place, name in enumerate(names)])

    return Plot("loss", "Loss", 'says "this" & <that>', "", (300, 400), draw)


NAMES = ["plain", "$x^2$ \\frac{", "<b>&\"'\u202e\x1b[31m\nx", "日本語の名前", "n" * 80, "a_{b}", "%d%%"]


@pytest.mark.parametrize("sheet", [WIDE, NARROW])
def test_any_name_is_shown_as_it_is(sheet: object) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = plot(NAMES).svg(sheet)
    root = ElementTree.fromstring(made)  # well-formed, so nothing in a name ended an element
    texts = {" ".join(" ".join(e.itertext()).split()) for e in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {f"{letter(i)} {shortened(name)}" for i, name in enumerate(NAMES)} <= texts
    assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e]", made)
    sources = [e.get("data-source") for e in root.iter() if e.get("data-source")]
    assert sources == [f"{i}:record.json#/name" for i in range(len(NAMES))]


def test_two_drawings_share_no_id_and_refer_to_their_own() -> None:
    wide, narrow = (plot(["a", "b"]).svg(sheet) for sheet in (WIDE, NARROW))
    ids = [re.findall(r'\bid="([^"]*)"', made) for made in (wide, narrow)]
    assert len(set(ids[0] + ids[1])) == len(ids[0] + ids[1])
    for made, own in zip((wide, narrow), ids, strict=True):
        assert set(re.findall(r'(?:url\(|href=")#([^)"]*)', made)) <= set(own)


def test_colours_are_the_pages() -> None:
    made = plot(["a", "b"]).svg(WIDE)
    assert not [colour for colour in PLACEHOLDERS.values() if colour in made] and "var(--s0)" in made and "var(--ink)" in made
    assert set(re.findall(r"#[0-9a-fA-F]{6}\b", made)) <= {"#000000"}, "a colour of its own would not turn dark"
    rules = colour_rules()
    assert all(f"--{name}: {colour};" in rules for palette in (LIGHT, DARK) for name, colour in palette.items())


def test_the_same_input_gives_the_same_bytes() -> None:
    assert plot(["a", "b"]).svg(WIDE) == plot(["a", "b"]).svg(WIDE) and plot(["a"]).png() == plot(["a"]).png()


def test_a_users_settings_change_nothing() -> None:
    import matplotlib

    before = plot(["a", "b"]).svg(WIDE)
    with matplotlib.rc_context({"font.size": 30, "axes.grid": False, "svg.fonttype": "path", "lines.linewidth": 9}):
        assert plot(["a", "b"]).svg(WIDE) == before
        assert matplotlib.rcParams["font.size"] == 30, "and they are put back"


def test_letters_go_on_after_z() -> None:
    made = [letter(place) for place in range(800)]
    assert made[:3] == ["A", "B", "C"] and made[25:28] == ["Z", "AA", "AB"] and len(set(made)) == 800


@pytest.mark.parametrize("text", ["short", "x" * 32, "x" * 33, "begin " + "y" * 100 + " end", ""])
def test_long_names_keep_both_ends(text: str) -> None:
    made = shortened(text)
    assert len(made) <= 32 and (made == text or (made[:10] == text[:10] and made[-4:] == text[-4:]))
