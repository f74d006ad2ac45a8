r"""Where an answer stands in what a model wrote: after the last ####, in the last \boxed{}, or after the last "answer is".

The whole text is searched, however long it is; of several answers the last one counts, as in a person's reading. A marker with nothing
behind it (the instruction repeated, an answer cut short by the token limit) is passed over.
"""

import re
from collections.abc import Iterator

MAX_ANSWER_CHARS = 500  # what is longer is no final answer
_BOXED = re.compile(r"\\f?box(?:ed)?\s{0,2}(?:\{|([^\s{}\\$]))")
_SAID = re.compile(r"\b(?:answer|result)(?:\s{1,2}\w+){0,4}?\s{0,2}(?:\bis\b|:|=)[:\s]*", re.IGNORECASE)
_MATH = re.compile(r"\\\((.+?)\\\)|\\\[(.+?)\\\]|\$\$(.+?)\$\$|(?<!\\)\$((?:[^$\\\n]|\\.)+?)(?<!\\)\$", re.DOTALL)
_TAIL_CHARS = 4 * MAX_ANSWER_CHARS


def marked(text: str) -> Iterator[str]:
    """What stands after each #### up to the end of its line, the last one first."""
    for line in reversed(text.splitlines()):
        _, marker, tail = line.rpartition("####")
        tail = tail.strip().strip("*`").strip()
        if marker and 0 < len(tail) <= MAX_ANSWER_CHARS:
            yield tail


def boxed(text: str) -> Iterator[str]:
    r"""The content of each \boxed{}, \fbox{} or bare `\boxed 5`, with nested braces, the last one first."""
    for match in reversed(list(_BOXED.finditer(text))):
        end = None if match[1] else closing_brace(text, match.end() - 1)
        content = match[1] if match[1] else "" if end is None else text[match.end() : end].strip()
        if content:
            yield content


def said(text: str) -> str | None:
    """What the last "answer is" or "answer:" introduces: the formula that follows at once, else the rest of its line up to a full stop.
    A heading alone on its line introduces the next line that is not empty."""
    matches = list(_SAID.finditer(text))
    if not matches:
        return None
    tail = text[matches[-1].end() :][:_TAIL_CHARS].lstrip("*_ \n\t")
    if math := _MATH.match(tail):
        return next(group for group in math.groups() if group is not None).strip()
    return re.split(r"\.(?:\s|$)|\n", tail, maxsplit=1)[0].strip().strip("*`").strip() or None


def last_line(text: str) -> str | None:
    """The last line that is not empty."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), None)


def closing_brace(text: str, opening: int) -> int | None:
    """Index of the brace that closes the one at `opening`, None where there is none near enough; escaped braces do not count."""
    depth = 0
    for index in range(opening, min(len(text), opening + MAX_ANSWER_CHARS + 2)):
        if text[index] in "{}" and not (index and text[index - 1] == "\\"):
            depth += 1 if text[index] == "{" else -1
            if depth == 0:
                return index
    return None
