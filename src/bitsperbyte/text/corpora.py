"""Documents from text on this machine: the embedded source, a file, or a folder of files.

Everything streams: at most one document (of a .txt or .md file: the file) is in memory at a time.
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import io
import json
import lzma
import re
import sys
import sysconfig
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

EMBEDDED = "embedded"
EMBEDDED_VERSION = 2  # raise it when the embedded documents change: a folder made before is then not taken for the same
TEXT_SUFFIXES = (".txt", ".md", ".markdown")
PACKED_SUFFIXES = (".gz", ".xz", ".zst")
READABLE = ".txt, .md, .markdown and .jsonl (plain or with .gz, .xz, .zst) and .parquet"

_MIN_CHARS = 200  # of an embedded document
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}


def iter_documents(source: str | Path, *, limit: int | None = None, field: str = "text",
                   skipped: Counter[str] | None = None) -> Iterator[str]:
    """The documents of `embedded`, of a file, or of all readable files below a folder in the order of their paths.

    One .txt or .md file is one document; a .jsonl line or a .parquet row is one document, its text in `field`.
    Documents of only whitespace are left out. `limit` stops after so many documents. `skipped` counts, by reason, the
    files of a folder and the documents that were passed over. ValueError names the file (and line or
    byte) that cannot be read.
    """
    skipped = Counter() if skipped is None else skipped
    yield from kept_documents(_all_documents(source, field, skipped), limit, skipped)


def kept_documents(texts: Iterable[str], limit: int | None, skipped: Counter[str]) -> Iterator[str]:
    """The first `limit` texts (None: all) that are more than whitespace."""
    if limit is not None and limit <= 0:
        raise ValueError(f"the limit of documents must be at least 1, not {limit}")
    num_given = 0
    for text in texts:
        if not text.strip():
            skipped["empty documents"] += 1
            continue
        yield text
        num_given += 1
        if num_given == limit:
            return


def source_files(source: str | Path, skipped: Counter[str] | None = None) -> list[Path]:
    """The files that `iter_documents` reads for a file or folder. Hidden files and folders of a folder are left out."""
    path = Path(source)
    if path.is_file():
        if _reader(path) is None:
            raise ValueError(f"{path}: the suffix says nothing this program reads; it reads {READABLE}")
        return [path]
    if not path.is_dir():
        raise ValueError(f"{path}: there is no such file or folder; a source is `{EMBEDDED}`, `fineweb`, `challenge`, "
                         "a file "
                         "or a folder")
    files = []
    for file in sorted(path.rglob("*"), key=lambda file: file.relative_to(path).as_posix()):
        if any(part.startswith(".") for part in file.relative_to(path).parts) or not file.is_file():
            continue
        if _reader(file) is not None:
            files.append(file)
        elif skipped is not None:
            skipped["files of another type"] += 1
    if not files:
        raise ValueError(f"{path}: no file in this folder can be read; the program reads {READABLE}")
    return files


def source_fingerprint(source: str | Path) -> str:
    """Changes when the source does: the Python version for `embedded`, else a hash of files' names, sizes and times."""
    if str(source) == EMBEDDED:
        return f"python {sys.version.split()[0]}, extraction {EMBEDDED_VERSION}"
    digest = hashlib.sha256()
    for file in source_files(source):
        stat = file.stat()
        digest.update(f"{file.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def read_parquet(path: Path, field: str) -> Iterator[str]:
    """The column `field` of a Parquet file, one row group in memory at a time; a null is an empty document."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            if field not in file.schema_arrow.names:
                raise ValueError(f"{path}: no column {field!r}; it has {', '.join(file.schema_arrow.names)}; name one "
                                 "with --field")
            kind = file.schema_arrow.field(field).type
            if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
                raise ValueError(f"{path}: the column {field!r} holds {kind} and not text; name another with --field")
            for group in range(file.num_row_groups):
                for batch in file.iter_batches(batch_size=1024, row_groups=[group], columns=[field]):
                    for value in batch.column(0):
                        yield value.as_py() or ""
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: cannot be read as Parquet, it may be truncated ({_first_line(error)})") from error


def _all_documents(source: str | Path, field: str, skipped: Counter[str]) -> Iterator[str]:
    if str(source) == EMBEDDED:
        yield from embedded_documents()
        return
    for file in source_files(source, skipped):
        reader = _reader(file)
        assert reader is not None
        yield from reader(file, field)


def _reader(path: Path) -> Callable[[Path, str], Iterator[str]] | None:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    packed = bool(suffixes) and suffixes[-1] in PACKED_SUFFIXES
    inner = suffixes[-2] if packed and len(suffixes) > 1 else suffixes[-1] if suffixes and not packed else ""
    if inner in TEXT_SUFFIXES:
        return _read_text
    if inner == ".jsonl":
        return _read_jsonl
    return read_parquet if inner == ".parquet" and not packed else None


def _read_text(path: Path, _field: str) -> Iterator[str]:
    with _open_unpacked(path) as file:
        try:
            raw = file.read()
        except _UNPACKING_ERRORS as error:
            raise _damaged(path, error) from error
    yield _decode(raw, path, 0).removeprefix("\ufeff")  # a byte-order mark is not text


def _read_jsonl(path: Path, field: str) -> Iterator[str]:
    for where, row in iter_rows(path):
        yield _row_text(row, field, where)


def iter_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """("file:line", object) of each line of a .jsonl file, plain or packed, blank lines left out; ValueError names a line that holds
    no JSON object."""
    offset = 0
    with _open_unpacked(path) as file:
        for number in range(1, sys.maxsize):
            try:
                raw = file.readline()
            except _UNPACKING_ERRORS as error:
                raise _damaged(path, error) from error
            if not raw:
                return
            if raw.strip():
                where = f"{path}:{number}"
                yield where, _json_object(_decode(raw, path, offset), where)
            offset += len(raw)


def _json_object(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.removeprefix("\ufeff"))
    except (ValueError, RecursionError) as error:  # plain ValueError: a number of thousands of digits
        raise ValueError(f"{where}: this line is not JSON ({error})") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where}: this line is not a JSON object with named fields (it is not an object)")
    return row


def _row_text(row: dict[str, Any], field: str, where: str) -> str:
    if field not in row:
        found = f"it has {', '.join(map(repr, list(row)[:8]))}"
        raise ValueError(f"{where}: no field {field!r} ({found}); name the field that holds the text with --field")
    if not isinstance(row[field], str):
        raise ValueError(f"{where}: the field {field!r} is not a string; name the field that holds the text with "
                         "--field")
    try:
        row[field].encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"{where}: the field {field!r} holds half of a surrogate pair, which is not text") from None
    return row[field]


def _decode(raw: bytes, path: Path, offset: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not valid UTF-8 at byte {offset + error.start} (of the unpacked text): "
                         f"{error.reason}; "
                         "convert the file first") from None


_UNPACKING_ERRORS = (EOFError, OSError, zlib.error, lzma.LZMAError)


def _damaged(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{path}: cannot be unpacked, the file is truncated or damaged ({_first_line(error)}); fetch it "
                      "again")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _open_unpacked(path: Path) -> BinaryIO:
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return gzip.open(path, "rb")
    if suffix == ".xz":
        return lzma.open(path, "rb")
    if suffix == ".zst":
        return io.BufferedReader(_ZstdReader(path), 1 << 16)
    return open(path, "rb")


class _ZstdReader(io.RawIOBase):
    """Unpacked bytes of a .zst file of one or more frames. A file that ends inside a frame is an error (the zstandard
    package's own reader ends there silently)."""

    def __init__(self, path: Path) -> None:
        import zstandard

        self._new_frame: Callable[[], Any] = lambda: zstandard.ZstdDecompressor().decompressobj()
        self._error = zstandard.ZstdError
        self._file = open(path, "rb")
        self._frame, self._packed, self._ready = None, b"", b""

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            self._packed = self._packed or self._file.read(1 << 14)
            if not self._packed:
                if self._frame is not None:
                    raise EOFError("it ends inside a frame")
                return 0
            self._frame = self._frame or self._new_frame()
            try:
                self._ready = self._frame.decompress(self._packed)
            except self._error as error:
                raise OSError(str(error)) from error
            self._packed = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = None
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count


@lru_cache(maxsize=1)
def embedded_documents() -> tuple[str, ...]:
    """English prose that every Python installation carries: the topics of `help()` and the library's docstrings.

    Source files are parsed, never imported. A docstring of 200 characters is a document; the shorter ones of a module
    are joined into one. The order is that of the documents' sha256, so that any stretch is representative, and it is
    the same for every call under one version of Python.
    """
    library = Path(sysconfig.get_path("stdlib"))
    documents = set(_topics(library))
    for file in library.rglob("*.py"):
        folders = file.relative_to(library).parts[:-1]
        if not _SKIPPED_FOLDERS.intersection(folders) and "pydoc_data" not in folders:
            documents.update(_docstrings(file))
    return tuple(sorted(documents, key=lambda text: hashlib.sha256(text.encode("utf-8")).digest()))


def _topics(library: Path) -> Iterator[str]:
    path = library / "pydoc_data" / "topics.py"
    if not path.is_file():
        raise ValueError(f"this Python lacks {path}, so it carries no embedded text; install it in full, or name a "
                         "file or folder as the source")
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            topics = ast.literal_eval(node.value)
            yield from (text for text in map(_reflow, topics.values()) if len(text) >= _MIN_CHARS)


def _docstrings(file: Path) -> Iterator[str]:
    try:
        with warnings.catch_warnings(action="ignore"):  # old escapes in old modules are not this program's business
            tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # templates and deliberately broken samples are no modules
        return
    short = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = _reflow(ast.get_docstring(node) or "")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            continue
        if len(text) >= _MIN_CHARS:
            yield text
        elif text:
            short.append(text)
    joined = "\n".join(short)
    if len(joined) >= _MIN_CHARS:
        yield joined


def _reflow(text: str) -> str:
    """One line a paragraph. Indentation and line breaks set for a terminal are no prose, and SentencePiece's normaliser
    would drop them (4% of the bytes), so that scores would be of another text than the documents."""
    paragraphs = re.split(r"\n\s*\n", text)
    return "\n".join(" ".join(paragraph.split()) for paragraph in paragraphs if paragraph.strip())
