"""Likelihood: documents to predict. The reward is minus the bits per byte of the train documents; there are no answers and no votes."""

from typing import Any, ClassVar, Literal

from bitsperbyte.randopt.config import TaskSection
from bitsperbyte.randopt.tasks.base import Grade, Item, check_disjoint, items_sha256
from bitsperbyte.text.corpora import EMBEDDED, iter_documents

MAX_CHARS = 20_000  # of a document: a book is cut here, at white space, so that one does not outweigh all others


class Likelihood:
    name: ClassVar[str] = "likelihood"
    version: ClassVar[str] = "1"
    kind: ClassVar[Literal["answers", "likelihood"]] = "likelihood"
    needs_processes: ClassVar[bool] = False
    default_max_new_tokens: ClassVar[int] = 1  # nothing is generated
    stop: tuple[str, ...] = ()

    def __init__(self, section: TaskSection) -> None:
        self.section = section
        train, test, data = section.num_train, section.num_test, section.data or EMBEDDED
        if section.test_data is None:
            texts = _documents(data, train + test, f"task.num_train + task.num_test is {train + test}")
            train_texts, test_texts = texts[:train], texts[train:]
        else:
            train_texts = _documents(data, train, f"task.num_train is {train}")
            test_texts = _documents(section.test_data, test, f"task.num_test is {test}")
        self._train = [Item(f"likelihood/train/{i}", text, "") for i, text in enumerate(train_texts)]
        self._test = [Item(f"likelihood/test/{i}", text, "") for i, text in enumerate(test_texts)]
        check_disjoint(self._train, self._test)

    def items(self) -> tuple[list[Item], list[Item]]:
        return self._train, self._test

    def prompt(self, item: Item) -> list[dict[str, str]]:
        raise AssertionError("documents are scored, not asked")

    def grade(self, item: Item, text: str) -> Grade:
        raise AssertionError("documents are scored, not answered")

    def equivalent(self, a: str, b: str) -> bool:
        raise AssertionError("documents are scored, not answered")

    def describe(self) -> dict[str, Any]:
        s = self.section
        return {"name": self.name, "version": self.version, "kind": self.kind, "data": s.data or EMBEDDED, "test_data": s.test_data,
                "train_sha256": items_sha256(self._train), "test_sha256": items_sha256(self._test), "num_train": len(self._train),
                "num_test": len(self._test), "max_chars": MAX_CHARS, "context": s.context}


def open_task(section: TaskSection) -> Likelihood:
    return Likelihood(section)


def _documents(source: str, num: int, wanted: str) -> list[str]:
    """The first `num` documents that hold more than white space; ValueError where there are fewer."""
    texts = [_cut(text) for text in iter_documents(source, limit=num)]
    if len(texts) < num:
        raise ValueError(f"{wanted}, and {source} holds {len(texts)} documents: ask for fewer, or give more data")
    return texts


def _cut(text: str) -> str:
    if len(text) <= MAX_CHARS:
        return text
    end = max(text.rfind(space, 0, MAX_CHARS) for space in (" ", "\n"))
    return text[: end if end > 0 else MAX_CHARS]
