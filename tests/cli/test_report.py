"""bpb report, as typed."""

import shutil
from pathlib import Path

import pytest

from bitsperbyte.__main__ import guarded, run_command


def bpb(capsys: pytest.CaptureFixture, *arguments: object) -> tuple[int, str, str]:
    code = guarded(lambda: run_command([str(a) for a in arguments]))
    return code, *capsys.readouterr()


def test_report_says_where_the_page_is(capsys: pytest.CaptureFixture, repo_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = sorted(p.parent for p in (repo_dir / "records").glob("*/*/record.json"))
    code, out, err = bpb(capsys, "report", *folders, "--out", tmp_path / "all.html")
    assert (code, err) == (0, "") and str(tmp_path / "all.html") in out and (tmp_path / "all.html").is_file()
    copy = Path(shutil.copytree(folders[0], tmp_path / "run"))
    assert bpb(capsys, "report", copy)[0] == 0 and (copy / "report.html").is_file() and list((copy / "report_png").glob("*.png"))
    monkeypatch.chdir(tmp_path)
    code, out, _ = bpb(capsys, "report", *folders[:2])
    assert code == 0 and "several runs and no --out" in out and (tmp_path / "report.html").is_file()


def test_report_refuses_in_one_sentence(capsys: pytest.CaptureFixture, repo_dir: Path, tmp_path: Path) -> None:
    folder = next((repo_dir / "records" / "golf").glob("*/record.json")).parent
    for arguments in ((tmp_path,), (tmp_path / "none",), (folder, folder), (folder, "--out", tmp_path / "page.pdf"),
                      (folder, "--out", "/proc/page.html")):
        code, out, err = bpb(capsys, "report", *arguments)
        assert code == 2 and out == "" and err.startswith("bpb: ") and err.count("\n") == 1, (arguments, err)
