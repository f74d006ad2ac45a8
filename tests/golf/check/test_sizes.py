"""Bytes to the byte: whichever of disk, claim and log is off by some, the finding says by how many."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bitsperbyte.golf.check.folder import read_submission
from bitsperbyte.golf.check.sizes import check_sizes
from bitsperbyte.golf.findings import Finding


def sizes_of(path: Path, local_files: Any = ()) -> Finding:
    found = read_submission(path)
    return check_sizes(found, local_files, found.logs)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(off=st.integers(-2_000, 2_000).filter(bool), key=st.sampled_from(["bytes_code", "bytes_total"]))
def test_any_difference_is_named_by_its_size(off: int, key: str, folder: Any) -> None:
    before = folder.facts[key]
    folder.claim(**{key: before + off})
    finding = sizes_of(folder.path)
    folder.claim(**{key: before})
    assert finding.ok is False and f"{abs(off):,} byte{'' if abs(off) == 1 else 's'} {'fewer' if off > 0 else 'more'}" in finding.detail


def test_without_an_artifact_sizes_are_unproven(folder: Any) -> None:
    finding = sizes_of(folder.path)
    assert finding.ok is None and "unproven" in finding.detail


def test_without_any_figure_nothing_is_said(folder: Any) -> None:
    for log in folder.path.glob("*.log"):
        log.write_text("seed:1\n", encoding="utf-8")
    folder.claim(bytes_total=None, bytes_code=None)
    finding = sizes_of(folder.path)
    assert finding.ok is None and "neither" in finding.detail


@pytest.mark.parametrize("total", ["one", "mean", "largest"])
def test_a_total_may_be_that_of_any_seed_or_the_mean(total: str, folder: Any) -> None:
    weights = {1337: 15_800_000, 42: 15_810_000, 7: 15_805_001}
    code = folder.facts["bytes_code"]
    for seed, bpb in folder.bpbs.items():
        folder.write(f"train_seed{seed}.log", folder.log(seed, bpb=bpb, weights=weights[seed]))
    claimed = {"one": weights[7], "mean": 15_805_000, "largest": 15_810_000}[total] + code
    folder.claim(bytes_total=claimed)
    assert sizes_of(folder.path).ok is None
    folder.claim(bytes_total=claimed + 3)
    assert sizes_of(folder.path).ok is False


@pytest.mark.parametrize("which", ["weights", "total"])
def test_artifact_bytes_may_mean_either(which: str, folder: Any) -> None:
    size = 15_815_847 + (folder.facts["bytes_code"] if which == "total" else 0)
    folder.claim(artifact_bytes=size)
    assert sizes_of(folder.path).ok is None
    folder.claim(artifact_bytes=size - 1)
    assert sizes_of(folder.path).ok is False


def test_the_sizes_of_each_seed_are_held_against_its_log(folder: Any) -> None:
    folder.claim(seed_results={"42": {"artifact_bytes": 15_815_847}, "7": {"artifact_bytes": 15_815_846}})
    finding = sizes_of(folder.path)
    assert finding.ok is False and "artifact_bytes of seed 7" in finding.detail and "seed 42" not in finding.detail


def test_an_artifact_on_the_disk_is_weighed(folder: Any) -> None:
    (folder.path / "final_model.int8.ptz").write_bytes(bytes(15_815_847))
    finding = sizes_of(folder.path)
    assert finding.ok and f"{16_000_000 - 15_815_847 - folder.facts['bytes_code']:,} left" in finding.detail
    with (folder.path / "final_model.int8.ptz").open("ab") as file:
        file.write(b"x")
    finding = sizes_of(folder.path)
    assert finding.ok is False and "1 byte more" in finding.detail


def test_files_of_code_beside_the_script_may_count(folder: Any) -> None:
    (folder.path / "final_model.int8.ptz").write_bytes(bytes(15_815_847))
    assert "helper.py (50 bytes)" in sizes_of(folder.path, [("helper.py", 50)]).detail
    finding = sizes_of(folder.path, [("helper.py", 200_000)])
    assert finding.ok is False and "over the cap" in finding.detail


def test_without_the_script_its_claim_is_held_against_the_log(folder: Any) -> None:
    (folder.path / "train_gpt.py").unlink()
    assert sizes_of(folder.path).ok is None
    folder.claim(bytes_code=folder.facts["bytes_code"] + 60)
    finding = sizes_of(folder.path)
    assert finding.ok is False and "60 bytes fewer" in finding.detail


@pytest.mark.parametrize(("key", "size", "ok"), [("bytes_model_int8_zlib", 15_815_847, None), ("bytes_model_int8_zlib", 15_815_846, False),
                                                 ("bytes_model", 15_815_848, False), ("bytes_model_raw", 67_224_983, None)])
def test_claimed_weights_without_an_artifact_are_held_against_the_log(key: str, size: int, ok: bool | None, folder: Any) -> None:
    folder.claim(**{key: size})
    finding = sizes_of(folder.path)
    assert finding.ok is ok and (ok is None or f"claims {key} {size:,}" in finding.detail), finding.detail


def test_a_log_that_counted_another_script_is_not_held_against_the_total(folder: Any) -> None:
    """As a folder of this package that was made by a later version than its runs: without its artifact no other size is wrong."""
    folder.claim(bytes_total=folder.facts["bytes_total"] + 8_329, code_as_recorded=False,
                 seed_results={"42": {"val_bpb": 1.1993, "bytes_total": folder.facts["bytes_total"] + 8_329}})
    assert sizes_of(folder.path).ok is None
    folder.claim(code_as_recorded=True)
    assert sizes_of(folder.path).ok is False
