"""From a config to a record: refusals before anything is trained, how a run ends, what the folder holds then."""

import fcntl
import json
import os
import random
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from bitsperbyte.__main__ import guarded, run_command
from bitsperbyte.golf import session as module
from bitsperbyte.golf.artifact import read_artifact, write_artifact
from bitsperbyte.golf.config import GolfConfig
from bitsperbyte.golf.model import GolfModel
from bitsperbyte.golf.session import load_run, train
from bitsperbyte.golf.train import Trainer
from bitsperbyte.records.store import read_record
from bitsperbyte.run.config import config_hash, load_config
from bitsperbyte.run.console import SteadyConsole
from bitsperbyte.run.folder import read_jsonl
from bitsperbyte.run.metrics import read_metrics
from bitsperbyte.run.trackers import Tracker
from bitsperbyte.text.tokenizers import load_tokenizer


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny: Callable) -> Path:
    """A finished run. Not to be changed."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    train(tiny({"schedule": {"warmup_steps": 2}}), folder)
    return folder


@pytest.fixture
def interrupted(tmp_path: Path, tiny: Callable, monkeypatch: pytest.MonkeyPatch) -> Path:
    class Dead(BaseException):
        pass

    def die(self: Trainer, loss: float, began_s: float, scale: float) -> None:
        if self.step == 6:
            raise Dead
        original(self, loss, began_s, scale)

    original = Trainer._finish_step
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_finish_step", die)
        with pytest.raises(Dead):
            train(tiny(), tmp_path / "run")
    return tmp_path / "run"


def exit_code(settings: dict, folder: Path, run_dir: Path, *more: str) -> int:
    """What the shell sees."""
    config = folder / "config_of_test.yaml"
    config.write_text(json.dumps(settings), encoding="utf-8")  # JSON is YAML
    return guarded(lambda: run_command(["golf", "train", str(config), "--run-dir", str(run_dir), *more]))


# -- a finished run --------------------------------------------------------------------------------------------------


def test_the_record_says_what_was_done(finished: Path, tiny: Callable) -> None:
    record = read_record(finished)
    config = tiny({"schedule": {"warmup_steps": 2}})
    t = record.training
    assert record.status == "finished" and record.error is None and record.seed == 1337 and record.track == "golf"
    assert GolfConfig.model_validate(record.config) == config
    assert (t.num_steps, t.num_tokens, t.batch_tokens) == (12, 12 * 128, 128)
    assert (t.lost_steps, t.num_resumes, t.charged_lost_s) == (0, 0, 0.0)
    model = GolfModel(config.model_dataclass())
    assert t.num_parameters == sum(p.numel() for p in model.parameters())
    rows = [row for row in read_jsonl(finished / "metrics.jsonl")[0] if "loss" in row]
    step_ms = sorted(row["step_ms"] for row in rows)
    assert step_ms[0] <= t.step_ms_p50 <= t.step_ms_p95 <= step_ms[-1]
    assert t.step_ms_p50 == pytest.approx((step_ms[5] + step_ms[6]) / 2) and t.final_train_loss == rows[-1]["loss"]
    assert t.train_s >= rows[-1]["elapsed_s"]
    assert {"setup", "warmup", "train", "validation", "checkpoint", "final_evaluation", "artifact"} <= set(record.phases_s)
    assert record.provenance["device"] == "cpu"
    assert record.provenance["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]  # package metadata may drop +cu130
    assert record.data.tokenizer_sha256 == load_tokenizer(finished).sha256


def test_the_score_is_that_of_the_file_on_the_disk(finished: Path, data_dir: Path) -> None:
    """Scored anew without the evaluator: one window of 16 after the other, bytes counted by hand."""
    record = read_record(finished)
    before, after = (record.score(label) for label in ("before_quantisation", "artifact"))
    assert before.evaluation_key == after.evaluation_key and before.num_bytes == after.num_bytes
    model, tokenizer, _ = load_run(finished)
    tokens = np.fromfile(data_dir / "val_000000.bin", dtype="<u2", offset=1024)[:500].astype(np.int64)
    nats = 0.0
    for start in range(0, 499, 16):
        x = torch.from_numpy(tokens[start : start + 17])
        with torch.no_grad():
            nats += float(model.loss(x[None, :-1], x[None, 1:])) * (len(x) - 1)
    num_bytes = int((tokens[1:] >= 4).sum())  # of the byte tokenizer: each byte is a token, control tokens count none
    assert after.num_tokens == 499 and after.num_bytes == num_bytes
    assert after.bpb == pytest.approx(nats / np.log(2) / num_bytes, rel=1e-5)
    ledger = record.artifact
    assert ledger.weight_bytes == (finished / "artifact.bpb").stat().st_size
    assert read_artifact(finished / "artifact.bpb").state.keys() == dict(model.named_parameters()).keys()


LINES = {  # from the challenge's formats
    r"model_params:(\d+)": 1,
    r"world_size:(\d+) grad_accum_steps:(\d+)": 1,
    r"seed:(\d+)": 1,
    r"val_loader:shards pattern=(\S+) tokens:(\d+)": 1,
    r"warmup_step:(\d+)/2": 1,
    r"step:(\d+)/12 train_loss:(\d+\.\d+) train_time:(\d+)ms step_avg:(\d+\.\d+)ms": 10,  # the first ten and each fifth
    r"step:(\d+)/12 val_loss:(\d+\.\d+) val_bpb:(\d+\.\d+) train_time:(\d+)ms step_avg:(\d+\.\d+)ms": 4,
    r"peak memory allocated: (\d+) MiB reserved: (\d+) MiB": 1,
    r"Serialized model: (\d+) bytes": 1,
    r"Code size: (\d+) bytes": 1,
    r"Total submission size: (\d+) bytes": 1,
    r"Serialized model int8\+zlib: (\d+) bytes \(payload:(\d+) raw_torch:(\d+) payload_ratio:(\d+\.\d\d)x\)": 1,
    r"Total submission size int8\+zlib: (\d+) bytes": 1,
    r"final_int8_zlib_roundtrip val_loss:(\d+\.\d+) val_bpb:(\d+\.\d+) eval_time:(\d+)ms": 1,
    r"final_int8_zlib_roundtrip_exact val_loss:(\d+\.\d{8}) val_bpb:(\d+\.\d{8})": 1,
}


@pytest.mark.parametrize("pattern", LINES)
def test_train_log_reads_as_the_challenges(finished: Path, pattern: str) -> None:
    log = (finished / "train.log").read_text(encoding="utf-8")
    assert len(re.findall(rf"(?m)^{pattern}$", log)) == LINES[pattern]


def test_train_log_agrees_with_the_record(finished: Path) -> None:
    log, record = (finished / "train.log").read_text(encoding="utf-8"), read_record(finished)
    loss, bpb = re.search(r"roundtrip_exact val_loss:(\S+) val_bpb:(\S+)", log).groups()
    assert float(loss) == pytest.approx(record.score("artifact").nats_per_token, abs=1e-8)
    assert float(bpb) == pytest.approx(record.score("artifact").bpb, abs=1e-8)
    size, payload = re.search(r"Serialized model int8\+zlib: (\d+) bytes \(payload:(\d+)", log).groups()
    assert (int(size), int(payload)) == (record.artifact.weight_bytes, record.artifact.payload_bytes)
    assert int(re.search(r"Total submission size int8\+zlib: (\d+)", log)[1]) == record.artifact.total_bytes


def test_an_artifact_of_another_tokenizer_is_refused(finished: Path, tmp_path: Path, tiny: Callable) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    artifact = read_artifact(run / "artifact.bpb")
    write_artifact(run / "artifact.bpb", state=artifact.state, model=artifact.model, tokenizer_sha256="0" * 64,
                   scheme="reference_int8", codec="zlib", extra={})
    with pytest.raises(ValueError, match="tokenizer"):
        load_run(run)


# -- resume ----------------------------------------------------------------------------------------------------------


def test_resume_under_another_config_shows_the_difference(interrupted: Path, tiny: Callable) -> None:
    with pytest.raises(ValueError, match=r"optim\.matrix_lr: 0\.04 -> 0\.02") as caught:
        train(tiny({"optim": {"matrix_lr": 0.02}}), interrupted, resume=True)
    assert "another --run-dir" in str(caught.value)
    assert read_record(interrupted).status == "running", "the record is as it was"


def test_resume_under_another_torch_is_refused(interrupted: Path, tiny: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    with pytest.raises(ValueError, match=r"versions\.torch: .* -> .*9\.9\.9"):
        train(tiny(), interrupted, resume=True)


def test_resume_under_other_data_is_refused(tmp_path: Path, data_dir: Path, tiny: Callable) -> None:
    data = shutil.copytree(data_dir, tmp_path / "data")
    config = tiny({"data": {"path": str(data)}, "schedule": {"max_steps": 3}})
    train(config, tmp_path / "run")
    (tmp_path / "run/record.json").unlink()
    shard = bytearray((data / "train_000000.bin").read_bytes())
    shard[2000] ^= 1
    (data / "train_000000.bin").write_bytes(shard)
    manifest = json.loads((data / "manifest.json").read_text())
    entry = manifest["splits"]["train"]["files"][0]
    entry["sha256"] = module.hashlib.sha256(shard).hexdigest()
    (data / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"data\.train_sha256: "):
        train(config, tmp_path / "run", resume=True)


def test_a_finished_run_is_neither_resumed_nor_overwritten(finished: Path, tmp_path: Path, settings: Callable, capsys) -> None:
    changes = {"schedule": {"warmup_steps": 2}}
    before = {p: p.read_bytes() for p in finished.rglob("*") if p.is_file() and p.name != ".lock"}
    assert exit_code(settings(changes), tmp_path, finished, "--resume") == 2
    assert re.search(r"bpb: the run in \S+ is finished: see its record\.json, or take another --run-dir", capsys.readouterr().err)
    assert exit_code(settings(changes), tmp_path, finished) == 2
    assert re.search(r"bpb: \S+ already holds a run: go on with it by --resume", capsys.readouterr().err)
    assert {p: p.read_bytes() for p in finished.rglob("*") if p.is_file() and p.name != ".lock"} == before


def test_nothing_to_resume(tmp_path: Path, settings: Callable, capsys) -> None:
    assert exit_code(settings(), tmp_path, tmp_path / "none", "--resume") == 2
    assert "holds no run to resume" in capsys.readouterr().err and not (tmp_path / "none").exists()


def test_a_folder_in_use_is_refused(interrupted: Path, tiny: Callable) -> None:
    with open(interrupted / ".lock", "r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="in use by"):
            train(tiny(), interrupted, resume=True)
    assert train(tiny(), interrupted, resume=True).status == "finished"


def test_a_run_that_died_before_its_first_checkpoint_starts_over(tmp_path: Path, tiny: Callable, losses: Callable,
                                                                 monkeypatch: pytest.MonkeyPatch, finished: Path) -> None:
    class Dead(BaseException):
        pass

    def die(self: Trainer) -> None:
        raise Dead

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "warm_up", die)
        with pytest.raises(Dead):
            train(tiny(), tmp_path / "run")
    assert train(tiny(), tmp_path / "run", resume=True).training.num_resumes == 1
    assert losses(tmp_path / "run") == losses(finished)


def test_ctrl_c_while_scoring_keeps_the_training(tmp_path: Path, tiny: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_artifact", stop)
        patch.setattr(module, "size_lines", stop)
        patch.setattr(module, "read_artifact", stop)
        patch.setattr(Trainer, "score", stop)
        with pytest.raises(KeyboardInterrupt):
            train(tiny({"eval": {"every_steps": None}}), tmp_path / "run")
    assert read_record(tmp_path / "run").status == "interrupted"
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", stop)  # nothing is left to train
        record = train(tiny({"eval": {"every_steps": None}}), tmp_path / "run", resume=True)
    assert record.status == "finished" and record.training.num_steps == 12 and record.training.lost_steps == 0
    assert len(record.scores) == 2


# -- how else a run ends ---------------------------------------------------------------------------------------------


def test_over_the_cap_is_an_error_that_keeps_everything(tmp_path: Path, settings: Callable, capsys) -> None:
    over = settings({"artifact": {"cap_bytes": 1000}})
    assert exit_code(over, tmp_path, tmp_path / "run") == 1
    assert re.search(r"bpb: the artifact is over the cap: [\d,]+ bytes too many", capsys.readouterr().err)
    record = read_record(tmp_path / "run")
    assert record.status == "over_cap" and "over the cap" in record.error and len(record.scores) == 2
    assert record.artifact.cap_bytes == 1000 and record.artifact.margin_bytes == 1000 - record.artifact.total_bytes
    assert (tmp_path / "run/artifact.bpb").stat().st_size == record.artifact.weight_bytes
    load_run(tmp_path / "run")
    assert exit_code(over, tmp_path, tmp_path / "run", "--resume") == 2


def test_exit_code_of_divergence_and_of_a_full_disk(tmp_path: Path, settings: Callable, monkeypatch: pytest.MonkeyPatch,
                                                    capsys) -> None:
    assert exit_code(settings({"optim": {"matrix_lr": 1e30, "scalar_lr": 1e30}}), tmp_path, tmp_path / "diverged") == 1
    assert "good checkpoint" in capsys.readouterr().err

    def full(*arguments: object) -> None:
        raise OSError(28, "cannot write the checkpoint of step 4 (No space left on device): make room, go on with --resume")

    monkeypatch.setattr("bitsperbyte.golf.train.save_checkpoint", full)
    assert exit_code(settings(), tmp_path, tmp_path / "full") == 3
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("bpb: ")]
    assert lines == ["bpb: cannot write the checkpoint of step 4 (No space left on device): make room, go on with --resume"]


def test_too_small_a_disk_is_refused_before_the_start(tmp_path: Path, settings: Callable, monkeypatch: pytest.MonkeyPatch,
                                                      capsys) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 90, 10))
    assert exit_code(settings(), tmp_path, tmp_path / "run") == 3
    assert re.search(r"10 bytes free, and three checkpoints and the artifact needs [\d,]+", capsys.readouterr().err)
    assert not (tmp_path / "run").exists()


def test_a_crash_stays_a_run(tmp_path: Path, tiny: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*arguments: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(Trainer, "train_step", crash)
    with pytest.raises(RuntimeError):
        train(tiny(), tmp_path / "run")
    record = read_record(tmp_path / "run")
    assert record.status == "crashed" and record.error == "RuntimeError: out of luck" and record.training.num_steps == 0


# -- input that cannot work ------------------------------------------------------------------------------------------


def refused(config: GolfConfig, run_dir: Path, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        train(config, run_dir)
    assert not run_dir.exists(), "a folder in which nothing was begun leaves no trace"


def test_a_tokenizer_of_another_size(tmp_path: Path, tiny: Callable) -> None:
    refused(tiny({"model": {"vocab_size": 1024}}), tmp_path / "run", r"has 260 pieces and model\.vocab_size is 1024: set them equal")


def test_text_too_short_for_a_batch(tmp_path: Path, tiny: Callable) -> None:
    refused(tiny({"train": {"batch_tokens": 65536, "micro_batch_tokens": 16}}), tmp_path / "run", "prepare more text, or lower")


def test_a_gpu_where_there_is_none(tmp_path: Path, tiny: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused(tiny({"train": {"device": "cuda"}}), tmp_path / "run", r"no GPU here")


def test_no_data(tmp_path: Path, tiny: Callable) -> None:
    refused(tiny({"data": {"path": str(tmp_path / "nowhere")}}), tmp_path / "run", "there is no such data folder")


def flip_and_refuse(data_dir: Path, tmp_path: Path, tiny: Callable, seed: int) -> None:
    rng = random.Random(seed)
    data = shutil.copytree(data_dir, tmp_path / "data")
    shard = data / rng.choice(["train_000000.bin", "val_000000.bin"])
    content = bytearray(shard.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    shard.write_bytes(content)
    refused(tiny({"data": {"path": str(data)}}), tmp_path / "run", re.escape(str(shard)))


@pytest.mark.parametrize("seed", range(4))
def test_a_flipped_bit_in_a_shard(data_dir: Path, tmp_path: Path, tiny: Callable, seed: int) -> None:
    flip_and_refuse(data_dir, tmp_path, tiny, seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 150))
def test_a_flipped_bit_anywhere_in_a_shard(data_dir: Path, tmp_path: Path, tiny: Callable, seed: int) -> None:
    flip_and_refuse(data_dir, tmp_path, tiny, seed)


@pytest.mark.parametrize("keep", [0.5, 0.01])
def test_a_truncated_shard(data_dir: Path, tmp_path: Path, tiny: Callable, keep: float) -> None:
    data = shutil.copytree(data_dir, tmp_path / "data")
    shard = data / "train_000000.bin"
    os.truncate(shard, int(shard.stat().st_size * keep) // 2 * 2)
    refused(tiny({"data": {"path": str(data)}}), tmp_path / "run", re.escape(str(shard)))




def test_files_that_resuming_does_not_need_may_be_lost(interrupted: Path, tiny: Callable) -> None:
    (interrupted / "record.json").write_text("{", encoding="utf-8")
    next(interrupted.glob("tokenizer.*")).unlink()
    record = train(tiny(), interrupted, resume=True)
    assert record.status == "finished" and load_tokenizer(interrupted).sha256 == record.data.tokenizer_sha256


def test_attempts_are_all_recorded(interrupted: Path, tiny: Callable) -> None:
    begun = read_record(interrupted).created_utc
    record = train(tiny(), interrupted, resume=True)
    assert record.created_utc == begun and [a["device"] for a in record.provenance["attempts"]] == ["cpu", "cpu"]


@pytest.mark.parametrize("row", ["{}", "[1]", '{"step": 3}', '{"step": 3, "elapsed_s": "a", "loss": 1.0, "step_ms": 2.0}', "not json",
                                 '{"event": "resume"}', '{"step": 3, "elapsed_s": 1.0, "loss": 1.0}'])
def test_a_damaged_metrics_row_is_refused_before_training(interrupted: Path, tiny: Callable, row: str) -> None:
    path = interrupted / "metrics.jsonl"
    path.write_text(row + "\n" + path.read_text(encoding="utf-8"), encoding="utf-8")
    with pytest.raises(ValueError, match="metrics.jsonl.*start a new run"):
        train(tiny(), interrupted, resume=True)
    assert read_record(interrupted).status == "crashed"


def test_metrics_that_are_gone_are_not_free_time(interrupted: Path, tiny: Callable) -> None:
    (interrupted / "metrics.jsonl").unlink()
    with pytest.raises(ValueError, match="metrics.jsonl has no row"):
        train(tiny(), interrupted, resume=True)


def test_a_reader_that_goes_away_does_not_end_the_run(tmp_path: Path, tiny: Callable) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed:
        record = train(tiny(), tmp_path / "run", console=SteadyConsole(file=closed, force_terminal=False))
    assert record.status == "finished" and record.training.num_steps == 12


# -- loggers ---------------------------------------------------------------------------------------------------------


def tensorboard_scalars(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_a_logger_taken_up_on_resume_gets_what_is_trained_from_there(interrupted: Path, tiny: Callable) -> None:
    """It is no part of what makes the run this run; the saved config says which one it is."""
    logged = tiny({"logger": {"backend": "tensorboard", "every_steps": 1}})
    record = train(logged, interrupted, resume=True)
    assert load_config(interrupted / "config.yaml", GolfConfig) == logged and record.config["logger"]["backend"] == "tensorboard"
    assert record.config_sha256 == config_hash(tiny()) == config_hash(logged)
    metrics = read_metrics(interrupted / "metrics.jsonl")
    found = tensorboard_scalars(interrupted)
    assert found["train/loss"] == [(row["step"], pytest.approx(row["loss"], rel=1e-6)) for row in metrics.steps if row["step"] > 4]
    assert dict(found["val/bpb"])[12] == pytest.approx(metrics.validations[-1]["val_bpb"], rel=1e-6)
    assert found["artifact/total_bytes"] == [(12, record.artifact.total_bytes)]
    assert found["artifact/bpb"] == [(12, pytest.approx(record.score("artifact").bpb, rel=1e-6))]
    with pytest.raises(ValueError, match="is finished"):
        train(tiny(), interrupted, resume=True)


def test_a_logger_that_fails_costs_nothing_of_the_run(tmp_path: Path, tiny: Callable, losses: Callable, finished: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def log(self, step: int, values: dict[str, float]) -> None:
            raise ConnectionError("the network is gone")

    monkeypatch.setattr(module, "open_tracker", lambda section, run_dir, *, say, **facts: Tracker(Broken(), "wandb", say))
    assert train(tiny({"schedule": {"warmup_steps": 2}}), tmp_path / "run").status == "finished"
    assert losses(tmp_path / "run") == losses(finished)
    assert (tmp_path / "run" / "train.log").read_text().count("logging to wandb failed and stops here; the run goes on") == 1


def test_a_logger_that_is_not_installed_is_refused_before_the_folder_holds_a_run(tmp_path: Path, tiny: Callable,
                                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    refused(tiny({"logger": {"backend": "trackio"}}), tmp_path / "run", "logger.backend is trackio and .* pip install trackio")
