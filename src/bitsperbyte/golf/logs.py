"""What a run says while it trains: train.log in the challenge's line formats, metrics.jsonl (read by run/metrics.py), and a progress bar."""

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from bitsperbyte.golf.lines import step_line, validation_line
from bitsperbyte.run.folder import JsonlWriter, RunFolder
from bitsperbyte.run.trackers import Tracker

LINE_EVERY_S = 10.0  # between progress lines where there is no terminal to draw a bar in
SYNC_EVERY_S = 1.0  # rows are handed to the system at once, which SIGKILL cannot undo; a power cut may cost this much


class RunLog:
    """Writes for the main rank; on other ranks (folder None) every call does nothing."""

    def __init__(self, folder: RunFolder | None, console: Console, *, max_steps: int | None, wallclock_s: float | None,
                 log_every: int) -> None:
        self.console, self.max_steps, self.wallclock_s, self.log_every = console, max_steps, wallclock_s, log_every
        self.total = max_steps or 0  # the challenge's lines show step:N/ITERATIONS; 0 says that only the clock ends the run
        self.active = folder is not None
        self.val_bpb: float | None = None
        self.track(Tracker(), every_steps=1)
        self._last_line_s = self._last_sync_s = 0.0
        if folder:
            self.metrics = JsonlWriter(folder.path / "metrics.jsonl")
            self._log = open(folder.path / "train.log", "a", encoding="utf-8")
        self._bar: Progress | None = None

    def __enter__(self) -> "RunLog":
        if self.active and self.console.is_terminal:
            self._bar = Progress(BarColumn(8 if self.console.width < 120 else 40), TextColumn("{task.fields[text]}"),
                                 console=self.console)
            self._task = self._bar.add_task("training", total=1.0, text="")
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar:
            self._bar.stop()
            self._bar = None

    def track(self, tracker: Tracker, every_steps: int) -> None:
        """From now on also log to `tracker`: each `every_steps`th step, and all that is rarer."""
        self._tracker, self._track_every = tracker, every_steps

    def close(self, failed: bool = False) -> None:
        self._tracker.close(failed)  # first: what fails in it is a line of the log
        if self.active:
            self.metrics.close()
            self._log.close()

    def line(self, text: str) -> None:
        """One line of train.log."""
        if self.active:
            self._log.write(text + "\n")
            self._log.flush()

    def say(self, text: str) -> None:
        """A line for the person and the log."""
        self.line(text)
        if self.active:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def row(self, row: dict[str, Any], sync: bool = True) -> None:
        if self.active:
            self.metrics.append(row, sync=sync)
            if row.get("event") == "resume":
                self._tracker.rewind(row["from_step"])

    def step(self, row: dict[str, Any]) -> None:
        """Record one finished step: step, loss, elapsed_s, step_ms, lr_scale, tokens."""
        if not self.active:
            return
        now = time.monotonic()
        sync = now - self._last_sync_s > SYNC_EVERY_S
        self.row(row, sync=sync)
        if sync:
            self._last_sync_s = now
        step = row["step"]
        if step == 1 or step % self._track_every == 0:
            self._tracker.log(step, {f"train/{name}": row[name] for name in ("loss", "lr_scale", "step_ms", "tokens", "elapsed_s")})
        if step <= 10 or step % self.log_every == 0:
            self.line(step_line(step, self.total, row["loss"], row["elapsed_s"]))
        text = self._progress_text(row)
        if self._bar:
            self._bar.update(self._task, completed=self._share_done(row), text=text)
        elif now - self._last_line_s > LINE_EVERY_S:
            self._last_line_s = now
            self.console.print(f"training {100 * self._share_done(row):3.0f}%  {text}", highlight=False, soft_wrap=True)

    def validation(self, step: int, score: Any, elapsed_s: float) -> None:
        self.val_bpb, self.bytes_per_token = score.bpb, score.bytes_per_token
        self.row({"step": step, "val_loss": score.nats_per_token, "val_bpb": score.bpb, "elapsed_s": elapsed_s})
        self._tracker.log(step, {"val/loss": score.nats_per_token, "val/bpb": score.bpb})
        self.line(validation_line(step, self.total, score, elapsed_s))

    def artifact(self, step: int, score: Any, ledger: Any) -> None:
        """Copy the artifact's score and bytes (the record's part; None but on the main rank) to the tracker; the lines have them."""
        if ledger is not None:
            self._tracker.log(step, {"artifact/bpb": score.bpb, "artifact/weight_bytes": ledger.weight_bytes,
                                     "artifact/total_bytes": ledger.total_bytes, "artifact/margin_bytes": ledger.margin_bytes})

    def _share_done(self, row: dict[str, Any]) -> float:
        shares = [row["elapsed_s"] / self.wallclock_s if self.wallclock_s else 0.0,
                  row["step"] / self.max_steps if self.max_steps else 0.0]
        return min(1.0, max(shares))

    def _progress_text(self, row: dict[str, Any]) -> str:
        step_s = row["elapsed_s"] / row["step"]
        left = [self.wallclock_s - row["elapsed_s"] if self.wallclock_s else float("inf"),
                (self.max_steps - row["step"]) * step_s if self.max_steps else float("inf")]
        bpb = f"  val bpb {self.val_bpb:.4f} ({self.bytes_per_token:.2f} B/token)" if self.val_bpb is not None else ""
        return (f"step {row['step']}  loss {row['loss']:.4f}{bpb}  {row['step_ms']:.1f} ms  "
                f"{max(0.0, min(left)):.0f} s left")
