"""One golf run: warm-up (untimed), the training loop under an honest clock, checkpoints, resume.

What follows the loop (artifact, scoring it, the record) is in session.py.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from bitsperbyte.golf.checkpoint import load_checkpoint, save_checkpoint
from bitsperbyte.golf.clock import Clock, agree_max
from bitsperbyte.golf.config import GolfConfig
from bitsperbyte.golf.devices import Ranks
from bitsperbyte.golf.evaluate import Evaluation, Protocol, evaluate
from bitsperbyte.golf.lines import cap_line
from bitsperbyte.golf.logs import RunLog
from bitsperbyte.golf.schedule import is_finished, lr_scale
from bitsperbyte.golf.step import Stepper, random_state, set_random_state
from bitsperbyte.run.metrics import read_metrics
from bitsperbyte.run.outcome import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_TERMINATED, RunFailed
from bitsperbyte.text.loader import TokenStream
from bitsperbyte.text.tokenizers import Tokenizer

# Of the wall-clock budget, the most that may lie between two checkpoints, whatever train.checkpoint_every_s says.
MAX_UNSAVED_SHARE = 0.05


@dataclass
class Trainer(Stepper):
    """Everything that moves while a run trains, around the step of step.py. Its state is what a checkpoint holds."""

    config: GolfConfig
    ranks: Ranks
    run_dir: Path
    log: RunLog
    stream: TokenStream
    val_tokens: np.ndarray
    tokenizer: Tokenizer
    step: int = 0
    finished: str | None = None  # why training ended: wallclock_cap or max_steps
    phases_s: dict[str, float] = field(default_factory=dict)
    last_good: str | None = None  # the newest checkpoint from whose weights a finite loss came
    _unproven: str | None = None  # a newer one that has had no step yet
    _checkpoint_at: float = 0.0

    def __post_init__(self) -> None:
        config = self.config
        super().__init__(config.model_dataclass(), config.optim_dataclass(), config.schedule_dataclass(), config.batch_dataclass(),
                         self.ranks, self.stream)
        self.clock = Clock(self.ranks.synchronize)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the seconds spent inside to the phase's total."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.phases_s[name] = self.phases_s.get(name, 0.0) + time.perf_counter() - begin

    def warm_up(self) -> None:
        if self.schedule.warmup_steps:
            with self.phase("warmup"):
                self.take_warmup_steps(self.log.line)

    # -- checkpoint and resume --------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write a checkpoint (main rank), with the clocks of all ranks paused: the others wait."""
        self._checkpoint_at = time.monotonic()
        with self.clock.paused(), self.phase("checkpoint"):
            if self.ranks.is_main:
                self._write_checkpoint()
            self.ranks.barrier()

    def _write_checkpoint(self) -> None:
        tensors = {f"model/{name}": p.detach() for name, p in self.model.named_parameters()}
        tensors |= {f"optim/{name}": t for name, t in self.optimizers.state_dict().items()}
        tensors |= {f"random/{name}": t for name, t in random_state(self.ranks.device).items()}
        meta = {"clock": self.clock.state(), "position": self.step * self.config.train.batch_tokens,
                "finished": self.finished, "phases_s": self.phases_s}
        self._unproven = str(save_checkpoint(self.run_dir, self.step, tensors, meta))

    def resume(self) -> None:
        """Continue from the newest whole checkpoint, or from the start where none was written. The seconds that the lost steps had
        taken stay charged to the budget."""
        checkpoint = load_checkpoint(self.run_dir)
        metrics = read_metrics(self.run_dir / "metrics.jsonl")
        if checkpoint:
            for note in checkpoint.notes:
                self.log.say(note)
            tensors = checkpoint.tensors
            with torch.no_grad():
                for name, parameter in self.model.named_parameters():
                    parameter.copy_(tensors[f"model/{name}"])
            self.optimizers.load_state_dict(_under("optim/", tensors))
            set_random_state(_under("random/", tensors))
            self.step, self.finished = checkpoint.step, checkpoint.meta["finished"]
            self.clock.restore(checkpoint.meta["clock"])
            self.phases_s = dict(checkpoint.meta["phases_s"])
            self.loader = self.loader_at(checkpoint.meta["position"])
            self._unproven = f"that of step {checkpoint.step}"
        if checkpoint and checkpoint.step and not metrics.steps:
            raise ValueError(f"{self.run_dir / 'metrics.jsonl'} has no row of {checkpoint.step} steps, so the seconds that lost "
                             "steps took are not known: restore it from a copy, or start a new run")
        charged = max(0.0, metrics.last_elapsed_s - self.clock.elapsed_s) if not self.finished else 0.0
        self.clock.charge(charged)
        self.ranks.barrier()  # all ranks have read the rows before the main one adds its own
        self.log.row({"event": "resume", "from_step": self.step, "charged_s": charged, "elapsed_s": self.clock.elapsed_s})
        lost = max(0, metrics.last_step - self.step)
        self.log.say(f"resumed at step {self.step}: {lost} steps are trained again, and the {charged:.1f} s they had taken stay "
                     "charged to the budget")
        if self.step == 0 and is_finished(self.schedule, 0, self.clock.elapsed_s):
            raise RunFailed("the whole budget went into steps that were lost before the first checkpoint, and nothing trained is left: "
                            "start a new run in another folder", EXIT_FAILED, "crashed")

    # -- the loop ---------------------------------------------------------------------------------------------------

    def validate(self, max_tokens: int | None = None) -> Evaluation:
        """Non-overlapping validation during training; the clock must be paused."""
        ev = self.config.eval
        with self.phase("validation"):
            return self.score(self.val_tokens[: max_tokens or ev.max_tokens], Protocol(ev.window or self.config.train.seq_len))

    def score(self, tokens: np.ndarray, protocol: Protocol) -> Evaluation:
        """The model's score over all ranks. A loss that is not finite is a run that diverged, not bad input: RunFailed."""
        try:
            return evaluate(self.model, tokens, self.tokenizer.table, self.tokenizer.bos_id, protocol, rank=self.ranks.rank,
                            batch_tokens=self.config.eval.batch_tokens, world_size=self.ranks.world_size)
        except ValueError:
            x = torch.from_numpy(tokens[: self.config.train.seq_len + 1].astype(np.int64)).to(self.ranks.device)
            with torch.no_grad():
                loss = self.model.loss(x[None, :-1], x[None, 1:]).item() if len(x) > 1 else 0.0
            if isfinite(loss):
                raise
            self.raise_diverged(f"the loss on the validation text is {loss} after step {self.step}")

    def run(self) -> None:
        """Train until a limit ends the run. Raises RunFailed for a loss that is not finite (exit code 1) and for SIGINT (130),
        SIGTERM or SIGHUP (143), after a checkpoint."""
        every, every_s = self.config.eval.every_steps, self.config.train.checkpoint_every_s
        if self.schedule.wallclock_s:  # a kill must never cost a short run most of its budget
            every_s = min(every_s, MAX_UNSAVED_SHARE * self.schedule.wallclock_s)
        self._checkpoint_at = time.monotonic()
        with _catch_signals() as caught, self.log:
            batch = None
            while not self.finished:
                due = time.monotonic() - self._checkpoint_at > every_s
                every_steps = self.config.train.checkpoint_every_steps
                due |= bool(every_steps and self.step and self.step % every_steps == 0)
                began = self.clock.elapsed_s  # this rank's own: the ranks' clocks differ by a little
                elapsed, signal_number, due = agree_max([began, float(caught[0]), float(due)])
                reason = is_finished(self.schedule, self.step, elapsed)
                if signal_number:
                    self._stop_clock()
                    self.save()
                    self._raise_interrupted(int(signal_number))
                if reason is None and due:
                    self.save()
                if reason is None and every and self.step % every == 0:
                    self._validate_paused(elapsed)
                if reason:
                    self._stop_clock()
                    self.finished = reason
                    if reason == "wallclock_cap":
                        self.log.line(cap_line(self.step, self.log.total, elapsed))
                    self.save()
                    break
                if not self.clock.running:
                    self.clock.start()
                scale = lr_scale(self.schedule, step=self.step, elapsed_s=elapsed)
                loss = self.train_step(batch or self.next_batch(), scale)
                batch = self.next_batch()  # fetched while the device still computes
                self._finish_step(loss.item(), began, scale)
            during_last_checkpoint = int(agree_max([float(caught[0])])[0])
            if during_last_checkpoint:
                self._raise_interrupted(during_last_checkpoint)

    def _stop_clock(self) -> None:
        if self.clock.running:  # it stands still before the first step
            self.clock.pause()

    def _finish_step(self, loss: float, began_s: float, scale: float) -> None:
        self.step += 1
        elapsed = self.clock.elapsed_s
        if not isfinite(loss):
            self._stop_clock()
            self.raise_diverged(f"the loss is {loss} after step {self.step}")
        if self._unproven:
            self.last_good, self._unproven = self._unproven, None
        self.log.step({"step": self.step, "loss": loss, "elapsed_s": elapsed, "step_ms": (elapsed - began_s) * 1e3,
                       "lr_scale": scale, "tokens": self.step * self.config.train.batch_tokens})

    def raise_diverged(self, what: str) -> NoReturn:
        good = f"The last good checkpoint is {self.last_good}" if self.last_good else "No good checkpoint was written before"
        raise RunFailed(f"{what}: training diverged. {good}; lower the learning rates and start a new run", EXIT_FAILED, "diverged")

    def _validate_paused(self, elapsed: float) -> None:
        with self.clock.paused():
            self.log.validation(self.step, self.validate().score, elapsed)

    def _raise_interrupted(self, number: int) -> None:
        code = EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_TERMINATED
        raise RunFailed(f"stopped by {signal.Signals(number).name} at step {self.step}, checkpoint written; go on with --resume",
                        code, "interrupted")


@contextmanager
def _catch_signals() -> Iterator[list[int]]:
    """While training, SIGINT, SIGTERM and SIGHUP (a closed terminal, unless nohup ignores it) only leave a note, so that the step in
    flight ends and a checkpoint is written. A second one acts at once."""
    caught = [0]
    before: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
                             if signal.getsignal(number) != signal.SIG_IGN}

    def note(number: int, frame: object) -> None:
        caught[0] = number
        signal.signal(number, before[number])

    try:
        for number in before:
            signal.signal(number, note)
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
