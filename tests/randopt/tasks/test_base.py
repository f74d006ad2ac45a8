"""Hashes of question sets, and the proof that train and test are apart."""

from dataclasses import replace

import pytest

from bitsperbyte.randopt.tasks.base import Item, check_disjoint, items_sha256

ITEMS = [Item("a/0", "How many?", "1"), Item("a/1", "How much?", "2")]


def test_the_hash_sees_every_part_and_the_order() -> None:
    first, second = ITEMS
    changed = [[second, first], [first], [replace(first, id="b"), second], [replace(first, question="?"), second],
               [replace(first, answer="3"), second], [replace(first, question="How many?1", answer=""), second]]
    assert len({items_sha256(items) for items in (ITEMS, *changed)}) == 1 + len(changed)
    assert items_sha256(ITEMS) == items_sha256([replace(item) for item in ITEMS])


def test_a_question_in_both_sets_is_refused_also_with_other_spacing() -> None:
    check_disjoint(ITEMS[:1], ITEMS[1:])
    with pytest.raises(ValueError, match="train set and in the test set"):
        check_disjoint(ITEMS[:1], [Item("b/0", "How \n many?", "1")])


def test_an_id_that_stands_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="'a/0' stands twice"):
        check_disjoint(ITEMS[:1], [Item("a/0", "Another?", "1")])
