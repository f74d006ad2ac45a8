"""What the log writes where."""

import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from bitsperbyte.golf.logs import RunLog
from bitsperbyte.metric.bpb import Score
from bitsperbyte.run.folder import RunFolder, read_jsonl


def step_row(step: int, elapsed_s: float, loss: float = 2.0) -> dict:
    return {"step": step, "loss": loss, "elapsed_s": elapsed_s, "step_ms": 10.0, "lr_scale": 1.0, "tokens": 8 * step}


# -- writing ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    with RunFolder.open(tmp_path / "run", resume=False, kind="golf") as opened:
        yield opened


def log_of(folder: RunFolder | None, *, terminal: bool = False, max_steps: int | None = 40,
           wallclock_s: float | None = None) -> tuple[RunLog, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=160)
    return RunLog(folder, console, max_steps=max_steps, wallclock_s=wallclock_s, log_every=20), out


def test_each_step_is_a_row_and_some_are_lines(folder: RunFolder) -> None:
    log, out = log_of(folder)
    with log:
        for step in range(1, 41):
            log.step(step_row(step, step / 100, loss=1 / step))
    log.close()
    rows = read_jsonl(folder.path / "metrics.jsonl")[0]
    assert [row["step"] for row in rows] == list(range(1, 41)) and rows[2]["loss"] == 1 / 3
    lines = re.findall(r"(?m)^step:(\d+)/40 train_loss:(\d\.\d{4}) train_time:(\d+)ms step_avg:(\d+\.\d\d)ms$",
                       (folder.path / "train.log").read_text())
    assert [int(line[0]) for line in lines] == [*range(1, 11), 20, 40]
    assert lines[-1] == ("40", "0.0250", "400", "10.00")
    assert out.getvalue().count("training") == 1, "without a terminal: a line every ten seconds, not every step"


def test_rows_are_on_their_way_to_the_disk_before_the_next_step(folder: RunFolder) -> None:
    """What SIGKILL cannot undo: no row waits in a buffer of this process."""
    log, _ = log_of(folder)
    with log:
        for step in range(1, 4):
            log.step(step_row(step, step / 100))
            assert len(read_jsonl(folder.path / "metrics.jsonl")[0]) == step
            assert f"step:{step}/" in (folder.path / "train.log").read_text()
    log.close()


def test_validation(folder: RunFolder) -> None:
    log, _ = log_of(folder)
    score = Score(nats=300.0, num_bytes=250, num_tokens=100)
    log.validation(0, score, 0.0)
    log.validation(20, score, 0.5)
    log.close()
    rows = read_jsonl(folder.path / "metrics.jsonl")[0]
    assert rows[1] == {"step": 20, "val_loss": 3.0, "val_bpb": score.bpb, "elapsed_s": 0.5}
    assert (folder.path / "train.log").read_text().splitlines() == [
        "step:0/40 val_loss:3.0000 val_bpb:1.7312 train_time:0ms step_avg:0.00ms",
        "step:20/40 val_loss:3.0000 val_bpb:1.7312 train_time:500ms step_avg:25.00ms"]


def test_a_loss_that_json_cannot_hold_is_refused(folder: RunFolder) -> None:
    log, _ = log_of(folder)
    with pytest.raises(ValueError, match="JSON"):
        log.step(step_row(1, 1.0, loss=float("nan")))
    log.close()
    assert read_jsonl(folder.path / "metrics.jsonl") == ([], False)


def test_a_bar_shows_loss_bpb_step_time_and_time_left(folder: RunFolder) -> None:
    log, out = log_of(folder, terminal=True, max_steps=None, wallclock_s=10.0)
    with log:
        log.validation(0, Score(nats=300.0, num_bytes=250, num_tokens=100), 0.0)
        log.step(step_row(50, 4.0, loss=2.25))
    log.close()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    assert re.search(r"step 50  loss 2\.2500  val bpb 1\.7312 \(2\.50 B/token\)  10\.0 ms  6 s left", shown)


@pytest.mark.parametrize(("max_steps", "wallclock_s", "left"), [(100, None, 5), (None, 8.0, 3), (100, 8.0, 3), (60, 8.0, 1)])
def test_time_left_is_that_of_the_limit_that_comes_first(folder: RunFolder, max_steps: int | None, wallclock_s: float | None,
                                                         left: int) -> None:
    log, out = log_of(folder, max_steps=max_steps, wallclock_s=wallclock_s)
    with log:
        log.step(step_row(50, 5.0))
    log.close()
    assert f"{left} s left" in out.getvalue()


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    log, out = log_of(None)
    with log:
        log.say("hello")
        log.line("line")
        log.step(step_row(1, 1.0))
        log.validation(1, Score(nats=300.0, num_bytes=250, num_tokens=100), 1.0)
        log.row({"event": "resume"})
    log.close()
    assert out.getvalue() == "" and not list(tmp_path.iterdir())
