"""What runs in each Ray worker: one engine, and nothing of the run around it. Plain data go in and come out."""

import importlib.metadata
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import bitsperbyte
from bitsperbyte.randopt.config import RandOptConfig
from bitsperbyte.randopt.engines.base import Engine, Sampling
from bitsperbyte.randopt.engines.registry import require_made
from bitsperbyte.randopt.jobs import Done, Job, do
from bitsperbyte.randopt.population import Member

# of what the engine says of itself, that which must be equal among the workers of a run
SAME_FACTS = ("kind", "engine", "weights_sha256", "tokenizer_sha256", "dtype", "num_parameters", "num_perturbed", "context", "prompt_format",
              "device", "attention")


class Worker:
    """The class behind the actor. Its methods are called one at a time, in the order they were asked for."""

    def __init__(self) -> None:
        self._engine: Engine | None = None

    def place(self) -> str:
        """Answered as soon as the cluster has room for the worker: its machine and process."""
        return f"{platform.node()}, process {os.getpid()}"

    def open(self, config: str, run_dir: str, opener: Callable[..., Engine], num_threads: int) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
        """Load the engine of `config` (JSON). (What it says of itself, what must be equal among workers, lines for the person)."""
        torch.set_num_threads(num_threads)
        lines: list[str] = []
        settings = RandOptConfig.model_validate_json(config)
        require_made(settings, Path(run_dir))
        self._engine = opener(settings, Path(run_dir), lines.append)
        facts = self._engine.describe()
        same: dict[str, Any] = {name: facts.get(name) for name in SAME_FACTS}
        decode = facts.get("decode")
        same["decode"] = decode.get("steps") if isinstance(decode, dict) else decode
        same["versions"] = {"bitsperbyte": bitsperbyte.__version__, "torch": torch.__version__,
                            "transformers": importlib.metadata.version("transformers")}
        return facts, same, lines

    def work(self, job: Job, member: Member, sampling: Sampling) -> Done:
        return do(self._engine, job, member, sampling)

    def call(self, method: str, *arguments: Any) -> Any:
        """Any other method of the engine."""
        return getattr(self._engine, method)(*arguments)
