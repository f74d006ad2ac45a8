"""A process that says whether two mathematical expressions are equal, by math-verify, and that cannot take anything else down.

math-verify parses with ANTLR and evaluates with sympy, which may run for hours or fill the memory on a short text, and its own time
limit needs signals, which only a main thread may set. So it runs as the main thread of a process of its own: each comparison has a
limit of CPU seconds (the kernel ends the process at SIGPROF; CPU and not wall time, so that a busy machine grades alike), the address
space is limited, no file can be written, and the process ends when its input does, also if the parent was killed.

Protocol: a line of JSON [a, b] in, a line of JSON true or false out; the first line out says that the process is ready.
"""

import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
from functools import lru_cache
from typing import Any

CPU_LIMIT_S = 5.0
WALL_LIMIT_S = 120.0  # only for a machine that stands still: the CPU limit comes first
START_LIMIT_S = 300.0
MEMORY_BYTES = 1 << 30


class WorkerDied(Exception):
    """The process ended instead of answering. `at_limit`: because the comparison took too much time or memory."""

    def __init__(self, at_limit: bool) -> None:
        super().__init__("the limit of time or memory was reached" if at_limit else "the process was ended from outside")
        self.at_limit = at_limit


class MathWorker:
    """The parent's side: one process, one comparison at a time."""

    def __init__(self, cpu_limit_s: float = CPU_LIMIT_S, memory_bytes: int = MEMORY_BYTES) -> None:
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self._is_ready = False
        self._errors = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(cpu_limit_s), str(memory_bytes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._errors, bufsize=0, env={**os.environ, "PYTHONPATH": paths},
            start_new_session=True)  # Ctrl-C is for the parent, which still wants the grades of what is done

    @property
    def pid(self) -> int:
        return self._process.pid

    def equal(self, a: str, b: str) -> bool:
        """Whether two expressions that passed `latex.is_expression` are equal; WorkerDied where no answer came."""
        self._start()
        try:
            self._process.stdin.write(json.dumps([a, b]).encode() + b"\n")
        except BrokenPipeError:
            raise WorkerDied(at_limit=False) from None
        return bool(self._read(WALL_LIMIT_S))

    def kill(self) -> None:
        """End the process; whoever waits for its answer gets WorkerDied."""
        self._process.kill()

    def close(self) -> None:
        """End the process and wait until it is gone. May be called twice."""
        self.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()
        self._errors.close()

    def _start(self) -> None:
        """Wait until the process is ready, at its first comparison: so it can be killed also while it starts."""
        if self._is_ready:
            return
        try:
            self._read(START_LIMIT_S)
        except WorkerDied as error:
            if not error.at_limit and self._process.returncode == -signal.SIGKILL:
                raise  # by `kill`, or by someone outside
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").strip().splitlines()
            raise RuntimeError("the process that compares mathematical answers did not start; is math-verify installed? "
                               f"({lines[-1] if lines else 'no message'})") from error
        self._is_ready = True

    def _read(self, limit_s: float) -> Any:
        readable, _, _ = select.select([self._process.stdout], [], [], limit_s)
        line = self._process.stdout.readline() if readable else b""
        if line.endswith(b"\n"):
            return json.loads(line)
        if not readable:
            self._process.kill()
        code = self._process.wait()
        raise WorkerDied(at_limit=not readable or code in (-signal.SIGPROF, _OUT_OF_MEMORY))


_OUT_OF_MEMORY = 3  # exit code


def main(cpu_limit_s: float, memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)  # what a library prints is no answer
    _same("\\frac{1}{2}+x", "x")  # the parser's tables are built at the first use
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    print("true", file=answers)
    for line in sys.stdin:
        a, b = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, cpu_limit_s)
        try:
            same = _same(a, b)
        except MemoryError:
            os._exit(_OUT_OF_MEMORY)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(same), file=answers)


def _same(a: str, b: str) -> bool:
    """Both ways round, so that the relation is symmetric. Nothing that a parser or sympy cannot work with equals anything."""
    from math_verify import verify

    with contextlib.suppress(ArithmeticError, AttributeError, LookupError, NotImplementedError, RecursionError, TypeError, ValueError):
        left, right = _parsed(a), _parsed(b)
        return bool(left and right and verify(left, right, timeout_seconds=None) and verify(right, left, timeout_seconds=None))
    return False


@lru_cache(maxsize=10_000)
def _parsed(text: str) -> list[Any]:
    r"""sympy's expression of a LaTeX text, in a list, [] where it is none. Only the LaTeX grammar is used: the one for plain
    expressions hands text to Python's evaluation."""
    from math_verify import LatexExtractionConfig, parse

    found = parse(f"${text}$", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None)
    return [value for value in found if not isinstance(value, str)]


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
