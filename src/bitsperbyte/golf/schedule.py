"""The schedule of a run as pure functions of its step and training clock: learning-rate scale, momentum, end."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """What ends a run, and how the learning rate falls before that.

    A run ends at `wallclock_s` training seconds or `max_steps` steps, whichever is first; None lifts a limit, but one
    must stand. Exactly one of the warmdown settings is given, 0 for none:
      `warmdown_steps`     the challenge's rule: the last so many steps' worth of time, at the mean step time so far;
      `warmdown_fraction`  the last share of the budget.
    `warmup_steps` are untimed steps that compile and warm up, whose effect is undone. Raises ValueError for settings
    that do not fit together.
    """

    wallclock_s: float | None = 600.0
    max_steps: int | None = 20_000
    warmdown_steps: int | None = None
    warmdown_fraction: float | None = None
    warmup_steps: int = 20

    def __post_init__(self) -> None:
        if self.wallclock_s is None and self.max_steps is None:
            raise ValueError("schedule: the run would never end: set wallclock_s or max_steps")
        if self.wallclock_s is not None and not (math.isfinite(self.wallclock_s) and self.wallclock_s > 0):
            raise ValueError(f"schedule: wallclock_s {self.wallclock_s} must be positive seconds, or null for no clock")
        if self.max_steps is not None and self.max_steps < 1:
            raise ValueError(f"schedule: max_steps {self.max_steps} must be at least 1, or null for no limit")
        if (self.warmdown_steps is None) == (self.warmdown_fraction is None):
            raise ValueError("schedule: set exactly one of warmdown_steps and warmdown_fraction (0 for no warmdown)")
        if self.warmdown_steps is not None and self.warmdown_steps < 0:
            raise ValueError(f"schedule: warmdown_steps {self.warmdown_steps} must not be negative")
        if self.warmdown_fraction is not None and not 0 <= self.warmdown_fraction <= 1:
            raise ValueError(f"schedule: warmdown_fraction {self.warmdown_fraction} must be between 0 and 1")
        if self.warmup_steps < 0:
            raise ValueError(f"schedule: warmup_steps {self.warmup_steps} must not be negative")


def lr_scale(schedule: Schedule, *, step: int, elapsed_s: float) -> float:
    """Factor in [0, 1] on all learning rates, for the step after `step` finished ones and `elapsed_s` training seconds.

    With both limits the smaller scale holds, which is that of the limit that ends the run first. Without a clock the
    result depends on `step` alone, so that such a run can be repeated exactly.
    """
    scale = 1.0
    if schedule.wallclock_s is not None:
        if schedule.warmdown_fraction is not None:
            warmdown_s = schedule.warmdown_fraction * schedule.wallclock_s
        else:
            # Before the first step no step time is known.
            warmdown_s = schedule.warmdown_steps * elapsed_s / step if step else 0.0
        scale = _ramp(schedule.wallclock_s - elapsed_s, warmdown_s)
    if schedule.max_steps is not None:
        scale = min(scale, _ramp(schedule.max_steps - step, _warmdown_steps(schedule)))
    return scale


def _ramp(remaining: float, warmdown: float) -> float:
    """1 until `warmdown` is left, then linear to 0; no warmdown at all is 1 throughout."""
    return max(remaining, 0.0) / warmdown if 0 < warmdown and remaining < warmdown else 1.0


def _warmdown_steps(schedule: Schedule) -> float:
    if schedule.warmdown_steps is not None:
        return schedule.warmdown_steps
    return schedule.warmdown_fraction * schedule.max_steps


def is_finished(schedule: Schedule, step: int, elapsed_s: float) -> str | None:
    """Why the run ends after `step` steps: "max_steps", "wallclock_cap", or None to go on."""
    if schedule.max_steps is not None and step >= schedule.max_steps:
        return "max_steps"
    if schedule.wallclock_s is not None and elapsed_s >= schedule.wallclock_s:
        return "wallclock_cap"
    return None


def momentum_at(step: int, start: float, end: float, warmup_steps: int) -> float:
    """Muon's momentum: linear from `start` to `end` over the first `warmup_steps` steps."""
    progress = min(step / warmup_steps, 1.0) if warmup_steps > 0 else 1.0
    return (1 - progress) * start + progress * end


def describe_warmdown(schedule: Schedule, step_s: float) -> str:
    """One phrase for the plan: which part of the run is warmdown if every step takes `step_s` seconds."""
    by_clock = schedule.wallclock_s is not None and (
        schedule.max_steps is None or schedule.wallclock_s <= schedule.max_steps * step_s)
    if by_clock:
        budget, steps = schedule.wallclock_s, schedule.warmdown_steps
        warmdown_s = steps * step_s if steps is not None else schedule.warmdown_fraction * budget
        if warmdown_s <= 0:
            return "none: the rate stays full to the end"
        if steps is not None and warmdown_s >= budget:
            return (f"decays from the first step: a step takes {step_s:.3g} s, over {budget / steps:.3g} s, so that "
                    f"{steps:,} steps of warmdown exceed the budget of {budget:g} s (warmdown as a fraction would not)")
        if warmdown_s >= budget:
            return f"decays from the first step: the warmdown is the whole budget of {budget:g} s"
        return f"the last {warmdown_s:.1f} s ({warmdown_s / budget:.1%}) of {budget:g} s"
    total, steps = schedule.max_steps, _warmdown_steps(schedule)
    if steps <= 0:
        return "none: the rate stays full to the end"
    if steps >= total:
        return (f"decays from the first step: {steps:,.0f} steps of warmdown cover all {total:,} steps, starting at "
                f"{total / steps:.0%} of the rate")
    return f"the last {steps:,.0f} ({steps / total:.1%}) of {total:,} steps, {steps * step_s:.1f} s"
