"""\\boxed{...} in LaTeX."""

import re

_OPENING = re.compile(r"\\f?box(?:ed)?\s*(?:\{|([^\s{}\\$]))")


def last_boxed(text: str) -> str | None:
    """What stands in the last \\boxed{}, \\fbox{} or bare `\\boxed 5` of the text, nested braces included; None where there is none, or
    where the last one never closes."""
    found = list(_OPENING.finditer(text))
    if not found:
        return None
    last = found[-1]
    if last[1] is not None:
        return last[1]
    depth, place = 1, last.end()
    while place < len(text):
        char = text[place]
        if char == "\\":
            place += 1  # an escaped brace is no brace
        elif char == "{":
            depth += 1
        elif char == "}":
            depth -= 1
            if depth == 0:
                return text[last.end() : place]
        place += 1
    return None
