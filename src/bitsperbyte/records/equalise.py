"""How to make the scores of two sides equal in their evaluation: the labels that already are, or the commands that score what is missing."""

import shlex
from dataclasses import asdict, dataclass
from typing import Any

from bitsperbyte.records.compare import View, equal_labels, label_options, unequal, view_of
from bitsperbyte.records.sides import Run, Side
from bitsperbyte.records.store import ARTIFACT

_SPLIT = "validation split of "  # how a score names prepared shards; any other name is a text's path
_FIRST = ":first-"  # what a split's hash ends in where only its beginning was scored


@dataclass(frozen=True)
class Explanation:
    """`differs`: in what the evaluations differ, None where they are equal. `labels`: pairs of labels that are equal already. `commands`:
    what scores each run that lacks it, then `compare` with the new labels. `notes`: what the commands assume."""

    differs: str | None
    labels: list[tuple[str, str]]
    commands: list[str]
    compare: str
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def explain(a: Side, b: Side, labels: tuple[str, str]) -> Explanation:
    """What makes the two sides' scores comparable, with side A's evaluation as the one to meet wherever every run can be scored so.

    ValueError for a run without a score of its label, and where nothing but imported runs stands on a side.
    """
    views = [[view_of(run, label) for run in side.runs] for side, label in zip((a, b), labels, strict=True)]
    everyone = [*views[0], *views[1]]
    differs = unequal(everyone)
    tokenizers = {view.run.record.data.tokenizer_sha256 for view in everyone}
    same_tokens = len(tokenizers) == 1 and None not in tokenizers
    pairs = equal_labels(a, b)
    if differs is None and (same_tokens or not everyone[0].evaluation["drop_tail"]):
        return Explanation(None, pairs, [], _compare(a, b, labels), [])
    notes = [f"{view.run} is imported, so it cannot be scored here: only what its source says of the evaluation, stated when it is imported, can "
             "make it comparable" for view in everyone if view.run.record.imported is not None]
    own = [view for view in everyone if view.run.record.imported is None]
    target = next((view for view in own if view.key is not None), None)
    if target is None:
        return Explanation(differs, pairs, [], _compare(a, b, labels), [*notes, "no run states an evaluation in full that the others could meet"])
    evaluation, again, text = _target(target, same_tokens, notes)
    new = _free_label(evaluation, own)
    commands, chosen = [], list(labels)
    for i, side in enumerate(views):
        if again or any(view.key != target.key for view in side):
            chosen[i] = new
            commands += [_command(view.run, evaluation, text, new) for view in side if view.run.record.imported is None]
            notes += [f"{view.run} has no {ARTIFACT}: score the run's own folder, and add its record again" for view in side
                      if view.run.record.imported is None and not (view.run.folder / ARTIFACT).is_file()]
    reason = differs or "the tokenizers differ, and each drops another tail"
    return Explanation(reason, pairs, commands, _compare(a, b, (chosen[0], chosen[1])), notes)


def _target(view: View, same_tokens: bool, notes: list[str]) -> tuple[dict[str, Any], bool, list[str] | None]:
    """(the evaluation to meet, whether all runs must be scored anew, the options that name the text; None is each run's own split)."""
    evaluation, text = dict(view.evaluation), view.text
    assert text is not None
    if same_tokens:
        split, first, _ = evaluation["split_sha256"].partition(_FIRST)
        evaluation["split_sha256"] = split
        if first:
            notes.append("a run may score the beginning of its split (eval.max_tokens), and bpb golf eval all of it: all are scored anew")
        options = ["--data", text.removeprefix(_SPLIT)] if text.startswith(_SPLIT) else ["--text", text]
        return evaluation, bool(first), options
    drops = evaluation["drop_tail"]
    evaluation["drop_tail"] = False
    if not text.startswith(_SPLIT):
        return evaluation, drops, ["--text", text]
    notes.append("the tokenizers differ, and prepared shards hold one tokenizer's tokens: FILE stands for one text, the same for all runs, that "
                 "none was trained on (text, Markdown, JSONL, Parquet)")
    evaluation["split_sha256"] = None
    return evaluation, True, ["--text", "FILE"]


def _command(run: Run, evaluation: dict[str, Any], text: list[str] | None, label: str) -> str:
    own = run.record.data.val_sha256 is not None and run.record.data.val_sha256 == evaluation["split_sha256"]
    words = ["bpb", "golf", "eval", str(run.folder), *([] if own or text is None else text), "--window", str(evaluation["window"])]
    words += ["--stride", str(evaluation["stride"])] if evaluation["stride"] else []
    words += ["--isolated"] if evaluation["documents"] == "isolated" else []
    words += ["--drop-tail"] if evaluation["drop_tail"] else []
    return shlex.join([*words, "--label", label])


def _free_label(evaluation: dict[str, Any], views: list[View]) -> str:
    """A label that says how the score was made, and that no run has yet."""
    parts = [f"w{evaluation['window']}", f"s{evaluation['stride']}" if evaluation["stride"] else "",
             "isolated" if evaluation["documents"] == "isolated" else "", "drop_tail" if evaluation["drop_tail"] else ""]
    label = "_".join(part for part in parts if part)
    taken = {row.label for view in views for row in view.run.record.scores}
    num = 1
    while (candidate := label if num == 1 else f"{label}_{num}") in taken:
        num += 1
    return candidate


def _compare(a: Side, b: Side, labels: tuple[str, str]) -> str:
    if len(a.arguments) == len(b.arguments):
        paths = [path for pair in zip(a.arguments, b.arguments, strict=True) for path in pair]
    else:
        paths = [word for side, option in ((a, "--a"), (b, "--b")) for path in side.arguments for word in (option, path)]
    return f"{shlex.join(['bpb', 'records', 'compare', *paths])} {label_options(labels)}"
