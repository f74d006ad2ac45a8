"""Whole folders: a right one passes, and each thing that can be wrong with one is named by the check it belongs to and by no other."""

import base64
import json
import lzma
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bitsperbyte.__main__ import guarded, run_command
from bitsperbyte.golf.check.checker import check_submission
from bitsperbyte.golf.findings import failed

CHECKS = ["files", "code", "sizes", "log", "bytes", "seeds", "budget", "score"]


def failures(path: Path, **options: Any) -> dict[str, str]:
    findings = check_submission(path, **options)
    assert [f.check for f in findings][: len(CHECKS)] == CHECKS
    return {f.check: f.detail for f in failed(findings)}


def edit(path: Path, change: Callable[[Any], None]) -> None:
    facts = json.loads(path.read_text(encoding="utf-8"))
    change(facts)
    path.write_text(json.dumps(facts), encoding="utf-8")


# -- a stranger's folder -------------------------------------------------------------------------------------------------


def test_a_right_folder_passes(folder: Any, verdicts: Callable) -> None:
    assert verdicts(check_submission(folder.path)) == {
        "files": "passed", "code": "passed", "sizes": "not checked", "log": "passed", "bytes": "passed", "seeds": "passed",
        "budget": "passed", "score": "not checked"}


WRAPPED = b"import math\nimport socket\n"
SPOILT: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "no README": (lambda f: (f.path / "README.md").unlink(), "files", "README.md is missing"),
    "no script": (lambda f: (f.path / "train_gpt.py").unlink(), "files", "train_gpt.py is missing"),
    "no submission.json": (lambda f: (f.path / "submission.json").unlink(), "files", "submission.json is missing"),
    "no JSON": (lambda f: f.write("submission.json", "{'a': 1}"), "files", "not JSON"),
    "a list": (lambda f: f.write("submission.json", "[1]"), "files", "list"),
    "NaN": (lambda f: f.write("submission.json", '{"val_bpb": NaN}'), "files", "NaN"),
    "no log": (lambda f: [p.unlink() for p in f.path.glob("*.log")], "files", "no train log"),
    "a module that is nowhere": (lambda f: rewrite(f, "import torch\nimport my_kernels\n"), "files", "my_kernels"),
    "a link": (lambda f: ((f.path / "README.md").unlink(), (f.path / "README.md").symlink_to("/etc/hostname")), "files", "link"),
    "code that does not parse": (lambda f: rewrite(f, "import torch\ndef f(:\n"), "code", "line 2"),
    "a request": (lambda f: rewrite(f, "import urllib.request\n"), "code", "line 1 imports urllib.request"),
    "curl": (lambda f: rewrite(f, "import subprocess\nsubprocess.run(['curl', 'x'])\n"), "code", "line 2 starts curl"),
    "a wrapped socket": (lambda f: rewrite(f, f"import lzma, base64\nexec(lzma.decompress(base64.b85decode("
                                              f"{base64.b85encode(lzma.compress(WRAPPED)).decode()!r})))\n"), "code", "imports socket"),
    "a zlib wrapper": (lambda f: rewrite(f, f"import zlib\nexec(zlib.decompress({zlib.compress(WRAPPED)!r}))\n"), "code", "imports socket"),
    "a byte of code more": (lambda f: f.write("train_gpt.py", (f.path / "train_gpt.py").read_text() + "\n"), "sizes", "1 byte more"),
    "a byte claimed less": (lambda f: f.claim(bytes_code=f.facts["bytes_code"] - 1), "sizes", "1 byte more"),
    "a total off by one": (lambda f: f.claim(bytes_total=f.facts["bytes_total"] + 1), "sizes", "1 byte fewer"),
    "a log's sum off by one": (lambda f: f.change_log(42, "size int8+zlib: 1", "size int8+zlib: 2"), "sizes", "train_seed42.log"),
    "over the cap": (lambda f: resize(f, 16_000_001), "sizes", "1 over the cap of 16,000,000"),
    "an artifact of another size": (lambda f: (f.path / "final_model.int8.ptz").write_bytes(bytes(1000)), "sizes", "final_model.int8.ptz"),
    "a log of another run": (lambda f: f.write("train_seed42.log", f.log(42, bpb=1.21, code=1, weights=2, steps=9_000, step_ms=70)), "log", "1.21"),
    "another seed's log": (lambda f: shutil.copy(f.path / "train_seed7.log", f.path / "train_seed42.log"), "log", "seed 7"),
    "a claimed score too good": (lambda f: f.claim(val_bpb=1.19), "log", "1.2006"),
    "a loss that is a bpb": (lambda f: f.claim(val_bpb=None, val_loss=1.2001), "log", "is the val_bpb"),
    "a score before quantisation": (lambda f: f.claim(val_bpb=1.1931, val_loss=None), "log", "one before it"),
    "other steps": (lambda f: f.claim(seed_results={"42": {"val_bpb": 1.1993, "steps": 13_779}}), "log", "13,780"),
    "an edited final line": (lambda f: f.change_log(42, "val_bpb:1.19930000", "val_bpb:1.09930000") or f.claim(
        val_bpb=None, val_loss=None, seed_results=None), "log", "does not follow"),
    "an edited time": (lambda f: f.change_log(42, "train_time:435400ms step_avg", "train_time:405400ms step_avg"), "log", "step"),
    "a log with another source": (lambda f: f.write("train_seed42.log", f.log(42, bpb=1.1993, source="import torch\ndef f():\n    pass")),
                                  "log", "part at line 1"),
    "bytes counted twice": (lambda f: [f.write(f"train_seed{s}.log", f.log(s, bpb=b, bytes_per_token=2.8613)) for s, b in f.bpbs.items()]
                            and f.claim(val_loss=None), "bytes", "too low"),
    "two seeds": (lambda f: [(f.path / "train_seed7.log").unlink(), f.claim(seeds=None, seed_results=None, val_bpb=1.2001, val_loss=None)],
                  "seeds", "at least 3"),
    "a seed without its log": (lambda f: [f.claim(seeds=[1337, 42, 7, 9])], "seeds", "9"),
    "training too long": (lambda f: f.write("train_seed42.log", f.log(42, bpb=1.1993, step_ms=43.7)), "budget", "over 600 s"),
    "evaluation too long": (lambda f: f.write("train_seed42.log", f.log(42, bpb=1.1993, eval_ms=600_500)), "budget", "evaluation"),
}


def rewrite(folder: Any, source: str) -> None:
    """Another script, of which all sizes tell the truth."""
    folder.write("train_gpt.py", source)
    for seed, bpb in folder.bpbs.items():
        folder.write(f"train_seed{seed}.log", folder.log(seed, bpb=bpb, code=len(source)))
    folder.claim(bytes_code=len(source), bytes_total=15_815_847 + len(source))


def resize(folder: Any, total: int) -> None:
    code = folder.facts["bytes_code"]
    for seed, bpb in folder.bpbs.items():
        folder.write(f"train_seed{seed}.log", folder.log(seed, bpb=bpb, weights=total - code))
    folder.claim(bytes_total=total)


@pytest.mark.parametrize("name", SPOILT)
def test_what_is_wrong_is_named_by_its_check_alone(name: str, folder: Any) -> None:
    spoil, check, words = SPOILT[name]
    spoil(folder)
    wrong = failures(folder.path)
    assert list(wrong) == [check], wrong
    assert words in wrong[check]


def test_under_the_cap_by_nothing_is_under_it(folder: Any) -> None:
    resize(folder, 16_000_000)
    assert failures(folder.path) == {}


def test_a_budget_of_ones_own(folder: Any) -> None:
    assert failures(folder.path, budget_s=500).keys() == {"budget"} and failures(folder.path, evaluation_budget_s=1).keys() == {"budget"}
    with pytest.raises(ValueError, match="more than 0"):
        check_submission(folder.path, budget_s=0)


def test_no_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not there"):
        check_submission(tmp_path / "nothing")


# -- our own -----------------------------------------------------------------------------------------------------------


def test_our_own_folder_passes(own: Path, verdicts: Callable) -> None:
    assert verdicts(check_submission(own)) == {
        "files": "passed", "code": "passed", "sizes": "passed", "log": "passed", "bytes": "not checked", "seeds": "passed",
        "budget": "passed", "score": "not checked"}


OWN_SPOILT: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no artifact": (lambda p: (p / "artifact.bpb").unlink(), "files"),
    "no tokenizer": (lambda p: (p / "tokenizer.json").unlink(), "files"),
    "a log less": (lambda p: (p / "train_seed2.log").unlink(), "files"),
    "an artifact of another run": (lambda p: flip(p / "artifact.bpb"), "files"),
    "code of the same size": (lambda p: (p / "train_gpt.py").write_text((p / "train_gpt.py").read_text().replace("losses", "Losses", 1)), "files"),
    "an artifact a byte longer": (lambda p: (p / "artifact.bpb").write_bytes((p / "artifact.bpb").read_bytes() + b"\0"), "sizes"),
    "code a byte longer": (lambda p: (p / "train_gpt.py").write_text((p / "train_gpt.py").read_text() + "\n"), "sizes"),
    "a total a byte off": (lambda p: edit(p / "submission.json", lambda f: f.update(bytes_total=f["bytes_total"] + 1)), "sizes"),
    "a log of another seed": (lambda p: shutil.copy(p / "train_seed3.log", p / "train_seed2.log"), "log"),
    "another headline": (lambda p: edit(p / "submission.json", lambda f: f.update(val_bpb=f["val_bpb"] - 1e-6)), "log"),
}


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("name", OWN_SPOILT)
def test_what_is_wrong_with_ours_is_named_by_its_check_alone(name: str, own: Path) -> None:
    spoil, check = OWN_SPOILT[name]
    spoil(own)
    assert list(failures(own)) == [check]


# -- anything at all ---------------------------------------------------------------------------------------------------

KEYS = ["val_bpb", "val_loss", "bytes_total", "bytes_code", "artifact_bytes", "seeds", "seed_results", "artifact", "tokenizer", "track", "steps",
        "code_sha256", "evaluation", "data", "hardware", "seed", "7", "42", "log", "log_sha256", "file", "sha256", "code_as_recorded"]
LEAVES = st.none() | st.booleans() | st.integers(-10**25, 10**25) | st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from(
    ["", "train_seed42.log", "..", "/etc/passwd", "\x00", "a\nb", "0" * 64, "10min_16mb"])
FACTS = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5), max_leaves=20)
LINES = st.sampled_from(["step:{n}/20000 val_loss:{x} val_bpb:{x} train_time:{n}ms step_avg:{x}ms", "final_x_exact val_loss:{x} val_bpb:{x}",
                         "Code size: {n} bytes", "Total submission size int8+zlib: {n} bytes", "Serialized model int8+zlib: {n} bytes",
                         "stopping_early: wallclock_cap train_time:{x}ms step:{n}/5", "seed:{n}", "val_loss:{x}", "=" * 100,
                         "val_loader:shards pattern=fineweb10B tokens:{n}", "GPTQ: calibrated in {x}s"])
NUMBERS = st.sampled_from(["0", "1", "62021632", "1.2", "1e30", "1e999999", "1e-999999", "-1", "nan", "9" * 30])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(facts=FACTS, lines=st.lists(st.tuples(LINES, NUMBERS, NUMBERS), max_size=12), script=st.sampled_from(["", "import torch\n", "x = ("]))
def test_nothing_in_a_folder_raises(facts: Any, lines: list, script: str, folder: Any) -> None:
    folder.write("submission.json", json.dumps(facts))
    folder.write("train_seed42.log", "\n".join(line.format(n=n, x=x) for line, n, x in lines))
    folder.write("train_gpt.py", script)
    for finding in check_submission(folder.path):
        assert finding.detail and finding.verdict


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_says_what_failed_by_its_exit_code(folder: Any, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert guarded(lambda: run_command(["golf", "check", str(folder.path)])) == 0
    out = capsys.readouterr().out
    assert all(check in out for check in CHECKS) and "FAILED" not in out
    folder.write("train_gpt.py", "import socket  # [bold]\n")
    assert guarded(lambda: run_command(["golf", "check", str(folder.path), "--json"])) == 1
    told = json.loads(capsys.readouterr().out)
    assert set(told["failed"]) == {"code", "sizes"} == {f["check"] for f in told["findings"] if f["ok"] is False}
    assert guarded(lambda: run_command(["golf", "check", str(folder.path / "nothing")])) == 2
    assert "is not there" in capsys.readouterr().err


def test_a_strangers_brackets_are_text(folder: Any, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    folder.claim(artifact={"file": "[red]x[/]"})
    assert guarded(lambda: run_command(["golf", "check", str(folder.path)])) == 1
    assert "[red]x[/]" in capsys.readouterr().out
