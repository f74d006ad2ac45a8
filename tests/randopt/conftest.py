"""A run with an engine that needs no model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bitsperbyte.randopt.config import RandOptConfig

VOLATILE = ("created_utc", "command", "provenance", "phases_s", "attempts", "config", "config_sha256")


def make_config(**overrides: Any) -> RandOptConfig:
    """A small run of the arithmetic task; overrides are whole sections, or dotted keys with __ for the dot."""
    values: dict[str, Any] = {
        "name": "tiny", "model": {"path": "fake"}, "task": {"name": "arithmetic", "num_train": 12, "num_test": 16},
        "noise": {"sigmas": [0.1, 0.2]}, "search": {"population": 12, "top_k": 3, "secondary_k": [2]},
        "controls": {"control_pool": 6}, "heldout": {"enabled": False}}
    for key, value in overrides.items():
        section, dot, name = key.partition("__")
        values[section] = {**values.get(section, {}), name: value} if dot else value
    return RandOptConfig.model_validate(values)


@pytest.fixture
def config() -> Callable[..., RandOptConfig]:
    return make_config


def without_times(value: Any) -> Any:
    """The value without what differs between two equal runs: times, rates, and where and when they ran."""
    if isinstance(value, dict):
        return {k: without_times(v) for k, v in value.items()
                if k not in VOLATILE and k != "seconds" and not k.endswith("_s")}
    return [without_times(v) for v in value] if isinstance(value, list) else value


@pytest.fixture
def timeless() -> Callable[[Any], Any]:
    return without_times


@pytest.fixture
def slice_path(tmp_path: Path) -> Path:
    """A held-out slice of three documents, with its manifest."""
    from bitsperbyte.text.slices import Request, make_slice

    source = tmp_path / "source.jsonl"
    source.write_text("".join(json.dumps({"text": f"document {i} " + "words " * (20 + i)}) + "\n" for i in range(3)))
    path = tmp_path / "slice.jsonl"
    make_slice(Request(str(source), num_docs=3, min_chars=1), path)
    return path
