"""Logs against claims to the digits that both have, within themselves, and against the published text."""

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitsperbyte.golf.check.folder import read_submission
from bitsperbyte.golf.check.inspection import inspect_code
from bitsperbyte.golf.check.logs import LogCheck, _is_same, check_bytes, check_logs, check_seeds, claims_a_record


def logs_of(path: Path) -> LogCheck:
    found = read_submission(path)
    return check_logs(found, inspect_code(path / "train_gpt.py", found.script) if found.script else None)


@pytest.mark.parametrize(("claim", "ok"), [
    (1.2, True), (1.20, True), (1.2000, True), (1.2001, True), (1.1993, True), (1.20060000, True), (1.2002, False), (1.19, False), (1.1995, False),
    (1.20009, False), (1.200123, False), (1.3, False),
])
def test_a_headline_is_held_against_the_digits_that_it_has(claim: float, ok: bool, folder: Any) -> None:
    """The logs end in 1.2001, 1.1993 and 1.2006, and their mean is 1.2000."""
    folder.claim(val_bpb=claim, val_loss=None)
    check = logs_of(folder.path)
    assert check.finding.ok is ok, check.finding.detail
    assert len(check.foreign) == (0 if ok else 3)


@pytest.mark.parametrize(("claim", "says"), [
    (1.2, None), (1.1993, "claimed is the score of train_seed42.log alone, and the mean of the 3 is 1.20000"),
])
def test_the_best_seed_as_the_headline_is_said(claim: float, says: str | None, folder: Any) -> None:
    folder.claim(val_bpb=claim, val_loss=None)
    detail = logs_of(folder.path).finding.detail
    assert says in detail if says else "claimed is" not in detail


def test_a_headline_that_is_not_the_last_score_is_said(folder: Any) -> None:
    for seed in (42, 7):
        (folder.path / f"train_seed{seed}.log").unlink()
    folder.change_log(1337, "peak memory", "final_early val_loss:2.0 val_bpb:1.1845\npeak memory")
    folder.claim(val_bpb=1.1845, val_loss=None, seeds=None, seed_results=None)
    finding = logs_of(folder.path).finding
    assert finding.ok and "claimed is final_early (1.1845), not the last" in finding.detail


@given(st.decimals(min_value="0.5", max_value="4", places=8), st.integers(3, 7))
def test_a_figure_equals_itself_rounded_or_cut(value: Decimal, places: int) -> None:
    step = Decimal(1).scaleb(-places)
    for mode in ("ROUND_HALF_EVEN", "ROUND_DOWN") if places > 3 else ("ROUND_HALF_EVEN",):
        written = value.quantize(step, rounding=mode)
        assert _is_same(written, value) and _is_same(value, written)
        assert not _is_same(written + step * Decimal("1.5"), value) and not _is_same(written - 2 * step, value)


def test_a_log_without_claims_is_not_checked(folder: Any) -> None:
    folder.claim(val_bpb=None, val_loss=None, seed_results=None)
    finding = logs_of(folder.path).finding
    assert finding.ok is None and "claims no val_bpb" in finding.detail


def test_logs_without_scores_are_not_checked(folder: Any) -> None:
    for log in folder.path.glob("*.log"):
        log.write_text("nothing that is known\n", encoding="utf-8")
    assert logs_of(folder.path).finding.ok is None


def test_the_embedded_source_is_the_script_or_what_it_unpacks(folder: Any) -> None:
    script = (folder.path / "train_gpt.py").read_text(encoding="utf-8")
    folder.write("train_gpt_human.py", "import torch\n\n\ndef main():\n    pass\n")
    human = (folder.path / "train_gpt_human.py").read_text(encoding="utf-8")
    for source, ok in ((script, True), (script.replace("\n", "\r\n") + "\n\n", True), ("# a comment\n" + script, True), (human, True),
                       (script + "x = 1\n", False), (human + "x = 1\n", False)):
        folder.write("train_seed42.log", folder.log(42, bpb=1.1993, source=source))
        check = logs_of(folder.path)
        assert (check.finding.ok, check.foreign) == (ok, frozenset() if ok else {"train_seed42.log"})


@pytest.mark.parametrize(("old", "new"), [
    ("val_bpb:1.19930000", "val_bpb:1.10000000"), ("step:13780/20000 val_loss", "step:13980/20000 val_loss"),
    ("train_time:348320ms", "train_time:448320ms"),
])
def test_an_edited_line_does_not_agree_with_the_others(old: str, new: str, folder: Any) -> None:
    folder.claim(val_bpb=None, val_loss=None, seed_results=None)
    folder.change_log(42, old, new)
    finding = logs_of(folder.path).finding
    assert finding.ok is False and finding.detail.startswith("train_seed42.log")


def test_a_miscopied_figure_does_not_make_a_log_another_runs(folder: Any) -> None:
    folder.claim(val_loss=2.5)
    check = logs_of(folder.path)
    assert check.finding.ok is False and check.foreign == frozenset()


@pytest.mark.parametrize(("bytes_per_token", "data", "ok"), [
    (2.43593, "fineweb10B_sp1024", True), (2.5115, "fineweb10B_sp1024", True), (2.8613, "fineweb10B_sp1024", False),
    (1.95, "fineweb10B_sp1024", False), (2.8613, "my_books", None),
])
def test_the_bytes_of_the_published_text(bytes_per_token: float, data: str, ok: bool | None, folder: Any) -> None:
    """2.8613 is what counting each leading space twice gives; 2.5115 is the other export, to a thousandth."""
    folder.write("train_seed42.log", folder.log(42, bytes_per_token=bytes_per_token, data=data))
    found = read_submission(folder.path)
    assert check_bytes(found, [log for log in found.logs if log.seed == 42]).ok is ok


def test_bytes_of_another_text_have_nothing_to_be_held_against(own: Path) -> None:
    found = read_submission(own)
    assert check_bytes(found, found.logs).ok is None


@pytest.mark.parametrize(("track", "record"), [
    ("10min_16mb", True), ("track_10min_16mb", True), ("track_non_record_16mb", False), ("non-record-10min_16mb", False), ("x", None), (None, None),
])
def test_which_tracks_are_of_records(track: str | None, record: bool | None, folder: Any) -> None:
    folder.claim(track=track)
    assert claims_a_record(read_submission(folder.path)) is record


def test_seeds_are_counted_by_logs(folder: Any) -> None:
    for seed in (42, 7):
        (folder.path / f"train_seed{seed}.log").unlink()
    folder.claim(seeds=None, seed_results=None)
    assert check_seeds(read_submission(folder.path)).ok is False
    folder.claim(track="track_non_record_16mb")
    finding = check_seeds(read_submission(folder.path))
    assert finding.ok and "seed 1337" in finding.detail and "no record is claimed" in finding.detail
