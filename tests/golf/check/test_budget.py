"""Seconds in logs against the budget: the step in flight is allowed, and not a third."""

from typing import Any

import pytest

from bitsperbyte.golf.check.budget import check_budget
from bitsperbyte.golf.check.folder import read_submission


def budget_of(folder: Any, **options: float) -> Any:
    found = read_submission(folder.path)
    return check_budget(found, found.logs, **options)


@pytest.mark.parametrize(("steps", "ok"), [(13_780, True), (13_781, True), (13_782, True), (13_784, False), (20_000, False)])
def test_the_step_in_flight_is_allowed(steps: int, ok: bool, folder: Any) -> None:
    """13,780 steps of 43.54 ms are 599.98 s."""
    folder.write("train_seed42.log", folder.log(42, steps=steps))
    assert budget_of(folder).ok is ok


def test_a_run_that_is_no_record_may_take_longer(folder: Any) -> None:
    folder.write("train_seed42.log", folder.log(42, steps=20_000))
    folder.claim(track="track_non_record_16mb")
    finding = budget_of(folder)
    assert finding.ok and "over the time of a record" in finding.detail


@pytest.mark.parametrize(("milliseconds", "ok"), [(599_999, True), (600_001, False)])
def test_evaluation_has_a_budget_of_its_own(milliseconds: int, ok: bool, folder: Any) -> None:
    folder.write("train_seed42.log", folder.log(42, eval_ms=milliseconds))
    assert budget_of(folder).ok is ok


def test_a_log_without_times_is_not_checked(folder: Any) -> None:
    for log in folder.path.glob("*.log"):
        log.write_text("seed:1\n", encoding="utf-8")
    assert budget_of(folder).ok is None


def test_work_on_the_weights_after_training_is_named(folder: Any) -> None:
    folder.change_log(42, "peak memory", "GPTQ:collecting Hessians from calibration data...\nGPTQ:collected 67 Hessians in 4.7s\npeak memory")
    finding = budget_of(folder)
    assert finding.ok and "4.7s" in finding.detail


def test_seconds_of_work_after_the_clock_are_shown(folder: Any) -> None:
    work = "".join(f"post_qat step:{n} loss:2.1 elapsed:{n * 130}ms\n" for n in (1, 2, 340)) + "GPTQ:collected 67 Hessians in 12.7s\n"
    folder.change_log(42, "peak memory", f"{work}peak memory")
    detail = budget_of(folder).detail
    assert "elapsed:44200ms" in detail and "elapsed:260ms" not in detail and "in 12.7s" in detail
