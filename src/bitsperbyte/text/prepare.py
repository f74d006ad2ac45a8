"""From documents to a folder of shards: split, tokenise, prove the byte counts, write the manifest last.

What is in val never is in train: documents go to val by the hash of their text (so a growing corpus keeps its split),
or the first so many do, or val has a source of its own; an exact copy of a val document is dropped and counted. Nothing
but the hashes of val is kept in memory. A folder without a manifest but with its state file was interrupted: the same
command starts it over, and keeps the revision it had pinned and every download that was finished.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from bitsperbyte.text import corpora, hub
from bitsperbyte.text.encode import Progress, Splitter, empty_split, write_splits
from bitsperbyte.text.shards import FORMAT, FORMAT_VERSION, MANIFEST, SPLITS, STATE, DataFolder, open_shard
from bitsperbyte.text.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer, train_sentencepiece

HUB_SOURCES = ("fineweb", "challenge")
DEFAULT_VAL_FRACTION = 0.05
TRAIN_TOKENIZER_BYTES = 200_000_000  # of train text that a new tokenizer is trained on
_DOWNLOADS = ".download"
_LOCK = ".preparing.lock"  # not the lock of a run folder, so that neither is taken for the other
# Only what matches this, or is noted in the state file as fetched, is ever deleted.
_WRITTEN = re.compile(r"(train|val)_\d{6}\.bin(\.tmp)?|tokenizer\.(model|json)|trained_\d+\.model|manifest\.json\.tmp"
                      r"|\.preparing\.json\.tmp|\.tokenizer\.(model|json)\.\d+\.part")


@dataclass(frozen=True)
class Request:
    """The arguments of `prepare`, checked."""

    source: str
    tokenizer: str
    val_fraction: float | None  # None together with val_docs or val_source
    val_docs: int | None
    limit_docs: int | None
    shard_tokens: int
    field: str
    seed: int
    revision: str | None
    num_shards: int
    val_source: str | None

    def __post_init__(self) -> None:
        for name, value in (("--val-docs", self.val_docs), ("--limit-docs", self.limit_docs),
                            ("the tokens of a shard", self.shard_tokens), ("--num-shards", self.num_shards)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if self.val_source is not None:
            if self.source == "challenge" or self.val_source in HUB_SOURCES:
                raise ValueError("--val-source names text on this machine (or `embedded`) for a --source other than the "
                                 f"challenge, whose shards are split already; these are --source {self.source} and "
                                 f"--val-source {self.val_source}")
            if self.val_fraction is not None or self.val_docs is not None:
                raise ValueError("--val-source is all of val, so it goes with neither --val-fraction nor --val-docs")
        if self.val_fraction is not None and not 0 < self.val_fraction < 1:
            raise ValueError(f"--val-fraction must lie between 0 and 1, not {self.val_fraction}")
        if self.val_docs is not None and self.limit_docs is not None and self.val_docs >= self.limit_docs:
            raise ValueError(f"--val-docs {self.val_docs} leaves nothing of --limit-docs {self.limit_docs} to train on")
        kind = tokenizer_kind(self.tokenizer)
        if self.source == "challenge" and kind != "challenge":
            raise ValueError(f"the challenge's shards come with their own tokenizer, so --tokenizer {self.tokenizer} "
                             "cannot "
                             "be used; name one of the challenge's (sp1024), or take --source fineweb")
        if self.revision and self.source not in HUB_SOURCES:
            raise ValueError(f"--revision is for the sources on the hub, and {self.source} is not one")

    def parameters(self) -> dict[str, Any]:
        """What decides the content of the folder, without paths of this machine (files by their hash)."""
        is_file = tokenizer_kind(self.tokenizer) == "file"
        tokenizer = f"sha256 {load_tokenizer(Path(self.tokenizer)).sha256}" if is_file else self.tokenizer
        chosen: dict[str, Any] = {"source": self.source if self.source in HUB_SOURCES else Path(self.source).name,
                                  "tokenizer": tokenizer}
        if self.source in HUB_SOURCES:
            chosen.update(revision=self.revision or "main", num_shards=self.num_shards)
        else:
            chosen.update(field=self.field, fingerprint=corpora.source_fingerprint(self.source))
        if self.source != "challenge":
            val = f"first {self.val_docs} documents" if self.val_docs else self.val_fraction
            if self.val_source:
                val = f"all of {Path(self.val_source).name}"
                chosen.update(field=self.field, val_fingerprint=corpora.source_fingerprint(self.val_source))
            chosen.update(seed=self.seed, val=val, limit_docs=self.limit_docs, shard_tokens=self.shard_tokens)
        return chosen


def prepare(source: str, tokenizer: str | None = None, out: Path | str = "data", *, val_source: str | None = None,
            val_fraction: float | None = None, val_docs: int | None = None, limit_docs: int | None = None,
            shard_tokens: int = 100_000_000, field: str = "text", seed: int = 0, revision: str | None = None,
            num_shards: int = 1, progress: Progress | None = None) -> dict[str, Any]:
    """Make the folder `out` and return its manifest. Calling it again with equal arguments returns what is there.

    source: `embedded`, `fineweb`, `challenge`, a file or a folder. tokenizer: `train:N` (SentencePiece on the first
    200 MB of train documents, N pieces), `byte`, `sp1024` (the challenge's, from the hub), or a path; by default
    train:1024, and sp1024 for the challenge. num_shards: train shards of the challenge, or Parquet files of FineWeb.
    val is a share of the documents (0.05 unless `val_fraction` says otherwise; seed changes which), or the first
    `val_docs`, or all of `val_source` (`embedded`, a file or a folder), which leaves all of `source` for train, up to
    `limit_docs`. ValueError for anything that the caller can mend.
    """
    if val_fraction is None and val_docs is None and val_source is None:
        val_fraction = DEFAULT_VAL_FRACTION
    tokenizer = tokenizer or (hub.CHALLENGE_TOKENIZER if source == "challenge" else "train:1024")
    request = Request(str(source), tokenizer, val_fraction, val_docs, limit_docs, shard_tokens, field, seed, revision,
                      num_shards, None if val_source is None else str(val_source))
    out, progress = Path(out), progress or (lambda what, done, total: None)
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; name a folder for the data")
    _refuse_inputs_inside(out, request)
    parameters = request.parameters()
    created = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    with _locked(out, created):
        if (out / MANIFEST).exists():
            return _same_manifest(out, parameters)
        state = _State.open(out, request, parameters)
        try:
            made = (_fetch_challenge if source == "challenge" else _encode_documents)(out, state, progress)
        except ValueError:
            _forget_if_nothing_is_done(out, state)
            raise
        manifest = {"format": FORMAT, "version": FORMAT_VERSION, "source": parameters["source"], **made,
                    "parameters": parameters}
        _write_json(out / MANIFEST, manifest)
        (out / STATE).unlink()
        shutil.rmtree(out / _DOWNLOADS, ignore_errors=True)
        return manifest


def tokenizer_kind(tokenizer: str) -> str:
    if tokenizer == "byte":
        return "byte"
    if tokenizer.startswith("train:"):
        if not re.fullmatch(r"train:[1-9]\d{2,4}", tokenizer) or int(tokenizer[6:]) > 1 << 16:
            raise ValueError(f"--tokenizer {tokenizer}: write train:N with a vocabulary N from 300 to 65536, such as "
                             "train:1024")
        return "train"
    return "challenge" if re.fullmatch(r"sp\d+", tokenizer) else "file"


def _refuse_inputs_inside(out: Path, request: Request) -> None:
    """What is read must not lie where shards are written and unfinished ones are deleted."""
    inputs = [("--source", request.source)] if request.source not in HUB_SOURCES else []
    if request.val_source is not None:
        inputs.append(("--val-source", request.val_source))
    inputs = [(option, path) for option, path in inputs if path != corpora.EMBEDDED]
    if tokenizer_kind(request.tokenizer) == "file":
        inputs.append(("--tokenizer", request.tokenizer))
    for option, path in inputs:
        if Path(path).resolve().is_relative_to(out.resolve()):
            raise ValueError(f"{option} {path} lies inside --out {out}, which must hold nothing but the prepared data; "
                             "name another --out, or move the input out of it")


@contextmanager
def _locked(out: Path, created: bool) -> Iterator[None]:
    """Hold the folder's lock and remove the lock file at the end; with `created`, also the folder if it is empty then."""
    path = out / _LOCK
    with open(path, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_current = os.path.samestat(os.fstat(lock.fileno()), os.stat(path))
        except (BlockingIOError, FileNotFoundError):  # the second: its owner ended, and removed it, just now
            is_current = False
        if not is_current:
            raise ValueError(f"{out}: another process is preparing this folder; wait for it or name another --out")
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            if created and not any(out.iterdir()):
                out.rmdir()


def _same_manifest(out: Path, parameters: dict[str, Any]) -> dict[str, Any]:
    manifest = DataFolder.open(out).manifest
    there = manifest.get("parameters", {})
    differing = [f"{key}: there {there.get(key)!r}, asked {parameters.get(key)!r}"
                 for key in sorted({*there, *parameters}) if there.get(key) != parameters.get(key)]
    if differing:
        raise ValueError(f"{out} already holds other data ({'; '.join(differing)}); name another --out, or delete that "
                         "folder first")
    return manifest


@dataclass
class _State:
    """What an interrupted preparation leaves behind: its parameters, the pinned commit, the files it lists and has."""

    path: Path
    request: Request
    parameters: dict[str, Any]
    commits: dict[str, str] = field(default_factory=dict)  # repository -> commit
    listings: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # repository -> files chosen there
    done: dict[str, str] = field(default_factory=dict)  # file in the folder -> sha256

    @classmethod
    def open(cls, out: Path, request: Request, parameters: dict[str, Any]) -> _State:
        path = out / STATE
        if not path.exists():
            _refuse_foreign(out, lambda name: name == STATE + ".tmp")
            saved = {}
        else:
            try:
                saved = json.loads(path.read_text(encoding="utf-8"))
                kept = {name: saved[name] for name in ("commits", "listings", "done")}
                before = saved["parameters"]
                fetched = set(kept["done"])
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"{path} is damaged; name another --out, or delete {path} and the shards beside it and "
                                 "prepare again") from None
            _refuse_foreign(out, lambda name: name in fetched or _WRITTEN.fullmatch(name) is not None)
            saved = kept if before == parameters else {"done": kept["done"]}
        state = cls(path, request, parameters, **saved)
        state.save()
        return state

    def save(self) -> None:
        _write_json(self.path, {name: getattr(self, name) for name in ("parameters", "commits", "listings", "done")})

    def pinned(self, repo: str, revision: str | None,
               choose: Callable[[str], list[hub.HubFile]]) -> tuple[str, list[hub.HubFile]]:
        """The commit and the files chosen at it: asked of the hub once, and read from the state file after that."""
        if repo not in self.listings:
            commit = hub.resolve_revision(repo, revision)
            self.listings[repo] = [file.to_dict() for file in choose(commit)]
            self.commits[repo] = commit
            self.save()
        return self.commits[repo], [hub.HubFile(**row) for row in self.listings[repo]]


def _fetch_challenge(out: Path, state: _State, progress: Progress) -> dict[str, Any]:
    request, name = state.request, state.request.tokenizer

    def choose(commit: str) -> list[hub.HubFile]:
        listing = hub.list_files(hub.CHALLENGE_REPO, commit)
        train, val = hub.challenge_shards(listing, name, request.num_shards)
        return [hub.challenge_tokenizer(listing, name), *val, *train]

    commit, files = state.pinned(hub.CHALLENGE_REPO, request.revision, choose)
    _clear(out, state, keep={Path(file.path).name for file in files})
    _require_space(out, sum(file.num_bytes for file in files if not (out / Path(file.path).name).exists()))
    missing = []
    for file in files:
        here = out / Path(file.path).name
        if not (here.is_file() and hub.file_sha256(here) == (file.sha256 or state.done.get(here.name))):
            missing.append(file)
    for file, path, sha256 in hub.fetch_all(hub.CHALLENGE_REPO, commit, missing, progress, out / _DOWNLOADS):
        here = out / Path(file.path).name
        state.done[here.name] = sha256
        state.save()
        os.replace(path, here)
    tokenizer = load_tokenizer(out / Path(files[0].path).name)
    splits = {}
    for split in SPLITS:
        names = sorted(Path(file.path).name for file in files if f"_{split}_" in file.path)
        splits[split] = _count_shards([out / name for name in names], tokenizer, progress)
    return {"revision": commit, "tokenizer": _tokenizer_entry(tokenizer, Path(files[0].path).name), "splits": splits,
            "proof": {}, "num_duplicates_dropped": 0, "skipped": {}}


def _count_shards(paths: list[Path], tokenizer: Tokenizer, progress: Progress) -> dict[str, Any]:
    """The manifest's entry for shards that came ready-made: num_bytes of the raw text cannot be known from them."""
    rows, num_documents, counted, previous = [], 0, 0, None
    for number, path in enumerate(paths):
        progress("checking shards", number, len(paths))
        sha256 = hub.file_sha256(path)
        tokens = open_shard(path, vocab_size=tokenizer.vocab_size)
        for start in range(0, len(tokens), 1 << 22):
            part = tokens[start : start + (1 << 22)]
            num_documents += int(np.count_nonzero(part == tokenizer.bos_id))
            before = np.concatenate([part[:1] if previous is None else previous, part[:-1]])
            counted += int(tokenizer.table.target_bytes(before, part)[0 if previous is not None else 1 :].sum())
            previous = part[-1:]
        rows.append({"file": path.name, "num_tokens": len(tokens), "sha256": sha256})
    progress("checking shards", len(paths), len(paths))
    return {"files": rows, "num_documents": num_documents, "num_tokens": sum(row["num_tokens"] for row in rows),
            "num_bytes": None, "counted_bytes": counted}


def _encode_documents(out: Path, state: _State, progress: Progress) -> dict[str, Any]:
    request = state.request
    skipped: Counter[str] = Counter()
    _clear(out, state, keep=set())
    revision = None
    if request.source == "fineweb":
        files = _fineweb_paths(out, state, progress)
        revision = state.commits[hub.FINEWEB_REPO]
        _require_space(out, sum(path.stat().st_size for path in files))
    else:
        files = []
        _require_space(out, _text_bytes(request.source) + (_text_bytes(request.val_source) if request.val_source else 0))

    def train_or_all(counts: Counter[str]) -> Iterator[str]:
        if files:
            texts = (text for path in files for text in corpora.read_parquet(path, "text"))
            return corpora.kept_documents(texts, request.limit_docs, counts)
        return corpora.iter_documents(request.source, limit=request.limit_docs, field=request.field, skipped=counts)

    def split(splitter: Splitter, counts: Counter[str]) -> Iterator[tuple[str, str]]:
        val_source = request.val_source
        val = corpora.iter_documents(val_source, field=request.field, skipped=counts) if val_source else ()
        return splitter.split(train_or_all(counts), val)

    if tokenizer_kind(request.tokenizer) == "train" and request.val_source is None:
        num_documents = sum(1 for _ in islice(train_or_all(Counter()), 2))
        if num_documents < 2:  # said here, as training on so little fails for a reason that would mislead
            raise ValueError(empty_split("val", num_documents, False))
    tokenizer = _tokenizer(out, state, lambda: _train_texts(split(_splitter(request), Counter())), progress)
    splitter = _splitter(request)
    splits, proofs = write_splits(split(splitter, skipped), tokenizer, out, request.shard_tokens, progress,
                                  has_val_source=request.val_source is not None)
    return {"revision": revision, "tokenizer": _tokenizer_entry(tokenizer, tokenizer.save(out).name),
            "source_sha256": state.done if files else {}, "splits": splits, "proof": proofs,
            "num_duplicates_dropped": splitter.num_dropped, "skipped": dict(skipped)}


def _splitter(request: Request) -> Splitter:
    return Splitter(request.val_fraction, request.val_docs, request.seed)


def _fineweb_paths(out: Path, state: _State, progress: Progress) -> list[Path]:
    request = state.request

    def choose(commit: str) -> list[hub.HubFile]:
        return hub.fineweb_files(hub.list_files(hub.FINEWEB_REPO, commit, hub.FINEWEB_FOLDER), request.num_shards)

    commit, files = state.pinned(hub.FINEWEB_REPO, request.revision, choose)
    fetched = list(hub.fetch_all(hub.FINEWEB_REPO, commit, files, progress))
    state.done = {file.path: sha256 for file, _, sha256 in fetched}
    return [path for _, path, _ in fetched]


def _tokenizer(out: Path, state: _State, train_texts: Callable[[], Iterable[str]], progress: Progress) -> Tokenizer:
    name = state.request.tokenizer
    match tokenizer_kind(name):
        case "byte":
            return ByteTokenizer()
        case "train":
            progress("training the tokenizer", 0, None)
            return train_sentencepiece(train_texts(), int(name.removeprefix("train:")), out)
        case "challenge":
            commit, files = state.pinned(hub.CHALLENGE_REPO, None, lambda commit: [
                hub.challenge_tokenizer(hub.list_files(hub.CHALLENGE_REPO, commit), name)])
            return load_tokenizer(hub.fetch(hub.CHALLENGE_REPO, commit, files[0])[0])
    return load_tokenizer(name)


def _train_texts(documents: Iterable[tuple[str, str]]) -> Iterator[str]:
    """The train documents up to TRAIN_TOKENIZER_BYTES in all."""
    num_bytes = 0
    for split, text in documents:
        if split == "train":
            num_bytes += len(text.encode("utf-8"))
            if num_bytes > TRAIN_TOKENIZER_BYTES:
                return
            yield text


def _tokenizer_entry(tokenizer: Tokenizer, file_name: str) -> dict[str, Any]:
    return {"file": file_name, "name": tokenizer.name, "sha256": tokenizer.sha256, "vocab_size": tokenizer.vocab_size}


def _refuse_foreign(out: Path, is_ours: Callable[[str], bool]) -> None:
    """ValueError where `out` holds something that is not ours. A `.lock` is left by earlier versions."""
    foreign = sorted(path.name for path in out.iterdir() if path.name not in (".lock", _LOCK, STATE, _DOWNLOADS)
                     and not (is_ours(path.name) and path.is_file()))
    if foreign:
        raise ValueError(f"{out} is not empty (it holds {foreign[0]}) and has no manifest.json; name an empty folder as "
                         "--out")


def _clear(out: Path, state: _State, keep: set[str]) -> None:
    """Remove what an interrupted preparation wrote, and nothing else."""
    for path in list(out.iterdir()):
        ours = _WRITTEN.fullmatch(path.name) or path.name in state.done
        if ours and path.name not in keep and path.is_file():
            path.unlink()


def _forget_if_nothing_is_done(out: Path, state: _State) -> None:
    """After a refusal, leave nothing behind unless a shard is finished or the hub was asked (its commit stays pinned)."""
    asked = state.request.source in HUB_SOURCES and state.commits
    if not asked and not any(path.suffix == ".bin" for path in out.iterdir()):
        _clear(out, state, keep=set())
        state.path.unlink(missing_ok=True)


def _text_bytes(source: str) -> int:
    if source == corpora.EMBEDDED:
        return 4 << 20
    return sum(path.stat().st_size * (1 if path.suffix in (".txt", ".md", ".markdown", ".jsonl") else 4)
               for path in corpora.source_files(source))


def _require_space(out: Path, num_bytes: int) -> None:
    """A rough check: a token takes 2 bytes and stands for more than that, so shards are no larger than their text."""
    free = shutil.disk_usage(out).free
    if free < num_bytes * 1.1:
        raise ValueError(f"{out}: about {num_bytes / 1e6:,.0f} MB are needed and {free / 1e6:,.0f} MB are free; choose "
                         "another disk")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    beside = path.with_name(path.name + ".tmp")
    with open(beside, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
