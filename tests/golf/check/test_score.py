"""Scores come out again or fail: our own artifact through its own script and through the package, claims that are off, text that is
another, and scripts that try the network only when they run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bitsperbyte.golf.check.checker import check_submission
from bitsperbyte.golf.check.score import SAME_KIND_TOLERANCE
from bitsperbyte.golf.findings import Finding
from bitsperbyte.text.prepare import prepare
from bitsperbyte.text.tokenizers import train_sentencepiece


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    facts = json.loads((folder / "submission.json").read_text(encoding="utf-8"))
    change(facts)
    (folder / "submission.json").write_text(json.dumps(facts), encoding="utf-8")


def checked(folder: Path, data: Path | None, **options: Any) -> dict[str, Finding]:
    return {f.check: f for f in check_submission(folder, data=data, device_name="cpu", **options)}


def test_our_own_score_comes_out_again(own: Path, data_dir: Path) -> None:
    found = checked(own, data_dir)
    claimed = json.loads((own / "submission.json").read_text())["artifact"]["val_bpb"]
    assert found["score"].ok and f"{claimed:.8f}" in found["score"].detail and "agrees to 8 decimals" in found["score"].detail
    assert found["run"].ok and "no network" in found["run"].detail and all(f.ok is not False for f in found.values())
    assert sorted(p.name for p in own.iterdir() if p.is_dir()) == [], "the script ran in a copy"


def test_a_score_that_does_not_come_out_again_fails_alone(own: Path, data_dir: Path) -> None:
    """Everything else agrees with the false claim: the headline, the seed's own figure and the log."""
    def lower(facts: dict[str, Any]) -> None:
        facts["artifact"]["val_bpb"] -= 0.001

    edit(own, lower)
    found = checked(own, data_dir)
    assert [f.check for f in found.values() if f.ok is False] == ["score"] and "0.00100000 apart" in found["score"].detail


def test_a_claim_may_be_off_by_what_another_machine_adds(own: Path, data_dir: Path) -> None:
    def change(facts: dict[str, Any]) -> None:
        facts["artifact"]["val_bpb"] += SAME_KIND_TOLERANCE["cpu"] / 2

    edit(own, change)
    assert checked(own, data_dir)["score"].ok


def test_a_script_that_prints_another_score_fails(own: Path, data_dir: Path) -> None:
    script = own / "train_gpt.py"
    text = script.read_text(encoding="utf-8")
    script.write_text(text.replace("val_bpb:{score.bpb:.8f}", "val_bpb:{score.bpb - 0.1:.8f}"), encoding="utf-8")
    assert text != script.read_text(encoding="utf-8")
    found = checked(own, data_dir)["score"]
    assert found.ok is False and "its own script makes it" in found.detail


def test_a_network_that_only_running_shows(own: Path, data_dir: Path) -> None:
    """`getattr` on a module that nothing names hides from reading; the guard sees it."""
    script = own / "train_gpt.py"
    hidden = ("import sys as _s, builtins as _b\ntry:\n    getattr(_b, '__im' + 'port__')('so' + 'cket').getaddrinfo('example.org', 80)\n"
              "except OSError:\n    pass\n")
    text = script.read_text(encoding="utf-8")
    at = text.index("import ")
    future = text.index("\n", text.index("from __future__")) + 1 if "from __future__" in text else at
    script.write_text(text[:future] + hidden + text[future:], encoding="utf-8")
    found = checked(own, data_dir)
    assert found["code"].ok is not False, "it is hidden from reading"
    assert found["run"].ok is False and "example.org" in found["run"].detail and found["score"].ok


@pytest.mark.parametrize(("change", "words"), [
    (lambda f: f["data"].update(val_sha256="0" * 64), "the claim is of the validation split"), (lambda f: f.pop("evaluation"), "windows"),
    (lambda f: f["evaluation"].update(window=-1), "window -1"), (lambda f: f["evaluation"].update(documents="some"), "some"),
    (lambda f: f.pop("artifact"), "only of several seeds"),
])
def test_what_cannot_be_scored_is_said(change: Callable, words: str, own: Path, data_dir: Path) -> None:
    edit(own, change)
    found = checked(own, data_dir)["score"]
    assert found.ok is None and words in found.detail


def test_a_damaged_artifact_fails(own: Path, data_dir: Path) -> None:
    raw = bytearray((own / "artifact.bpb").read_bytes())
    raw[-1] ^= 1
    (own / "artifact.bpb").write_bytes(raw)
    assert checked(own, data_dir)["score"].ok is False


def test_a_tokenizer_of_another_artifact_fails(own: Path, data_dir: Path) -> None:
    texts = [path.read_text(encoding="utf-8") for path in sorted((data_dir.parent / "text").glob("*.txt"))]
    train_sentencepiece(texts, 300, own / "tokenizer.model")
    edit(own, lambda facts: facts["tokenizer"].update(file="tokenizer.model"))
    found = checked(own, data_dir)["score"]
    assert found.ok is False and "tokenizer.model is not the tokenizer" in found.detail


def test_text_of_another_tokenizer_is_no_text_of_the_claim(own: Path, data_dir: Path, tmp_path: Path) -> None:
    prepare(str(data_dir.parent / "text"), "train:300", tmp_path / "data", val_docs=8)
    found = checked(own, tmp_path / "data")["score"]
    assert found.ok is None and "another tokenizer" in found.detail


def test_a_data_folder_that_cannot_be_used_is_an_error(own: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such data folder"):
        checked(own, tmp_path / "nothing")


def test_a_strangers_artifact_is_not_read(folder: Any, data_dir: Path) -> None:
    (folder.path / "final_model.int8.ptz").write_bytes(b"\x80\x04pickle")
    found = checked(folder.path, data_dir)["score"]
    assert found.ok is None and "format of its own" in found.detail


@pytest.mark.parametrize(("source", "ok", "words"), [
    ("import os\nprint(os.environ['ITERATIONS'], os.environ['DATA_PATH'])\n", True, "tried no network"),
    ("import time\ntime.sleep(60)\n", True, "was ended after 2 s"), ("raise SystemExit('no GPU')\n", None, "no GPU"),
    ("n = 'soc' 'ket'\n__import__(n).getaddrinfo('example.org', 80)\n", False, "example.org"),
])
def test_a_few_steps_of_a_strangers_script(source: str, ok: bool | None, words: str, folder: Any, data_dir: Path) -> None:
    folder.write("train_gpt.py", source)
    found = checked(folder.path, data_dir, run=True, limit_s=2)
    assert found["run"].ok is ok and words in found["run"].detail
    assert "run" not in checked(folder.path, data_dir), "only when asked"


def test_links_are_not_copied(folder: Any, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    (folder.path / "link").symlink_to(tmp_path / "secret")
    folder.write("train_gpt.py", "import os\nassert not os.path.lexists('link')\n")
    assert checked(folder.path, None, run=True, limit_s=30)["run"].ok
