"""Which engine runs a model, chosen by name."""

from __future__ import annotations

import importlib
import platform
from collections.abc import Callable
from pathlib import Path

from bitsperbyte.randopt.config import ModelSection, RandOptConfig
from bitsperbyte.randopt.engines.base import Engine

# each module has open_engine(config, run_dir, say) -> Engine
ENGINES = {
    "native": "bitsperbyte.randopt.engines.native",
    "golf": "bitsperbyte.randopt.engines.golf",
    "vllm": "bitsperbyte.randopt.engines.vllm",
}


def engine_name(model: ModelSection) -> str:
    """The engine that `model.engine` names, or for auto the one that the model's file calls for."""
    if model.engine != "auto":
        return model.engine
    if model.golf is not None or _is_golf(Path(model.path)):
        return "golf"
    return "native"


def prepare_model(config: RandOptConfig, run_dir: Path, say: Callable[[str], None]) -> None:
    """Make a model that is made in `run_dir` first, so that several processes can then open it."""
    if config.model.golf is not None:
        importlib.import_module(ENGINES["golf"]).make_model(config.model.golf, run_dir, say)


def require_made(config: RandOptConfig, run_dir: Path) -> None:
    """ValueError where `run_dir`, as this machine sees it, lacks the model that was made there: it is not to be made a second time."""
    if config.model.golf is not None and not importlib.import_module(ENGINES["golf"]).is_made(run_dir):
        raise ValueError(f"the model that the run made is not in {run_dir} on {platform.node()}: with workers on several nodes, put the run "
                         "folder on a file system that all of them see")


def open_engine(config: RandOptConfig, run_dir: Path, say: Callable[[str], None]) -> Engine:
    """The engine of `config`, its model loaded (or made, in `run_dir`); `say` takes a line for the person and the log."""
    return importlib.import_module(ENGINES[engine_name(config.model)]).open_engine(config, run_dir, say)


def _is_golf(path: Path) -> bool:
    return path.suffix == ".bpb" or (path / "artifact.bpb").is_file()
