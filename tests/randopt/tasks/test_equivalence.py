"""Mathematical answers are equal where a person says so, and hostile ones harm nothing."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from bitsperbyte.randopt.tasks.equivalence import Equivalence
from bitsperbyte.randopt.tasks.latex import canonical

EQUAL = [("\\frac12", "\\frac{1}{2}"), ("1/2", "\\frac{1}{2}"), ("0.5", "\\frac{1}{2}"), ("42.00", "42"), ("x=5", "5"),
         ("4210_{5}", "4210"), ("x \\in [-2,7]", "[-2,7]"),
         ("\\pm 3", "3,-3"), ("2sqrt(5)", "2\\sqrt{5}"), ("y = 2x+3", "y = 3+2x"), ("2x-y+3=0", "y=2x+3"), ("3,5,7", "7, 3, 5"),
         ("(0,9)\\cup(9,36)", "(9,36) \\cup (0,9)"),
         ("\\{1\\pm\\sqrt{5},-2\\}", "-2, 1+\\sqrt5, 1-\\sqrt5"), ("\\begin{bmatrix}1/2\\\\2\\end{bmatrix}",
             "\\begin{bmatrix} \\frac12 \\\\ 2 \\end{bmatrix}"),
         ("11\\sqrt5+11", "11(1+\\sqrt{5})"), ("\\left(\\frac{3}{5},\\frac{8}{3}\\right]", "(0.6, 8/3]"), ("\\text{(B)}", "B"),
         ("137\\tfrac12", "137.5"), ("15\\mbox{ cm}^2", "15")]
# pairs that the digits or letters alone would make equal
UNEQUAL = [("3\\sqrt{2}", "\\frac{3}{2}"), ("x^2+3", "2x+3"), ("(2,5]", "[2,5)"), ("2", "2\\pi"), ("3", "\\pm 3"), ("(2,5)", "[2,5]"),
           ("2,5", "(2,5)"), ("x=5", "y=5"), ("4210_5", "4210_6"),
           ("(3,5,7)", "(7,3,5)"), ("-1", "1"), ("12", "1,2"), ("east", "seat"), ("p-q", "q-p"), ("x<5", "x>5"), ("\\text{none}", ""),
           ("", ""), ("1/3", "0.33"), ("3,3", "3"), ("A", "B")]
HOSTILE = ["__import__('os').system('touch {mark}')", "().__class__.__base__.__subclasses__()", "9^9^9^9", "9^{9^{9}}", "9**9**9",
           "((9!)!)!", "\\input{/etc/passwd}", "lambda:0", "\x00", "(" * 400]


@pytest.fixture(scope="module")
def equivalence() -> Iterator[Equivalence]:
    equivalence = Equivalence()
    yield equivalence
    equivalence.close()


@pytest.mark.parametrize(("a", "b", "same"), [*((a, b, True) for a, b in EQUAL), *((a, b, False) for a, b in UNEQUAL)])
def test_answers_that_a_person_calls_equal(equivalence: Equivalence, a: str, b: str, same: bool) -> None:
    assert equivalence.equal(a, b) is equivalence.equal(b, a) is same


def test_hostile_answers_do_nothing_and_equal_nothing(equivalence: Equivalence, tmp_path: Path) -> None:
    before = equivalence.timeouts
    for text in HOSTILE:
        for other in ("1", "x+1", "\\sqrt{2}"):
            assert equivalence.equal(text.replace("{mark}", str(tmp_path / "ran")), other) is False
    assert not (tmp_path / "ran").exists() and equivalence.timeouts == before


def test_every_reference_answer_equals_itself_and_no_other(equivalence: Equivalence, shared_dir: Path) -> None:
    lines = (shared_dir / "data/math500/test.jsonl").read_text(encoding="utf-8").splitlines()
    answers = sorted({json.loads(line)["answer"] for line in lines})
    assert all(equivalence.equal(answer, answer) for answer in answers)
    written_apart = [answer.replace("\\frac", "\\dfrac").replace("(", "\\left(").replace(")", "\\right)").replace("\\left\\left",
        "\\left").replace("\\right\\right", "\\right")
                     for answer in answers]
    assert all(equivalence.equal(a, b) for a, b in zip(answers, written_apart, strict=True))
    distinct = list({canonical(answer): answer for answer in answers}.values())
    symbolic = [answer for answer in distinct if "\\sqrt" in answer or "\\pi" in answer or "x" in answer or "i" in answer][::3]
    for i, a in enumerate(symbolic):
        for b in symbolic[i + 1 :]:
            assert not equivalence.equal(a, b), (a, b)
    assert equivalence.timeouts == 0


def test_an_endless_comparison_is_unequal_and_counted_and_the_next_one_works() -> None:
    equivalence = Equivalence(cpu_limit_s=0.5)
    a, b = "((9^{999})^{999})^{999}", "((8^{999})^{999})^{999}+x"
    assert equivalence.equal(a, b) is False and equivalence.timeouts == 1
    assert equivalence.equal(b, a) is False and equivalence.timeouts == 1  # known by now
    assert equivalence.equal("x+x", "2x") and equivalence.timeouts == 1
    equivalence.close()


def test_a_worker_that_was_killed_is_replaced_without_a_wrong_answer(equivalence: Equivalence) -> None:
    assert equivalence.equal("x+x+x", "3x")
    for worker in equivalence._idle:
        os.kill(worker.pid, signal.SIGKILL)
    before = equivalence.timeouts
    assert equivalence.equal("x+x+x+x", "4x") and equivalence.timeouts == before


def test_threads_share_the_processes_and_closing_ends_them() -> None:
    equivalence = Equivalence()
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda i: equivalence.equal(f"x+{i}x", f"{i + 1}x"), range(20)))
    assert all(answers)
    pids = [worker.pid for worker in equivalence._idle]
    assert 1 <= len(pids) <= 2
    equivalence.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_closing_while_a_comparison_runs_raises_there() -> None:
    equivalence = Equivalence(cpu_limit_s=60)
    errors = []

    def compare() -> None:
        try:
            equivalence.equal("((9^{999})^{999})^{999}", "((8^{999})^{999})^{999}+x")
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=compare)
    thread.start()
    while not equivalence._busy:
        thread.join(0.05)
    equivalence.close()
    thread.join(60)
    assert not thread.is_alive() and "closed" in errors[0]


def test_a_worker_killed_in_the_middle_of_a_comparison_is_replaced_and_the_comparison_done() -> None:
    equivalence = Equivalence(cpu_limit_s=2)
    assert equivalence.equal("x+x", "2x")
    with ThreadPoolExecutor(1) as pool:
        endless = pool.submit(equivalence.equal, "((9^{999})^{999})^{999}", "((8^{999})^{999})^{999}+x")
        while not equivalence._busy:
            time.sleep(0.01)
        killed = equivalence._busy[0]
        os.kill(killed.pid, signal.SIGKILL)
        assert endless.result(60) is False
    assert equivalence.timeouts == 1  # asked again of a second process, which came to its limit
    assert equivalence.equal("x+x+x", "3x") and killed not in equivalence._idle
    equivalence.close()


@pytest.mark.parametrize("wait_s", [0.0, 0.3])
def test_closing_reaches_a_process_that_is_still_starting(wait_s: float) -> None:
    before = set(psutil.Process().children())
    equivalence = Equivalence(cpu_limit_s=60)
    with ThreadPoolExecutor(1) as pool:
        endless = pool.submit(equivalence.equal, "((9^{999})^{999})^{999}", "((8^{999})^{999})^{999}+x")
        while not set(psutil.Process().children()) - before:
            time.sleep(0.001)
        time.sleep(wait_s)
        equivalence.close()
        with pytest.raises(RuntimeError, match="closed"):
            endless.result(20)
    assert not set(psutil.Process().children()) - before and not equivalence._idle and not equivalence._busy
