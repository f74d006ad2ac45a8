import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bitsperbyte.run import provenance


def git(directory: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", "-C", str(directory), *arguments],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    package = tmp_path / "src" / "pkg"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("x = 1\n")
    (tmp_path / "README.md").write_text("hello\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    return package


def test_facts_are_plain_and_complete() -> None:
    facts = provenance.collect()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["versions"].keys() == set(provenance.PACKAGES) and all(facts["versions"].values())
    assert facts["num_cores"] >= 1 and facts["memory_bytes"] > 2**28
    assert facts["python"] == ".".join(map(str, sys.version_info[:3]))
    assert len(facts["source_sha256"]) == 64
    assert (facts["commit"] is None) == ("no_commit_because" in facts)


def test_no_environment_leaks_and_no_torch_is_loaded(tmp_path: Path) -> None:
    code = (
        "import sys, json\nfrom bitsperbyte.run.provenance import collect\n"
        "print(json.dumps(collect()), 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "HF_TOKEN": "hf_secret42", "GIT_DIR": "/nowhere"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "hf_secret42" not in done.stdout and done.stdout.strip().endswith("False")


def test_clean_and_dirty_checkouts(checkout: Path) -> None:
    head = git(checkout, "rev-parse", "HEAD")
    assert provenance.source_state(checkout) == {"commit": head, "dirty": False}
    (checkout.parents[1] / "README.md").write_text("changed\n")
    assert provenance.source_state(checkout)["dirty"] is False  # not the package's source
    (checkout / "new.py").write_text("")
    assert provenance.source_state(checkout)["dirty"] is True
    (checkout / "new.py").unlink()
    (checkout / "__init__.py").write_text("x = 2\n")
    assert provenance.source_state(checkout) == {"commit": head, "dirty": True}


def test_another_repository_around_an_installed_package_is_not_its_commit(checkout: Path) -> None:
    installed = checkout.parents[1] / "venv" / "pkg"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("")
    state = provenance.source_state(installed)
    assert state["commit"] is None and "not tracked" in state["no_commit_because"]


def test_outside_a_checkout_and_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = provenance.source_state(tmp_path)
    assert state["commit"] is None and state["dirty"] is None and "not a git repository" in state["no_commit_because"]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance.source_state(tmp_path)["no_commit_because"] == "git is not installed"


def test_source_hash_follows_code_and_nothing_else(checkout: Path) -> None:
    first = provenance.source_sha256(checkout)
    (checkout / "notes.txt").write_text("x")
    assert provenance.source_sha256(checkout) == first
    (checkout / "b.py").write_text("")
    added = provenance.source_sha256(checkout)
    (checkout / "b.py").rename(checkout / "c.py")
    assert len({first, added, provenance.source_sha256(checkout)}) == 3


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["/home/me/.venv/bin/bpb", "golf", "train", "a b.yaml"], "bpb golf train 'a b.yaml'"),
        (["/home/me/src/bitsperbyte/__main__.py", "golf"], "python -m bitsperbyte golf"),
        (["-c"], "-c"),
        ([], "''"),
    ],
)
def test_command_line_is_pasteable_and_hides_where_python_lives(argv: list[str], expected: str) -> None:
    assert provenance.command_line(argv) == expected
