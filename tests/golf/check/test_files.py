"""The findings `files` and `code`: modules that are nowhere, files that are not those named, and what reading the code shows."""

import json
from pathlib import Path
from typing import Any

import pytest

from bitsperbyte.golf.check.files import check_code, check_files
from bitsperbyte.golf.check.folder import read_submission
from bitsperbyte.golf.check.inspection import Inspection, inspect_code
from bitsperbyte.golf.findings import Finding


def files_of(path: Path) -> Finding:
    found = read_submission(path)
    return check_files(found, inspect_code(path / "train_gpt.py", found.script) if found.script else None)


@pytest.mark.parametrize("source", [
    "import numpy, torch\nfrom flash_attn_interface import flash_attn_func\n", "try:\n    import exotic\nexcept ImportError:\n    exotic = None\n",
    "from beside import x\n", "from package.part import y\n", "import my_package\n", "def f():\n    import zlib\n",
])
def test_modules_that_are_somewhere(source: str, folder: Any) -> None:
    folder.write("requirements.txt", "# packages\nmy-package>=1.0\n")
    folder.write("beside.py", "x = 1\n")
    (folder.path / "package").mkdir()
    folder.write("package/part.py", "import sibling\n")
    folder.write("package/sibling.py", "\n")
    folder.write("train_gpt.py", source)
    assert files_of(folder.path).ok


@pytest.mark.parametrize("source", ["import exotic\n", "from bitsperbyte.golf import model\n", "from .beside import x\n", "from . import beside\n"])
def test_modules_that_are_nowhere(source: str, folder: Any) -> None:
    folder.write("train_gpt.py", source)
    finding = files_of(folder.path)
    assert finding.ok is False and "train_gpt.py line 1 imports" in finding.detail


@pytest.mark.parametrize(("file", "keys"), [("artifact.bpb", ("artifact", "sha256")), ("tokenizer.json", ("tokenizer", "sha256")),
                                            ("train_gpt.py", ("code_sha256",))])
def test_another_file_of_the_same_size_is_named(file: str, keys: tuple[str, ...], own: Path) -> None:
    assert files_of(own).ok
    facts = json.loads((own / "submission.json").read_text(encoding="utf-8"))
    where = facts
    for key in keys[:-1]:
        where = where[key]
    where[keys[-1]] = "0" * 64
    (own / "submission.json").write_text(json.dumps(facts), encoding="utf-8")
    finding = files_of(own)
    assert finding.ok is False and finding.detail.startswith(f"{file} has sha256") and "0000000000000000" in finding.detail


@pytest.mark.parametrize(("inspection", "ok", "words"), [
    (Inspection(broken=["a line 1: x"]), False, "does not parse"), (Inspection(network=[f"n{i}" for i in range(9)]), False, "and 5 more"),
    (Inspection(unseen=["line 3 runs text"]), None, "not all of it can be read"), (Inspection(), True, "no call onto the network"),
])
def test_what_reading_the_code_shows(inspection: Inspection, ok: bool | None, words: str) -> None:
    finding = check_code(inspection)
    assert finding.ok is ok and words in finding.detail


def test_without_a_script_there_is_nothing_to_read() -> None:
    assert check_code(None).ok is None
