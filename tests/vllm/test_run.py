"""A whole run through the command, in a process that has the package from its installation and from nowhere else."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

CONFIG = {
    "name": "tiny_vllm", "task": {"name": "arithmetic", "num_train": 12, "num_test": 16}, "noise": {"sigmas": [0.02, 0.05]},
    "search": {"population": 6, "top_k": 3, "secondary_k": [2]}, "controls": {"control_pool": 4},
    "heldout": {"enabled": True, "path": "slice.jsonl", "source": "arithmetic", "num_docs": 6, "context": 16}}


def bpb(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run([Path(sys.executable).parent / "bpb", *arguments], cwd=folder, env=environment, capture_output=True, text=True)


def test_a_run_with_vllm_finds_what_a_run_with_the_native_engine_finds(checkpoint_folder: Callable[..., Path], tmp_path: Path) -> None:
    model = str(checkpoint_folder("qwen2", True, hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32))
    records = {}
    for engine in ("vllm", "native"):
        config = {**CONFIG, "model": {"path": model, "engine": engine, "device": "cpu"}}
        (tmp_path / f"{engine}.yaml").write_text(yaml.safe_dump(config))
        done = bpb(tmp_path, "randopt", "run", f"{engine}.yaml", "--run-dir", engine)
        assert done.returncode == 0, done.stderr[-3000:]
        records[engine] = json.loads((tmp_path / engine / "record.json").read_text())["randopt"]
    vllm, native = records["vllm"], records["native"]
    assert (vllm["engine"]["engine"], native["engine"]["engine"]) == ("vllm", "native")
    for name in ("task", "population", "selection", "base", "ensemble"):
        assert vllm[name] == native[name], name
    assert vllm["controls"]["random_k"] == native["controls"]["random_k"] and vllm["noise"] == native["noise"]
    for name in ("base", "mixture", "mean_member", "best_single"):
        one, other = (record["heldout"][name] for record in (vllm, native))
        assert one["nats"] == pytest.approx(other["nats"], rel=1e-5) and one["num_bytes"] == other["num_bytes"]
    grown = bpb(tmp_path, "randopt", "run", "vllm.yaml", "--run-dir", "vllm", "--resume", "--set", "search.population=8")
    assert grown.returncode == 0, grown.stderr[-3000:]
    assert json.loads((tmp_path / "vllm" / "record.json").read_text())["randopt"]["population"]["size"] == 8
    exported = bpb(tmp_path, "randopt", "export", "vllm/record.json", "--rank", "1", "--out", "best")
    assert exported.returncode == 0, exported.stderr[-3000:]
