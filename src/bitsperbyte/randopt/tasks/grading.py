"""Grading beside the search."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from bitsperbyte.randopt.tasks.base import Grade, Item, Task


class Grader:
    def __init__(self, task: Task, num_workers: int | None = None) -> None:
        self.task = task
        self._pool = ThreadPoolExecutor(1)

    def submit(self, items: Sequence[Item], texts: Sequence[str]) -> Future[list[Grade]]:
        return self._pool.submit(lambda: [self.task.grade(i, t) for i, t in zip(items, texts, strict=True)])

    def submit_classes(self, votes: Sequence[Sequence[str]]) -> Future[list[list[int]]]:
        return self._pool.submit(lambda: [self._classes(v) for v in votes])

    def _classes(self, votes: Sequence[str]) -> list[int]:
        firsts: list[str] = []
        classes = []
        for vote in votes:
            found = next((i for i, f in enumerate(firsts) if self.task.equivalent(f, vote)), None)
            if found is None:
                found = len(firsts)
                firsts.append(vote)
            classes.append(found)
        return classes

    def close(self) -> None:
        self._pool.shutdown()

    def __enter__(self) -> "Grader":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
