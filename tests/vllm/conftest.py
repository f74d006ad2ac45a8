"""Tests against a real vLLM, which has an environment of its own: `make test-vllm` makes it and runs them. Elsewhere they say so and skip."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HAS_VLLM = importlib.util.find_spec("vllm") is not None
HERE = Path(__file__).resolve().parent


def _module_at(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("engine_fixtures", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# the tiny models of the engines' own tests
engines = _module_at(HERE.parent / "randopt" / "engines" / "conftest.py")
checkpoint_folder, run_config, tiny_model = engines.checkpoint_folder, engines.run_config, engines.tiny_model


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(600))
            if not HAS_VLLM:
                item.add_marker(pytest.mark.skip(reason="needs vLLM, which has an environment of its own: run make test-vllm"))


@pytest.fixture(scope="session")
def text() -> str:
    return engines.TEXT


@pytest.fixture(scope="session")
def opened(checkpoint_folder: Callable[..., Path], run_config: Callable[..., Any]) -> Callable[..., Any]:
    """open(engine name, kind, sections, **model): the engine over a tiny model of 4 heads, 2 of them for keys and values."""
    from bitsperbyte.randopt.engines.registry import open_engine

    def open_tiny(name: str, kind: str = "qwen2", sections: dict | None = None, bos: bool = True, **model: Any) -> Any:
        sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, **model}
        sections = dict(sections or {})
        sections["model"] = {"engine": name, **sections.get("model", {})}
        config = run_config(checkpoint_folder(kind, bos, **sizes), **sections)
        return open_engine(config, Path("."), lambda line: None)

    return open_tiny
