"""A tiny prepared data folder, tiny configs, and ways to run them: in this process and as a command."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console

from bitsperbyte.golf.config import GolfConfig
from bitsperbyte.golf.devices import Ranks
from bitsperbyte.golf.logs import RunLog
from bitsperbyte.golf.train import Trainer
from bitsperbyte.run.folder import RunFolder
from bitsperbyte.run.metrics import read_metrics
from bitsperbyte.text.loader import TokenStream
from bitsperbyte.text.prepare import prepare
from bitsperbyte.text.shards import DataFolder, open_shard

WORDS = "the a of run step ends when its budget is spent and every loss was written before next began café".split()


def deep_merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        merged[key] = deep_merge(base[key], value) if isinstance(value, dict) and isinstance(base.get(key), dict) else value
    return merged


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Faster for tiny models, and as the processes that tests start have it: bit for bit holds for equal numbers of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 short documents under the byte tokenizer: about 19,000 training and 2,900 validation tokens. Not to be changed."""
    root = tmp_path_factory.mktemp("golf")
    rng = random.Random(0)
    (root / "text").mkdir()
    for i in range(60):
        lines = [" ".join(rng.choice(WORDS) for _ in range(12)) + "." for _ in range(6)]
        (root / "text" / f"{i:03d}.txt").write_text("\n".join(lines), encoding="utf-8")
    prepare(str(root / "text"), "byte", root / "data", val_docs=8)
    return root / "data"


@pytest.fixture(scope="session")
def settings(data_dir: Path) -> Callable[..., dict[str, Any]]:
    """settings({section: {key: value}}) -> the mapping of a config that a CPU trains in about a second."""
    base = {
        "name": "tiny",
        "data": {"path": str(data_dir)},
        "model": {"vocab_size": 260, "dim": 16, "num_heads": 2, "num_kv_heads": 1, "order": [0, 1], "skips": [[0, 1]]},
        "schedule": {"wallclock_s": None, "max_steps": 12, "warmdown": {"steps": 6}, "warmup_steps": 0},
        "train": {"batch_tokens": 128, "seq_len": 16, "micro_batch_tokens": 128, "checkpoint_every_steps": 4, "device": "cpu",
                  "log_every": 5},
        "eval": {"every_steps": 5, "batch_tokens": 1024, "max_tokens": 500},
    }
    return lambda changes=None: deep_merge(base, changes or {})


@pytest.fixture(scope="session")
def tiny(settings: Callable[..., dict[str, Any]]) -> Callable[..., GolfConfig]:
    """tiny({section: {key: value}}) -> GolfConfig."""
    return lambda changes=None: GolfConfig.model_validate(settings(changes))


@pytest.fixture
def trainer_of(tmp_path: Path) -> Iterator[Callable[..., Trainer]]:
    """A Trainer in tmp_path/NAME, without the session around it."""
    opened: list[Any] = []

    def build(config: GolfConfig, name: str = "run") -> Trainer:
        folder = RunFolder.open(tmp_path / name, resume=False, kind="golf")
        data = DataFolder.open(Path(config.data.path))
        log = RunLog(folder, Console(quiet=True), max_steps=config.schedule.max_steps,
                     wallclock_s=config.schedule.wallclock_s, log_every=config.train.log_every)
        opened.extend([log, folder])
        val = open_shard(data.shards("val")[0].path)
        return Trainer(config, Ranks(0, 1, torch.device("cpu")), folder.path, log, TokenStream(data.shards("train")), val,
                       data.tokenizer)

    yield build
    for thing in opened:
        thing.close()


def losses_of(run_dir: Path) -> list[float]:
    """Every step's loss, after a check that the steps that count are 1, 2, 3, ..."""
    steps = read_metrics(run_dir / "metrics.jsonl").steps
    assert [row["step"] for row in steps] == list(range(1, len(steps) + 1))
    return [row["loss"] for row in steps]


@pytest.fixture(scope="session")
def losses() -> Callable[[Path], list[float]]:
    return losses_of


@pytest.fixture(scope="session")
def record_of() -> Callable[[Path], dict[str, Any]]:
    return lambda run_dir: json.loads((run_dir / "record.json").read_text(encoding="utf-8"))


def environment() -> dict[str, str]:
    outside = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**outside, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


class Command:
    """`bpb golf train` as a process of its own."""

    def __init__(self, root: Path, mapping: dict[str, Any]) -> None:
        self.config, self.run_dir = root / "config.yaml", root / "run"
        self.config.write_text(yaml.safe_dump(mapping), encoding="utf-8")

    def arguments(self, resume: bool = False) -> list[str]:
        more = ["--resume"] if resume else []
        return ["golf", "train", str(self.config), "--run-dir", str(self.run_dir), *more]

    def start(self, *, resume: bool = False, through: Sequence[str] = ("-m", "bitsperbyte")) -> subprocess.Popen:
        return subprocess.Popen([sys.executable, *through, *self.arguments(resume)], env=environment(), text=True,
                                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


@pytest.fixture
def command(tmp_path: Path, settings: Callable[..., dict[str, Any]]) -> Callable[..., Command]:
    return lambda changes=None: Command(tmp_path, settings(changes))
