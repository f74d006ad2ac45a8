"""Grades come in order, from the background, and faults come out as sentences."""

import threading
import time
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitsperbyte.randopt.tasks.base import Grade, Item
from bitsperbyte.randopt.tasks.grading import Grader


@dataclass
class Slow:
    """Votes are numbers, equal modulo `modulus`. Waits for `go` before each grade; "raise" raises."""

    needs_processes: bool = False
    modulus: int = 10
    name: str = "slow"
    go: threading.Event = field(default_factory=threading.Event)
    threads: set[str] = field(default_factory=set)
    is_closed: bool = False

    def grade(self, item: Item, text: str) -> Grade:
        self.go.wait(60)
        self.threads.add(threading.current_thread().name)
        if text == "raise":
            raise KeyError("nothing there")
        return Grade(text, text, 1.0, text == item.answer)

    def equivalent(self, a: str, b: str) -> bool:
        return int(a) % self.modulus == int(b) % self.modulus

    def close(self) -> None:
        self.is_closed = True


ITEMS = [Item(f"slow/{i}", "?", str(i)) for i in range(30)]
TEXTS = [item.answer for item in ITEMS]


@pytest.mark.parametrize("needs_processes", [False, True])
def test_submitting_does_not_wait_and_grades_keep_their_order(needs_processes: bool) -> None:
    task = Slow(needs_processes)
    with Grader(task, num_workers=3) as grader:
        future = grader.submit(ITEMS, TEXTS)
        wrong = grader.submit(ITEMS[:2], ["1", "0"])
        assert not future.done()
        task.go.set()
        assert [grade.answer for grade in future.result(60)] == TEXTS and all(grade.correct for grade in future.result())
        assert [grade.correct for grade in wrong.result(60)] == [False, False]
        assert len(task.threads) == 1 or needs_processes
    assert task.is_closed is needs_processes


def test_nothing_to_grade_is_ready_at_once() -> None:
    with Grader(Slow()) as grader:
        assert grader.submit([], []).result(1) == [] == grader.submit_classes([]).result(1)


def test_as_many_texts_as_items() -> None:
    with Grader(Slow()) as grader, pytest.raises(ValueError):
        grader.submit(ITEMS, TEXTS[1:])


def test_an_exception_names_the_task_the_item_and_the_answer() -> None:
    task = Slow()
    task.go.set()
    with Grader(task) as grader:
        future = grader.submit(ITEMS[:3], ["0", "raise", "2"])
        with pytest.raises(RuntimeError, match=r"slow failed to grade an answer to slow/1 \(KeyError: 'nothing there'\).*'raise'"):
            future.result(60)
        assert grader.submit(ITEMS[:1], ["0"]).result(60)[0].correct  # the grader goes on


@given(st.lists(st.lists(st.integers(0, 40).map(str), unique=True, max_size=12), max_size=4), st.integers(1, 12))
def test_classes_are_those_of_the_relation_numbered_by_appearance(votes: list[list[str]], modulus: int) -> None:
    with Grader(Slow(modulus=modulus)) as grader:
        found = grader.submit_classes(votes).result(60)
    for texts, classes in zip(votes, found, strict=True):
        order: dict[Any, int] = {}
        assert classes == [order.setdefault(int(text) % modulus, len(order)) for text in texts]


def test_the_classes_of_a_beginning_do_not_depend_on_what_follows() -> None:
    class Chain(Slow):
        def equivalent(self, a: str, b: str) -> bool:  # near to each other: not transitive
            return abs(int(a) - int(b)) <= 1

    with Grader(Chain()) as grader:
        whole, beginning = grader.submit_classes([["0", "2", "1", "3"], ["0", "2"]]).result(60)
    assert whole == [0, 1, 0, 1] and beginning == whole[:2]


def test_closing_gives_up_what_waits() -> None:
    task = Slow(needs_processes=True)
    grader = Grader(task, num_workers=1)
    future = grader.submit(ITEMS, TEXTS)
    while not grader._pool._threads:
        time.sleep(0.01)
    threading.Timer(0.2, task.go.set).start()
    grader.close()
    with pytest.raises(CancelledError):
        future.result(60)
    assert task.is_closed and len(task.threads) <= 1


def test_after_closing_no_further_votes_are_compared() -> None:
    class Counting(Slow):
        num_compared = 0

        def equivalent(self, a: str, b: str) -> bool:
            self.num_compared += 1
            self.go.wait(60)
            return False

    task = Counting()
    grader = Grader(task)
    future = grader.submit_classes([TEXTS])
    while not task.num_compared:
        time.sleep(0.01)
    threading.Timer(0.2, task.go.set).start()
    grader.close()
    with pytest.raises(RuntimeError, match="closed"):
        future.result(60)
    assert task.num_compared == 1
