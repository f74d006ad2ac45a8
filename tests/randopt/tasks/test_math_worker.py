"""The process that compares expressions: its limits, and that it never outlives its parent."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from bitsperbyte.randopt.tasks.math_worker import MathWorker, WorkerDied

ENDLESS = ("((9^{999})^{999})^{999}", "((8^{999})^{999})^{999}+x")  # passes the grammar check, and has 900 million digits


@pytest.fixture(scope="module")
def worker() -> Iterator[MathWorker]:
    worker = MathWorker()
    yield worker
    worker.close()


@pytest.mark.parametrize(("a", "b", "same"), [
    ("\\frac{\\sqrt{3}}{3}", "\\frac{1}{\\sqrt{3}}", True), ("(a+5)(b+2)", "ab+2a+5b+10", True), ("2\\pi", "\\pi+\\pi", True),
    ("x^2-1", "(x+1)(x-1)", True),
    ("3\\sqrt{2}", "\\frac{3}{2}", False), ("x^2+3", "2x+3", False), ("2\\pi", "2", False), ("p-q", "q-p", False),
    ("\\frac{1}{0}", "x", False), (")(", "x", False)])
def test_it_compares_by_meaning_either_way_round(worker: MathWorker, a: str, b: str, same: bool) -> None:
    assert worker.equal(a, b) is worker.equal(b, a) is same


def test_a_text_of_code_is_neither_run_nor_equal(worker: MathWorker, tmp_path: object) -> None:
    mark = f"{tmp_path}/ran"
    for text in (f"__import__('os').system('touch {mark}')", f"().__class__.__base__.__subclasses__() or open('{mark}','w')"):
        assert worker.equal(text, "1") is False
    assert not os.path.exists(mark)


def test_too_much_work_ends_the_process_at_its_limit() -> None:
    worker = MathWorker(cpu_limit_s=0.5)
    begin = time.perf_counter()
    with pytest.raises(WorkerDied) as death:
        worker.equal(*ENDLESS)
    assert death.value.at_limit and not psutil.pid_exists(worker.pid)
    assert time.perf_counter() - begin < 60  # wall time on a busy machine for 0.5 s of work
    worker.close()


def test_a_process_ended_from_outside_is_told_apart() -> None:
    worker = MathWorker()
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(WorkerDied) as death:
        worker.equal("x", "y")
    assert not death.value.at_limit
    worker.close()


def test_a_process_that_cannot_start_is_said_with_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bitsperbyte.randopt.tasks.math_worker.__name__", "no_such_module")
    worker = MathWorker()
    with pytest.raises(RuntimeError, match="did not start.*No module named no_such_module"):
        worker.equal("x", "y")
    worker.close()


def test_a_killed_parent_leaves_no_process() -> None:
    script = ("import time; from bitsperbyte.randopt.tasks.math_worker import MathWorker; worker = MathWorker(); worker.equal('x', 'y'); "
              "print(worker.pid, flush=True); time.sleep(600)")
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    worker = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    worker.wait(timeout=60)
    assert not worker.is_running()
