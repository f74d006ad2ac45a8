"""Score a finished run's artifact on a text or on prepared shards, and keep the score in its record if asked."""

import hashlib
import warnings
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress

from bitsperbyte.golf.devices import pick_device
from bitsperbyte.golf.evaluate import Protocol, evaluate
from bitsperbyte.golf.session import ARTIFACT, IDENTITY_PARTS, RECORD, load_run, score_row
from bitsperbyte.records.schema import Record, ScoreRow
from bitsperbyte.records.store import read_record, write_record
from bitsperbyte.run.config import read_yaml
from bitsperbyte.run.folder import read_identity
from bitsperbyte.text.corpora import iter_documents
from bitsperbyte.text.shards import DataFolder, open_shard
from bitsperbyte.text.tokenizers import Prover, Tokenizer

OWN_LABELS = ("before_quantisation", "artifact")


def trained_window(run_dir: Path) -> int:
    """The window that the run's config scores with: eval.window, or the sequence length it trained on.
    ValueError naming the file where it states neither."""
    path = run_dir / "config.yaml"
    config = read_yaml(path)
    try:
        return int(config["eval"]["window"] or config["train"]["seq_len"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} does not give eval.window or train.seq_len as a run's config does: restore it from a copy of the "
                         "run") from error


def score_run(run_dir: Path, *, text: Path | None = None, data: Path | None = None, window: int | None = None,
              stride: int | None = None, isolated: bool = False, drop_tail: bool = False, label: str | None = None,
              device_name: str = "auto", show_progress: bool = True) -> ScoreRow:
    """The score of run_dir's artifact on `text` (documents, each after a BOS), on the validation split of the shards in `data`, or by
    default on the run's own validation split. ValueError for a text that the tokenizer cannot account for, and, with a label, where the
    record is another artifact's; without one that is a warning."""
    if text and data:
        raise ValueError("give either --text or --data, not both")
    if label is not None and not label.strip():
        raise ValueError("--label is empty: give the score a name, or leave the option out")
    if label in OWN_LABELS:
        raise ValueError(f"--label {label} is the label of a score that the run itself made: choose another")
    model, tokenizer, _ = load_run(run_dir)
    record = None
    if label is not None:
        record = _record_of_artifact(run_dir)
    elif (run_dir / RECORD).exists():
        _warn_of_another_record(run_dir)
    protocol = Protocol(trained_window(run_dir) if window is None else window, stride, "isolated" if isolated else "across", drop_tail)
    if stride and stride > protocol.window:
        raise ValueError(f"--stride {stride} must not exceed the window of {protocol.window} tokens")
    if stride and drop_tail:
        raise ValueError("--drop-tail goes with non-overlapping windows: leave --stride out")
    if text:
        tokens, split, name = *_encode_text(tokenizer, text), str(text)
    else:
        tokens, split, name = _validation_split(run_dir, tokenizer, data)
    device = pick_device(device_name)
    model.place(device)
    console = Console(stderr=True)
    with Progress(console=console, disable=not (show_progress and console.is_terminal), transient=True) as bar:
        task = bar.add_task(f"scoring {len(tokens):,} tokens", total=None)
        result = evaluate(model, tokens, tokenizer.table, tokenizer.bos_id, protocol,
                          progress=lambda done, total: bar.update(task, completed=done, total=total))
    row = score_row("evaluation" if label is None else label, result, name, split)
    if record is not None:
        record.scores = [s for s in record.scores if s.label != label] + [row]
        write_record(run_dir / RECORD, record)
    return row


def _record_of_artifact(run_dir: Path) -> Record:
    """The run's record, refused where it is that of another artifact than the one in the folder."""
    record = read_record(run_dir / RECORD)
    if difference := _difference(run_dir, record):
        raise ValueError(f"{difference}: score it without --label")
    return record


def _warn_of_another_record(run_dir: Path) -> None:
    """Scoring without a label leaves the record alone, so that one that is damaged or another artifact's only gives a warning."""
    try:
        problem = _difference(run_dir, read_record(run_dir / RECORD))
    except ValueError as error:
        problem = str(error)
    if problem:
        warnings.warn(f"{problem}; the score is of the artifact, and the record's own scores do not speak for it", stacklevel=3)


def _difference(run_dir: Path, record: Record) -> str | None:
    found = hashlib.sha256((run_dir / ARTIFACT).read_bytes()).hexdigest()
    if record.artifact is None or record.artifact.sha256 != found:
        return f"{run_dir / RECORD} is not the record of the artifact beside it, {ARTIFACT} (sha256 {found[:16]}...)"
    return None


def _encode_text(tokenizer: Tokenizer, text: Path) -> tuple[np.ndarray, str]:
    """BOS before each document. The proof of metric.md holds for every document scored."""
    prover, parts, digest = Prover(tokenizer), [], hashlib.sha256()
    for document in iter_documents(str(text)):
        ids = tokenizer.encode(document)
        prover.add(document, ids)
        digest.update(document.encode() + b"\0")
        parts += [np.array([tokenizer.bos_id], np.uint16), np.asarray(ids, np.uint16)]
    if not parts:
        raise ValueError(f"{text} holds no document to score")
    prover.result()
    return np.concatenate(parts), digest.hexdigest()


def _validation_split(run_dir: Path, tokenizer: Tokenizer, data: Path | None) -> tuple[np.ndarray, str, str]:
    identity = read_identity(run_dir, IDENTITY_PARTS)
    path = data or Path(identity["config"]["data"]["path"])
    given = None if (path / "manifest.json").exists() else next(run_dir.glob("tokenizer.*"))
    folder = DataFolder.open(path, tokenizer_path=given)
    if folder.tokenizer.sha256 != tokenizer.sha256:
        raise ValueError(f"the shards in {path} were made with another tokenizer than the run's: score them with --text, or prepare "
                         f"them again with --tokenizer {run_dir}")
    folder.verify("val")
    split = folder.split_sha256("val")
    if data is None and split != identity["data"]["val_sha256"]:
        raise ValueError(f"the validation split in {path} has changed since the run; name it with --data to score it anyway")
    tokens = np.concatenate([open_shard(info.path, vocab_size=tokenizer.vocab_size) for info in folder.shards("val")])
    return tokens, split, f"validation split of {path}"
