"""Several processes over gloo against one: gradients, updates, scores, the end of a run, checkpoints, and a rank that dies."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from bitsperbyte.golf.muon import shares
from bitsperbyte.golf.ranks import is_lost_rank
from bitsperbyte.golf.session import train

OUTSIDE = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
ENVIRONMENT = {**OUTSIDE, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

TOGETHER = """
import json, sys
from datetime import timedelta
import numpy as np, torch
import torch.distributed as dist
from bitsperbyte.golf.evaluate import Protocol, evaluate
from bitsperbyte.golf.model import GolfModel, ModelConfig
from bitsperbyte.golf.muon import OptimConfig, build_optimizers
from bitsperbyte.golf.reduce import GradientReducer
from bitsperbyte.text.tokenizers import ByteTable

rank, world, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[4]
torch.set_num_threads(1)
if world > 1:
    dist.init_process_group("gloo", init_method="file://" + sys.argv[3], rank=rank, world_size=world, timeout=timedelta(seconds=60))

V = 40
def made():
    torch.manual_seed(0)
    model = GolfModel(ModelConfig(vocab_size=V, dim=16, num_heads=4, num_kv_heads=2, order=(0, 1, 2, 2, 1, 0), skips=((2, 3), (0, 5))))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model

# three steps on 12 sequences in micro-batches of 2, gradients reduced in small buckets
model = made()
optimizers = build_optimizers(model, OptimConfig(weight_decay=0.1), rank, world)
reducer = GradientReducer(model.parameters(), world, bucket_bytes=2000) if world > 1 else None
tokens = torch.randint(0, V, (12, 9), generator=torch.Generator().manual_seed(1))
share = tokens[rank * 12 // world : (rank + 1) * 12 // world].split(2)
early, grads = [], {}
for step in range(3):
    for i, part in enumerate(share, 1):
        if reducer and i == len(share):
            reducer.begin()
        (model.loss(part[:, :-1], part[:, 1:]) / len(share)).backward()
    if reducer:
        early.append(reducer._next)
        reducer.finish()
    grads |= {f"grad{step}/{name}": p.grad.numpy().copy() for name, p in model.named_parameters()}
    optimizers.step(1.0 - step / 4, 0.9)
    optimizers.zero_grad()
state = {f"state/{k}": v.numpy() for k, v in optimizers.state_dict().items()}
weights = {f"weight/{name}": p.detach().numpy() for name, p in model.named_parameters()}

# scores of the first model
ids = np.arange(V)
table = ByteTable(np.where(ids < 4, 0, 1 + ids % 4), (ids >= 4) & (ids % 3 == 0), ids < 4)
rng = np.random.default_rng(0)
stream = np.concatenate([np.concatenate([[1], rng.integers(4, V, n)]) for n in (50, 3, 17, 90)]).astype(np.uint16)
scored = {}
for name, protocol in (("plain", Protocol(8)), ("stride", Protocol(8, 3)), ("isolated", Protocol(16, 5, "isolated"))):
    seen = []
    ev = evaluate(made(), stream, table, 1, protocol, batch_tokens=24, rank=rank, world_size=world, progress=lambda *at: seen.append(at))
    scored |= {f"score/{name}": np.array([ev.score.nats, ev.score.num_bytes, ev.score.num_tokens]), f"docs/{name}": ev.document_nats,
               f"bytes/{name}": ev.document_bytes, f"positions/{name}": ev.by_position.nats, f"counts/{name}": ev.by_position.num_tokens,
               f"progress/{name}": np.array(seen)}
np.savez(out, early=np.array(early), buckets=len(reducer.buckets) if reducer else 0, **grads, **state, **weights, **scored)
if world > 1:
    dist.destroy_process_group()
"""


def together(root: Path, world: int) -> list[dict[str, np.ndarray]]:
    outs = [root / f"{world}_{rank}.npz" for rank in range(world)]
    processes = [subprocess.Popen([sys.executable, "-c", TOGETHER, str(rank), str(world), str(root / f"store{world}"), str(outs[rank])],
                                  env=ENVIRONMENT, stderr=subprocess.PIPE, text=True) for rank in range(world)]
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert all(process.returncode == 0 for process in processes), errors
    return [dict(np.load(out)) for out in outs]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, np.ndarray]]]:
    root = tmp_path_factory.mktemp("ranks")
    return {world: together(root, world) for world in (1, 2, 3)}


@pytest.mark.parametrize("world", [2, 3])
def test_gradients_updates_and_momenta_are_those_of_one_rank(runs: dict, world: int) -> None:
    [alone] = runs[1]
    for made in runs[world]:
        for name, expected in alone.items():
            kind = name.split("/")[0].rstrip("012")
            if kind in ("grad", "weight", "state"):
                np.testing.assert_allclose(made[name], expected, atol=3e-5, rtol=3e-4, err_msg=name)
        for name in alone:
            if name.startswith(("grad", "weight/", "state/")):
                assert (made[name] == runs[world][0][name]).all(), f"{name} differs between the ranks"


@pytest.mark.parametrize("world", [2, 3])
def test_reductions_begin_before_the_backward_pass_has_ended(runs: dict, world: int) -> None:
    """Buckets were under way when `backward` returned; nothing was left for `finish` but to wait."""
    for made in runs[world]:
        assert int(made["buckets"]) > 3 and (made["early"] == int(made["buckets"])).all()


@pytest.mark.parametrize("world", [2, 3])
def test_scores_are_bit_for_bit_those_of_one_rank(runs: dict, world: int) -> None:
    [alone] = runs[1]
    names = [name for name in alone if name.startswith(("score/", "docs/", "bytes/", "positions/", "counts/", "progress/"))]
    assert len(names) == 18
    for made in runs[world]:
        for name in names:
            assert np.array_equal(made[name], alone[name]), name


@given(st.lists(st.tuples(st.integers(1, 600), st.integers(1, 600)), max_size=60), st.integers(1, 9))
def test_shares_hold_each_matrix_once_and_are_even(shapes: list[tuple[int, int]], world: int) -> None:
    made = shares(shapes, world)
    assert len(made) == world and sorted(i for share in made for i in share) == list(range(len(shapes)))

    def cost(index: int) -> int:
        short, long = sorted(shapes[index])
        return short * short * (2 * long + short)

    loads = [sum(map(cost, share)) for share in made]
    if shapes:  # the bound of giving each to whoever has least: the mean and one more
        assert max(loads) <= sum(loads) / world + max(map(cost, range(len(shapes))))


def test_the_baselines_matrices_go_round_evenly() -> None:
    shapes = [(512, 512), (256, 512), (256, 512), (512, 512), (1024, 512), (512, 1024)] * 9
    for world in (2, 4, 8):
        loads = [sum(min(shapes[i]) ** 2 * (2 * max(shapes[i]) + min(shapes[i])) for i in share) for share in shares(shapes, world)]
        assert max(loads) <= 1.2 * sum(loads) / world


@pytest.mark.parametrize("error, lost", [
    (RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:535] Connection closed by peer [127.0.0.1]:3456"), True),
    (torch.distributed.DistBackendError("NCCL communicator was aborted"), True), (RuntimeError("shape mismatch"), False),
    (ValueError("gloo"), False)])
def test_a_lost_rank_is_told_from_other_errors(error: Exception, lost: bool) -> None:
    assert is_lost_rank(error) == lost


# -- whole runs -------------------------------------------------------------------------------------------------------


def torchrun(config: Path, run_dir: Path, *more: str, world: int = 2, through: tuple[str, ...] = ("-m", "bitsperbyte")) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world), *through, "golf",
                             "train", str(config), "--run-dir", str(run_dir), *more], env=ENVIRONMENT, stdout=subprocess.DEVNULL,
                            stderr=subprocess.PIPE, text=True)


@pytest.fixture
def config_file(tmp_path: Path, settings: Callable) -> Callable[..., Path]:
    def write(changes: dict[str, Any] | None = None, name: str = "config") -> Path:
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(settings(changes)))
        return path

    return write


STOPPING = """
import os, sys
import bitsperbyte.golf.train as module
from bitsperbyte.__main__ import main
step = module.Trainer._finish_step
def finish(self, *arguments):
    step(self, *arguments)
    if self.step == 6:
        os.kill(os.getpid(), 15)
module.Trainer._finish_step = finish
sys.exit(main())
"""


@pytest.mark.parametrize("first, then", [(2, 1), (1, 2)])
def test_a_run_goes_on_with_another_number_of_ranks(config_file: Callable, tmp_path: Path, tiny: Callable, losses: Callable, record_of: Callable,
                                                    first: int, then: int) -> None:
    reference = tmp_path / "reference"
    train(tiny(), reference)
    (tmp_path / "stopping.py").write_text(STOPPING)
    stopped = torchrun(config_file(), tmp_path / "run", world=first, through=(str(tmp_path / "stopping.py"),))
    stopped.communicate(timeout=120)
    assert stopped.returncode != 0 and record_of(tmp_path / "run")["status"] == "interrupted"
    resumed = torchrun(config_file(), tmp_path / "run", "--resume", world=then)
    assert resumed.wait(timeout=120) == 0, resumed.stderr.read()
    assert losses(tmp_path / "run") == pytest.approx(losses(reference), abs=1e-4)
    record, alone = record_of(tmp_path / "run"), record_of(reference)
    assert record["status"] == "finished" and record["training"]["num_resumes"] == 1
    assert record["scores"][-1]["bpb"] == pytest.approx(alone["scores"][-1]["bpb"], abs=1e-3)


SKEWED = """
import os, sys, time
import bitsperbyte.golf.train as module
from bitsperbyte.__main__ import main
from bitsperbyte.golf.clock import Clock
rank = int(os.environ["RANK"])
module.Clock = lambda synchronize: Clock(synchronize, lambda: time.perf_counter() * (1 + 3 * rank))
run = module.Trainer.run
def noted(self):
    run(self)
    open(f"{sys.argv[5]}.rank{rank}", "w").write(f"{self.step} {self.finished}")
module.Trainer.run = noted
sys.exit(main())
"""


def test_the_cap_is_one_for_all_ranks(config_file: Callable, tmp_path: Path) -> None:
    """The second rank's clock runs four times as fast: both end at one step, when the faster clock says so."""
    config = config_file({"schedule": {"wallclock_s": 2.0, "max_steps": None, "warmdown": {"steps": 0}}, "eval": {"every_steps": None}})
    (tmp_path / "skewed.py").write_text(SKEWED)
    done = torchrun(config, tmp_path / "run", through=(str(tmp_path / "skewed.py"),))
    assert done.wait(timeout=120) == 0, done.stderr.read()
    ends = [(tmp_path / f"run.rank{rank}").read_text() for rank in (0, 1)]
    assert ends[0] == ends[1] and ends[0].endswith("wallclock_cap")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(row["elapsed_s"] for row in rows if "loss" in row) < 1.5, "the main rank's own clock was far from the cap"


def test_a_rank_that_dies_ends_the_others_with_a_sentence(config_file: Callable, tmp_path: Path, record_of: Callable) -> None:
    import psutil

    process = torchrun(config_file({"schedule": {"max_steps": 100_000}, "eval": {"every_steps": None}}), tmp_path / "run")
    metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 90
    while time.monotonic() < deadline and not (metrics.is_file() and len(metrics.read_text().splitlines()) > 5):
        time.sleep(0.1)
    ranks = [child for child in psutil.Process(process.pid).children(recursive=True) if "bitsperbyte" in child.cmdline()]
    victim = next(child for child in ranks if child.environ()["RANK"] == "1")
    begin = time.monotonic()
    victim.send_signal(signal.SIGKILL)
    errors = process.communicate(timeout=90)[1]
    assert process.returncode != 0 and time.monotonic() - begin < 60
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in ranks)
    assert record_of(tmp_path / "run")["status"] in ("crashed", "interrupted"), errors
    resumed = torchrun(config_file({"schedule": {"max_steps": 100_000}, "eval": {"every_steps": None}}), tmp_path / "run", "--resume", world=1)
    lines = len(metrics.read_text().splitlines())
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and len(metrics.read_text().splitlines()) < lines + 3:
        time.sleep(0.1)
    resumed.send_signal(signal.SIGTERM)
    resumed.communicate(timeout=60)
    assert len(metrics.read_text().splitlines()) >= lines + 3, "what was saved goes on"
