"""HTML of a report: everything from a file is escaped, every number carries its source."""

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bitsperbyte.records.report.sources import Value

SHORT_NAME = 12  # characters; a column of longer names keeps a width, so that it does not become a stack of words
UNKNOWN = '<span class="unknown">not recorded</span>'


@dataclass(frozen=True)
class Cell:
    """HTML in a table, and whether it is a number."""

    html: str
    is_number: bool = False


def one_line(text: Any) -> str:
    """Text of a file as one line without control characters, those that turn the direction of writing included."""
    return " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())


def escaped(text: Any) -> str:
    """Text of a file in HTML: one line, no control characters."""
    return html.escape(one_line(text), quote=True)


def attribute(text: str) -> str:
    """A quoted attribute."""
    return f'"{escaped(text)}"'


def constant(text: str) -> str:
    """A number of the prose that no file holds, such as a level of confidence."""
    return f"<span data-constant>{escaped(text)}</span>"


def shown(value: Value, form: str = "", *, scale: float = 1, unknown: str = UNKNOWN) -> str:
    """A value in a format with its source; scaled where `scale` says so (data-scale, e.g. 100 for points of a share)."""
    if not value.known:
        return unknown
    number = value.value * scale if scale != 1 else value.value
    text = format(number, form)
    if text.startswith("-"):
        text = "\N{MINUS SIGN}" + text[1:]
    scaled = f' data-scale="{scale:g}"' if scale != 1 else ""
    return f"<span data-source={attribute(value.source)}{scaled}>{escaped(text)}</span>"


def number(value: Value, form: str = "", *, scale: float = 1, unit: str = "") -> Cell:
    """A cell of one number."""
    return Cell(shown(value, form, scale=scale) + (f" {unit}" if unit and value.known else ""), True)


def text(value: Value, *, length: int | None = None) -> str:
    """A text of the file; its first `length` characters where given."""
    if value.value is None:
        return UNKNOWN
    whole = str(value.value)
    title = f" title={attribute(whole)}" if length is not None and len(whole) > length else ""
    return f"<span data-source={attribute(value.source)}{title}>{escaped(whole[:length])}</span>"


def interval(low: Value, high: Value, form: str, *, scale: float = 1) -> str:
    """[low, high], or nothing where they are not known."""
    if not (low.known and high.known):
        return ""
    return f'<span class="interval">[{shown(low, form, scale=scale)}, {shown(high, form, scale=scale)}]</span>'


def table(header: Sequence[str], rows: Sequence[Sequence[Cell | str]]) -> str:
    """A table that scrolls inside itself where it is wider than the page. `header` is HTML; the first cell of a row names it. A column
    that holds numbers alone is set flush right, its head too; one of numbers and words flush left."""
    cells = [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in rows]
    are_numbers = [all(cell.is_number for cell in column if cell.html) and any(cell.html for cell in column) for column in zip(*cells, strict=True)]
    are_numbers = are_numbers or [False] * len(header)  # a table without rows
    head = "".join(f'<th scope="col"{_flush(place > 0 and are_numbers[place])}>{cell}</th>' for place, cell in enumerate(header))
    body = []
    for first, *rest in cells:
        data = "".join(f"<td{_flush(flush)}>{cell.html}</td>" for cell, flush in zip(rest, are_numbers[1:], strict=True))
        body.append(f'<tr><th scope="row">{first.html}</th>{data}</tr>')
    head = f"<thead><tr>{head}</tr></thead>" if header else ""
    longest = max((len(re.sub("<[^>]*>", "", first.html)) for first, *_ in cells), default=0)
    return f'<div class="scroll{" named" if longest > SHORT_NAME else ""}" tabindex="0"><table>{head}<tbody>{"".join(body)}</tbody></table></div>'


def _flush(is_number: bool) -> str:
    return ' class="number"' if is_number else ""


def paragraphs(sentences: Sequence[str], kind: str = "") -> str:
    """HTML sentences as paragraphs."""
    cls = f' class="{kind}"' if kind else ""
    return "".join(f"<p{cls}>{sentence}</p>" for sentence in sentences)
