"""Held-out slices: a few hundred documents pinned by sha256, so that two models are scored on the same bytes.

A slice is a JSONL file of {"text": ...} with FILE.manifest.json beside it, written last. Documents are the first of their
source that pass the filters, each text once. Of a sample on the hub they come from its *last* Parquet file: `bpb data
prepare --source fineweb` takes the first ones, so a model trained on those has not seen the slice.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bitsperbyte.run.folder import write_atomic
from bitsperbyte.text import corpora, hub
from bitsperbyte.text.encode import Progress

FORMAT, FORMAT_VERSION = "bitsperbyte.slice", 1
MANIFEST_SUFFIX = ".manifest.json"
HUB_SAMPLES = {  # source -> repository and folder of its sample
    "fineweb": (hub.FINEWEB_REPO, hub.FINEWEB_FOLDER),
    "fineweb-edu": ("HuggingFaceFW/fineweb-edu", "sample/10BT"),
}
MIN_CHARS, MAX_CHARS = 1_000, 20_000


@dataclass(frozen=True)
class Slice:
    """A slice as read and checked: its documents, the sha256 of its file, and its manifest."""

    path: Path
    documents: tuple[str, ...]
    sha256: str
    manifest: dict[str, Any]


@dataclass(frozen=True)
class Request:
    """What decides a slice. Lengths are in characters, both ends included; `skip_docs` passes over so many documents that
    the filters let through."""

    source: str
    num_docs: int = 256
    min_chars: int = MIN_CHARS
    max_chars: int = MAX_CHARS
    skip_docs: int = 0
    field: str = "text"
    revision: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("num_docs", 1), ("min_chars", 1), ("skip_docs", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, not {getattr(self, name)}")
        if self.max_chars < self.min_chars:
            raise ValueError(f"--max-chars {self.max_chars} lies below --min-chars {self.min_chars}: no document fits both")
        if self.revision and self.source not in HUB_SAMPLES:
            raise ValueError(f"--revision is for the sources on the hub, and {self.source} is not one")

    def parameters(self) -> dict[str, Any]:
        """The request as the manifest keeps it: without paths of this machine."""
        chosen = asdict(self)
        if self.source in HUB_SAMPLES:
            return {**chosen, "revision": self.revision or "main"}
        del chosen["revision"]
        return {**chosen, "source": Path(self.source).name}


def manifest_path(path: Path | str) -> Path:
    path = Path(path)
    return path.with_name(path.name + MANIFEST_SUFFIX)


def make_slice(request: Request, out: Path | str, *, documents: Iterable[str] | None = None,
               progress: Progress | None = None) -> tuple[dict[str, Any], bool]:
    """(the manifest, whether the slice was there already). What is there is never replaced by anything else: ValueError
    for another slice, or another file, at `out`, for too few documents, and for a source that cannot be read.

    A slice whose file is lost is built again at the revision that its manifest pins, and must come out the same.
    `documents`: those of a source that a program makes; the request's `source` then only names them (with seed and version).
    """
    out, progress = Path(out), progress or (lambda what, done, total: None)
    if out.is_dir():
        raise ValueError(f"{out} is a folder; name a file for the slice, such as {out / 'slice.jsonl'}")
    pinned = _read_manifest(out) if manifest_path(out).exists() else None
    if pinned is not None:
        _refuse_other(out, pinned["parameters"], request.parameters())
        if out.exists():
            return read_slice(out).manifest, True
    if documents is None:
        if request.source not in (*HUB_SAMPLES, corpora.EMBEDDED) and out.resolve() == Path(request.source).resolve():
            raise ValueError(f"--out {out} is the source itself; name another file for the slice")
        facts, documents = _open_source(request, pinned, progress)
    else:
        facts = {"revision": None, "source_files": {}}
    content, num_docs, num_bytes = _content(request, documents, progress)
    manifest = {"format": FORMAT, "version": FORMAT_VERSION, "source": request.parameters()["source"], **facts,
                "num_docs": num_docs, "num_bytes": num_bytes, "sha256": hashlib.sha256(content).hexdigest(),
                "parameters": request.parameters()}
    _write(out, content, manifest, pinned)
    return manifest, False


def read_slice(path: Path | str) -> Slice:
    """The documents of a slice whose file still has the sha256 of its manifest; ValueError, naming the file, otherwise."""
    path = Path(path)
    manifest = _read_manifest(path)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise ValueError(f"{path}: this slice is missing, though its manifest is there; make it again with the `bpb data slice` "
                         "command that made it") from None
    found = hashlib.sha256(content).hexdigest()
    if found != manifest["sha256"]:
        raise ValueError(f"{path}: its sha256 is {found[:16]}... and its manifest says {manifest['sha256'][:16]}...: the slice "
                         "changed or is damaged, and scores on it would compare with nothing; restore it, or delete it and make "
                         "it again")
    documents = tuple(_text(line, f"{path}:{number}") for number, line in enumerate(content.splitlines(), 1))
    if len(documents) != manifest.get("num_docs"):
        raise ValueError(f"{path}: it holds {len(documents)} documents and its manifest says {manifest.get('num_docs')}: one of the two "
                         "was changed; delete both and make the slice again")
    return Slice(path, documents, found, manifest)


def _text(line: bytes, where: str) -> str:
    try:
        text = json.loads(line)["text"]
        text.encode()  # not with half of a surrogate pair
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{where}: not a document as a slice holds it, {{\"text\": ...}}; delete the slice and its manifest, and make it "
                         "again") from error
    return text


def ensure_slice(path: Path | str, source: str, num_docs: int, build_if_missing: bool, *, documents: Iterable[str] | None = None,
                 say: Callable[[str], None] = lambda line: None) -> Slice:
    """The slice at `path`, made first from `source` where it is missing and `build_if_missing` allows it; from `documents`, of any
    length, where `source` only names these. ValueError where it is missing and may not be made, or is there and is another
    source's or another number of documents."""
    path = Path(path)
    if not path.exists() and not build_if_missing:
        raise ValueError(f"{path}: there is no such slice; make it with `bpb data slice --source {source} --num-docs {num_docs} "
                         f"--out {path}`, or set heldout.build_if_missing")
    if not manifest_path(path).exists() or not path.exists():
        say(f"making the held-out slice {path}: {num_docs} documents of {source}")
        limits = {} if documents is None else {"min_chars": 1}
        make_slice(Request(source, num_docs, **limits), path, documents=documents)
    found = read_slice(path)
    asked = {"source": Request(source, num_docs).parameters()["source"], "num_docs": num_docs}
    _refuse_other(path, {key: found.manifest["parameters"].get(key) for key in asked}, asked)
    return found


def _open_source(request: Request, pinned: dict[str, Any] | None, progress: Progress) -> tuple[dict[str, Any], Iterator[str]]:
    """What the manifest says of the source, and its documents."""
    if request.source not in HUB_SAMPLES:
        files = [] if request.source == corpora.EMBEDDED else corpora.source_files(request.source)
        version = corpora.source_fingerprint(request.source) if request.source == corpora.EMBEDDED else None
        facts = {"revision": version, "source_files": {file.name: hub.file_sha256(file) for file in files}}
        return facts, corpora.iter_documents(request.source, field=request.field)
    repo, folder = HUB_SAMPLES[request.source]
    commit = pinned["revision"] if pinned else hub.resolve_revision(repo, request.revision)
    files = [file for file in hub.list_files(repo, commit, folder) if file.path.endswith(".parquet")]
    if not files:
        raise ValueError(f"{repo} has no Parquet file below {folder} at this revision; name another --revision")
    ((file, path, sha256),) = hub.fetch_all(repo, commit, files[-1:], progress)
    facts = {"revision": commit, "source_files": {file.path: sha256}}
    return facts, corpora.read_parquet(path, request.field)


def _content(request: Request, texts: Iterable[str], progress: Progress) -> tuple[bytes, int, int]:
    """(the slice's file, documents in it, UTF-8 bytes of their texts)."""
    lines, num_bytes, seen, outside = [], 0, set(), 0
    for text in corpora.kept_documents(texts, None, Counter()):
        if not request.min_chars <= len(text) <= request.max_chars:
            outside += 1
            continue
        raw = text.encode()
        digest = hashlib.sha256(raw).digest()
        if digest in seen:
            continue
        seen.add(digest)
        if len(seen) <= request.skip_docs:
            continue
        lines.append(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n")
        num_bytes += len(raw)
        if len(lines) % 64 == 0:
            progress("choosing documents", len(lines), request.num_docs)
        if len(lines) == request.num_docs:
            return b"".join(lines), len(lines), num_bytes
    raise ValueError(f"{request.source} has {len(seen)} different documents of {request.min_chars:,} to {request.max_chars:,} "
                     f"characters ({outside} are shorter or longer), and --skip-docs {request.skip_docs} with --num-docs "
                     f"{request.num_docs} asks for more: lower one of them, or widen --min-chars and --max-chars")


def _write(out: Path, content: bytes, manifest: dict[str, Any], pinned: dict[str, Any] | None) -> None:
    """The slice and then its manifest, each whole. A slice without a manifest is one whose making was cut short."""
    if pinned is not None and pinned["sha256"] != manifest["sha256"]:
        raise ValueError(f"{out}: the source has changed since this slice was made (sha256 {manifest['sha256'][:16]}..., in the "
                         f"manifest {pinned['sha256'][:16]}...): restore the slice, or delete {manifest_path(out)} to pin a new one")
    if out.exists() and out.read_bytes() != content:
        raise ValueError(f"{out} is there, without a manifest, and holds something else; name another --out, or delete it first")
    out.parent.mkdir(parents=True, exist_ok=True)
    if not out.exists():
        write_atomic(out, content)
    if pinned is None:
        write_atomic(manifest_path(out), json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")


def _refuse_other(out: Path, there: dict[str, Any], asked: dict[str, Any]) -> None:
    differing = [f"{key}: there {there.get(key)!r}, asked {asked.get(key)!r}"
                 for key in sorted({*there, *asked}) if there.get(key) != asked.get(key)]
    if differing:
        raise ValueError(f"{out} is another slice ({'; '.join(differing)}); name another file for this one, or delete that one and its "
                         "manifest first")


def _read_manifest(path: Path) -> dict[str, Any]:
    beside = manifest_path(path)
    try:
        manifest = json.loads(beside.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} has no manifest ({beside.name}) beside it, so nothing says what it is; make the slice with "
                         "`bpb data slice`") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{beside}: not valid JSON ({error}); restore it, or delete it and make the slice again") from None
    sound = (isinstance(manifest, dict) and manifest.get("format") == FORMAT and isinstance(manifest.get("parameters"), dict)
             and isinstance(manifest.get("sha256"), str) and re.fullmatch("[0-9a-f]{64}", manifest["sha256"]) is not None
             and "revision" in manifest and isinstance(manifest.get("source"), str))
    if not sound or manifest.get("version") != FORMAT_VERSION:
        raise ValueError(f"{beside}: not a manifest of a slice in version {FORMAT_VERSION}; make the slice again with this program")
    return manifest
