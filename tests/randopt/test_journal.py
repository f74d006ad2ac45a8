"""The journal: every row once, whole or not at all, and nobody else's."""

import json
import math
import os
import random
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitsperbyte.metric.bpb import Score
from bitsperbyte.randopt.journal import HASH, Journal, Row

IDENTITY = {"engine": {"weights_sha256": "ab"}, "task": {"name": "sums", "test_sha256": "cd"}}
ROW = Row("search", 0, 2**62 + 1, 0.1, 0.5, [1.0, 0.0], [True, False], ["12", None], [], [], 2, 20, 7, 1, 0.25, 0.5, 0.125, 1.0)
SCORED = replace(ROW, phase="heldout", reward=-Score(12.5, 9, 7).bpb, rewards=[], correct=[], votes=[], nats=[12.5, 0.0], num_bytes=[9, 0],
                 num_truncated=0)
TIMES = {"switch_s", "generate_s", "grade_s", "seconds"}


def written(path: Path, *rows: Row) -> Path:
    with Journal.open(path, IDENTITY) as journal:
        for row in rows:
            journal.append(row)
    return path


@given(answers=st.lists(st.tuples(st.floats(allow_nan=False, allow_infinity=False, width=32), st.booleans(), st.none() | st.text()), min_size=2,
                        max_size=5), sigma=st.floats(1e-9, 1e9), seconds=st.floats(0, 1e6))
def test_rows_round_trip(tmp_path_factory: pytest.TempPathFactory, answers: list, sigma: float, seconds: float) -> None:
    rewards, correct, votes = map(list, zip(*answers, strict=True))
    row = replace(ROW, rewards=rewards, reward=math.fsum(rewards) / len(rewards), correct=correct, votes=votes, num_prompts=len(answers),
                  sigma=sigma, seconds=seconds)
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


@pytest.mark.parametrize("row", [ROW, SCORED], ids=["answered", "scored"])
@pytest.mark.parametrize("is_old", [False, True], ids=["with hash", "without"])
def test_a_row_that_no_run_writes_is_refused_with_its_line(tmp_path: Path, row: Row, is_old: bool) -> None:
    """Whatever the hash says: a journal of before it was kept has none."""
    changes = {"rewards": row.rewards[:-1] or [1.0], "correct": row.correct[:-1] or [True], "votes": row.votes[:-1] or [None], "nats": [-1.0] * 2,
               "num_bytes": row.num_bytes[:-1] or [3], "num_prompts": 0, "num_prompt_tokens": -1, "num_tokens": 10**400, "num_truncated": 3,
               "index": -1, "seed": None, "sigma": None, "reward": row.reward + 1e-6, **dict.fromkeys(TIMES, -1.0)}
    for name, value in changes.items():
        line = {**asdict(row), name: value}
        path = tmp_path / f"{name}.jsonl"
        path.write_text("\n".join(map(json.dumps, [{"journal": 1, "identity": IDENTITY}, line if is_old else {**line, HASH: "0" * 16}])) + "\n")
        with pytest.raises(ValueError, match="line 2: .* so it was damaged after it was written"):
            Journal.open(path, IDENTITY)


@pytest.mark.parametrize("row", [ROW, SCORED], ids=["answered", "scored"])
def test_no_changed_byte_of_a_row_becomes_a_figure(tmp_path: Path, row: Row) -> None:
    """A byte that changed on the disk is named with its line, or it changed nothing that a record is made of."""
    whole = written(tmp_path / "j.jsonl", row).read_bytes()
    header = whole.index(b"\n") + 1
    rng = random.Random(0)
    path, num_named = tmp_path / "changed.jsonl", 0
    for _ in range(600):
        at = rng.randrange(header, len(whole) - 1)
        path.write_bytes(whole[:at] + bytes([rng.choice(b'0123456789.,-"truefals[]{} \n\xff\0')]) + whole[at + 1 :])
        try:
            with Journal.open(path, IDENTITY) as journal:
                (found,) = journal.rows(row.phase)
            assert {**asdict(found), **dict.fromkeys(TIMES, 0)} == {**asdict(row), **dict.fromkeys(TIMES, 0)}
        except ValueError as error:
            assert f"{path} line" in str(error)
            num_named += 1
    assert num_named > 300


def test_nested_without_end_is_damage(tmp_path: Path) -> None:
    path = written(tmp_path / "j.jsonl", ROW)
    with path.open("a") as file:
        file.write("[" * 200_000 + "\n")
    with pytest.raises(ValueError, match="line 3 is not JSON"):
        Journal.open(path, IDENTITY)


def test_equal_rows_have_equal_lines_but_for_their_times(tmp_path: Path) -> None:
    slower = replace(ROW, switch_s=9.0, generate_s=9.0, grade_s=9.0, seconds=9.0)
    lines = [json.loads(written(tmp_path / f"{i}.jsonl", row).read_text().splitlines()[1]) for i, row in enumerate((ROW, slower))]
    assert [{key: value for key, value in line.items() if key not in TIMES} for line in lines] == [
        {key: value for key, value in lines[0].items() if key not in TIMES}] * 2


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
