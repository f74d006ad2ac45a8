"""Which engine runs a model, and that each keeps to the protocol."""

import importlib
import inspect
from pathlib import Path

import pytest

from bitsperbyte.randopt.config import ModelSection
from bitsperbyte.randopt.engines.base import Engine
from bitsperbyte.randopt.engines.registry import ENGINES, engine_name

METHODS = [name for name, member in vars(Engine).items() if inspect.isfunction(member) and not name.startswith("_")]


@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_has_the_protocols_methods(name: str) -> None:
    module = importlib.import_module(ENGINES[name])
    assert list(inspect.signature(module.open_engine).parameters) == ["config", "run_dir", "say"]
    (engine,) = [member for label, member in vars(module).items() if label.endswith("Engine") and member.__module__ == module.__name__]
    for method in METHODS:
        asked = list(inspect.signature(getattr(Engine, method)).parameters)
        assert list(inspect.signature(getattr(engine, method)).parameters) == asked, method


def test_the_model_decides_where_the_config_does_not(tmp_path: Path) -> None:
    (tmp_path / "artifact.bpb").write_bytes(b"")
    assert engine_name(ModelSection(path=str(tmp_path))) == "golf"
    assert engine_name(ModelSection(path="a/model.bpb")) == "golf"
    assert engine_name(ModelSection(golf={})) == "golf"
    assert engine_name(ModelSection(path="org/name")) == "native"
    assert engine_name(ModelSection(path="org/name", engine="golf")) == "golf"
    assert engine_name(ModelSection(path="org/name", engine="vllm")) == "vllm"
