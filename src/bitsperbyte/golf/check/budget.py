"""Seconds of training and of evaluation in the logs against what the challenge allows: the finding `budget`."""

from collections.abc import Iterator, Sequence

from bitsperbyte.golf.check.folder import LogFile, Submission
from bitsperbyte.golf.check.logs import claims_a_record
from bitsperbyte.golf.check.readings import Timed, end_of_training, evaluation_s, work_after_training
from bitsperbyte.golf.findings import Finding

BUDGET_S = 600.0  # of training, and as much again of evaluation
STEPS_OVER = 2  # the step in flight at the cap is finished; its own time may be above the mean


def check_budget(found: Submission, logs: Sequence[LogFile], *, budget_s: float = BUDGET_S, evaluation_budget_s: float = BUDGET_S) -> Finding:
    """The training time of each log is at most the budget and the step then in flight; each evaluation takes at most its own."""
    if found.logs and not logs:
        return Finding("budget", None, "the logs are of other runs")
    known = [(log, end) for log in logs if (end := end_of_training(log.log)) is not None]
    evaluations = [(log, seconds) for log in logs if (seconds := evaluation_s(log.log)) is not None]
    if not known and not evaluations:
        return Finding("budget", None, "no log gives a training time")
    over = [*_training_over(known, budget_s), *_evaluation_over(evaluations, evaluation_budget_s)]
    after = [f'{log.name}: after training "{what}"' for log, _ in known for what in work_after_training(log.text)]
    said = "; ".join(filter(None, [
        f"training took {_span([end.train_ms / 1e3 for _, end in known])} of {budget_s:g} s" if known else "no training time is given",
        f"evaluation {_span([seconds for _, seconds in evaluations])} of {evaluation_budget_s:g} s" if evaluations else
        "no evaluation time is given", *after[:2]]))
    if over and claims_a_record(found) is False:
        return Finding("budget", True, f"{said}; over the time of a record, which none is claimed to be")
    return Finding("budget", False, "; ".join([*over, *after[:2]])) if over else Finding("budget", True, said)


def _training_over(known: Sequence[tuple[LogFile, Timed]], budget_s: float) -> Iterator[str]:
    for log, end in known:
        step_s = (end.average_ms if end.average_ms is not None else end.train_ms / max(end.step, 1)) / 1e3
        spare_s = STEPS_OVER * step_s + end.rounding_ms / 1e3
        if end.train_ms / 1e3 > budget_s + spare_s:
            yield (f"{log.name}: {end.train_ms / 1e3:,.3f} s of training at step {end.step:,} are {end.train_ms / 1e3 - budget_s:,.3f} s over "
                   f"{budget_s:g} s, more than the step in flight ({step_s * 1e3:.1f} ms)")


def _evaluation_over(evaluations: Sequence[tuple[LogFile, float]], budget_s: float) -> Iterator[str]:
    for log, seconds in evaluations:
        if seconds > budget_s:
            yield f"{log.name}: an evaluation of {seconds:,.1f} s is {seconds - budget_s:,.1f} s over {budget_s:g} s"


def _span(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{high:,.1f} s" if high - low < 0.05 else f"{low:,.1f} to {high:,.1f} s"
