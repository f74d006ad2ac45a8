"""Grading beside the search: answers are judged while the next model generates."""

import os
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any

from bitsperbyte.randopt.tasks.base import Grade, Item, Task


class Grader:
    """Grades in the background: cheap tasks on one thread, tasks that `needs_processes` on `num_workers` threads (default 4, or the
    number of cores where that is less), each of which waits for a worker process of the task. An exception of a task comes out of the
    future as RuntimeError with the item's id; a task never raises for what a model wrote, so that is a fault of the task."""

    def __init__(self, task: Task, num_workers: int | None = None) -> None:
        self.task = task
        num_threads = (num_workers or min(4, os.cpu_count() or 1)) if task.needs_processes else 1
        self._is_closed = False
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="grading")

    def submit(self, items: Sequence[Item], texts: Sequence[str]) -> Future[list[Grade]]:
        """The grades of one answer text for each item, in order."""
        pairs = list(zip(items, texts, strict=True))  # before anything is begun
        return _gathered([self._pool.submit(self._grade, item, text) for item, text in pairs])

    def submit_classes(self, votes: Sequence[Sequence[str]]) -> Future[list[list[int]]]:
        """For each list of distinct votes, the number of each vote's class, 0.. in order of first appearance: a vote joins the first
        class whose first vote is equivalent to it. So the classes of a list's beginning do not depend on what follows."""
        return _gathered([self._pool.submit(self._classes, list(texts)) for texts in votes])

    def close(self) -> None:
        """Give up what is not graded, and end threads and processes."""
        self._is_closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self.task.needs_processes:
            self.task.close()
        self._pool.shutdown()
        if self.task.needs_processes:
            self.task.close()  # a comparison that began in between has started a process again

    def __enter__(self) -> "Grader":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _grade(self, item: Item, text: str) -> Grade:
        try:
            return self.task.grade(item, text)
        except Exception as error:
            raise RuntimeError(f"the task {self.task.name} failed to grade an answer to {item.id} ({type(error).__name__}: {error}); the "
                               f"answer began {text[:80]!r}") from error

    def _classes(self, votes: list[str]) -> list[int]:
        firsts: list[str] = []
        classes = []
        for vote in votes:
            found = next((i for i, first in enumerate(firsts) if self._equivalent(first, vote)), len(firsts))
            if found == len(firsts):
                firsts.append(vote)
            classes.append(found)
        return classes

    def _equivalent(self, a: str, b: str) -> bool:
        if self._is_closed:
            raise RuntimeError("the classes of votes were given up, since the grader was closed")
        return self.task.equivalent(a, b)


def _gathered(futures: Sequence[Future[Any]]) -> Future[list[Any]]:
    """One future of all results in order, or of the first exception in order; ready when all are."""
    gathered: Future[list[Any]] = Future()
    gathered.set_running_or_notify_cancel()
    lock = threading.Lock()
    num_missing = len(futures)

    def finish() -> None:
        try:
            gathered.set_result([future.result() for future in futures])
        except (Exception, CancelledError) as error:
            gathered.set_exception(error)

    def arrived(_: Future[Any]) -> None:
        nonlocal num_missing
        with lock:
            num_missing -= 1
            is_last = num_missing == 0
        if is_last:
            finish()

    if not futures:
        finish()
    for future in futures:
        future.add_done_callback(arrived)
    return gathered
