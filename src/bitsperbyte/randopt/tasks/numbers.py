r"""A number as a person reads it: `1,234`, `$42`, `\$42`, `42.00`, `-3/4`, `2 1/2`, `50%`, `**42**.`

The value is exact. A percent sign is read as a unit, like a currency sign: an answer of 50% to "what percent" is 50. Numbers of more
than 60 digits are none, so that no text can make arithmetic slow.
"""

import re
from fractions import Fraction

from bitsperbyte.randopt.tasks.extraction import boxed, marked

MAX_DIGITS = 60
_THOUSANDS = re.compile(r"\{,\}|,\\!\s*")
_FRACTION = re.compile(r"([0-9]?)\s?\\[dtc]?frac\s{0,2}(?:\{\s*(-?[0-9]+)\s*\}\s{0,2}\{\s*([0-9]+)\s*\}|([0-9])\s{0,2}([0-9]))")
_NUMBER = re.compile(
    r"(?<![A-Za-z0-9_^])"  # 2 is no number in cm2, cm^2 and x_2
    r"(?P<sign>(?<![)\]}])[-+])?(?:\\?[$€£¥]\s?)?(?P<inner_sign>-)?"
    r"(?:(?P<whole>[0-9]+)\s+(?P<top>[0-9]+)/(?P<bottom>[0-9]+)"
    r"|(?P<integer>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)?(?P<decimals>\.[0-9]+)?(?P<exponent>[eE][+-]?[0-9]{1,2}(?![A-Za-z0-9]))?"
    r"(?P<divisor>/[0-9]+(?![0-9/]|\.[0-9]))?)"
)


def parse_number(text: str) -> Fraction | None:
    """The number that `text` is as a whole, None where it is something else."""
    text = _plain(text).strip().strip("*_`").strip().rstrip(".").strip()
    if len(text) > 1 and text[0] == text[-1] == "$":
        text = text[1:-1].strip()
    match = _NUMBER.fullmatch(text.removesuffix("%").removesuffix("\\").rstrip())
    return _value(match) if match else None


def numbers(text: str) -> list[Fraction]:
    """All numbers in a text, in order. A minus directly before a number counts as its sign unless it follows a number or a letter, so
    that 10-12 holds 10 and 12."""
    found = (_value(match) for match in _NUMBER.finditer(_plain(text)))
    return [value for value in found if value is not None]


def final_number(text: str) -> Fraction | None:
    r"""The number that an answer ends with: after the last ####, else in the last \boxed{}, else the last number of the text. Behind a
    marker the first number counts ("42 apples in 3 boxes"), and of an equation its right-hand side."""
    for answers in (marked(text), boxed(text)):
        for answer in answers:
            if found := numbers(answer.rpartition("=")[2]) or numbers(answer):
                return found[0]
    found = numbers(text)
    return found[-1] if found else None


def number_text(value: Fraction) -> str:
    """The one way that a number is written in votes: 42, -3/4."""
    return str(value)


def _plain(text: str) -> str:
    text = _THOUSANDS.sub("", text.replace("−", "-").replace("\u00a0", " "))
    return _FRACTION.sub(lambda m: f"{m[1]}{' ' * bool(m[1])}{m[2] or m[4]}/{m[3] or m[5]}", text)


def _value(match: re.Match[str]) -> Fraction | None:
    part = match.groupdict()
    digits = "".join(part[name] or "" for name in ("whole", "top", "bottom", "integer", "decimals", "divisor"))
    if not any(part[name] for name in ("whole", "integer", "decimals")) or len(digits) > MAX_DIGITS:
        return None
    if part["whole"]:
        top, bottom = Fraction(int(part["top"])), int(part["bottom"])
        value = int(part["whole"]) + top / bottom if bottom else None
    else:
        value = Fraction((part["integer"] or "0").replace(",", "") + (part["decimals"] or "") + (part["exponent"] or ""))
        divisor = int(part["divisor"][1:]) if part["divisor"] else 1
        value = value / divisor if divisor else None
    if value is None:
        return None
    return -value if (part["sign"] == "-") != bool(part["inner_sign"]) else value
