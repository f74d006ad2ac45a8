r"""Mathematical answers as text: one way of writing each, the structure of lists and intervals, and what may reach a parser.

`canonical` removes what carries no meaning (spacing, \left, \dfrac, units, a currency sign, a full stop) and writes every number
the same way. A percent sign, degrees and trailing words such as "cents" or "\text{ cm}^2" are units and are dropped, as the data sets'
own graders do.
"""

import re
from fractions import Fraction

from bitsperbyte.randopt.tasks.extraction import MAX_ANSWER_CHARS, closing_brace
from bitsperbyte.randopt.tasks.numbers import number_text, parse_number

FUNCTIONS = frozenset("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp".split())
GREEK = frozenset("alpha beta gamma delta epsilon theta lambda mu nu phi psi rho sigma tau omega Delta Omega Phi".split())
COMMANDS = FUNCTIONS | GREEK | frozenset("frac sqrt pi infty cdot times div binom lfloor rfloor lceil rceil".split())

_SYMBOLS = {"π": r"\pi ", "√": r"\sqrt ", "×": r"\times ", "·": r"\cdot ", "÷": r"\div ", "−": "-", "–": "-", "∞": r"\infty ",
            "∪": r"\cup ", "±": r"\pm ", "≤": r"\le ", "≥": r"\ge ", "²": "^2", "³": "^3", "°": "", "θ": r"\theta ", "∈": r"\in "}
_SPACING = re.compile(r"(?<!\\)\\[!,;:> ]|~|\\(?:left|right|bigl?|bigr|Bigl?|Bigr|displaystyle|textstyle|limits|q?quad)(?![A-Za-z])\.?")
_TEXT = re.compile(r"\\(?:text(?:bf|rm|it|normal)?|mbox|mathrm|mathbf|mathit|operatorname)\s*\{([^{}]*)\}")
_TRAILING_UNIT = re.compile(r"(?<=[0-9A-Za-z)}\]])(?:\s*\\text\{\s*(?!and\b|or\b)[A-Za-z .()/]*\}(?:\^\{?[0-9]\}?)?)+$")
_PLAIN_UNIT = re.compile(r"([0-9.,/-]+|[0-9.,-]*\\frac\{[0-9]+\}\{[0-9]+\}) ([a-z]{2,}(?: [a-z]{2,}){0,2})(?:\^[0-9])?")
_DEGREES = re.compile(r"\^\{?\s*\\circ\s*\}?|\\degree(?![A-Za-z])|\\circ(?![A-Za-z])")
_BARE = re.compile(r"(?<![\\A-Za-z])(sqrt|pi|infty|infinity|theta|" + "|".join(sorted(FUNCTIONS, key=len, reverse=True)) + r")(?![A-Za-z])")
_NUMBER_TEXT = re.compile(r"-?[0-9]+(?:/[0-9]+)?")
_MIXED = re.compile(r"(-?)([0-9]+)\s*\\frac\{([0-9]+)\}\{([0-9]+)\}")
_FRACTION = re.compile(r"(-?)\\frac\{(-?[0-9]+)\}\{(-?[0-9]+)\}")
_MATRIX = re.compile(r"\\begin\{([pbvB]?matrix)\}(.*)\\end\{\1\}", re.DOTALL)
_TOKEN = re.compile(r"\\[A-Za-z]+|[A-Za-z]+|[0-9]+|\s+|.", re.DOTALL)


def canonical(text: str) -> str:
    """`text` in its canonical form, "" for a text of nothing or of more than 500 characters; never raises."""
    if len(text) > MAX_ANSWER_CHARS:
        return ""
    for symbol, command in _SYMBOLS.items():
        text = text.replace(symbol, command)
    text = _unwrapped(re.sub(r"\{,\}|,\\!\s*", ",", text))
    if (value := parse_number(text)) is not None:
        return number_text(value)
    text = re.sub(r"\\[dtc]frac(?![A-Za-z])", r"\\frac", _SPACING.sub(" ", text)).replace("\\ne ", "\\neq ")
    text = re.sub(r"\\(?:le|leq|leqslant)(?![A-Za-z])", r"\\le ", re.sub(r"\\(?:ge|geq|geqslant)(?![A-Za-z])", r"\\ge ", text))
    text = _DEGREES.sub("", text).replace("\\$", "").replace("$", "").replace("\\%", "").replace("%", "").strip()
    text = _TEXT.sub(r"\\text{\1}", text)
    text = _TRAILING_UNIT.sub("", text)
    text = re.sub(r"\\text\{\s*(?:and|or)\s*\}", ",", text)
    text = _TEXT.sub(r"\1", text).strip()
    text = _braced(_BARE.sub(lambda m: "\\" + {"infinity": "infty"}.get(m[1], m[1]) + " ", text))
    if (unit := _PLAIN_UNIT.fullmatch(text)) and not set(unit[2].split()) & {"and", "or"}:
        text = unit[1]
    text = _tight(text).rstrip(".,;:")
    if re.fullmatch(r"\([A-Za-z]\)", text):  # (B) of a multiple choice
        text = text[1]
    if "\\" not in text and re.search(r"[A-Za-z]{2}", text) and not re.search(r"[0-9^=+*/]", text):
        text = text.casefold()
    return _number(text) or text


def is_number(text: str) -> bool:
    """Whether a canonical text is a rational number."""
    return bool(_NUMBER_TEXT.fullmatch(text))


def members(text: str) -> tuple[str, bool, list[str]] | None:
    r"""(delimiters, whether order counts, parts) of a canonical text that is a tuple, an interval, a set, a union, a matrix or a list;
    None for a single expression. A part with \pm in a list or set is two parts; a set and a bare list are alike."""
    if matrix := _MATRIX.fullmatch(text):
        rows = [row for row in matrix[2].split("\\\\") if row.strip()]
        return f"matrix {len(rows)}", True, [cell for row in rows for cell in row.split("&")]
    union = _split(text, "\\cup")
    if len(union) > 1:
        return "union", False, union
    inner, delimiters = text, ""
    if text.startswith("\\{") and text.endswith("\\}"):
        inner, delimiters = text[2:-2], "list"
    elif len(text) > 1 and text[0] in "([" and text[-1] in ")]" and _closes_at_end(text):
        inner, delimiters = text[1:-1], text[0] + text[-1]
    parts = _split(inner, ",")
    if delimiters in ("", "list"):
        parts = [both for part in parts for both in _plus_and_minus(part)]
        return ("list", False, parts) if len(parts) > 1 or delimiters else None
    if len(parts) > 1:
        return delimiters, True, parts
    return (delimiters, True, parts) if delimiters in ("[]", "(]", "[)") else None


def is_expression(text: str) -> bool:
    r"""Whether a canonical text may be handed to a parser of LaTeX: known commands, single letters and short products of them, numbers
    of at most 30 digits, no tower of exponents, shallow nesting. What is refused is compared as text."""
    if not text or len(text) > 200 or not re.fullmatch(r"[A-Za-z0-9\\{}()\[\]|+\-*/^_.!<>= ]+", text):
        return False
    if re.fullmatch(r"[A-Za-z]{3,}", text):  # a word, which is no product of its letters
        return False
    if "__" in text or "!!" in text or ")!" in text or "}!" in text or re.search(r"[0-9]{4}!", text):
        return False
    if any(not _is_small_exponent(text, match.end()) for match in re.finditer(r"\^", text)):
        return False
    if re.search(r"_(?![0-9A-Za-z]|\{[0-9A-Za-z]{1,3}\})|\*\s*\*", text):
        return False
    depth = 0
    for token in _TOKEN.findall(text):
        depth += (token in "([{") - (token in ")]}")
        if depth < 0 or depth > 12:
            return False
        if token[0] == "\\" and token[1:] not in COMMANDS:
            return False
        if token[0].isdigit() and len(token) > 30 or token[0].isalpha() and len(token) > 3:
            return False
    return depth == 0


def _unwrapped(text: str) -> str:
    """Without the delimiters of a formula, emphasis and a final full stop."""
    while True:
        before = text
        text = text.strip().strip("`").rstrip(".")
        for opening, closing in (("**", "**"), ("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("\\boxed{", "}")):
            inner = text[len(opening) : -len(closing)]
            if len(text) > len(opening) + len(closing) and text.startswith(opening) and text.endswith(closing) and (
                    closing not in inner or opening == "\\boxed{" and closing_brace(text, 6) == len(text) - 1):
                text = inner
        if text == before:
            return text


def _braced(text: str) -> str:
    r"""\frac12 as \frac{1}{2}, \sqrt2 and \sqrt(2) as \sqrt{2}, x^{2} as x^2, 4_{5} as 4_5."""
    text = re.sub(r"\\frac\s*([0-9A-Za-z])\s*([0-9A-Za-z])", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\s*([0-9A-Za-z])\s*\{", r"\\frac{\1}{", text)
    text = re.sub(r"\\frac\s*(\{[^{}]*\})\s*([0-9A-Za-z])", r"\\frac\1{\2}", text)
    text = re.sub(r"\\frac\s*\{([^{}]*)\}\s*\{", r"\\frac{\1}{", text)
    text = re.sub(r"\\sqrt\s*([0-9A-Za-z]|\\pi)", r"\\sqrt{\1}", text)
    text = re.sub(r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    return re.sub(r"([\^_])\s*\{\s*([0-9A-Za-z])\s*\}", r"\1\2", text)


def _tight(text: str) -> str:
    """Without spaces, except between two letters ("no solution") and after a command that a letter follows."""
    return re.sub(r"(?<=[A-Za-z])\s+(?=[A-Za-z])|\s+", lambda m: " " if _between_letters(m) else "", text.strip())


def _between_letters(match: re.Match[str]) -> bool:
    text, begin, end = match.string, match.start(), match.end()
    return 0 < begin and end < len(text) and text[begin - 1].isalpha() and text[end].isalpha()


def _number(text: str) -> str | None:
    if (value := parse_number(text)) is not None:
        return number_text(value)
    if mixed := _MIXED.fullmatch(text):
        sign, whole, top, bottom = mixed.groups()
        if int(bottom):
            value = int(whole) + Fraction(int(top), int(bottom))
            return number_text(-value if sign else value)
    if fraction := _FRACTION.fullmatch(text):
        sign, top, bottom = fraction.groups()
        if int(bottom):
            return number_text(Fraction(int(top), int(bottom)) * (-1 if sign else 1))
    return None


def _split(text: str, separator: str) -> list[str]:
    """Parts between separators that stand outside all brackets; thousands are no parts ("1,234" alone was read as a number)."""
    parts, depth, begin, index = [], 0, 0, 0
    while index < len(text):
        if text[index] in "([{":
            depth += 1
        elif text[index] in ")]}":
            depth -= 1
        elif depth == 0 and text.startswith(separator, index):
            parts.append(text[begin:index].strip())
            begin = index + len(separator)
            index = begin - 1
        index += 1
    return [*parts, text[begin:].strip()]


def _closes_at_end(text: str) -> bool:
    depth = 0
    for index, char in enumerate(text):
        depth += (char in "([") - (char in ")]")
        if depth == 0:
            return index == len(text) - 1
    return False


def _plus_and_minus(part: str) -> list[str]:
    if "\\pm" not in part and "\\mp" not in part:
        return [part]
    plus = _tight(part.replace("\\pm", "+").replace("\\mp", "-")).removeprefix("+")
    minus = _tight(part.replace("\\pm", "-").replace("\\mp", "+")).removeprefix("+")
    return [_number(plus) or plus, _number(minus) or minus]


def _is_small_exponent(text: str, begin: int) -> bool:
    """Whether the exponent after ^ is one letter, digit or command, or a group with numbers of at most 3 digits and no ^ of its own."""
    rest = text[begin:].lstrip()
    if not rest.startswith("{"):
        return bool(re.match(r"[0-9A-Za-z]|\\[A-Za-z]", rest)) and not re.match(r"(?:[0-9A-Za-z]|\\[A-Za-z]+)\s*\^", rest)
    end = closing_brace(rest, 0)
    if end is None or rest[end + 1 :].lstrip().startswith("^"):
        return False
    group = rest[1:end]
    return "^" not in group and "!" not in group and not re.search(r"[0-9]{4}", group)
