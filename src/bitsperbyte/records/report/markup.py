"""HTML of a report: everything from a file is escaped, every number carries its source."""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bitsperbyte.records.report.sources import Value

UNKNOWN = '<span class="unknown">not recorded</span>'


@dataclass(frozen=True)
class Cell:
    """HTML in a table; numbers are set flush right."""

    html: str
    is_number: bool = False


def escaped(text: Any) -> str:
    """Text of a file in HTML: one line, no control characters."""
    return html.escape(" ".join("".join(c if c.isprintable() else " " for c in str(text)).split()), quote=True)


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
    return f"[{shown(low, form, scale=scale)}, {shown(high, form, scale=scale)}]" if low.known and high.known else ""


def table(header: Sequence[str], rows: Sequence[Sequence[Cell | str]], *, numbers_from: int = 1) -> str:
    """A table that scrolls inside itself where it is wider than the page. `header` is HTML; the first cell of a row names it."""
    head = "".join(f'<th scope="col"{_flush(place >= numbers_from)}>{cell}</th>' for place, cell in enumerate(header))
    body = []
    for first, *rest in rows:
        name = first.html if isinstance(first, Cell) else first
        cells = "".join(f"<td{_flush(cell.is_number)}>{cell.html}</td>" if isinstance(cell, Cell) else f"<td>{cell}</td>" for cell in rest)
        body.append(f'<tr><th scope="row">{name}</th>{cells}</tr>')
    head = f"<thead><tr>{head}</tr></thead>" if header else ""
    return f'<div class="scroll" tabindex="0"><table>{head}<tbody>{"".join(body)}</tbody></table></div>'


def _flush(is_number: bool) -> str:
    return ' class="number"' if is_number else ""


def paragraphs(sentences: Sequence[str], kind: str = "") -> str:
    """HTML sentences as paragraphs."""
    cls = f' class="{kind}"' if kind else ""
    return "".join(f"<p{cls}>{sentence}</p>" for sentence in sentences)
