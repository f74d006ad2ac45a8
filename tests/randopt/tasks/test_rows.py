"""Files of questions: what is wrong is said with its line; draws are the same everywhere."""

from pathlib import Path

import pytest

from bitsperbyte.randopt.tasks.rows import enough, hub_file, local_file, read_rows, shuffled, text_of
from bitsperbyte.text import hub


def test_rows_come_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('\ufeff{"a": "x"}\n\n{"a": 2}\n', encoding="utf-8")
    assert list(read_rows(path)) == [(f"{path}:1", {"a": "x"}), (f"{path}:3", {"a": 2})]


@pytest.mark.parametrize(("content", "words"), [("{", "a.jsonl:1: this line is not JSON"),
                                                ('{"a": 1}\n[1]', "a.jsonl:2: this line is not a JSON object"),
                                                ('{"a": ' + "9" * 5000 + "}", "a.jsonl:1: this line is not JSON"),
                                                ("[" * 200_000, "a.jsonl:1: this line is not JSON")])
def test_a_bad_line_is_named(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(ValueError, match=words):
        list(read_rows(tmp_path / "a.jsonl"))


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no file"):
        list(read_rows(tmp_path / "a.jsonl"))


def test_fields_are_texts_or_numbers() -> None:
    assert [text_of({"a": value}, "a", "f:1") for value in ("x", 2, 2.5)] == ["x", "2", "2.5"]
    for row, words in [({"b": "x"}, "no field 'a'; the line has 'b'"), ({}, "has none"), ({"a": " "}, "is empty"),
                       ({"a": True}, "not bool"), ({"a": float("nan")}, "is nan, which is no number"), ({"a": float("inf")}, "is inf"),
                       ({"a": "x\ud800"}, "half of a surrogate pair"), ({"a": None}, "not NoneType")]:
        with pytest.raises(ValueError, match=f"f:1: .*{words}"):
            text_of(row, "a", "f:1")


def test_shuffles_are_permutations_that_seed_and_purpose_choose() -> None:
    orders = [shuffled(50, seed, purpose) for seed, purpose in [(0, "a"), (1, "a"), (0, "b"), (2**62, "a")]]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4 and shuffled(50, 0, "a") == orders[0]


def test_enough_or_a_sentence() -> None:
    enough(3, 3, "a.jsonl", "task.num_train")
    with pytest.raises(ValueError, match="task.num_train asks for 4 questions, and a.jsonl has 3: ask for fewer"):
        enough(4, 3, "a.jsonl", "task.num_train")


def test_one_file_of_the_hub_is_meant(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = [hub.HubFile(path, 1, None) for path in ("README.md", "test.jsonl", "train-0.parquet", "train-1.parquet")]
    monkeypatch.setattr(hub, "resolve_revision", lambda repo, revision: "c" * 40)
    monkeypatch.setattr(hub, "list_files", lambda repo, commit, folder: files)
    monkeypatch.setattr(hub, "fetch", lambda repo, commit, file: (tmp_path / file.path, "0" * 64))
    assert hub_file("o/r", None, "test") == (tmp_path / "test.jsonl", {"repo": "o/r", "commit": "c" * 40, "path": "test.jsonl",
        "sha256": "0" * 64})
    with pytest.raises(ValueError, match="o/r has 2 files named train"):
        hub_file("o/r", None, "train")


def test_a_local_file_is_known_by_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"abc")
    assert local_file(path) == {"path": str(path), "sha256": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"}
