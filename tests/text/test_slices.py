"""Held-out slices: which documents, pinned how, and that nothing there is ever replaced by something else."""

import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitsperbyte.text import slices
from bitsperbyte.text.slices import Request, ensure_slice, make_slice, manifest_path, read_slice

TEXTS = [f"Document {n}:" + " more" * n for n in range(60)]
LOOSE = {"min_chars": 1, "max_chars": 10_000}


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "source.jsonl", TEXTS)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@given(lengths=st.lists(st.integers(0, 12), min_size=1, max_size=40), low=st.integers(1, 8), more=st.integers(0, 8),
       skip=st.integers(0, 4), num=st.integers(1, 10))
def test_the_documents_are_the_first_different_ones_that_fit(
    lengths: list[int], low: int, more: int, skip: int, num: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    texts = ["é" * length for length in lengths]  # characters and bytes differ; equal lengths are equal texts
    out = tmp_path_factory.mktemp("slice") / "s.jsonl"
    expected = [text for text in dict.fromkeys(texts) if low <= len(text) <= low + more][skip : skip + num]
    request = Request("made", num, low, low + more, skip)
    if len(expected) < num:
        with pytest.raises(ValueError, match="asks for more"):
            make_slice(request, out, documents=texts)
        assert files(out.parent) == {}
        return
    manifest, there = make_slice(request, out, documents=texts)
    assert not there and read_slice(out).documents == tuple(expected)
    assert manifest["num_bytes"] == sum(len(text.encode()) for text in expected) and manifest["num_docs"] == num
    assert manifest["sha256"] == hashlib.sha256(out.read_bytes()).hexdigest() == read_slice(out).sha256


def test_text_of_every_kind_comes_back_as_it_was(tmp_path: Path) -> None:
    texts = ["line\nbreaks\r\nand\u2028others\x85", 'quotes " and \\', "tabs\tNUL\x00", "日本語 🙂", "  spaces  "]
    make_slice(Request("made", 5, **LOOSE), tmp_path / "s.jsonl", documents=texts)
    assert read_slice(tmp_path / "s.jsonl").documents == tuple(texts)


def test_an_equal_command_changes_nothing_and_another_is_refused(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "folder/s.jsonl"
    manifest, there = make_slice(Request(str(source), 10, **LOOSE), out)
    assert not there
    before = files(out.parent)
    assert make_slice(Request(str(source), 10, **LOOSE), out) == (manifest, True)
    with pytest.raises(ValueError, match="another slice .num_docs: there 10, asked 11"):
        make_slice(Request(str(source), 11, **LOOSE), out)
    other = write_jsonl(tmp_path / "other.jsonl", TEXTS)
    with pytest.raises(ValueError, match="source: there 'source.jsonl', asked 'other.jsonl'"):
        make_slice(Request(str(other), 10, **LOOSE), out)
    assert files(out.parent) == before and set(before) == {"s.jsonl", "s.jsonl.manifest.json"}


def test_a_file_of_something_else_is_never_replaced(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "notes.jsonl"
    out.write_text("mine")
    with pytest.raises(ValueError, match="without a manifest, and holds something else"):
        make_slice(Request(str(source), 10, **LOOSE), out)
    with pytest.raises(ValueError, match="is the source itself"):
        make_slice(Request(str(source), 10, **LOOSE), source)
    with pytest.raises(ValueError, match="is a folder"):
        make_slice(Request(str(source), 10, **LOOSE), tmp_path)
    assert out.read_text() == "mine" and not manifest_path(out).exists() and not manifest_path(source).exists()


@pytest.mark.parametrize("write", [1, 2])
def test_stopped_between_its_two_files_the_same_command_finishes(
    write: int, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = make_slice(Request(str(source), 10, **LOOSE), tmp_path / "whole.jsonl")
    out, calls, real = tmp_path / "s.jsonl", [], slices.write_atomic

    def write_atomic(path: Path, data: str | bytes) -> None:
        calls.append(path)
        if len(calls) == write:
            raise KeyboardInterrupt
        real(path, data)

    monkeypatch.setattr(slices, "write_atomic", write_atomic)
    with pytest.raises(KeyboardInterrupt):
        make_slice(Request(str(source), 10, **LOOSE), out)
    with pytest.raises(ValueError, match="has no manifest"):
        read_slice(out)
    monkeypatch.setattr(slices, "write_atomic", real)
    assert make_slice(Request(str(source), 10, **LOOSE), out) == (expected, False)
    assert read_slice(out).manifest == expected


def test_a_lost_file_is_made_again_only_from_an_unchanged_source(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "s.jsonl"
    make_slice(Request(str(source), 10, **LOOSE), out)
    content = out.read_bytes()
    out.unlink()
    with pytest.raises(ValueError, match="missing, though its manifest is there"):
        read_slice(out)
    make_slice(Request(str(source), 10, **LOOSE), out)
    assert out.read_bytes() == content
    out.unlink()
    write_jsonl(source, TEXTS[1:])
    with pytest.raises(ValueError, match="the source has changed"):
        make_slice(Request(str(source), 10, **LOOSE), out)
    assert not out.exists()


def test_any_change_of_the_file_or_damage_to_its_manifest_is_said(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "s.jsonl"
    make_slice(Request(str(source), 10, **LOOSE), out)
    content = out.read_bytes()
    for damaged in (content[:-1], content.replace(b"Document 3", b"Document 4"), content + b"\n", b""):
        out.write_bytes(damaged)
        for read in (read_slice, lambda path: make_slice(Request(str(source), 10, **LOOSE), path)):
            with pytest.raises(ValueError, match=r"s\.jsonl: its sha256 is .* changed or is damaged"):
                read(out)
        assert out.read_bytes() == damaged
    out.write_bytes(content)
    manifest = json.loads(manifest_path(out).read_text())
    for text in ("{", "[" * 200_000, "[]", json.dumps({k: v for k, v in manifest.items() if k != "source"}),
                 json.dumps({**manifest, "sha256": "0"}), json.dumps({**manifest, "version": 2}),
                 json.dumps({**manifest, "format": "x"}), json.dumps({k: v for k, v in manifest.items() if k != "parameters"})):
        manifest_path(out).write_text(text)
        with pytest.raises(ValueError, match=r"s\.jsonl\.manifest\.json"):
            read_slice(out)


@pytest.mark.parametrize(("content", "words"), [
    (b"[1]\n", ":1: not a document"), (b'{"text": "a"}\n{"text": 5}\n', ":2: not a document"), (b'{"text": "a"}\n{"text": "\\ud800"}\n', ":2: not a"),
    (b'{"text": "cut', ":1: not a document"), (b"", "it holds 0 documents and its manifest says 10"),
    (b'{"text": "a"}\n', "it holds 1 documents")])
def test_a_slice_whose_hash_was_forged_is_refused_too(source: Path, tmp_path: Path, content: bytes, words: str) -> None:
    out = tmp_path / "s.jsonl"
    make_slice(Request(str(source), 10, **LOOSE), out)
    out.write_bytes(content)
    manifest = json.loads(manifest_path(out).read_text())
    manifest_path(out).write_text(json.dumps({**manifest, "sha256": hashlib.sha256(content).hexdigest()}))
    with pytest.raises(ValueError, match=words):
        read_slice(out)


def test_embedded_text_needs_no_file(tmp_path: Path) -> None:
    manifest, _ = make_slice(Request("embedded", 20), tmp_path / "s.jsonl")
    documents = read_slice(tmp_path / "s.jsonl").documents
    assert len(set(documents)) == 20 and all(1_000 <= len(text) <= 20_000 for text in documents)
    assert manifest["revision"].startswith("python 3.")


@pytest.mark.parametrize(("change", "words"), [
    ({"num_docs": 0}, "--num-docs must be at least 1"), ({"min_chars": 0}, "--min-chars"), ({"skip_docs": -1}, "--skip-docs"),
    ({"min_chars": 5, "max_chars": 4}, "--max-chars 4 lies below"), ({"revision": "main"}, "--revision is for the sources on the hub"),
])
def test_requests_that_cannot_be_are_refused(change: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Request(**{"source": "embedded", **change})


def test_a_run_gets_its_slice_or_is_told_how(tmp_path: Path) -> None:
    out, lines = tmp_path / "data/s.jsonl", []
    with pytest.raises(ValueError, match="bpb data slice --source embedded --num-docs 8 --out"):
        ensure_slice(out, "embedded", 8, False, say=lines.append)
    assert not out.parent.exists() and lines == []
    found = ensure_slice(out, "embedded", 8, True, say=lines.append)
    assert len(found.documents) == 8 and len(lines) == 1
    assert ensure_slice(out, "embedded", 8, False, say=lines.append) == found and len(lines) == 1
    for source, num_docs in (("fineweb", 8), ("embedded", 9)):
        with pytest.raises(ValueError, match="is another slice"):
            ensure_slice(out, source, num_docs, True)


def test_a_run_may_give_the_documents_itself(tmp_path: Path) -> None:
    found = ensure_slice(tmp_path / "s.jsonl", "sums", 3, True, documents=["1+1=2", "1+2=3", "1+1=2", "2+2=4", "3+3=6"])
    assert found.documents == ("1+1=2", "1+2=3", "2+2=4") and found.manifest["source"] == "sums"
    assert ensure_slice(tmp_path / "s.jsonl", "sums", 3, True, documents=["others"]) == found
