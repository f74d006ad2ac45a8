r"""Whether two mathematical answers are equal: as text, as numbers, part by part, and at last by math-verify in a process of its own.

The order is: canonical text (latex.py), then rational numbers exactly; lists, sets, tuples, intervals, unions and matrices must have
the same delimiters and equal parts; equations must have equal sides, or one be minus the other; only single expressions reach
math-verify, and only those that pass a grammar check. Each rule is symmetric. What cannot be decided is not equal: an expression that
exceeds its limit of time or memory counts so, and in `timeouts`.

Two leniencies of a person's reading hold for pairs: `x = 5` and `x \in [1,2]` equal what stands on the right alone, and a numeral with
the base as an index equals the numeral alone. math-verify in turn takes a decimal for an irrational number if it agrees to 6 places.
"""

import re
import threading

from bitsperbyte.randopt.tasks.latex import canonical, is_expression, is_number, members
from bitsperbyte.randopt.tasks.math_worker import CPU_LIMIT_S, MEMORY_BYTES, MathWorker, WorkerDied

_CACHE_SIZE = 200_000
_NAMED = re.compile(r"[A-Za-z](?:=|\\in)(.+)", re.DOTALL)
_BASE = re.compile(r"([0-9]+)_(?:[0-9]|\{[0-9]+\})")


class Equivalence:
    """Comparisons with the processes that they need: started when first needed, as many as threads ask at once, and replaced when they
    die. Safe to call from several threads."""

    def __init__(self, cpu_limit_s: float = CPU_LIMIT_S, memory_bytes: int = MEMORY_BYTES) -> None:
        self.timeouts = 0  # comparisons without an answer, counted as unequal
        self._limits = (cpu_limit_s, memory_bytes)
        self._lock = threading.Lock()
        self._idle: list[MathWorker] = []
        self._busy: list[MathWorker] = []
        self._num_closed = 0
        self._known: dict[tuple[str, str], bool] = {}

    def equal(self, a: str, b: str) -> bool:
        """Whether two answers mean the same; never raises for what they hold."""
        return self._equal(canonical(a), canonical(b), depth=0)

    def close(self) -> None:
        """End all processes, also busy ones, whose comparison then raises; a later comparison starts new ones."""
        with self._lock:
            self._num_closed += 1
            workers, self._idle = self._idle, []
            for worker in self._busy:
                worker.kill()
        for worker in workers:
            worker.close()

    def _equal(self, a: str, b: str, depth: int) -> bool:
        if not a or not b:
            return False
        if a == b:
            return True
        if is_number(a) and is_number(b) or depth > 3:
            return False
        if (named_a := _NAMED.fullmatch(a)) and "=" not in b and "\\in" not in b.replace("\\infty", ""):
            return self._equal(canonical(named_a[1]), b, depth + 1)
        if (named_b := _NAMED.fullmatch(b)) and "=" not in a and "\\in" not in a.replace("\\infty", ""):
            return self._equal(a, canonical(named_b[1]), depth + 1)
        if _BASE.fullmatch(a) or _BASE.fullmatch(b):
            return "_" not in (a if _BASE.fullmatch(b) else b) and _without_base(a) == _without_base(b)
        parts_a, parts_b = members(a), members(b)
        if parts_a or parts_b:
            return bool(parts_a and parts_b) and self._equal_parts(parts_a, parts_b, depth + 1)
        if a.count("=") == 1 and b.count("=") == 1:
            return self._equal_equations(a, b)
        return self._equal_expressions(a, b)

    def _equal_parts(self, a: tuple[str, bool, list[str]], b: tuple[str, bool, list[str]], depth: int) -> bool:
        if a[:2] != b[:2] or len(a[2]) != len(b[2]):
            return False
        left, right = [canonical(part) for part in a[2]], [canonical(part) for part in b[2]]
        if a[1]:
            return all(self._equal(x, y, depth) for x, y in zip(left, right, strict=True))
        for x in left:
            found = next((i for i, y in enumerate(right) if self._equal(x, y, depth)), None)
            if found is None:
                return False
            right.pop(found)
        return True

    def _equal_equations(self, a: str, b: str) -> bool:
        (a_left, a_right), (b_left, b_right) = a.split("="), b.split("=")
        difference = f"{a_left}-({a_right})"
        return (self._equal_expressions(difference, f"{b_left}-({b_right})")
                or self._equal_expressions(difference, f"{b_right}-({b_left})"))

    def _equal_expressions(self, a: str, b: str) -> bool:
        if not (is_expression(a) and is_expression(b)):
            return False
        if any(sign in text for sign in "<>" for text in (a, b)) or "=" in a or "=" in b:
            return False  # relations are equal as text or not at all
        pair = (a, b) if a < b else (b, a)
        with self._lock:
            if pair in self._known:
                return self._known[pair]
        result = self._ask(*pair)
        with self._lock:
            if len(self._known) >= _CACHE_SIZE:
                self._known.clear()
            self._known[pair] = result
        return result

    def _ask(self, a: str, b: str) -> bool:
        num_closed = self._num_closed
        for _attempt in range(2):
            try:
                return self._ask_once(a, b)
            except WorkerDied as death:
                if self._num_closed != num_closed:
                    raise RuntimeError("the comparison was given up, since the grader was closed") from death
                if death.at_limit:
                    break
                # otherwise it was ended from outside, which says nothing about the answers: asked once more
        with self._lock:
            self.timeouts += 1
        return False

    def _ask_once(self, a: str, b: str) -> bool:
        with self._lock:
            num_closed = self._num_closed
            worker = self._idle.pop() if self._idle else MathWorker(*self._limits)
            self._busy.append(worker)  # before it has started, so that closing reaches it
        is_kept = False
        try:
            result = worker.equal(a, b)
            is_kept = True
        finally:
            with self._lock:
                self._busy.remove(worker)
                is_kept = is_kept and self._num_closed == num_closed
                if is_kept:
                    self._idle.append(worker)
            if not is_kept:
                worker.close()
        return result


def _without_base(text: str) -> str:
    base = _BASE.fullmatch(text)
    return base[1] if base else text
