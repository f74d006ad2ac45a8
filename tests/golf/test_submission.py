"""A submission's script, where this package cannot be imported: it trains as the run did, and scores what the run scored."""

import dataclasses
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bitsperbyte.golf import submission as module
from bitsperbyte.golf.artifact import read_artifact, write_artifact
from bitsperbyte.golf.bundle import FORMS, bundle
from bitsperbyte.golf.config import GolfConfig
from bitsperbyte.golf.model import ModelConfig
from bitsperbyte.golf.session import train
from bitsperbyte.golf.submission import SubmissionConfig, main
from bitsperbyte.golf.submit import read_run, settings_of
from bitsperbyte.records.schema import Record
from bitsperbyte.records.store import read_record
from bitsperbyte.text.prepare import prepare

# Runs the script of each folder twice: training under its own name, then scoring alone. Every loss is written in full. The package is
# not on the path (-I) and refused besides; one process for all, since most of its seconds go into importing torch.
DRIVER = """
import os, sys, types

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("bitsperbyte", "pydantic", "rich", "typer", "yaml", "safetensors", "psutil"):
            raise ModuleNotFoundError(f"blocked: {name}")

sys.meta_path.insert(0, Blocked())
for folder in sys.argv[1:]:
    os.chdir(folder)
    script = types.ModuleType("script")
    script.__file__ = "train_gpt.py"
    sys.modules["script"] = script
    exec(compile(open("train_gpt.py", encoding="utf-8").read(), "train_gpt.py", "exec"), script.__dict__)
    losses, original = [], script.Stepper.train_step

    def recorded(self, batch, scale):
        loss = original(self, batch, scale)
        losses.append(loss.item())
        return loss

    script.Stepper.train_step = recorded
    print("training", folder)
    sys.argv = ["train_gpt.py"]
    assert script.main(script.CONFIG) == 0
    print("losses:" + " ".join(loss.hex() for loss in losses))
    print("scoring alone")
    sys.argv = ["train_gpt.py", "--eval-only", "artifact.bpb"]
    assert script.main(script.CONFIG) == 0
    print("end")
assert not any(name.partition(".")[0] == "bitsperbyte" for name in sys.modules)
"""
CHANGES = {"zlib": {"artifact": {"scheme": "reference_int8", "codec": "zlib"}},
           "zstd": {"artifact": {"scheme": "int6", "codec": "zstd"}, "eval": {"stride": 4, "max_tokens": None}, "optim": {"grad_clip_norm": 0.5},
                    "schedule": {"warmup_steps": 2}, "train": {"micro_batch_tokens": 64}},
           "brotli": {"artifact": {"scheme": "int8", "codec": "brotli"}, "eval": {"documents": "isolated"}, "model": {"attention_window": 7}}}


def environment(**values: str) -> dict[str, str]:
    outside = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PYTHONPATH", "SEED", "RUN_ID")}
    return {**outside, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **values}


def run_script(folder: Path, command: list[str], **values: str) -> subprocess.CompletedProcess:
    done = subprocess.run(command, cwd=folder, env=environment(**values), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    return done


def folder_of(root: Path, run_dir: Path, form: str) -> Path:
    """The files that the script needs, in a folder of their own."""
    run = read_run(run_dir)
    folder = root / "alone"
    folder.mkdir()
    (folder / "train_gpt.py").write_text(bundle(settings_of(run), form).text, encoding="utf-8")
    shutil.copy(run_dir / "artifact.bpb", folder)
    run.tokenizer.save(folder)
    return folder


def exact_line(record: Record) -> str:
    final = record.score("artifact")
    assert final and record.artifact
    scheme = str(record.artifact.scheme).removeprefix("reference_")
    return f"final_{scheme}_{record.artifact.codec}_roundtrip_exact val_loss:{final.nats_per_token:.8f} val_bpb:{final.bpb:.8f}"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, data_dir: Path, tiny: Callable) -> dict[str, tuple[Path, Path, str, str]]:
    """For each form, run under one of CHANGES: the run's folder, the script's, and what it printed in training and in scoring."""
    made = {}
    for form, codec in zip(FORMS, CHANGES, strict=True):
        root = tmp_path_factory.mktemp(form)
        train(tiny(CHANGES[codec]), root / "run")
        made[form] = root / "run", folder_of(root, root / "run", form)
    done = run_script(data_dir, [sys.executable, "-I", "-c", DRIVER, *(str(folder) for _, folder in made.values())], DATA_PATH=str(data_dir),
                      RUN_ID="again")
    found = {}
    for form, (run_dir, folder) in made.items():
        trained, _, scored = done.stdout.partition(f"training {folder}")[2].partition("\nend\n")[0].partition("scoring alone")
        found[form] = run_dir, folder, trained, scored
    return found


@pytest.mark.parametrize(("form", "codec"), list(zip(FORMS, CHANGES, strict=True)))
def test_each_form_trains_and_scores_as_the_run_did(form: str, codec: str, alone: dict, losses: Callable) -> None:
    """Bit for bit: every loss, and the artifact. The artifact alone scores what the record says, to eight decimals."""
    run_dir, folder, trained, scored = alone[form]
    record = read_record(run_dir)
    found = [float.fromhex(x) for x in next(line for line in trained.splitlines() if line.startswith("losses:"))[7:].split()]
    warmup = CHANGES[codec].get("schedule", {}).get("warmup_steps", 0)
    assert len(found) == 12 + warmup and found[warmup:] == losses(run_dir)
    assert (folder / "logs/again.artifact.bpb").read_bytes() == (run_dir / "artifact.bpb").read_bytes()
    assert exact_line(record) in trained.splitlines() and exact_line(record) in scored.splitlines()
    assert f"val_sha256:{record.data.val_sha256} as recorded" in scored
    log = (folder / "logs/again.txt").read_text(encoding="utf-8")
    script = (folder / "train_gpt.py").read_text(encoding="utf-8")
    assert log.startswith(script) and exact_line(record) in log and f"Code size: {len(script.encode())} bytes" in log
    recorded = (run_dir / "train.log").read_text(encoding="utf-8").splitlines()
    for line in recorded:  # the run's log without its times, its code and what it says to a person
        if line.startswith(("step:", "model_params", "world_size", "train_batch", "seed:", "warmup_step")):
            assert line.partition(" train_time")[0] in log, line


def test_the_challenges_bare_folder_and_its_tokenizer_beside_the_script(tmp_path: Path) -> None:
    """SentencePiece, shards without a manifest, as the challenge's data are; run by its own name."""
    words = "some words that make a text of which nothing is asked but that it is long enough for pieces".split()
    (tmp_path / "text").mkdir()
    for i in range(40):
        (tmp_path / f"text/{i}.txt").write_text(" ".join(words[(i * j) % len(words)] for j in range(1, 80)), encoding="utf-8")
    prepare(str(tmp_path / "text"), "train:300", tmp_path / "data", val_docs=8)
    config = GolfConfig.model_validate({
        "data": {"path": str(tmp_path / "data")}, "schedule": {"wallclock_s": None, "max_steps": 3, "warmdown": {"fraction": 0.5}, "warmup_steps": 0},
        "model": {"vocab_size": 300, "dim": 16, "num_heads": 2, "num_kv_heads": 1, "order": [0], "skips": [], "tie_embeddings": False},
        "train": {"batch_tokens": 128, "seq_len": 16, "micro_batch_tokens": 128, "device": "cpu"}})
    record = train(config, tmp_path / "run")
    folder = folder_of(tmp_path, tmp_path / "run", "plain")
    (tmp_path / "bare").mkdir()
    for shard in (tmp_path / "data").rglob("*.bin"):
        shutil.copy(shard, tmp_path / f"bare/set_{shard.name}")
    done = run_script(folder, [sys.executable, "-I", "train_gpt.py", "--eval-only", "artifact.bpb"], DATA_PATH=str(tmp_path / "bare"))
    assert done.stdout.splitlines()[-1] == exact_line(record) and "as recorded" in done.stdout
    assert not (folder / "logs").exists(), "scoring leaves nothing behind"


def test_two_ranks_train_as_one(alone: dict, data_dir: Path, losses: Callable) -> None:
    """Started as torchrun starts them. Ranks add their gradients up in another order, so the losses are equal to rounding."""
    run_dir, folder, _, _ = alone["plain"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "DATA_PATH": str(data_dir), "RUN_ID": "two"}
    ranks = [subprocess.Popen([sys.executable, "-I", "train_gpt.py"], cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              env=environment(**shared, RANK=str(rank), LOCAL_RANK=str(rank))) for rank in range(2)]
    outs = [rank.communicate(timeout=60) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outs
    lines = outs[0][0].splitlines()
    assert "world_size:2 grad_accum_steps:1" in lines and not outs[1][0], "the main rank speaks for all"
    found = [float(line.partition("train_loss:")[2].split()[0]) for line in lines if "train_loss" in line]
    assert len(found) == 10 and found == pytest.approx(losses(run_dir)[:10], abs=2e-4)
    assert read_artifact(folder / "logs/two.artifact.bpb").model == read_artifact(run_dir / "artifact.bpb").model
    recorded = read_record(run_dir).score("artifact")
    assert recorded and float(lines[-1].rpartition("val_bpb:")[2]) == pytest.approx(recorded.bpb, abs=1e-3)


# -- input that cannot work --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny: Callable) -> Path:
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    train(tiny({"schedule": {"max_steps": 2}}), run_dir)
    return run_dir


@pytest.fixture
def script(finished: Path, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
           capsys: pytest.CaptureFixture) -> Callable[..., tuple[int, str, str]]:
    """script(*arguments, changes=..., SEED=...) -> exit code, stdout, stderr of the entry in an empty folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("SEED", "RUN_ID", "TOKENIZER_PATH", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DATA_PATH", str(data_dir))

    def run(*arguments: str, changes: dict[str, Any] | None = None, **values: str) -> tuple[int, str, str]:
        for name, value in values.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["train_gpt.py", *arguments])
        config: SubmissionConfig = dataclasses.replace(settings_of(read_run(finished)), **(changes or {}))
        code = main(config)
        out = capsys.readouterr()
        return code, out.out, out.err

    return run


def refused(result: tuple[int, str, str], code: int, *parts: str) -> None:
    assert result[0] == code and result[2].startswith("error: ") and result[2].count("\n") == 1, result
    assert all(part in result[2] for part in parts), result[2]


def test_input_that_cannot_work_is_one_sentence(script: Callable, finished: Path, tmp_path: Path) -> None:
    refused(script(SEED="-3"), 2, "SEED '-3' must be a whole number")
    refused(script(SEED="", RUN_ID="../up"), 2, "RUN_ID", "without slashes")
    refused(script(RUN_ID="x", DATA_PATH="nowhere"), 2, "nowhere", "no such data folder")
    assert not (tmp_path / "logs").exists(), "a run that cannot begin leaves no log"


def test_a_log_is_not_written_over(script: Callable, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/mine.txt").write_text("precious")
    refused(script(RUN_ID="mine"), 2, "logs/mine.txt exists")
    assert (tmp_path / "logs/mine.txt").read_text() == "precious"


def test_another_tokenizer_is_refused_and_other_text_is_said(script: Callable, finished: Path) -> None:
    refused(script(changes={"tokenizer_sha256": "0" * 64}), 2, "the recorded run's has 0000000000000000...")
    code, out, _ = script("--eval-only", str(finished / "artifact.bpb"), changes={"val_sha256": "1" * 64})
    assert code == 0 and f"NOT the recorded {'1' * 64}: scores do not compare" in out


def test_only_an_artifact_of_the_scripts_own_network_is_scored(script: Callable, finished: Path, tmp_path: Path) -> None:
    refused(script("--eval-only", "absent.bpb"), 2, "absent.bpb: no such artifact")
    (tmp_path / "noise.bpb").write_bytes(os.urandom(500))
    refused(script("--eval-only", "noise.bpb"), 2, "not a golf artifact")
    whole = bytearray((finished / "artifact.bpb").read_bytes())
    whole[len(whole) // 2] ^= 1
    (tmp_path / "flipped.bpb").write_bytes(whole)
    refused(script("--eval-only", "flipped.bpb"), 2, "checksum")
    artifact = read_artifact(finished / "artifact.bpb")
    other = dataclasses.replace(artifact.model, logit_softcap=20.0)
    assert isinstance(other, ModelConfig)
    write_artifact(tmp_path / "other.bpb", state=artifact.state, model=other, tokenizer_sha256=artifact.tokenizer_sha256,
                   scheme=artifact.scheme, codec=artifact.codec)
    refused(script("--eval-only", "other.bpb"), 2, "its network is another than this script's")


def test_over_the_cap_is_exit_code_1(script: Callable) -> None:
    code, out, err = script(changes={"cap_bytes": 1000}, RUN_ID="over")
    assert code == 1 and not err and "over the cap by" in out.splitlines()[-1] and "roundtrip_exact" in out


def test_a_diverged_run_is_exit_code_1(script: Callable, finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = module.Stepper.train_step
    monkeypatch.setattr(module.Stepper, "train_step", lambda self, batch, scale: original(self, batch, scale) * float("nan"))
    refused(script(RUN_ID="nan"), 1, "the loss is nan after step 1: training diverged")


def test_seed_and_clock_are_those_asked_for(script: Callable, finished: Path) -> None:
    settings = settings_of(read_run(finished))
    schedule = dataclasses.replace(settings.schedule, wallclock_s=1e-9, max_steps=None, warmdown_steps=None, warmdown_fraction=0.5)
    code, out, _ = script(changes={"schedule": schedule}, SEED="7", RUN_ID="clock")
    lines = out.splitlines()
    assert code == 0 and "seed:7" in lines
    assert [line for line in lines if line.startswith("stopping_early: wallclock_cap") and line.endswith("step:1/0")]
    assert len([line for line in lines if "train_loss" in line]) == 1, "the first step crosses the cap and is the last"
    assert torch.initial_seed() == 7
