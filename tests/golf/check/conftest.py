"""Submission folders to be spoilt: one of our own, made once by `submit`, and one as strangers write them, made of text."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bitsperbyte.golf.findings import Finding
from bitsperbyte.golf.seeds import train_seeds
from bitsperbyte.golf.submit import submit

BYTES_PER_TOKEN = 2.43593
SCRIPT = "import os\nimport torch\n\n\ndef main():\n    print('trains', os.environ.get('SEED'), torch.__version__)\n\n\nmain()\n"
LN_2 = 0.6931471805599453


def log_text(seed: int, *, bpb: float = 1.2, steps: int = 13_780, step_ms: float = 43.54, code: int = len(SCRIPT), weights: int = 15_815_847,
             source: str | None = None, eval_ms: int = 1_400, data: str = "fineweb10B_sp1024", bytes_per_token: float = BYTES_PER_TOKEN) -> str:
    """A log in the challenge's format, true in itself."""
    def both(value: float, digits: int) -> str:
        return f"val_loss:{value * LN_2 * bytes_per_token:.{digits}f} val_bpb:{value:.{digits}f}"

    def timed(step: int) -> str:
        return f"train_time:{step * step_ms:.0f}ms step_avg:{step_ms:.2f}ms"

    lines = [] if source is None else [source, "=" * 100, "Running Python 3.12", "Running PyTorch 2.9", "=" * 100]
    lines += [f"val_loader:shards pattern=./data/datasets/{data}/fineweb_val_*.bin tokens:62021632", "model_params:17059912",
              "world_size:8 grad_accum_steps:1",
              "train_batch_tokens:524288 train_seq_len:1024 iterations:20000 warmup_steps:20 max_wallclock_seconds:600.000", f"seed:{seed}"]
    lines += [f"step:{s}/20000 train_loss:{8 - s / steps * 6:.4f} {timed(s)}" for s in (*range(1, 11), *range(200, steps, 200))]
    lines += [f"step:{steps}/20000 {both(bpb - 0.007, 4)} {timed(steps)}",
              f"stopping_early: wallclock_cap train_time:{steps * step_ms:.0f}ms step:{steps}/20000",
              "peak memory allocated: 10184 MiB reserved: 10200 MiB", "Serialized model: 67224983 bytes", f"Code size: {code} bytes",
              f"Total submission size: {67224983 + code} bytes",
              f"Serialized model int8+zlib: {weights} bytes (payload:17178912 raw_torch:17224025 payload_ratio:3.91x)",
              f"Total submission size int8+zlib: {weights + code} bytes",
              f"final_int8_zlib_roundtrip {both(bpb, 4)} eval_time:{eval_ms}ms", f"final_int8_zlib_roundtrip_exact {both(bpb, 8)}"]
    return "\n".join(lines) + "\n"


class Folder:
    """A stranger's folder of three seeds for the track of records, right in everything until it is changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()
        self.bpbs = {1337: 1.2001, 42: 1.1993, 7: 1.2006}
        self.write("train_gpt.py", SCRIPT)
        self.write("README.md", "# A record\n")
        for seed, bpb in self.bpbs.items():
            self.write(f"train_seed{seed}.log", log_text(seed, bpb=bpb))
        mean = sum(self.bpbs.values()) / 3
        self.facts: dict[str, Any] = {
            "author": "A", "track": "10min_16mb", "val_bpb": round(mean, 8), "val_loss": round(mean * LN_2 * BYTES_PER_TOKEN, 8),
            "bytes_total": 15_815_847 + len(SCRIPT), "bytes_code": len(SCRIPT), "seeds": list(self.bpbs),
            "seed_results": {str(seed): {"val_bpb": bpb, "steps": 13_780} for seed, bpb in self.bpbs.items()}}
        self.claim()

    def write(self, name: str, text: str) -> None:
        (self.path / name).write_text(text, encoding="utf-8")

    log = staticmethod(log_text)

    def claim(self, **changes: Any) -> None:
        """Rewrite submission.json, keys that are given None left out."""
        self.facts |= changes
        self.write("submission.json", json.dumps({k: v for k, v in self.facts.items() if v is not None}))

    def change_log(self, seed: int, old: str, new: str) -> None:
        path = self.path / f"train_seed{seed}.log"
        text = path.read_text(encoding="utf-8")
        assert old in text
        path.write_text(text.replace(old, new), encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "record")


@pytest.fixture(scope="session")
def submitted(tmp_path_factory: pytest.TempPathFactory, tiny: Callable) -> Path:
    """Our own folder of three seeds. Not to be changed."""
    root = tmp_path_factory.mktemp("submitted")
    train_seeds({seed: tiny({"train": {"seed": seed}, "schedule": {"max_steps": 4}}) for seed in (1, 2, 3)}, root / "run")
    return submit(root / "run", root / "out").path


@pytest.fixture
def own(submitted: Path, tmp_path: Path) -> Path:
    """A copy of our own folder, to be spoilt."""
    shutil.copytree(submitted, tmp_path / "own")
    return tmp_path / "own"


@pytest.fixture(scope="session")
def verdicts() -> Callable[[list[Finding]], dict[str, str]]:
    return lambda findings: {finding.check: finding.verdict for finding in findings}


@pytest.fixture(scope="session")
def write_log() -> Callable[..., str]:
    return log_text
