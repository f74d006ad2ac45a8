"""`bpb golf legal`: an artifact, as read from disk, through the checks of legality.py, and its evaluation against them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bitsperbyte.golf.artifact import read_artifact
from bitsperbyte.golf.devices import pick_device
from bitsperbyte.golf.evaluate import Protocol, evaluate
from bitsperbyte.golf.findings import LegalityFinding
from bitsperbyte.golf.legality import check_legal
from bitsperbyte.golf.model import GolfModel
from bitsperbyte.golf.scorers import NetworkScorer
from bitsperbyte.golf.session import ARTIFACT
from bitsperbyte.run.config import read_yaml
from bitsperbyte.text.corpora import EMBEDDED, iter_documents
from bitsperbyte.text.shards import DataFolder, open_shard
from bitsperbyte.text.tokenizers import Tokenizer, load_tokenizer

DEFAULT_WINDOW = 1024  # the challenge's, for an artifact with no config beside it
MAX_DOCUMENTS, MAX_TOKENS = 500, 1_000_000  # of a text; of shards
MAX_SUM_ERROR = 1e-6  # relative: two float64 sums of the same float32 losses in another order, far below any score's digits


@dataclass(frozen=True)
class Legality:
    """What was checked and what was found."""

    artifact: Path
    text: str
    protocol: Protocol
    device: str
    findings: list[LegalityFinding]


def check_artifact(path: Path, *, tokenizer: Path | None = None, data: Path | None = None, text: Path | None = None,
                   window: int | None = None, stride: int | None = None, isolated: bool | None = None, num_cuts: int = 64,
                   exhaustive: bool = False, seed: int = 0, device_name: str = "auto",
                   progress: Callable[[str], None] | None = None) -> Legality:
    """The findings of an artifact.bpb, or of that of a run folder, on the validation split of `data`, on `text`, or by default on the
    documentation embedded in Python.

    Windows are those that the config beside the artifact scores with unless given. ValueError for what cannot be read, for a
    tokenizer or data of another kind than the artifact's, and for windows that do not fit.
    """
    if text and data:
        raise ValueError("give either --text or --data, not both")
    file = path / ARTIFACT if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{file}: there is no such artifact; give an {ARTIFACT} or the folder of a finished run")
    known = load_tokenizer(tokenizer or file.parent)
    artifact = read_artifact(file, expected_tokenizer_sha256=known.sha256)
    protocol = _protocol(file.parent / "config.yaml", window, stride, isolated)
    model = GolfModel(artifact.model)
    model.load_state_dict(artifact.state)
    if known.vocab_size > artifact.model.vocab_size:
        raise ValueError(f"{file}: the tokenizer has {known.vocab_size} tokens and the model {artifact.model.vocab_size}: it cannot score them all")
    tokens, texts, name = _shards(known, data) if data else _documents(known, EMBEDDED if text is None else str(text))
    device = pick_device(device_name)
    model.place(device)
    findings = check_legal(model, window=protocol.window, stride=protocol.stride, documents=protocol.documents, bos_id=known.bos_id,
                           tokens=tokens, tokenizer=known, texts=texts, num_cuts=num_cuts, exhaustive=exhaustive, seed=seed, progress=progress)
    if progress:
        progress("evaluation")
    findings.append(check_evaluation(model, tokens[: 4 * protocol.window + protocol.window // 3], known, protocol))
    return Legality(file, name, protocol, str(device), findings)


def check_evaluation(model: GolfModel, tokens: np.ndarray, tokenizer: Tokenizer, protocol: Protocol) -> LegalityFinding:
    """Whether the sums of golf/evaluate.py, which scores are made of, are those of the target by target nats and bytes checked here."""
    result = evaluate(model, tokens.astype(np.uint16), tokenizer.table, tokenizer.bos_id, protocol)
    stream = tokens.astype(np.int64)
    (scored,) = NetworkScorer(model, protocol, bos_id=tokenizer.bos_id).score([stream])
    nats = float(scored.nats.sum())
    num_bytes = int(tokenizer.table.target_bytes(stream[scored.positions - 1], stream[scored.positions]).sum())
    if (result.score.num_tokens, result.score.num_bytes) != (len(scored.positions), num_bytes):
        return LegalityFinding("evaluation", False, f"the evaluation counts {result.score.num_tokens} tokens and {result.score.num_bytes} "
                               f"bytes where the targets checked are {len(scored.positions)} and stand for {num_bytes}", None,
                               float(abs(result.score.num_bytes - num_bytes)))
    if not abs(result.score.nats - nats) <= MAX_SUM_ERROR * nats:
        return LegalityFinding("evaluation", False, f"the evaluation sums {result.score.nats:.6f} nats where the targets checked have "
                               f"{nats:.6f}", None, abs(result.score.nats - nats))
    return LegalityFinding("evaluation", True, f"the evaluation's sums are those of the predictions checked: {len(scored.positions)} tokens, "
                           f"{num_bytes} bytes, {nats:.2f} nats ({protocol.describe()})")


def _protocol(config_path: Path, window: int | None, stride: int | None, isolated: bool | None) -> Protocol:
    """What is given, and the rest from the config, which an artifact may be without."""
    found_window, found_stride, documents = DEFAULT_WINDOW, None, "across"
    if config_path.is_file():
        config = read_yaml(config_path)
        try:
            found_window = int(config["eval"]["window"] or config["train"]["seq_len"])
            found_stride, documents = config["eval"]["stride"], config["eval"]["documents"]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{config_path} does not give eval.window and eval.stride as a run's config does: restore it, or copy the artifact "
                             "and its tokenizer elsewhere and give --window") from error
    if window is not None and stride is None:
        found_stride = None  # another window's stride says nothing
    chosen = Protocol(window or found_window, stride or found_stride, documents if isolated is None else ("isolated" if isolated else "across"))
    if chosen.window < 2:
        raise ValueError(f"--window {chosen.window} is too short: give at least 2 tokens")
    if chosen.stride and chosen.stride > chosen.window:
        raise ValueError(f"--stride {chosen.stride} must not exceed the window of {chosen.window} tokens")
    return chosen


def _documents(tokenizer: Tokenizer, source: str) -> tuple[np.ndarray, list[str], str]:
    """Tokens with a BOS before each document, the documents, and what they are."""
    texts = list(iter_documents(source, limit=MAX_DOCUMENTS))
    if not texts:
        raise ValueError(f"{source} holds no document to check with")
    parts = [np.concatenate([np.array([tokenizer.bos_id], np.int64), np.asarray(ids, np.int64)]) for ids in tokenizer.encode_batch(texts)]
    return np.concatenate(parts), texts, "the documentation embedded in Python" if source == EMBEDDED else source


def _shards(tokenizer: Tokenizer, data: Path) -> tuple[np.ndarray, list[str], str]:
    """The first tokens of a validation split, and its first documents decoded."""
    folder = DataFolder.open(data)
    if not folder.bare and folder.tokenizer.sha256 != tokenizer.sha256:
        raise ValueError(f"the shards in {data} were made with another tokenizer than the artifact's: check it with --text")
    first = folder.shards("val")[0]
    tokens = np.asarray(open_shard(first.path, vocab_size=tokenizer.vocab_size, sha256=first.sha256)[:MAX_TOKENS], np.int64)
    borders = np.flatnonzero(tokens == tokenizer.bos_id)[: MAX_DOCUMENTS + 1]
    whole = [tokens[begin + 1 : end] for begin, end in zip(borders[:-1], borders[1:], strict=True)]
    return tokens, [decoded for ids in whole if (decoded := tokenizer.decode(ids)).strip()], f"validation split of {data}"
