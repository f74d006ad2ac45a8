"""One training step, the only one there is: a run (train.py) and a submission's script (submission.py) both take it here."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bitsperbyte.golf.model import GolfModel, ModelConfig
from bitsperbyte.golf.muon import OptimConfig, build_optimizers
from bitsperbyte.golf.ranks import Ranks
from bitsperbyte.golf.reduce import GradientReducer
from bitsperbyte.golf.schedule import Schedule, momentum_at
from bitsperbyte.text.loader import BatchLoader, TokenStream


@dataclass(frozen=True)
class BatchConfig:
    """Tokens of a step over all ranks, of a sequence, and that a rank puts through at once; the seed of the weights; whether the
    network is compiled (auto, on, off: auto compiles on CUDA only)."""

    batch_tokens: int
    seq_len: int
    micro_batch_tokens: int
    seed: int
    compile: str = "auto"


class Stepper:
    """Weights, optimisers and the position in the data, and the step that moves them."""

    def __init__(self, model: ModelConfig, optim: OptimConfig, schedule: Schedule, batch: BatchConfig, ranks: Ranks,
                 stream: TokenStream) -> None:
        self.optim, self.schedule, self.batch, self.ranks, self.stream = optim, schedule, batch, ranks, stream
        self.step = 0
        torch.manual_seed(batch.seed)
        self.model = GolfModel(model).place(ranks.device)
        self.optimizers = build_optimizers(self.model, optim, ranks.rank, ranks.world_size)
        self.reducer = GradientReducer(self.model.parameters(), ranks.world_size) if ranks.world_size > 1 else None
        self.loader = self.loader_at(0)
        local = batch.batch_tokens // ranks.world_size // batch.seq_len  # sequences
        self.local_micro = min(batch.micro_batch_tokens // batch.seq_len, local)
        while local % self.local_micro:  # the largest size within the limit that cuts this rank's share evenly
            self.local_micro -= 1
        self.num_micro = local // self.local_micro
        self.loss_fn: Callable[[Tensor, Tensor], Tensor] = self.model.loss
        if batch.compile == "on" or (batch.compile == "auto" and ranks.device.type == "cuda"):
            self.model.prepare(batch.seq_len, ranks.device)  # built before the compiler looks
            self.loss_fn = torch.compile(self.model.loss, dynamic=False)

    def loader_at(self, position: int) -> BatchLoader:
        """This rank's batches from that token of the stream on."""
        return BatchLoader(self.stream, batch_tokens=self.batch.batch_tokens, seq_len=self.batch.seq_len, rank=self.ranks.rank,
                           world_size=self.ranks.world_size, position=position)

    def next_batch(self) -> tuple[Tensor, Tensor]:
        inputs, targets = (torch.from_numpy(np.ascontiguousarray(part)) for part in self.loader.next())
        return inputs.to(self.ranks.device), targets.to(self.ranks.device)

    def train_step(self, batch: tuple[Tensor, Tensor], scale: float) -> Tensor:
        """Gradient of the whole batch in micro-batches, one optimiser step at the learning rates times `scale`. Returns the mean loss
        over all ranks. The caller counts the step (`self.step`, on which Muon's momentum depends)."""
        total = torch.zeros((), device=self.ranks.device)
        inputs, targets = (part.split(self.local_micro) for part in batch)
        for i, (x, y) in enumerate(zip(inputs, targets, strict=True), 1):
            loss = self.loss_fn(x, y) / self.num_micro
            if self.reducer and i == self.num_micro:
                self.reducer.begin()
            loss.backward()
            total += loss.detach()
        if self.reducer:
            self.reducer.finish()
        if self.optim.grad_clip_norm:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.optim.grad_clip_norm)
        momentum = momentum_at(self.step, self.optim.momentum_warmup_start, self.optim.momentum, self.optim.momentum_warmup_steps)
        self.optimizers.step(lr_scale=scale, momentum=momentum)
        self.optimizers.zero_grad()
        return self.ranks.mean(total)

    def take_warmup_steps(self, say: Callable[[str], None]) -> None:
        """Untimed steps that compile the network and fill caches; all state is put back afterwards, as the challenge allows."""
        num_steps = self.schedule.warmup_steps
        weights = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        saved, rng, position = self.optimizers.snapshot(), random_state(self.ranks.device), self.loader.position
        for i in range(num_steps):
            self.train_step(self.next_batch(), 1.0)
            if i + 1 == num_steps or (i + 1) % 10 == 0:
                say(f"warmup_step:{i + 1}/{num_steps}")
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(weights[name])
        self.optimizers.restore(saved)
        set_random_state(rng)
        self.loader = self.loader_at(position)
        self.ranks.synchronize()


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The state of torch's generators on the CPU and, on CUDA, on the device."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())
