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
from bitsperbyte.run.provenance import source_sha256

# of what the engine says of itself, that which must be equal among the workers of a run
SAME_FACTS = ("kind", "engine", "weights_sha256", "tokenizer_sha256", "dtype", "num_parameters", "num_perturbed", "context", "prompt_format",
              "device", "attention")


def versions() -> dict[str, str]:
    """Of what a result depends on; of our own code the hash as well."""
    return {"bitsperbyte": bitsperbyte.__version__, "torch": torch.__version__, "transformers": importlib.metadata.version("transformers"),
            "source": source_sha256(Path(bitsperbyte.__file__).resolve().parent)}


class Worker:
    """The class behind the actor. Its methods are called one at a time, in the order they were asked for."""

    def __init__(self) -> None:
        self._engine: Engine | None = None

    def place(self) -> tuple[str, dict[str, str]]:
        """Answered as soon as the cluster has room for the worker: (its machine and process, its versions)."""
        return f"{platform.node()}, process {os.getpid()}", versions()

    def open(self, config: str, run_dir: str, directory: str, opener: Callable[..., Engine],
             num_threads: int) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
        """Load the engine of `config` (JSON), whose relative paths count from `directory`: (what it says of itself, what must be equal
        among workers, lines for the person)."""
        if os.path.isdir(directory):
            os.chdir(directory)
        torch.set_num_threads(num_threads)
        lines: list[str] = []
        settings = RandOptConfig.model_validate_json(config)
        require_made(settings, Path(run_dir))
        self._engine = opener(settings, Path(run_dir), lines.append)
        facts = self._engine.describe()
        same: dict[str, Any] = {name: facts.get(name) for name in SAME_FACTS}
        decode = facts.get("decode")
        same["decode"] = decode.get("steps") if isinstance(decode, dict) else decode
        return facts, same, lines

    def work(self, job: Job, member: Member, sampling: Sampling) -> Done:
        return do(self._engine, job, member, sampling)

    def call(self, method: str, *arguments: Any) -> Any:
        """Any other method of the engine."""
        return getattr(self._engine, method)(*arguments)
