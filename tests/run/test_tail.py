"""Lines of a file that another process writes."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitsperbyte.run.tail import LineTail, last_lines

PIECES = st.lists(st.text(alphabet="ab\né", max_size=8).map(str.encode), max_size=12)


@given(pieces=PIECES)
def test_however_a_file_grows_each_whole_line_comes_once(tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes]) -> None:
    path = tmp_path_factory.mktemp("tail") / "log"
    tail, seen = LineTail(path), []
    assert tail.read() == ([], False)
    with open(path, "ab", buffering=0) as file:
        for piece in pieces:
            for part in (piece[:3], piece[3:]):  # a character may be cut too
                file.write(part)
                lines, restarted = tail.read()
                assert not restarted
                seen += lines
                assert seen == path.read_bytes().split(b"\n")[:-1]


@given(first=st.lists(st.binary(min_size=1, max_size=5).filter(lambda b: b"\n" not in b), min_size=1, max_size=6),
       second=st.lists(st.binary(min_size=1, max_size=5).filter(lambda b: b"\n" not in b), max_size=6), how=st.sampled_from(["new", "same"]))
def test_a_file_that_was_replaced_or_rewritten_is_read_anew(tmp_path_factory: pytest.TempPathFactory, first: list[bytes], second: list[bytes],
                                                            how: str) -> None:
    """Whether another file took its name, or it was cut and written again: what counts afterwards is what stands in it."""
    path = tmp_path_factory.mktemp("tail") / "log"
    path.write_bytes(b"".join(line + b"\n" for line in first))
    tail = LineTail(path)
    state, _ = tail.read()
    assert state == first
    if how == "new":
        other = path.with_name("other")
        other.write_bytes(b"".join(line + b"\n" for line in second))
        os.replace(other, path)
    else:
        path.write_bytes(b"".join(line + b"\n" for line in second))
    lines, restarted = tail.read()
    state = lines if restarted else state + lines
    assert state == second
    assert restarted or second[: len(first)] == first, "only a file that goes on as it began is the same one"


def test_a_file_that_went_away_and_came_back(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"a\n")
    tail = LineTail(path)
    assert tail.read() == ([b"a"], False)
    path.unlink()
    assert tail.read() == ([], True) and tail.read() == ([], False)
    path.write_bytes(b"a\nb")
    assert tail.read() == ([b"a"], False)


@given(lines=st.lists(st.text(alphabet="abcé", max_size=9), max_size=9), num=st.integers(0, 10), within=st.integers(1, 60))
def test_last_lines_are_the_files_last_that_fit(tmp_path_factory: pytest.TempPathFactory, lines: list[str], num: int, within: int) -> None:
    path = tmp_path_factory.mktemp("last") / "log"
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    found = last_lines(path, num, within)
    assert len(found) <= num and found == lines[len(lines) - len(found):]
    size = path.stat().st_size
    assert size > within or len(found) == min(num, len(lines))


def test_last_lines_of_nothing_and_of_bytes_that_are_no_text(tmp_path: Path) -> None:
    assert last_lines(tmp_path / "none", 3) == []
    (tmp_path / "log").write_bytes(b"a\xff\nb")
    assert last_lines(tmp_path / "log", 5) == ["a\ufffd", "b"]
