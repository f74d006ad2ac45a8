"""metrics.jsonl with lost rows left out."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitsperbyte.run.metrics import read_metrics


def step_row(step: int, elapsed_s: float, loss: float = 2.0) -> dict:
    return {"step": step, "loss": loss, "elapsed_s": elapsed_s, "step_ms": 10.0, "lr_scale": 1.0, "tokens": 8 * step}


def write_rows(path: Path, rows: list[dict], tail: str = "") -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
    return path


def test_an_absent_file_is_an_empty_run(tmp_path: Path) -> None:
    metrics = read_metrics(tmp_path / "none")
    assert (metrics.steps, metrics.validations, metrics.num_lost_steps, metrics.num_resumes) == ([], [], 0, 0)
    assert (metrics.last_elapsed_s, metrics.last_step) == (0.0, 0)


@given(lives=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=6), every=st.integers(1, 4))
def test_whatever_the_resumes_each_step_counts_once(tmp_path_factory: pytest.TempPathFactory, lives: list[tuple[int, int]],
                                                    every: int) -> None:
    """Each life goes back by some steps and trains some; every row carries its life, and the last one to train a step counts."""
    rows, expected, at, now, num_lost, reached = [], {}, 0, 0.0, 0, 0
    for life, (back, forward) in enumerate(lives):
        if life:
            start = max(0, at - back)
            num_lost += at - start
            at = start
            rows.append({"event": "resume", "from_step": at, "charged_s": 0.0, "elapsed_s": now})
        for step in range(at, at + forward):
            if step % every == 0:
                rows.append({"step": step, "val_loss": 3.0, "val_bpb": 1.0, "elapsed_s": now, "life": life})
            now += 0.5
            rows.append({**step_row(step + 1, now), "life": life})
            expected[step + 1] = life
        at += forward
        reached = at
    metrics = read_metrics(write_rows(tmp_path_factory.mktemp("rows") / "metrics.jsonl", rows, tail='{"step": 99, "lo'))
    assert [(r["step"], r["life"]) for r in metrics.steps] == [(step, expected[step]) for step in range(1, reached + 1)]
    assert (metrics.num_lost_steps, metrics.num_resumes, metrics.last_step) == (num_lost, len(lives) - 1, reached)
    assert metrics.last_elapsed_s == now, "the budget used never shrinks, whatever counts"
    validated = [r["step"] for r in metrics.validations]
    assert validated == sorted(set(validated)) and set(validated) <= set(range(0, reached + 1))


def test_the_seconds_of_rows_that_no_longer_count_are_remembered(tmp_path: Path) -> None:
    rows = [step_row(1, 1.0), step_row(2, 2.0), {"event": "resume", "from_step": 1, "charged_s": 1.0, "elapsed_s": 2.0}]
    metrics = read_metrics(write_rows(tmp_path / "m", rows))
    assert metrics.last_elapsed_s == 2.0 and metrics.last_step == 1 and metrics.num_lost_steps == 1


def test_a_damaged_row_in_the_middle_is_named(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "m", [step_row(1, 1.0)], tail='{"step": 2, "lo\n{"step": 3}\n')
    with pytest.raises(ValueError, match="line 2 is not JSON"):
        read_metrics(path)


@pytest.mark.parametrize(("row", "fault"), [({"step": 1, "loss": 2.0}, "no number 'elapsed_s'"), ({**step_row(1, 1.0), "loss": None}, "'loss'"),
                                            ({**step_row(1, 1.0), "step": True}, "'step'"), ({**step_row(1, 1.0), "step_ms": "9"}, "step_ms is '9'")])
def test_a_row_without_its_numbers_is_named(tmp_path: Path, row: dict, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        read_metrics(write_rows(tmp_path / "m", [row]))


def test_the_milliseconds_of_a_step_may_be_unknown(tmp_path: Path) -> None:
    row = {"step": 200, "loss": 2.0, "elapsed_s": 9.0, "step_ms": None}
    assert read_metrics(write_rows(tmp_path / "m", [row])).steps == [row]
