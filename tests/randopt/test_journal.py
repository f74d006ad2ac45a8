"""The journal: every row once, whole or not at all, and nobody else's."""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitsperbyte.randopt.journal import Journal, Row

IDENTITY = {"engine": {"weights_sha256": "ab"}, "task": {"name": "sums", "test_sha256": "cd"}}
ROW = Row("search", 0, 2**62 + 1, 0.1, 0.5, [1.0, 0.0], [True, False], ["12", None], [], [], 2, 20, 7, 1, 0.25, 0.5, 0.125, 1.0)


def written(path: Path, *rows: Row) -> Path:
    with Journal.open(path, IDENTITY) as journal:
        for row in rows:
            journal.append(row)
    return path


@given(rewards=st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=5), sigma=st.floats(1e-9, 1e9),
       votes=st.lists(st.none() | st.text(), max_size=4), seconds=st.floats(0, 1e6))
def test_rows_round_trip(tmp_path_factory: pytest.TempPathFactory, rewards: list[float], sigma: float, votes: list,
                         seconds: float) -> None:
    row = replace(ROW, rewards=rewards, reward=sum(rewards) / len(rewards), sigma=sigma, votes=votes, seconds=seconds)
    path = written(tmp_path_factory.mktemp("j") / "journal.jsonl", row)
    with Journal.open(path, IDENTITY) as journal:
        assert journal.get("search", 0) == row and journal.rows("test") == []


def test_rows_come_back_by_index_and_phase(tmp_path: Path) -> None:
    rows = [replace(ROW, index=i) for i in (3, 0, 2)]
    path = written(tmp_path / "j.jsonl", *rows, replace(ROW, phase="base_train", index=-1, seed=None, sigma=None))
    with Journal.open(path, IDENTITY) as journal:
        assert [row.index for row in journal.rows("search")] == [0, 2, 3]
        assert journal.get("base_train", -1).seed is None and journal.get("search", 1) is None


def test_a_torn_last_line_is_dropped_at_any_length(tmp_path: Path) -> None:
    whole = written(tmp_path / "whole.jsonl", ROW, replace(ROW, index=1)).read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == 10]
    for length in range(len(whole)):
        path = tmp_path / "torn.jsonl"
        path.write_bytes(whole[:length])
        with Journal.open(path, IDENTITY) as journal:
            kept = sum(end <= length for end in ends)
            assert len(journal.rows("search")) == max(0, kept - 1), length
            assert journal.dropped_torn_bytes == length - max([0, *(end for end in ends if end <= length)])
            for row in (ROW, replace(ROW, index=1)):
                if journal.get("search", row.index) is None:
                    journal.append(row)
        assert path.read_bytes() == whole


@pytest.mark.parametrize(("change", "sentence"), [
    (lambda line: line[:20] + "\n", "line 2 is not JSON"),
    (lambda line: "[]\n", "line 2 holds a list"),
    (lambda line: line.replace('"index": 0', '"index": "0"'), "line 2: index is '0', so it was damaged"),
    (lambda line: line.replace('"index": 0', '"index": true'), "line 2: index is 'True'"),
    (lambda line: line.replace('"rewards": [1.0', '"rewards": [0.9'), "the reward 0.5 is not the mean"),
    (lambda line: line.replace('"reward": 0.5', '"reward": NaN'), "reward is 'nan'"),
    (lambda line: line.replace('"phase": "search"', '"phase": "sarch"'), "no phase 'sarch'"),
    (lambda line: line.replace('"sigma"', '"sigmas"'), "its keys are not those of a row"),
    (lambda line: line + line, "line 3 holds search 0 a second time"),
])
def test_damage_is_named(tmp_path: Path, change: object, sentence: str) -> None:
    path = written(tmp_path / "j.jsonl", ROW)
    header, line = path.read_text().splitlines(keepends=True)
    path.write_text(header + change(line) + json.dumps(asdict(replace(ROW, index=5))) + "\n")
    before = path.read_bytes()
    with pytest.raises(ValueError, match=sentence):
        Journal.open(path, IDENTITY)
    assert path.read_bytes() == before


def test_another_model_or_task_is_refused_with_the_difference(tmp_path: Path) -> None:
    path = written(tmp_path / "j.jsonl", ROW)
    with pytest.raises(ValueError, match='engine.weights_sha256: "ab" -> "zz"'):
        Journal.open(path, {**IDENTITY, "engine": {"weights_sha256": "zz"}})
    (tmp_path / "other.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ValueError, match="does not begin with the header of a journal"):
        Journal.open(tmp_path / "other.jsonl", IDENTITY)


def test_a_full_disk_takes_nothing_of_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "j.jsonl", ROW)
    before = path.read_bytes()
    real, room = os.write, 30

    def write(descriptor: int, data: bytes) -> int:
        nonlocal room
        if room == 0:
            raise OSError(28, "No space left on device")
        taken = real(descriptor, bytes(data[:room]))
        room -= taken
        return taken

    with Journal.open(path, IDENTITY) as journal:
        monkeypatch.setattr(os, "write", write)
        with pytest.raises(OSError, match="the disk is full"):
            journal.append(replace(ROW, index=1))
        assert journal.get("search", 1) is None and path.read_bytes() == before
        monkeypatch.setattr(os, "write", real)
        journal.append(replace(ROW, index=1))
    assert len(path.read_bytes().splitlines()) == 3
