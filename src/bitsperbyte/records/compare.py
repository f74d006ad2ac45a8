"""Is B better than A: golf runs over their seeds, at equal evaluation only.

Losses, so lower is better, and a gain is A's mean less B's: above 0 where B is better. compare_answers.py is the same for randopt runs.
"""

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from bitsperbyte.metric.bpb import bits
from bitsperbyte.records.leaderboard import BEFORE
from bitsperbyte.records.schema import PublishedScore, ScoreRow
from bitsperbyte.records.sides import Run, Side, check_independent, config_differences, same_run, warnings_of
from bitsperbyte.stats.intervals import mean
from bitsperbyte.stats.welch import Welch, runs_needed, welch

MARGIN_NATS, ALPHA = 0.005, 0.01  # the challenge's: by how much, in nats a token, and how surely a new record must be better
POWER = 0.8
LABEL = "artifact"
EVALUATION = ("split_sha256", "window", "stride", "documents", "drop_tail")


@dataclass(frozen=True)
class View:
    """A score of one run under one label: a ScoreRow's own figures, or a PublishedScore's with None for what is unknown. `unknown` names
    what of the evaluation is not known."""

    run: Run
    label: str
    text: str | None
    evaluation: dict[str, Any]
    unknown: tuple[str, ...]
    bpb: float | None
    nats_per_token: float | None
    bytes_per_token: float | None
    num_tokens: int | None
    num_bytes: int | None

    @property
    def key(self) -> tuple[Any, ...] | None:
        """What two scores must share to be compared; None where part of it is unknown."""
        return None if self.unknown else tuple(self.evaluation[name] for name in EVALUATION)


@dataclass(frozen=True)
class GolfComparison:
    """Everything about a comparison. `tests`: by unit, nats_per_token where both sides have one tokenizer, and bpb; empty where a side
    has a single run. `gain` and `margin`: by unit. `num_needed`: runs a side that would decide, where that can be said."""

    labels: tuple[str, str]
    evaluation: dict[str, Any]
    text: str | None
    rows: list[dict[str, Any]]
    units: list[str]
    gain: dict[str, float]
    margin: dict[str, float | None]
    margin_how: str
    alpha: float
    confidence: float
    tests: dict[str, Welch]
    no_test: str | None
    shown: bool | None
    num_needed: int | None
    verdict: list[str]
    differences: list[str]
    warnings: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {"track": "golf", **asdict(self)}


def compare_golf(a: Side, b: Side, labels: tuple[str, str] = (LABEL, LABEL), *, margin_nats: float = MARGIN_NATS, alpha: float = ALPHA,
                 confidence: float = 0.95) -> GolfComparison:
    """Compare two sides of golf runs under a label each.

    Raises ValueError for runs that are not independent, a run without that score, and evaluations that differ or are unknown: such
    scores do not compare, whatever the test.
    """
    if not 0 < alpha < 1:
        raise ValueError(f"--alpha is {alpha}, and must lie between 0 and 1, e.g. {ALPHA}")
    if not 0 <= margin_nats < float("inf"):
        raise ValueError(f"--margin-nats is {margin_nats}, and must be a finite number of at least 0, e.g. {MARGIN_NATS}")
    for side in (a, b):
        check_independent(side)
    for run_a in a.runs:
        for run_b in b.runs:
            if same := same_run(run_a, run_b):
                raise ValueError(f"{run_a} stands on side A and {run_b} on side B, and {same}: a run does not compare with itself")
    views = [[view_of(run, label) for run in side.runs] for side, label in zip((a, b), labels, strict=True)]
    everyone = [*views[0], *views[1]]
    if problem := unequal(everyone):
        raise ValueError(f"these scores do not compare: {problem}. {_advice(a, b)}")
    tokenizers = {view.run.record.data.tokenizer_sha256 for view in everyone}
    same_tokens = len(tokenizers) == 1 and None not in tokenizers and all(v.nats_per_token is not None for v in everyone)
    warnings = [*_of_tokens(views, same_tokens), *warnings_of(a, b)]
    warnings += [f"{view.run} was published in {row.digits} decimals: its score is sure to {0.5 * 10**-row.digits:g} only" for view in everyone
                 if isinstance(row := row_of(view.run, view.label), PublishedScore) and row.digits is not None]
    if BEFORE in labels:
        warnings.insert(0, f"{BEFORE} scores weights that do not ship: the artifact's score is the run's result")
    units = [*(["nats_per_token"] if same_tokens else []), *(["bpb"] if all(view.bpb is not None for view in everyone) else [])]
    if not units:
        raise ValueError("these scores share no unit: some state no bpb, and their tokenizers differ or are not stated")
    margin, how = _margin(views, units, margin_nats, same_tokens)
    values = {unit: [[getattr(view, unit) for view in side] for side in views] for unit in units}
    gain = {unit: mean(x) - mean(y) for unit, (x, y) in values.items()}
    single = [side.name for side in (a, b) if len(side.runs) < 2]
    tests = {} if single else {unit: welch(*values[unit], margin[unit] or 0.0, confidence) for unit in units}
    no_test = None
    if single:
        no_test = (f"side{'s' if len(single) > 1 else ''} {' and '.join(single)} {'have' if len(single) > 1 else 'has'} a single run, whose "
                   "spread over seeds is unknown: a test needs two or more a side")
    elif tests[units[0]].df is None:
        no_test = "the runs of each side have one and the same score, so they show no spread over seeds: are they independent?"
        tests = {}
    unit = units[0]
    testable = bool(tests) and margin[unit] is not None
    shown = tests[unit].exceeds_margin(alpha) if testable else None
    needed = runs_needed(tests[unit], alpha, POWER) if testable and not shown else None
    differences = config_differences(a.runs[0].record, b.runs[0].record)
    first = everyone[0]
    rows = [_row(side.name, view) for side, own in zip((a, b), views, strict=True) for view in own]
    made = GolfComparison(labels, first.evaluation, first.text, rows, units, gain, margin, how, alpha, confidence, tests, no_test, shown, needed, [],
                          differences, warnings)
    made.verdict.extend(_verdict(made))
    return made


def view_of(run: Run, label: str) -> View:
    """The run's score of that label; ValueError, naming those that it has, where there is none."""
    imported, row = run.record.imported, row_of(run, label)
    if row is None:
        rows = scores_of(run)
        labels = ", ".join(dict.fromkeys(row.label for row in rows))
        why = f" ({run.record.status}{': ' + run.record.error if run.record.error else ''})" if run.record.status != "finished" else ""
        has = f"it has {labels}: choose with --label, --label-a and --label-b" if labels else "it has none at all: leave it out, and say so"
        raise ValueError(f"{run}{why} has no score {label!r}; {has}")
    evaluation = {name: getattr(row, name) for name in EVALUATION}
    if isinstance(row, ScoreRow):
        unknown = () if row.split_sha256 is not None else ("split_sha256",)
        return View(run, label, row.text, evaluation, unknown, row.bpb, row.nats_per_token, row.bytes_per_token, row.num_tokens, row.num_bytes)
    stated = imported.stated if imported else {}
    evaluation = {name: stated.get(name) if value is None else value for name, value in evaluation.items()}
    # a stride of None is a statement (windows do not overlap) only where someone stated it
    unknown = tuple(name for name in EVALUATION if evaluation[name] is None and not (name == "stride" and "stride" in stated))
    per_token = bits(row.nats_per_token) / row.bpb if row.nats_per_token and row.bpb else None
    return View(run, label, row.text or stated.get("text"), evaluation, unknown, row.bpb, row.nats_per_token, per_token, row.num_tokens, None)


def row_of(run: Run, label: str) -> ScoreRow | PublishedScore | None:
    """The run's first score of that label, as its record has it."""
    return next((row for row in scores_of(run) if row.label == label), None)


def scores_of(run: Run) -> list[ScoreRow | PublishedScore]:
    """A run's own scores, then those that it was imported with."""
    return [*run.record.scores, *(run.record.imported.scores if run.record.imported else [])]


def unequal(views: Sequence[View]) -> str | None:
    """In what the views' evaluations differ or are not known, as one sentence without its full stop; None where all are equal."""
    for view in views:
        if view.unknown:
            does = "was imported, and its source does not say" if view.run.record.imported else "does not say"
            return (f"{view.run} {does} the {', the '.join(_NAMES[name] for name in view.unknown)} of {view.label!r}, and nothing is guessed"
                    + ("; import it again with --state for what you know of it" if view.run.record.imported else ""))
    first = views[0]
    for view in views[1:]:
        if differing := [name for name in EVALUATION if view.evaluation[name] != first.evaluation[name]]:
            return "; ".join(f"the {_NAMES[name]} is {show(name, first)} in {first.run} ({first.label}) and {show(name, view)} in {view.run} "
                             f"({view.label})" for name in differing)
    return None


_NAMES = {"split_sha256": "text (its sha256)", "window": "window", "stride": "stride", "documents": "document mode",
          "drop_tail": "dropping of the tail"}


def show(name: str, view: View) -> str:
    """One part of an evaluation in words."""
    value = view.evaluation[name]
    if name == "split_sha256":
        return f"{value[:12]}" + (f" ({view.text})" if view.text else "")
    if name == "stride" and value is None:
        return "none (non-overlapping)"
    return {True: "on", False: "off"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def equal_labels(a: Side, b: Side) -> list[tuple[str, str]]:
    """Pairs of labels under which all runs of both sides were scored alike; the ones of equal name first."""

    def labels(side: Side) -> list[str]:
        each = [[row.label for row in scores_of(run)] for run in side.runs]
        return [label for label in dict.fromkeys(each[0]) if all(label in others for others in each)]

    found = []
    for label_a in labels(a):
        for label_b in labels(b):
            if (label_a == BEFORE) == (label_b == BEFORE):
                views = [view_of(run, label) for side, label in ((a, label_a), (b, label_b)) for run in side.runs]
                if len({view.key for view in views}) == 1 and views[0].key is not None:
                    found.append((label_a, label_b))
    return sorted(found, key=lambda pair: pair[0] != pair[1])


def label_options(pair: tuple[str, str]) -> str:
    """A pair of labels as the command line takes it."""
    return f"--label {shlex.quote(pair[0])}" if pair[0] == pair[1] else f"--label-a {shlex.quote(pair[0])} --label-b {shlex.quote(pair[1])}"


def _advice(a: Side, b: Side) -> str:
    pairs = equal_labels(a, b)
    equal = f"Equal under both are {'; '.join(label_options(pair) for pair in pairs)}. " if pairs else ""
    return f"{equal}--explain says what to run to make them equal"


def _of_tokens(views: Sequence[Sequence[View]], same_tokens: bool) -> list[str]:
    """ValueError where figures contradict the equal evaluation; sentences on what a differing tokenizer changes."""
    everyone = [view for side in views for view in side]
    first = everyone[0]
    if same_tokens:
        for view in everyone[1:]:
            for name in ("num_tokens", "num_bytes"):
                mine, other = getattr(first, name), getattr(view, name)
                if None not in (mine, other) and mine != other:
                    raise ValueError(f"{first.run} scored {mine:,} {name[4:]} and {view.run} {other:,} under what both state as one evaluation "
                                     "with one tokenizer: one of the records is wrong, so score both again with bpb golf eval")
        return []
    for side in views:
        if len({view.run.record.data.tokenizer_sha256 for view in side}) > 1:
            raise ValueError(f"the tokenizer differs within a side ({side[0].run} and others): runs of a side are one recipe under several "
                             "seeds")
    if first.evaluation["drop_tail"]:
        raise ValueError("the tokenizers differ or are not stated, and each drops another tail of the text: score both without --drop-tail")
    found = ["the tokenizers differ or are not stated, so nats per token do not compare; bits per byte do"]
    counts = [view.num_bytes for view in everyone if view.num_bytes is not None]
    if counts and max(counts) != min(counts):
        share = max(counts) / min(counts) - 1
        moved = share * max(v.bpb for v in everyone if v.bpb is not None)
        found.append(f"the tokenizers leave {min(counts):,} and {max(counts):,} bytes of one text, which alone may move bpb by about {moved:.5f}")
    return found


def _margin(views: Sequence[Sequence[View]], units: Sequence[str], margin_nats: float, same_tokens: bool) -> tuple[dict[str, float | None], str]:
    """The margin in each unit, and how that of bpb follows from the nats."""
    known = [view.bytes_per_token for side in views for view in side]
    margin: dict[str, float | None] = {"nats_per_token": margin_nats} if "nats_per_token" in units else {}
    if "bpb" not in units:
        return margin, "in nats per token, since some of the scores state no bpb"
    if margin_nats == 0:
        return {**margin, "bpb": 0.0}, "no margin: the test is whether B is better at all"
    if None in known or not all(known):
        return {**margin, "bpb": None}, "not converted: some of the scores do not say how many bytes a token has"
    smallest = min(known)
    margin["bpb"] = bits(margin_nats) / smallest
    if same_tokens:
        return margin, f"{margin_nats:g} nats a token / (ln 2 * {smallest:.5f} bytes a token of this text)"
    return margin, (f"{margin_nats:g} nats a token / (ln 2 * {smallest:.5f} bytes a token), by the tokenizer of shorter tokens (the other has "
                    f"{max(known):.5f}): the stricter of the two conversions, so that a gain that passes clears the margin by either")


def _row(side: str, view: View) -> dict[str, Any]:
    record = view.run.record
    training, artifact = record.training, record.artifact
    return {"side": side, "run": str(view.run), "name": record.name, "seed": record.seed, "status": record.status, "label": view.label,
            "nats_per_token": view.nats_per_token, "bpb": view.bpb, "bytes_per_token": view.bytes_per_token, "num_tokens": view.num_tokens,
            "num_bytes": view.num_bytes, "num_steps": training.num_steps, "train_s": training.train_s, "budget_s": training.budget_s,
            "weight_bytes": artifact.weight_bytes if artifact else None, "total_bytes": artifact.total_bytes if artifact else None,
            "tokenizer_sha256": record.data.tokenizer_sha256, "train_sha256": record.data.train_sha256}


UNITS = {"nats_per_token": "nats a token", "bpb": "bits a byte"}


def _verdict(made: GolfComparison) -> list[str]:
    unit = made.units[0]
    gain, margin, name = made.gain[unit], made.margin[unit], UNITS[unit]
    better, worse = ("B", "A") if gain >= 0 else ("A", "B")
    observed = f"{better} is better than {worse} by {abs(gain):.5f} {name} on average" if gain else "A and B have equal means"
    if made.no_test:
        return [f"{observed}, and whether that is more than chance is not tested: {made.no_test}."]
    test = made.tests[unit]
    lines = [f"{observed}: " + ("more than chance" if test.p_two_sided < 1 - made.confidence else "chance alone could do that")
             + f" (Welch's two-sided p = {test.p_two_sided:.3g}, {made.confidence:.0%} interval of the gain {test.interval.low:.5f} to "
             f"{test.interval.high:.5f})."]
    if margin is None:
        return [*lines, f"The margin is not tested: it was {made.margin_how}."]
    guard = "" if test.p_guard is None else f", {test.p_guard:.3g} after Behrens and Fisher, as the numbers of runs differ"
    ps = f"p = {test.p_margin:.3g}{guard}"
    if made.shown:
        return [*lines, f"B is better than A by more than {margin:.5f} {name}: shown at {made.alpha:g} ({ps})."]
    lines.append(f"That B is better than A by more than {margin:.5f} {name} is not shown at {made.alpha:g} ({ps}).")
    if gain <= margin:
        lines.append("More runs will not decide it: the gain observed is not above the margin.")
    elif made.num_needed is None:
        lines.append("Even 1,000 runs a side would not decide it, at the gain and spread observed.")
    else:
        more = [made.num_needed - test.num_a, made.num_needed - test.num_b]
        lines.append(f"At the gain and spread observed, {made.num_needed} runs a side would show it with a power of {POWER:g}: {more[0]} more of A "
                     f"and {more[1]} more of B. Fix the number first: testing after each run fires more often than {made.alpha:g}.")
    return lines
