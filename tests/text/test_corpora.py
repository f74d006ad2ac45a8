"""Each kind of file gives its documents, whole or refused by name; the embedded source is the same every time."""

import gzip
import hashlib
import json
import lzma
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from bitsperbyte.text.corpora import embedded_documents, iter_documents, source_fingerprint

DOCUMENTS = ["A first text.\nTwo lines.", "Zweiter Text: äöü ∑ 🙂", "third"]
PACKERS = {"": lambda raw: raw, ".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstandard.ZstdCompressor().compress}


def jsonl(documents: list[str], field: str = "text") -> bytes:
    return "".join(json.dumps({"title": "t", field: text}, ensure_ascii=False) + "\n" for text in documents).encode()


@pytest.mark.parametrize("suffix", PACKERS)
def test_jsonl_and_text(tmp_path: Path, suffix: str) -> None:
    pack = PACKERS[suffix]
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(pack(jsonl(DOCUMENTS)))
    assert list(iter_documents(path)) == DOCUMENTS
    assert list(iter_documents(path, limit=2)) == DOCUMENTS[:2]
    for kind in (".txt", ".md", ".markdown"):
        path = tmp_path / f"a{kind}{suffix}"
        path.write_bytes(pack("\ufeff".encode() + DOCUMENTS[1].encode()))
        assert list(iter_documents(str(path))) == [DOCUMENTS[1]]


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
@pytest.mark.parametrize("inner", [".txt", ".jsonl"])
def test_a_truncated_or_damaged_packed_file_is_refused(tmp_path: Path, suffix: str, inner: str) -> None:
    packed = PACKERS[suffix](jsonl([f"document {n} {n * n}" for n in range(3000)]))
    path = tmp_path / f"a{inner}{suffix}"
    for cut in (len(packed) - 1, len(packed) // 2, 5):
        path.write_bytes(packed[:cut])
        with pytest.raises(ValueError, match=f"a{inner}{suffix}: .*(truncated|damaged)"):
            list(iter_documents(path))
    path.write_bytes(b"plain text, not packed")
    with pytest.raises(ValueError, match=f"a{inner}{suffix}: .*damaged"):
        list(iter_documents(path))


def test_several_frames_in_one_packed_file(tmp_path: Path) -> None:
    for suffix, pack in PACKERS.items():
        path = tmp_path / f"a.jsonl{suffix}"
        path.write_bytes(b"".join(pack(jsonl([text])) for text in DOCUMENTS))
        assert list(iter_documents(path)) == DOCUMENTS, suffix


def test_a_long_line_through_zstd(tmp_path: Path) -> None:
    text = "word " * 400_000
    (tmp_path / "a.jsonl.zst").write_bytes(PACKERS[".zst"](jsonl([text, "end"])))
    assert [len(found) for found in iter_documents(tmp_path / "a.jsonl.zst")] == [len(text), 3]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (b"{not json", "a.jsonl:3: this line is not JSON"),
        (b'"text"', "a.jsonl:3: this line is not a JSON object"),
        (b'{"body": "x"}', "a.jsonl:3: no field 'text' .*'body'.*--field"),
        (b'{"text": 7}', "a.jsonl:3: the field 'text' is not a string"),
        (b'{"text": "\\ud800"}', "a.jsonl:3: .*surrogate"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: bytes, sentence: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl(DOCUMENTS[:1]) + b"\n" + line + b"\n")  # the empty line counts as a line and is no document
    with pytest.raises(ValueError, match=sentence):
        list(iter_documents(path))


def test_another_field(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(DOCUMENTS, "body"))
    assert list(iter_documents(tmp_path / "a.jsonl", field="body")) == DOCUMENTS


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.jsonl.gz"])
def test_invalid_utf8_is_named_with_its_offset(tmp_path: Path, name: str) -> None:
    good = jsonl(["fine"]) if "jsonl" in name else b"fine\n"
    raw = good + b'{"text": "\xff"}'
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith("gz") else raw)
    with pytest.raises(ValueError, match=f"{name}: not valid UTF-8 at byte {len(good) + 10} "):
        list(iter_documents(tmp_path / name))


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    texts = [f"row {n}" for n in range(2500)]
    table = pyarrow.table({"text": [*texts, None, " "], "n": list(range(2502))})
    pyarrow.parquet.write_table(table, path, row_group_size=700)
    skipped: Counter[str] = Counter()
    assert list(iter_documents(path, skipped=skipped)) == texts and skipped == {"empty documents": 2}
    with pytest.raises(ValueError, match="no column 'body'; it has text, n"):
        list(iter_documents(path, field="body"))
    with pytest.raises(ValueError, match="holds int64"):
        list(iter_documents(path, field="n"))
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match="a.parquet: .*truncated"):
        list(iter_documents(path))


def test_a_folder_is_read_in_order_and_counts_what_it_passes_over(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    for name, text in (
        ("b/z.txt", "4"),
        ("b.md", "1"),
        ("a.txt", "0"),
        ("b/a.txt", "3"),
        ("b/.hidden.txt", "no"),
        (".git/c.txt", "no"),
        ("b/pic.png", "no"),
        ("note.gz", "no"),
        ("b/0.txt", " \n"),
        ("NOTE.TXT", "-1"),
    ):
        (tmp_path / name).write_text(text)
    skipped: Counter[str] = Counter()
    assert list(iter_documents(tmp_path, skipped=skipped)) == ["-1", "0", "1", "3", "4"]
    assert skipped == {"files of another type": 2, "empty documents": 1}
    before = source_fingerprint(tmp_path)
    assert before == source_fingerprint(tmp_path)
    (tmp_path / "a.txt").write_text("00")
    assert source_fingerprint(tmp_path) != before


def test_sources_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_text("x")
    for source, sentence in (
        (tmp_path / "a.pdf", "suffix"),
        (tmp_path, "no file in this folder"),
        (tmp_path / "absent", "no such file or folder"),
    ):
        with pytest.raises(ValueError, match=sentence):
            list(iter_documents(source))
    with pytest.raises(ValueError, match="at least 1"):
        list(iter_documents("embedded", limit=0))


def test_the_embedded_source_is_large_clean_and_the_same_in_another_process() -> None:
    documents = embedded_documents()
    assert sum(len(text.encode()) for text in documents) > 1_500_000
    assert min(map(len, documents)) > 150 and len(set(documents)) == len(documents)
    assert not any("  " in text or "\n\n" in text for text in documents)  # what SentencePiece would drop
    code = (
        "import hashlib; from bitsperbyte.text.corpora import iter_documents\n"
        "print(hashlib.sha256('\\0'.join(iter_documents('embedded')).encode()).hexdigest())"
    )
    out = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": "7"},
    )
    assert out.stdout.strip() == hashlib.sha256("\0".join(documents).encode()).hexdigest() and not out.stderr
