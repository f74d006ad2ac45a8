"""One golf run: warm-up (untimed), the training loop under an honest clock, checkpoints, resume.

What follows the loop (artifact, scoring it, the record) is in session.py.
"""

import signal
import time
from collections.abc import Callable, Iterator
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
from bitsperbyte.golf.logs import RunLog
from bitsperbyte.golf.model import GolfModel
from bitsperbyte.golf.muon import build_optimizers
from bitsperbyte.golf.schedule import is_finished, lr_scale, momentum_at
from bitsperbyte.run.metrics import read_metrics
from bitsperbyte.run.outcome import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_TERMINATED, RunFailed
from bitsperbyte.text.loader import BatchLoader, TokenStream
from bitsperbyte.text.tokenizers import Tokenizer

# Of the wall-clock budget, the most that may lie between two checkpoints, whatever train.checkpoint_every_s says.
MAX_UNSAVED_SHARE = 0.05


@dataclass
class Trainer:
    """Everything that moves while a run trains. Its state is what a checkpoint holds."""

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
        config, device = self.config, self.ranks.device
        torch.manual_seed(config.train.seed)
        self.schedule, self.optim = config.schedule_dataclass(), config.optim_dataclass()
        self.model = GolfModel(config.model_dataclass()).place(device)
        self.optimizers = build_optimizers(self.model, self.optim)
        self.clock = Clock(self.ranks.synchronize)
        self.loader = self._loader(position=0)
        local = config.train.batch_tokens // self.ranks.world_size // config.train.seq_len  # sequences
        self.local_micro = min(config.train.micro_batch_tokens // config.train.seq_len, local)
        while local % self.local_micro:  # the largest size within the limit that cuts this rank's share evenly
            self.local_micro -= 1
        self.num_micro = local // self.local_micro
        self.loss_fn: Callable[[Tensor, Tensor], Tensor] = self.model.loss
        mode = config.train.compile
        if mode == "on" or (mode == "auto" and device.type == "cuda"):
            self.model.prepare(config.train.seq_len, device)  # built before the compiler looks
            self.loss_fn = torch.compile(self.model.loss, dynamic=False)

    def _loader(self, position: int) -> BatchLoader:
        train = self.config.train
        return BatchLoader(self.stream, batch_tokens=train.batch_tokens, seq_len=train.seq_len, rank=self.ranks.rank,
                           world_size=self.ranks.world_size, position=position)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the seconds spent inside to the phase's total."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.phases_s[name] = self.phases_s.get(name, 0.0) + time.perf_counter() - begin

    # -- one step ---------------------------------------------------------------------------------------------------

    def next_batch(self) -> tuple[Tensor, Tensor]:
        inputs, targets = (torch.from_numpy(np.ascontiguousarray(part)) for part in self.loader.next())
        return inputs.to(self.ranks.device), targets.to(self.ranks.device)

    def train_step(self, batch: tuple[Tensor, Tensor], scale: float) -> Tensor:
        """Gradient of the whole batch in micro-batches, one optimiser step. Returns the mean loss over all ranks."""
        total = torch.zeros((), device=self.ranks.device)
        inputs, targets = (part.split(self.local_micro) for part in batch)
        for x, y in zip(inputs, targets, strict=True):
            loss = self.loss_fn(x, y) / self.num_micro
            loss.backward()
            total += loss.detach()
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        self.ranks.average_gradients(parameters)
        if self.optim.grad_clip_norm:
            torch.nn.utils.clip_grad_norm_(parameters, self.optim.grad_clip_norm)
        momentum = momentum_at(self.step, self.optim.momentum_warmup_start, self.optim.momentum, self.optim.momentum_warmup_steps)
        self.optimizers.step(lr_scale=scale, momentum=momentum)
        self.optimizers.zero_grad()
        return self.ranks.mean(total)

    def warm_up(self) -> None:
        """Untimed steps that compile the network and fill caches; all state is put back afterwards, as the challenge allows."""
        num_steps = self.schedule.warmup_steps
        if not num_steps:
            return
        with self.phase("warmup"):
            weights = {name: p.detach().clone() for name, p in self.model.named_parameters()}
            saved, rng, position = self.optimizers.snapshot(), _random_state(self.ranks.device), self.loader.position
            for i in range(num_steps):
                self.train_step(self.next_batch(), 1.0)
                if i + 1 == num_steps or (i + 1) % 10 == 0:
                    self.log.line(f"warmup_step:{i + 1}/{num_steps}")
            with torch.no_grad():
                for name, parameter in self.model.named_parameters():
                    parameter.copy_(weights[name])
            self.optimizers.restore(saved)
            _set_random_state(rng)
            self.loader = self._loader(position)
            self.ranks.synchronize()

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
        tensors |= {f"random/{name}": t for name, t in _random_state(self.ranks.device).items()}
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
            _set_random_state(_under("random/", tensors))
            self.step, self.finished = checkpoint.step, checkpoint.meta["finished"]
            self.clock.restore(checkpoint.meta["clock"])
            self.phases_s = dict(checkpoint.meta["phases_s"])
            self.loader = self._loader(checkpoint.meta["position"])
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
                        self.log.line(f"stopping_early: wallclock_cap train_time:{elapsed * 1e3:.0f}ms "
                                      f"step:{self.step}/{self.log.total}")
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


def _random_state(device: torch.device) -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _set_random_state(state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
