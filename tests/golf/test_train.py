"""Training: what must not change the losses, and every way a run can stop."""

import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import yaml

from bitsperbyte.golf import checkpoint as checkpoint_module
from bitsperbyte.golf import train as module
from bitsperbyte.golf.clock import Clock
from bitsperbyte.golf.session import train
from bitsperbyte.golf.train import Trainer
from bitsperbyte.run.folder import read_jsonl
from bitsperbyte.run.metrics import read_metrics
from bitsperbyte.run.outcome import RunFailed


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory, tiny: Callable) -> Path:
    """The run folder of the tiny config, trained without interruption."""
    folder = tmp_path_factory.mktemp("reference") / "run"
    train(tiny(), folder)
    return folder


def at_step(monkeypatch: pytest.MonkeyPatch, step: int, act: Callable[[Trainer], object]) -> None:
    """Call `act` within the training step that follows `step` finished ones."""
    original = Trainer.train_step

    def wrapped(self: Trainer, batch: tuple, scale: float) -> torch.Tensor:
        if self.step == step:
            act(self)
        return original(self, batch, scale)

    monkeypatch.setattr(Trainer, "train_step", wrapped)


# -- what leaves the losses as they are ------------------------------------------------------------------------------


def test_the_model_learns(reference: Path, losses: Callable) -> None:
    found = losses(reference)
    assert len(found) == 12 and found[0] == pytest.approx(math.log(260), abs=0.1)
    assert found[-1] < found[0] - 1.5


def test_equal_configs_give_equal_losses_and_artifacts(reference: Path, tmp_path: Path, tiny: Callable, losses: Callable) -> None:
    train(tiny(), tmp_path / "again")
    assert losses(tmp_path / "again") == losses(reference)
    assert (tmp_path / "again/artifact.bpb").read_bytes() == (reference / "artifact.bpb").read_bytes()


def test_another_seed_gives_other_losses(reference: Path, tmp_path: Path, tiny: Callable, losses: Callable) -> None:
    train(tiny({"train": {"seed": 7}}), tmp_path / "other")
    assert losses(tmp_path / "other") != losses(reference)


def test_warm_up_leaves_no_trace(reference: Path, tmp_path: Path, tiny: Callable, losses: Callable) -> None:
    train(tiny({"schedule": {"warmup_steps": 3}}), tmp_path / "warm")
    assert losses(tmp_path / "warm") == losses(reference)
    assert (tmp_path / "warm/artifact.bpb").read_bytes() == (reference / "artifact.bpb").read_bytes()


@pytest.mark.parametrize("num_before", [0, 2])
def test_warm_up_restores_every_state(trainer_of: Callable, tiny: Callable, num_before: int) -> None:
    trainer = trainer_of(tiny({"schedule": {"warmup_steps": 3}}))
    for _ in range(num_before):
        trainer.train_step(trainer.next_batch(), 1.0)
        trainer.step += 1

    def state() -> tuple[dict[str, torch.Tensor], int, int, float]:
        tensors = {name: p.detach().clone() for name, p in trainer.model.named_parameters()} | trainer.optimizers.snapshot()
        tensors["random"] = torch.get_rng_state()
        return tensors, trainer.loader.position, trainer.step, trainer.clock.elapsed_s

    before, *rest_before = state()
    calls = []
    original = trainer.train_step
    trainer.train_step = lambda *arguments: (calls.append(1), torch.rand(3), original(*arguments))[-1]
    trainer.warm_up()
    after, *rest_after = state()
    assert len(calls) == 3 and rest_after == rest_before and after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert all(p.grad is None for p in trainer.model.parameters()) and trainer.phases_s["warmup"] > 0


@pytest.mark.parametrize("micro_batch_tokens", [16, 64])
def test_micro_batches_do_not_change_the_result(reference: Path, tmp_path: Path, tiny: Callable, losses: Callable,
                                                micro_batch_tokens: int) -> None:
    record = train(tiny({"train": {"micro_batch_tokens": micro_batch_tokens}}), tmp_path / "micro")
    assert record.status == "finished"
    assert f"grad_accum_steps:{128 // micro_batch_tokens}" in (tmp_path / "micro/train.log").read_text()
    assert losses(tmp_path / "micro") == pytest.approx(losses(reference), abs=1e-5)


def test_two_ranks_train_as_one(reference: Path, tmp_path: Path, settings: Callable, losses: Callable, record_of: Callable) -> None:
    """Over gloo, two seeds one after the other, with validation and checkpoints in between; one record, one row a step."""
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(settings()))
    outside = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "bitsperbyte", "golf",
         "train", str(config), "--run-dir", str(tmp_path / "two"), "--seeds", "7,1337"],
        env={**outside, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("artifact bpb over 2 seeds") == 1, "only one rank speaks"
    assert record_of(tmp_path / "two/seed_7")["status"] == "finished"
    two = tmp_path / "two/seed_1337"
    assert losses(two) == pytest.approx(losses(reference), abs=1e-4)
    rows = read_jsonl(two / "metrics.jsonl")[0]
    assert sum("loss" in row for row in rows) == 12, "only one rank writes"
    assert all(row["step_ms"] > 0 for row in rows if "loss" in row)
    record, alone = record_of(two), record_of(reference)
    assert record["status"] == "finished" and record["provenance"]["num_devices"] == 2
    for of_two, of_one in zip(record["scores"], alone["scores"], strict=True):
        assert of_two["num_tokens"] == of_one["num_tokens"] and of_two["num_bytes"] == of_one["num_bytes"]
        assert of_two["bpb"] == pytest.approx(of_one["bpb"], abs=1e-3)


# -- the clock -------------------------------------------------------------------------------------------------------


def test_validation_and_checkpoints_are_off_the_clock(tmp_path: Path, tiny: Callable, monkeypatch: pytest.MonkeyPatch,
                                                      record_of: Callable) -> None:
    """On a clock that moves by 1 s in a step, 100 s in an evaluation, 10,000 s in a checkpoint and 1,000,000 s in warm-up."""
    now = [0.0]

    def taking(seconds: float, original: Callable) -> Callable:
        def wrapped(*arguments, **named):
            now[0] += seconds
            return original(*arguments, **named)

        return wrapped

    monkeypatch.setattr(module, "Clock", lambda synchronize: Clock(synchronize, lambda: now[0]))
    monkeypatch.setattr(module, "evaluate", taking(100, module.evaluate))
    monkeypatch.setattr(module, "save_checkpoint", taking(10_000, module.save_checkpoint))
    monkeypatch.setattr(Trainer, "train_step", taking(1, Trainer.train_step))
    monkeypatch.setattr(Trainer, "warm_up", taking(1_000_000, Trainer.warm_up))
    train(tiny({"schedule": {"max_steps": 6, "warmup_steps": 2}, "eval": {"every_steps": 2}, "train": {"checkpoint_every_steps": 3}}),
          tmp_path / "run")
    assert now[0] == 6 + 2 + 5 * 100 + 2 * 10_000 + 1_000_000, "all of it happened: 5 evaluations, 2 checkpoints"
    assert record_of(tmp_path / "run")["training"]["train_s"] == 6
    steps = read_metrics(tmp_path / "run/metrics.jsonl").steps
    assert [(row["elapsed_s"], row["step_ms"]) for row in steps] == [(float(i), 1000.0) for i in range(1, 7)]
    assert checkpoint_module.load_checkpoint(tmp_path / "run").meta["clock"]["elapsed_s"] == 6


def test_a_budget_in_seconds_ends_the_run(tmp_path: Path, tiny: Callable, record_of: Callable) -> None:
    train(tiny({"schedule": {"wallclock_s": 1.2, "max_steps": None, "warmdown": {"steps": None, "fraction": 0.5}}}), tmp_path / "run")
    record, log = record_of(tmp_path / "run"), (tmp_path / "run/train.log").read_text()
    steps = read_metrics(tmp_path / "run/metrics.jsonl").steps
    assert record["training"]["stopped_by"] == "wallclock_cap" and "stopping_early: wallclock_cap" in log
    assert steps[-2]["elapsed_s"] < 1.2 <= record["training"]["train_s"] < 1.2 + 5 * steps[-1]["step_ms"] / 1e3
    assert [row["elapsed_s"] for row in steps] == sorted(row["elapsed_s"] for row in steps)
    for row in steps:
        began = row["elapsed_s"] - row["step_ms"] / 1e3
        assert row["lr_scale"] == pytest.approx(min(1.0, (1.2 - began) / 0.6), abs=0.02)


# -- signals ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def hang_up_by_default() -> Iterator[None]:
    """SIGHUP as a terminal leaves it: a suite started under nohup inherits it ignored, and so do the runs in it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 143)])
def test_a_signal_writes_a_checkpoint_and_the_run_goes_on_as_if_nothing_had_been(
        reference: Path, tmp_path: Path, tiny: Callable, losses: Callable, record_of: Callable, monkeypatch: pytest.MonkeyPatch,
        number: int, code: int, hang_up_by_default: None) -> None:
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with monkeypatch.context() as patch:
        at_step(patch, 6, lambda trainer: os.kill(os.getpid(), number))
        with pytest.raises(RunFailed, match=r"at step 7, checkpoint written; go on with --resume") as caught:
            train(tiny(), tmp_path / "run")
    assert caught.value.code == code
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == handlers
    record = record_of(tmp_path / "run")
    assert record["status"] == "interrupted" and record["training"]["num_steps"] == 7 and "--resume" in record["error"]
    assert checkpoint_module.load_checkpoint(tmp_path / "run").step == 7
    train(tiny(), tmp_path / "run", resume=True)
    resumed = record_of(tmp_path / "run")
    assert losses(tmp_path / "run") == losses(reference)
    assert (tmp_path / "run/artifact.bpb").read_bytes() == (reference / "artifact.bpb").read_bytes()
    assert resumed["status"] == "finished" and resumed["error"] is None
    assert resumed["training"]["lost_steps"] == 0 and resumed["training"]["num_resumes"] == 1
    assert resumed["created_utc"] == record["created_utc"], "a record tells when the run began"


def test_a_signal_during_the_last_checkpoint_is_not_swallowed(tmp_path: Path, tiny: Callable, monkeypatch: pytest.MonkeyPatch,
                                                              reference: Path, losses: Callable) -> None:
    original = module.save_checkpoint

    def save(folder: Path, step: int, tensors: dict, meta: dict) -> Path:
        if step == 12:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(folder, step, tensors, meta)

    with monkeypatch.context() as patch:
        patch.setattr(module, "save_checkpoint", save)
        with pytest.raises(RunFailed, match="stopped by SIGTERM at step 12") as caught:
            train(tiny(), tmp_path / "run")
    assert caught.value.code == 143
    assert train(tiny(), tmp_path / "run", resume=True).status == "finished"
    assert losses(tmp_path / "run") == losses(reference)


def test_a_second_signal_acts_at_once(tmp_path: Path, tiny: Callable, monkeypatch: pytest.MonkeyPatch, record_of: Callable) -> None:
    def twice(trainer: Trainer) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    at_step(monkeypatch, 5, twice)
    with pytest.raises(KeyboardInterrupt):
        train(tiny(), tmp_path / "run")
    assert record_of(tmp_path / "run")["status"] == "interrupted"
    assert checkpoint_module.load_checkpoint(tmp_path / "run").step == 4


# -- divergence ------------------------------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_names_the_last_checkpoint_that_was_good(tmp_path: Path, tiny: Callable, record_of: Callable,
                                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(trainer: Trainer) -> None:
        with torch.no_grad():
            trainer.model.tok_emb.weight.fill_(float("nan"))

    at_step(monkeypatch, 6, spoil)
    with pytest.raises(RunFailed, match=r"loss is nan after step 7.*last good checkpoint is .*step_00000004\.safetensors") as caught:
        train(tiny(), tmp_path / "run")
    assert caught.value.code == 1
    record = record_of(tmp_path / "run")
    assert record["status"] == "diverged" and "step_00000004" in record["error"] and record["training"]["num_steps"] == 6
    assert (tmp_path / "run/checkpoint/step_00000004.safetensors").is_file()


def test_a_checkpoint_whose_weights_give_no_finite_loss_is_not_called_good(tmp_path: Path, tiny: Callable,
                                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """The fourth update ruins the weights, which are then saved before a loss can show it."""
    original = Trainer.train_step

    def ruin_after(self: Trainer, batch: tuple, scale: float) -> torch.Tensor:
        loss = original(self, batch, scale)
        if self.step == 3:
            with torch.no_grad():
                self.model.tok_emb.weight.fill_(float("inf"))
        return loss

    monkeypatch.setattr(Trainer, "train_step", ruin_after)
    with pytest.raises(RunFailed, match=r"after step 5.*last good checkpoint is .*step_00000002\.safetensors"):
        train(tiny({"train": {"checkpoint_every_steps": 2}}), tmp_path / "run")
    assert (tmp_path / "run/checkpoint/step_00000002.safetensors").is_file()


def test_an_absurd_learning_rate_diverges(tmp_path: Path, tiny: Callable, record_of: Callable) -> None:
    with pytest.raises(RunFailed, match="No good checkpoint was written before; lower the learning rates") as caught:
        train(tiny({"optim": {"matrix_lr": 1e30, "scalar_lr": 1e30}}), tmp_path / "run")
    assert caught.value.code == 1 and record_of(tmp_path / "run")["status"] == "diverged"


@pytest.mark.parametrize("max_steps", [4, 1])
def test_weights_ruined_by_the_last_step_are_a_diverged_run(tmp_path: Path, tiny: Callable, record_of: Callable,
                                                            monkeypatch: pytest.MonkeyPatch, max_steps: int) -> None:
    """No later loss shows it: the score does, and that is the run's fault and not the data's."""
    original = Trainer.train_step

    def ruin_last(self: Trainer, batch: tuple, scale: float) -> torch.Tensor:
        loss = original(self, batch, scale)
        if self.step == max_steps - 1:
            with torch.no_grad():
                self.model.tok_emb.weight.fill_(float("nan"))
        return loss

    monkeypatch.setattr(Trainer, "train_step", ruin_last)
    with pytest.raises(RunFailed, match=f"loss on the validation text is nan after step {max_steps}: training diverged") as caught:
        train(tiny({"schedule": {"max_steps": max_steps}, "train": {"checkpoint_every_steps": 2}}), tmp_path / "run")
    assert caught.value.code == 1 and record_of(tmp_path / "run")["status"] == "diverged"


# -- damage ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def stopped(tmp_path: Path, tiny: Callable, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that died within step 11 as by SIGKILL, as far as its files tell: checkpoints of steps 4 and 8, rows up to 10."""
    class Dead(BaseException):
        pass

    def die(trainer: Trainer) -> None:
        raise Dead

    with monkeypatch.context() as patch:
        at_step(patch, 10, die)
        with pytest.raises(Dead):
            train(tiny(), tmp_path / "run")
    return tmp_path / "run"


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def test_lost_steps_are_trained_again_and_their_seconds_stay_charged(stopped: Path, reference: Path, tiny: Callable, losses: Callable,
                                                                     record_of: Callable) -> None:
    before = read_metrics(stopped / "metrics.jsonl")
    rows, saved_s = before.steps, checkpoint_module.load_checkpoint(stopped).meta["clock"]["elapsed_s"]
    train(tiny(), stopped, resume=True)
    training, metrics = record_of(stopped)["training"], read_metrics(stopped / "metrics.jsonl")
    assert losses(stopped) == losses(reference)
    assert training["lost_steps"] == 2 and training["num_resumes"] == 1 and training["num_steps"] == 12
    assert rows[7]["elapsed_s"] <= saved_s < rows[8]["elapsed_s"]
    assert training["charged_lost_s"] == pytest.approx(before.last_elapsed_s - saved_s)
    assert metrics.steps[8]["elapsed_s"] > rows[9]["elapsed_s"], "the first step trained again continues at the last row's time"
    assert training["train_s"] >= rows[9]["elapsed_s"] + sum(row["step_ms"] for row in metrics.steps[8:]) / 1e3 - 1e-6
    assert "2 steps are trained again" in (stopped / "train.log").read_text()
    assert [row["step"] for row in metrics.validations] == [0, 5, 10, 12]


def test_a_lost_budget_is_not_given_back(tmp_path: Path, tiny: Callable, monkeypatch: pytest.MonkeyPatch, record_of: Callable) -> None:
    """A run of 0.6 s that dies at about 0.4 s without a checkpoint has about 0.2 s left."""
    config = tiny({"schedule": {"wallclock_s": 0.6, "max_steps": None, "warmdown": {"steps": None, "fraction": 0.0}},
                   "train": {"checkpoint_every_steps": None}})
    original = Trainer._finish_step

    def die(self: Trainer, loss: float, began_s: float, scale: float) -> None:
        original(self, loss, began_s, scale)
        if self.clock.elapsed_s > 0.4:
            raise SystemExit

    monkeypatch.setattr("bitsperbyte.golf.train.MAX_UNSAVED_SHARE", 100.0)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_finish_step", die)
        with pytest.raises(SystemExit):
            train(config, tmp_path / "run")
    before = read_metrics(tmp_path / "run/metrics.jsonl")
    train(config, tmp_path / "run", resume=True)
    training = record_of(tmp_path / "run")["training"]
    assert training["charged_lost_s"] == pytest.approx(before.last_elapsed_s) and training["lost_steps"] == before.last_step
    trained_s = sum(row["step_ms"] for row in read_metrics(tmp_path / "run/metrics.jsonl").steps) / 1e3
    assert training["train_s"] >= 0.6 and training["train_s"] == pytest.approx(training["charged_lost_s"] + trained_s, abs=0.1)


def test_a_torn_last_row_is_dropped(stopped: Path, reference: Path, tiny: Callable, losses: Callable) -> None:
    with open(stopped / "metrics.jsonl", "a") as file:
        file.write('{"step": 11, "loss": 2.')
    train(tiny(), stopped, resume=True)
    assert losses(stopped) == losses(reference) and not read_jsonl(stopped / "metrics.jsonl")[1]


def test_a_truncated_checkpoint_is_passed_over_and_said(stopped: Path, reference: Path, tiny: Callable, losses: Callable,
                                                        record_of: Callable) -> None:
    truncate(stopped / "checkpoint/step_00000008.safetensors")
    train(tiny(), stopped, resume=True)
    log = (stopped / "train.log").read_text()
    assert "the checkpoint of step 8 is not used" in log and "resumed at step 4: 6 steps are trained again" in log
    assert losses(stopped) == losses(reference) and record_of(stopped)["training"]["lost_steps"] == 6


def test_without_a_whole_checkpoint_nothing_is_trained_or_lost(stopped: Path, tiny: Callable) -> None:
    for step in (4, 8):
        truncate(stopped / f"checkpoint/step_{step:08d}.safetensors")
    before = {p.name: p.read_bytes() for p in stopped.rglob("*") if p.name.startswith(("metrics", "step_", "latest"))}
    with pytest.raises(ValueError, match=r"no checkpoint can be used.*step 8.*step 4.*new run folder"):
        train(tiny(), stopped, resume=True)
    assert {name: next(stopped.rglob(name)).read_bytes() for name in before} == before


def test_a_full_disk_ends_the_run_with_one_sentence_and_the_earlier_checkpoint(
        tmp_path: Path, tiny: Callable, monkeypatch: pytest.MonkeyPatch, record_of: Callable, reference: Path,
        losses: Callable) -> None:
    original = checkpoint_module._write_synced

    def full(path: Path, data: bytes) -> None:
        if "step_00000008" in path.name:
            raise OSError(28, "No space left on device")
        original(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module, "_write_synced", full)
        with pytest.raises(OSError, match=r"cannot write the checkpoint of step 8.*make room"):
            train(tiny(), tmp_path / "run")
    record = record_of(tmp_path / "run")
    assert record["status"] == "crashed" and "No space left" in record["error"]
    assert checkpoint_module.load_checkpoint(tmp_path / "run").step == 4
    train(tiny(), tmp_path / "run", resume=True)
    assert losses(tmp_path / "run") == losses(reference)


@pytest.mark.parametrize("share, saved", [(0.05, True), (100.0, False)])
def test_a_short_run_is_saved_in_time(tmp_path: Path, tiny: Callable, monkeypatch: pytest.MonkeyPatch,
                                         share: float, saved: bool) -> None:
    """At checkpoint_every_s of a minute, a run of one second would lose everything to a kill; a run that lost all its budget before
    a checkpoint has nothing to show and says so."""
    config = tiny({"schedule": {"wallclock_s": 1.0, "max_steps": None, "warmdown": {"steps": None, "fraction": 0.0}},
                   "train": {"checkpoint_every_steps": None}})
    original = Trainer._finish_step

    def die_at_the_end(self: Trainer, loss: float, began_s: float, scale: float) -> None:
        original(self, loss, began_s, scale)
        if self.clock.elapsed_s > 1.0:
            raise SystemExit

    monkeypatch.setattr("bitsperbyte.golf.train.MAX_UNSAVED_SHARE", share)
    monkeypatch.setattr(Trainer, "_finish_step", die_at_the_end)
    with pytest.raises(SystemExit):
        train(config, tmp_path / "run")
    if saved:
        record = train(config, tmp_path / "run", resume=True)
        assert record.status == "finished" and record.training.num_steps > 0 and record.training.charged_lost_s < 0.5
    else:
        with pytest.raises(RunFailed, match="nothing trained is left") as failed:
            train(config, tmp_path / "run", resume=True)
        assert (failed.value.code, failed.value.status) == (1, "crashed")
