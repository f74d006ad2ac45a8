"""Reads records of earlier versions: one named step from each version to the next, applied in order to the JSON as it was written."""

from collections.abc import Callable
from typing import Any

from bitsperbyte.records.schema import SCHEMA_VERSION


def with_items_and_positions(record: dict[str, Any]) -> dict[str, Any]:
    """1 -> 2. Version 2 may hold results by item, loss by position and imported figures; version 1 measured none of them, so that they
    stay absent: nothing else changed."""
    return {**record, "schema_version": 2}


MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {1: with_items_and_positions}


def migrate(record: dict[str, Any]) -> dict[str, Any]:
    """The record in this version's form; ValueError for a version that is newer, or none at all."""
    version = record.get("schema_version")
    if not isinstance(version, int) or isinstance(version, bool) or not min(MIGRATIONS) <= version <= SCHEMA_VERSION:
        raise ValueError(f"has schema_version {version!r}, and this version of bitsperbyte reads {min(MIGRATIONS)} to {SCHEMA_VERSION}: "
                         "use the one that wrote it")
    for step in range(version, SCHEMA_VERSION):
        record = MIGRATIONS[step](record)
    return record
