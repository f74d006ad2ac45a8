"""bpb data, as typed: what it prints, what it warns of, and how it refuses."""

import gzip
import json
from pathlib import Path

import pytest

from bitsperbyte.__main__ import guarded, run_command
from bitsperbyte.text.shards import DataFolder

TEXTS = [f"Document {n} says {n * n} things, and the next says {n + 1}." for n in range(120)]


@pytest.fixture
def prepare(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "200")

    def prepare(*options: object, source: Path | str, out: str = "out") -> tuple[int, str, str]:
        arguments = ["data", "prepare", "--source", source, "--out", tmp_path / out, *options]
        code = guarded(lambda: run_command([str(a) for a in arguments]))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return prepare


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "source.jsonl", TEXTS)


def cells(out: str, split: str) -> list[str]:
    """The row of one split in the printed table."""
    row = next(line for line in out.splitlines() if f"│ {split} " in line)
    return [cell.strip() for cell in row.strip("│ ").split("│")]


def test_the_summary_counts_what_is_there(prepare, source: Path, tmp_path: Path) -> None:
    code, out, err = prepare("--tokenizer", "byte", "--val-docs", 20, source=source)
    assert (code, err) == (0, "")
    for split, texts in (("train", TEXTS[20:]), ("val", TEXTS[:20])):
        num_bytes = sum(map(len, texts))
        tokens = num_bytes + len(texts)
        assert cells(out, split) == [split, str(len(texts)), f"{tokens:,}", f"{num_bytes:,}", f"{num_bytes / tokens:.4f}",
                                     "0.0000%", "1"]
    assert "written: " in out and "260 pieces" in out
    code, out, _ = prepare("--tokenizer", "byte", "--val-docs", 20, source=source)
    assert code == 0 and "already there: " in out


def test_json_is_the_manifest_and_nothing_else(prepare, source: Path, tmp_path: Path) -> None:
    code, out, err = prepare("--tokenizer", "byte", "--json", source=source)
    assert (code, err) == (0, "") and json.loads(out) == DataFolder.open(tmp_path / "out").manifest


def test_what_the_normaliser_loses_is_shown_and_warned_of(prepare, tmp_path: Path) -> None:
    texts = [text + "  " * (n % 10 == 0) for n, text in enumerate(TEXTS)]
    source = write_jsonl(tmp_path / "spaces.jsonl", texts)
    code, out, err = prepare("--tokenizer", "train:300", "--val-docs", 20, source=source)
    assert (code, err) == (0, "")
    proof = DataFolder.open(tmp_path / "out").manifest["proof"]
    for split, part in (("train", texts[20:]), ("val", texts[:20])):
        lost = 2 * sum(text.endswith("  ") for text in part) / sum(map(len, part))
        assert proof[split]["lost_share"] == lost > 0.001
        assert cells(out, split)[5] == f"{lost:.4%}" and f"changed {lost:.2%} of the bytes of {split}" in out


def test_shards_of_unknown_raw_text_say_so(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of the challenge's own shards the raw text is not at hand."""
    from rich.console import Console

    from bitsperbyte.cli.data import _print_summary

    part = {"num_bytes": None, "counted_bytes": 24, "num_tokens": 10, "num_documents": 2, "files": [{}]}
    manifest = {"splits": {"val": part}, "proof": {}, "num_duplicates_dropped": 0, "skipped": {}, "source": "challenge",
                "revision": "abc", "tokenizer": {"name": "sp1024", "vocab_size": 1024}}
    _print_summary(Console(width=200), manifest, tmp_path, False)
    out = capsys.readouterr().out
    assert cells(out, "val") == ["val", "2", "10", "24", "2.4000", "not known", "1"] and "challenge at abc" in out


def test_val_source(prepare, source: Path, tmp_path: Path) -> None:
    val = tmp_path / "val.jsonl.gz"
    val.write_bytes(gzip.compress(write_jsonl(tmp_path / "val.jsonl", ["new", TEXTS[0]]).read_bytes()))
    code, out, _ = prepare("--tokenizer", "byte", "--val-source", val, source=source)
    assert code == 0 and cells(out, "val")[1] == "2" and cells(out, "train")[1] == "119"
    assert "1 exact copies of validation documents dropped" in out
    for options in (("--val-docs", 3), ("--val-fraction", 0.05)):
        code, out, err = prepare("--tokenizer", "byte", "--val-source", val, *options, source=source, out="other")
        assert (code, out) == (2, "") and "neither --val-fraction nor --val-docs" in err and err.count("\n") == 1


def test_other_files_and_blank_documents_are_counted(prepare, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", [*TEXTS[:30], " "])
    (folder / "b.md").write_text("# A heading\n\nAnd text.")
    (folder / "c.pdf").write_bytes(b"x")
    code, out, _ = prepare("--tokenizer", "byte", "--val-docs", 5, source=folder)
    assert code == 0 and "1 empty documents passed over" in out and "1 files of another type passed over" in out
    assert cells(out, "train")[1] == "26"


@pytest.mark.parametrize("options, sentence", [
    (("--tokenizer", "absent.model"), "absent.model"), (("--tokenizer", "train:9"), "train:9"), (("--val-docs", 0), "at least 1"),
    (("--val-fraction", 2), "between 0 and 1"), (("--field", "body"), "no field 'body'"), (("--revision", "x"), "--revision is for"),
])
def test_refusals_are_one_sentence(prepare, source: Path, options: tuple, sentence: str) -> None:
    code, out, err = prepare("--tokenizer", "byte", *options, source=source) if "--tokenizer" not in options else prepare(
        *options, source=source)
    assert (code, out) == (2, "") and err.startswith("bpb: ") and err.count("\n") == 1 and sentence in err


def test_a_source_that_is_not_there(prepare, tmp_path: Path) -> None:
    code, out, err = prepare(source=tmp_path / "absent")
    assert (code, out) == (2, "") and "no such file or folder" in err and err.count("\n") == 1


def test_a_slice_is_written_once(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    def bpb(*options: object) -> tuple[int, str, str]:
        code = guarded(lambda: run_command(["data", "slice", "--source", "embedded", "--out", *map(str, options)]))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    out = tmp_path / "s.jsonl"
    code, text, err = bpb(out, "--num-docs", 30)
    manifest = json.loads((tmp_path / "s.jsonl.manifest.json").read_text())
    assert (code, err) == (0, "") and len(text.splitlines()) == 1
    assert text.startswith(f"written: {out} (30 documents of embedded at python") and manifest["sha256"] in text
    code, text, _ = bpb(out, "--num-docs", 30)
    assert code == 0 and text.startswith(f"already there: {out}")
    code, text, _ = bpb(out, "--num-docs", 30, "--json")
    assert code == 0 and json.loads(text) == manifest
    code, text, err = bpb(out, "--num-docs", 30, "--min-chars", 2_000)
    assert (code, text) == (2, "") and "min_chars: there 1000, asked 2000" in err and len(err.splitlines()) == 1
    assert len(out.read_text().splitlines()) == 30
