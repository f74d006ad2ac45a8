"""The training clock: seconds spent training, on which the budget and the schedule run.

Compilation, evaluation and saving are off it.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist


class Clock:
    """A stopwatch that waits for the device before it starts and stops, so that queued work falls on the right side.

    `device_sync` blocks until the device is idle (torch.cuda.synchronize; None on a CPU). Reading `elapsed_s` does not
    wait. A new clock stands still.
    """

    def __init__(
        self, device_sync: Callable[[], object] | None = None, time_fn: Callable[[], float] = time.perf_counter
    ) -> None:
        self._sync = device_sync or (lambda: None)
        self._time = time_fn
        self._finished_s = 0.0
        self._charged_s = 0.0
        self._started_at: float | None = None

    @property
    def running(self) -> bool:
        return self._started_at is not None

    @property
    def elapsed_s(self) -> float:
        """Seconds of all intervals, the one that runs included, and all charged seconds."""
        running_s = self._time() - self._started_at if self._started_at is not None else 0.0
        return self._finished_s + running_s + self._charged_s

    @property
    def charged_s(self) -> float:
        """Seconds in `elapsed_s` that were charged: training that a crash lost and that is done again."""
        return self._charged_s

    def start(self) -> None:
        assert not self.running, "the clock runs already"
        self._sync()
        self._started_at = self._time()

    def pause(self) -> None:
        assert self._started_at is not None, "the clock does not run"
        self._sync()
        self._finished_s += self._time() - self._started_at
        self._started_at = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop for the block, then go on if it ran before, also after an exception: else training would become free."""
        was_running = self.running
        if was_running:
            self.pause()
        try:
            yield
        finally:
            if was_running:
                self.start()

    def charge(self, seconds: float) -> None:
        """Count seconds that this process did not spend. Raises ValueError unless finite and not negative."""
        self._charged_s += _seconds(seconds, "charged seconds")

    def state(self) -> dict[str, float]:
        """For a checkpoint; the running interval is included."""
        return {"elapsed_s": self.elapsed_s, "charged_s": self._charged_s}

    def restore(self, state: dict[str, float]) -> None:
        """Go back to a saved `state`; the clock must not run. Raises ValueError for a state that no clock can have."""
        assert not self.running, "pause the clock before restoring it"
        missing = {"elapsed_s", "charged_s"} - set(state)
        if missing:
            raise ValueError(f"the clock's saved state lacks {sorted(missing)}")
        elapsed_s, charged_s = _seconds(state["elapsed_s"], "elapsed_s"), _seconds(state["charged_s"], "charged_s")
        if charged_s > elapsed_s:
            raise ValueError(f"the clock's saved state charges {charged_s} s of only {elapsed_s} s")
        self._finished_s, self._charged_s = elapsed_s - charged_s, charged_s


def _seconds(value: float, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise ValueError(f"clock: {what} must be a finite number of seconds, at least 0, not {value!r}")
    return float(value)


def agree_max(values: Sequence[float], group_active: bool | None = None) -> list[float]:
    """Each value's maximum over all ranks, so that every rank takes the same decision.

    Without a process group, the values themselves. `group_active` None looks whether torch.distributed is initialised.
    All ranks must call it together.
    """
    if group_active is None:
        group_active = dist.is_available() and dist.is_initialized()
    if not group_active:
        return [float(value) for value in values]
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    agreed = torch.tensor(list(values), dtype=torch.float64, device=device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
    return agreed.tolist()
