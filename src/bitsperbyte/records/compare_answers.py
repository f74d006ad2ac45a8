"""Is B better than A: randopt runs over the same test questions or documents, item by item.

Accuracies are better when higher and bits per byte when lower, so a gain is B - A of the first and A - B of the second: above 0 where B
is better. compare.py is the same for golf runs.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bitsperbyte.metric.bpb import bits
from bitsperbyte.records.schema import AccuracyPart, ItemsPart
from bitsperbyte.records.sides import Run, Side, check_independent, config_differences, same_run, warnings_of
from bitsperbyte.records.store import JOURNAL
from bitsperbyte.run.folder import read_jsonl
from bitsperbyte.stats.intervals import Interval, paired_bootstrap
from bitsperbyte.stats.paired import mcnemar_exact, paired_bootstrap_accuracy, wilson
from bitsperbyte.stats.welch import Welch, welch

LABEL, MIXTURE = "ensemble", "mixture"
# what two runs must share for their answers to be to the same questions, asked and graded alike
_TASK = {"name": "task", "version": "task's version", "kind": "kind of task", "test_sha256": "test set (its sha256)",
         "num_test": "size of the test set", "system": "system message of the prompt", "context": "window of the documents",
         "answers": "way of comparing answers"}
_ITEM_LABELS = ("base", "best_single")  # whose answers a journal holds as they are


@dataclass(frozen=True)
class Paired:
    """One comparison over the same items: the gain of B with a bootstrap interval over items. Of single runs' answers also the numbers of
    questions that only one side got right, and the exact McNemar p. `unit`: accuracy or bpb."""

    what: str
    unit: str
    value_a: float
    value_b: float
    gain: float
    interval: Interval
    num_items: int
    only_a: int | None = None
    only_b: int | None = None
    both: int | None = None
    neither: int | None = None
    p_mcnemar: float | None = None


@dataclass(frozen=True)
class RandOptComparison:
    """Everything about a comparison. `tests`: the test set, then the held-out slice where both sides have it by document. `over_runs`:
    Welch's test of the runs' own results (accuracy of B less that of A, or bpb of A less that of B), where both sides have two or more."""

    labels: tuple[str, str]
    task: dict[str, Any]
    rows: list[dict[str, Any]]
    confidence: float
    tests: list[Paired]
    over_runs: Welch | None
    verdict: list[str]
    differences: list[str]
    notes: list[str]
    warnings: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {"track": "randopt", **asdict(self)}


def compare_randopt(a: Side, b: Side, labels: tuple[str, str] = (LABEL, LABEL), *, confidence: float = 0.95) -> RandOptComparison:
    """Compare two sides of randopt runs under a label each: ensemble (of documents also called mixture), base, best_single and others of
    `randopt.items`.

    Raises ValueError for runs without results, tests on other questions or asked otherwise, results that were not kept item by item, and
    one run on both sides under one label.
    """
    for side in (a, b):
        check_independent(side)
    runs = [*a.runs, *b.runs]
    for run in runs:
        if run.record.randopt is None:
            raise ValueError(f"{run} ({run.record.status}) has no result" + (": an imported run keeps no answers by question, so nothing can be "
                             "compared question by question" if run.record.imported else ": resume it to its end, or leave it out and say so"))
    part = runs[0].record.randopt
    of_answers = part.task.get("kind") != "likelihood"
    labels = (_named(labels[0], of_answers), _named(labels[1], of_answers))
    if labels[0] == labels[1]:
        for run_a in a.runs:
            for run_b in b.runs:
                if same := same_run(run_a, run_b):
                    raise ValueError(f"{run_a} stands on side A and {run_b} on side B, and {same}: a run does not compare with itself, only one of "
                                     "its results with another, by --label-a and --label-b")
    if problem := unequal_tests(runs):
        raise ValueError(f"these results do not compare: {problem}")
    items = [[_items(run, label, of_answers) for run in side.runs] for side, label in zip((a, b), labels, strict=True)]
    if len({tuple(kept.ids) for side in items for kept in side if kept.ids is not None}) > 1:
        raise ValueError("these results do not compare: their items differ, or stand in another order")
    what = "test questions" if of_answers else "test documents"
    tests = [_answers(what, items, labels, confidence) if of_answers else _documents(what, items, labels, confidence)]
    held, notes = _held_out(a, b, labels, confidence)
    tests += held
    rows = [_row(side.name, run, label, kept) for side, label, own in zip((a, b), labels, items, strict=True)
            for run, kept in zip(side.runs, own, strict=True)]
    over_runs = None
    if min(len(a.runs), len(b.runs)) > 1:
        values = [[_value(row) for row in rows if row["side"] == side] for side in "AB"]
        over_runs = welch(values[1], values[0], 0.0, confidence) if of_answers else welch(values[0], values[1], 0.0, confidence)
        over_runs = over_runs if over_runs.df is not None else None
    else:
        notes.append("how far another search seed would move either side is not known from single runs: give several a side")
    own = {run.folder.resolve() for run in a.runs} == {run.folder.resolve() for run in b.runs}  # two results of the same runs
    warnings = [*_of_limits(runs), *([] if own else warnings_of(a, b))]
    made = RandOptComparison(labels, {name: part.task.get(name) for name in _TASK if name in part.task}, rows, confidence, tests, over_runs, [],
                             config_differences(a.runs[0].record, b.runs[0].record), notes, warnings)
    made.verdict.extend(_verdict(made))
    return made


def unequal_tests(runs: Sequence[Run]) -> str | None:
    """In what the runs' test sets or prompts differ or are unknown, as a sentence without its full stop; None where they are equal."""
    def facts(run: Run) -> dict[str, Any]:
        task, engine = run.record.randopt.task, run.record.randopt.engine
        return {**{words: task.get(name) for name, words in _TASK.items()}, "form of the prompt": engine.get("prompt_format")}

    first = facts(runs[0])
    for run in runs:
        if run.record.randopt.task.get("test_sha256") is None:
            return f"{run} does not say which test set it answered"
        other = facts(run)
        if differing := [words for words in first if first[words] != other[words]][: 1 if first["task"] != other["task"] else None]:
            return "; ".join(f"the {words} is {_short(first[words])} in {runs[0]} and {_short(other[words])} in {run}" for words in differing)
    return None


def _named(label: str, of_answers: bool) -> str:
    """The label as `randopt.items` has it: an ensemble of documents is a mixture."""
    return MIXTURE if label == LABEL and not of_answers else label


def _items(run: Run, label: str, of_answers: bool) -> ItemsPart:
    """The run's results item by item, with those of `label` among them: from its record, else for what a journal holds as it is from the
    journal beside it. ValueError, saying what can be done, where neither has them."""
    kept = run.record.randopt.items
    results = (kept.correct if of_answers else kept.nats) if kept else {}
    if label in results:
        return kept
    if kept:
        raise ValueError(f"{run} has no result {label!r} item by item; it has {', '.join(results)}: choose with --label, --label-a and --label-b")
    journal = run.folder / JOURNAL
    if not journal.is_file():
        raise ValueError(f"{run} keeps no results item by item (its record is older than they are), and no {JOURNAL} lies beside it: put back the "
                         "journal, or run again")
    if label not in _ITEM_LABELS:
        raise ValueError(f"{run} keeps no results item by item (its record is older than they are), and its {JOURNAL} holds those of "
                         f"{' and '.join(_ITEM_LABELS)} alone: compare with --label {_ITEM_LABELS[0]}, or in the run's own folder move record.json "
                         "away and run the same command with --resume, which takes all answers from the journal and writes a full record")
    return _from_journal(run, journal, label, of_answers)


def _from_journal(run: Run, journal: Path, label: str, of_answers: bool) -> ItemsPart:
    part = run.record.randopt
    phase, index = ("base_test", -1) if label == "base" else ("test", part.selection.members[0].index)
    rows, _ = read_jsonl(journal)
    row = next((row for row in rows if row.get("phase") == phase and row.get("index") == index), None)
    result = part.results().get(label)
    if row is None or result is None:
        raise ValueError(f"{journal} holds no results of {label}: was that control turned off?")
    if of_answers:
        marks = "".join("01"[right is True] for right in row.get("correct") or [])
        found = ItemsPart(correct={label: marks})
        agrees = isinstance(result, AccuracyPart) and (len(marks), marks.count("1")) == (result.num, result.num_correct)
    else:
        nats, num_bytes = row.get("nats") or [], row.get("num_bytes") or []
        found = ItemsPart(nats={label: nats}, num_bytes=num_bytes)
        agrees = sum(num_bytes) == result.num_bytes and math.isclose(math.fsum(nats), result.nats, rel_tol=1e-6)
    if not agrees:
        raise ValueError(f"{journal} does not hold the results of {label} that the record beside it states: one of the two was changed after the "
                         "run; restore it, or run again")
    return found


def _answers(what: str, items: Sequence[Sequence[ItemsPart]], labels: tuple[str, str], confidence: float) -> Paired:
    marks = [[np.array([mark == "1" for mark in kept.correct[label]]) for kept in side] for side, label in zip(items, labels, strict=True)]
    if len({len(row) for side in marks for row in side}) > 1:
        raise ValueError("these results do not compare: they are of different numbers of questions")
    a, b = (np.mean(side, axis=0) for side in marks)
    interval = paired_bootstrap_accuracy(b, a, confidence=confidence)
    made = {"what": what, "unit": "accuracy", "value_a": float(a.mean()), "value_b": float(b.mean()), "gain": interval.estimate,
            "interval": interval, "num_items": len(a)}
    if max(len(side) for side in marks) > 1:
        return Paired(**made)  # McNemar's test is of single answers, not of shares
    one, other = marks[0][0], marks[1][0]
    only_a, only_b = int((one & ~other).sum()), int((other & ~one).sum())
    return Paired(**made, only_a=only_a, only_b=only_b, both=int((one & other).sum()), neither=int((~one & ~other).sum()),
                  p_mcnemar=mcnemar_exact(only_a, only_b))


def _documents(what: str, items: Sequence[Sequence[ItemsPart]], labels: tuple[str, str], confidence: float) -> Paired:
    sizes = {tuple(kept.num_bytes) for side in items for kept in side}
    if len(sizes) > 1:
        raise ValueError(f"these results do not compare: the bytes of the {what} differ, so their tokenizers count another text")
    num_bytes = np.array(sizes.pop())
    a, b = (np.mean([kept.nats[label] for kept in side], axis=0) for side, label in zip(items, labels, strict=True))
    some = num_bytes > 0  # a document without bytes has no share in the quotient's resamples
    interval = paired_bootstrap(a[some], num_bytes[some], b[some], num_bytes[some], confidence=confidence)
    values = [_bpb(side, num_bytes) for side in (a, b)]
    return Paired(what, "bpb", values[0], values[1], interval.estimate, interval, int(some.sum()))


def _bpb(nats: np.ndarray, num_bytes: np.ndarray) -> float:
    """Bits per byte of all documents together."""
    return bits(math.fsum(nats)) / int(num_bytes.sum())


def _held_out(a: Side, b: Side, labels: tuple[str, str], confidence: float) -> tuple[list[Paired], list[str]]:
    """(the held-out comparison, or none; why not)."""
    names = tuple(MIXTURE if label == LABEL else label for label in labels)
    parts = [[run.record.randopt.heldout for run in side.runs] for side in (a, b)]
    everyone = [part for side in parts for part in side]
    if not all(part is not None and part.enabled for part in everyone):
        return [], ["held-out text: not compared, since not every run scored it"]
    if len({(part.slice_sha256, part.context) for part in everyone}) > 1 or everyone[0].slice_sha256 is None:
        return [], ["held-out text: not compared, since the slices or their windows differ"]
    if not all(part.items and name in part.items.nats for side, name in zip(parts, names, strict=True) for part in side):
        return [], [f"held-out text: not compared, since not every record keeps the nats of {' and '.join(dict.fromkeys(names))} by document"]
    try:
        return [_documents("held-out documents", [[part.items for part in side] for side in parts], names, confidence)], []
    except ValueError as error:
        return [], [f"held-out text: {error}"]


def _row(side: str, run: Run, label: str, kept: ItemsPart) -> dict[str, Any]:
    record, part = run.record, run.record.randopt
    row = {"side": side, "run": str(run), "name": record.name, "seed": record.seed, "status": record.status, "label": label,
           "model": part.engine.get("model"), "weights_sha256": part.engine.get("weights_sha256"), "population": part.population.size,
           "k": part.selection.top_k, "accuracy": None, "num_correct": None, "num": None, "low": None, "high": None, "bpb": None}
    if marks := kept.correct.get(label):
        made = wilson(marks.count("1"), len(marks))
        return row | {"accuracy": made.estimate, "num_correct": marks.count("1"), "num": len(marks), "low": made.low, "high": made.high}
    return row | {"bpb": _bpb(np.array(kept.nats[label]), np.array(kept.num_bytes)), "num": len(kept.num_bytes)}


def _value(row: dict[str, Any]) -> float:
    return row["bpb"] if row["accuracy"] is None else row["accuracy"]


def _of_limits(runs: Sequence[Run]) -> list[str]:
    """Settings that are not the test's but move its result."""
    found = []
    for what, value_of in (
        ("the limit of an answer's tokens", lambda record: (record.config.get("task") or {}).get("max_new_tokens")),
        ("the model", lambda record: (record.randopt.engine.get("weights_sha256") or "unknown")[:12]),
        ("the size of the population", lambda record: record.randopt.population.size),
        ("the size of the ensemble", lambda record: record.randopt.selection.top_k),
    ):
        values = list(dict.fromkeys(value_of(run.record) for run in runs))
        if len(values) > 1:
            found.append(f"{what} differs: {', '.join('not set' if value is None else str(value) for value in values)}")
    return found


def _verdict(made: RandOptComparison) -> list[str]:
    lines = []
    for test in made.tests:
        better, worse = ("B", "A") if test.gain >= 0 else ("A", "B")
        of_answers = test.unit == "accuracy"
        amount = f"{100 * abs(test.gain):.2f} points" if of_answers else f"{abs(test.gain):.6f} bits a byte"
        scale = 100 if of_answers else 1
        digits = 2 if of_answers else 6
        interval = f"{made.confidence:.0%} interval of the gain {scale * test.interval.low:.{digits}f} to {scale * test.interval.high:.{digits}f}"
        if test.p_mcnemar is not None:
            beyond = test.p_mcnemar < 1 - made.confidence
            how = f"exact McNemar p = {test.p_mcnemar:.3g}; {interval}"
        else:
            beyond, how = not test.interval.low <= 0 <= test.interval.high, interval
        observed = f"{better} is better than {worse} by {amount}" if test.gain else "A and B are equal"
        lines.append(f"{observed} on the {test.num_items:,} {test.what}: {'more than chance' if beyond else 'chance alone could do that'} ({how}).")
    if made.over_runs is not None:
        w = made.over_runs
        beyond = w.p_two_sided < 1 - made.confidence
        lines.append(f"Over the runs of each side, the difference is {'more' if beyond else 'not more'} than their search seeds make "
                     f"(Welch's two-sided p = {w.p_two_sided:.3g}).")
    return lines


def _short(value: Any) -> str:
    text = "not stated" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:12]}..."
