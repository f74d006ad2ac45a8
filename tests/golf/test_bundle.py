"""The flattened script is the modules' own program, in three forms; what cannot be flattened with its meaning kept is refused."""

import ast
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitsperbyte.golf import bundle as module
from bitsperbyte.golf.bundle import FORMS, bundle, choose_script, flatten, in_order, literal, minify, package_modules, read_module, script_config
from bitsperbyte.golf.config import GolfConfig
from bitsperbyte.golf.ledger import BUNDLED_MODULES
from bitsperbyte.golf.model import ModelConfig
from bitsperbyte.golf.muon import OptimConfig
from bitsperbyte.golf.submission import SubmissionConfig

PACKAGE = Path(module.__file__).resolve().parents[1]
HASHES = {"tokenizer_sha256": "a" * 64, "val_sha256": "b" * 64}


def config_of(**changes: Any) -> SubmissionConfig:
    return script_config(GolfConfig.model_validate(changes), tokenizer_file="tokenizer.model", **HASHES)


def source_of(script: str) -> str:
    """The program's text: that of the compressed form is what it unpacks."""
    tree = ast.parse(script)
    if not any(isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SOURCE" for node in tree.body):
        return script
    namespace: dict[str, Any] = {"__name__": "unpacked", "__file__": "train_gpt.py"}
    exec(compile(ast.Module(tree.body[:2], []), "train_gpt.py", "exec"), namespace)
    return namespace["SOURCE"]


def definitions(tree: ast.Module) -> dict[str, ast.stmt]:
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


# -- the same program --------------------------------------------------------------------------------------------------


def test_every_definition_is_that_of_its_module() -> None:
    """Plain keeps each definition it takes as the module has it; only CODECS is cut down."""
    script = definitions(ast.parse(bundle(config_of(), "plain").text))
    sources: dict[str, ast.stmt] = {}
    for path in BUNDLED_MODULES:
        sources |= definitions(ast.parse((PACKAGE / path).read_text(encoding="utf-8")))
    assert len(script) > 100 and {"main", "Stepper", "GolfModel", "evaluate", "Score"} <= set(script)
    for name, node in script.items():
        assert ast.dump(node) == ast.dump(sources[name]), name
    assert "train_sentencepiece" in sources and "train_sentencepiece" not in script, "what the program cannot reach is left out"


def test_a_comment_stays_with_what_it_explains() -> None:
    text = bundle(config_of(), "plain").text
    for path, comment in (("golf/muon.py", "# Bound the largest singular value by 1"), ("golf/artifact.py", "# The cap is 16 MB; these bounds")):
        lines = (PACKAGE / path).read_text(encoding="utf-8").splitlines()
        at = next(i for i, line in enumerate(lines) if comment in line)
        assert "\n".join(lines[at : at + 2]) in text


def instructions(text: str) -> dict[str, tuple]:
    """By name: the compiled functions and classes of a script as nested tuples, without docstrings, lines and signatures' annotations."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        if isinstance(node, ast.arg):
            node.annotation = None
        if "lineno" in node._attributes:
            node.lineno = node.end_lineno = 1
            node.col_offset = node.end_col_offset = 0

    def parts(code: CodeType) -> tuple:
        constants = tuple(parts(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts)
        return code.co_name, code.co_code, constants, code.co_names, code.co_varnames, code.co_flags

    top = compile(tree, "script", "exec", optimize=2, dont_inherit=True)
    return {c.co_name: parts(c) for c in top.co_consts if isinstance(c, CodeType)}


@pytest.mark.parametrize("codec", ["lzma", "brotli"])
def test_minified_functions_run_the_same_instructions(codec: str) -> None:
    """Every function and class that the minified form keeps compiles to what the plain form compiles to."""
    plain, minified = (instructions(bundle(config_of(artifact={"codec": codec}), form).text) for form in ("plain", "minified"))
    assert len(minified) > 100 and set(minified) <= set(plain)
    assert set(plain) - set(minified) == {"Tokenizer"}, "only what annotations alone name is dropped"
    assert minified == {name: plain[name] for name in minified}


def test_minifying_twice_changes_nothing_more() -> None:
    minified = bundle(config_of(), "minified").text
    banner, _, rest = minified.partition("\nfrom __future__")
    again = minify(banner + "\n\nfrom __future__" + rest)
    assert again == minified
    assert '"""' not in rest and not any(line.lstrip().startswith("#") for line in rest.splitlines())


def test_compressed_unpacks_to_the_minified_text() -> None:
    config = config_of()
    assert source_of(bundle(config, "compressed").text) == bundle(config, "minified").text


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("codec", "package"), [("zlib", None), ("zstd", "zstandard"), ("brotli", "brotli"), ("lzma", None)])
def test_a_script_imports_what_its_run_needs_and_nothing_else(form: str, codec: str, package: str | None) -> None:
    text = source_of(bundle(config_of(artifact={"codec": codec}), form).text)
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            found.add(str(node.module).partition(".")[0])
    assert found - set(sys.stdlib_module_names) == {"torch", "numpy", "sentencepiece"} | ({package} if package else set())


def test_the_bundle_is_every_module_that_the_entry_needs() -> None:
    assert {m.path for m in package_modules()} == set(BUNDLED_MODULES)
    text = bundle(config_of(), "plain").text
    assert all(f"# ==== {path} =" in text for path in BUNDLED_MODULES), "a module that gives nothing has no place in the list"


# -- sizes and forms ---------------------------------------------------------------------------------------------------


def test_equal_input_gives_equal_bytes_in_any_process() -> None:
    code = ("from bitsperbyte.golf.bundle import *\n"
            "c = script_config(GolfConfig(), tokenizer_file='tokenizer.model', tokenizer_sha256='a' * 64, val_sha256='b' * 64)\n"
            "print(*(bundle(c, form).sha256 for form in FORMS))")
    there = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": "1"}, check=True, capture_output=True,
                           text=True)
    here = [bundle(config_of(), form).sha256 for form in FORMS]
    bundle.cache_clear()
    assert there.stdout.split() == here == [bundle(config_of(), form).sha256 for form in FORMS]


def test_the_most_readable_form_that_fits_is_taken() -> None:
    config = config_of()
    plain, minified, compressed = (bundle(config, form).num_bytes for form in FORMS)
    assert plain > minified > compressed and minified < 0.75 * plain and compressed < 0.45 * minified
    rooms = {plain: "plain", plain - 1: "minified", minified: "minified", minified - 1: "compressed", compressed: "compressed",
             compressed - 1: "compressed", -5: "compressed"}
    assert {room: choose_script(config, "auto", room).form for room in rooms} == rooms
    assert choose_script(config, "plain", 0).form == "plain", "a form asked for is taken whatever its size"
    with pytest.raises(ValueError, match="no form 'tiny'.*compressed"):
        bundle(config, "tiny")


def test_the_published_baseline_leaves_room_for_every_form() -> None:
    """15,815,847 bytes of weights leave 184,153 (the challenge's first record)."""
    assert bundle(config_of(), "plain").num_bytes < 184_153


# -- settings ----------------------------------------------------------------------------------------------------------


@given(st.builds(OptimConfig, matrix_lr=st.floats(1e-300, 1e300), weight_decay=st.floats(0, 1), momentum_warmup_steps=st.integers(0, 10**12)),
       st.text(max_size=8), st.one_of(st.none(), st.integers(1, 10**9)))
@settings(max_examples=60, deadline=None)
def test_settings_come_back_equal(optim: OptimConfig, path: str, window: int | None) -> None:
    config = config_of()
    config = type(config)(**{**vars(config), "optim": optim, "data_path": path, "model": ModelConfig(attention_window=window)})
    namespace = {name: getattr(module, name, None) for name in ("SubmissionConfig", "Protocol")}
    from bitsperbyte.golf.schedule import Schedule
    from bitsperbyte.golf.step import BatchConfig

    namespace |= {"Schedule": Schedule, "BatchConfig": BatchConfig, "OptimConfig": OptimConfig, "ModelConfig": ModelConfig}
    assert eval(literal(config), namespace) == config


def test_a_data_path_of_this_machine_stays_here() -> None:
    assert config_of(data={"path": "/home/me/secret/books"}).data_path == "data/books"
    assert config_of(data={"path": "../elsewhere/books"}).data_path == "data/books"
    assert config_of(data={"path": "data/fineweb"}).data_path == "data/fineweb"


def test_a_setting_that_is_no_literal_is_refused() -> None:
    with pytest.raises(AssertionError, match="a setting is a list"):
        literal([1])


# -- what cannot be flattened ------------------------------------------------------------------------------------------

MAIN = "def main(config):\n    return help_me(config)\n"


@pytest.mark.parametrize(("sources", "match"), [
    ({"golf/a.py": "def f(): pass", "golf/b.py": "def f(): pass"}, "the name f .*golf/b.py.* stands for something else.*golf/a.py.*rename"),
    ({"golf/a.py": "X = 1", "golf/b.py": "from math import pi as X"}, "the name X .*from math import pi as X"),
    ({"golf/a.py": "from math import pi", "golf/b.py": "from cmath import pi"}, "the name pi .*from cmath import pi"),
    ({"golf/a.py": "import numpy as np", "golf/b.py": "import torch as np"}, "the name np .*import torch as np"),
    ({"golf/a.py": "def open(): pass"}, "the name open .*a builtin"),
    ({"golf/a.py": "def f(): return g()", "golf/b.py": "def g(): pass"}, "golf/a.py: uses .'g'., which it neither defines nor imports"),
    ({"golf/a.py": "from bitsperbyte.golf.b import g as h", "golf/b.py": "def g(): pass"}, "g would have two names"),
    ({"golf/a.py": "import bitsperbyte.golf.b"}, "import names out of bitsperbyte.golf.b"),
    ({"golf/a.py": "def f():\n    from bitsperbyte.golf.b import g"}, "line 2: imports the package inside a function"),
    ({"golf/a.py": "from bitsperbyte.golf.c import g"}, "imports g from golf/c.py, which is not bundled"),
    ({"golf/a.py": "from bitsperbyte.golf.b import g", "golf/b.py": "def h(): pass"}, "imports g, not defined in golf/b.py"),
    ({"golf/a.py": "from math import *"}, "name what is imported"),
    ({"golf/a.py": "import os.path"}, "needs a name of its own"),
    ({"golf/a.py": "if True:\n    X = 1"}, "line 1: a top-level If cannot be flattened"),
    ({"golf/a.py": "X = 1\nprint(X)"}, "line 2: a top-level Expr cannot be flattened"),
    ({"golf/a.py": "X = 1\nX = 2"}, "binds .'X'. more than once"),
])
def test_what_would_change_its_meaning_is_refused(sources: dict[str, str], match: str) -> None:
    with pytest.raises(AssertionError, match=match):
        in_order(read_module(path, source) for path, source in sources.items())


def toy(tmp_path: Path, sources: dict[str, str]) -> ModuleType:
    """The flattened and executed script of toy modules, whose entry takes settings of which it uses nothing."""
    text = flatten(in_order(read_module(path, source) for path, source in sources.items()), config_of())
    script = ModuleType("toy")
    names = {"SubmissionConfig": dict, "ModelConfig": dict, "OptimConfig": dict, "Schedule": dict, "BatchConfig": dict, "Protocol": dict}
    script.__dict__.update(names)
    exec(compile(text, "toy.py", "exec"), script.__dict__)
    return script


def test_modules_come_after_what_they_import_whatever_the_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_unbound", lambda text: set())  # the toy has no settings of its own
    base = "import math\n\n# twice pi\nTAU = 2 * math.pi\n\ndef unused(): pass\n"
    middle = "from bitsperbyte.golf.z import TAU\n\ndef help_me(x, *, by=TAU):\n    return by\n"
    main = "from bitsperbyte.golf.m import help_me\n\n" + MAIN
    for order in (["golf/a.py", "golf/m.py", "golf/z.py"], ["golf/z.py", "golf/a.py", "golf/m.py"]):
        sources = {"golf/a.py": main, "golf/m.py": middle, "golf/z.py": base}
        script = toy(tmp_path, {path: sources[path] for path in order})
        assert script.main(None) == pytest.approx(6.283185307179586) and not hasattr(script, "unused")


def test_a_definition_that_something_reads_is_never_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check behind it: a script that lacks a name it reads is not written."""
    cut: Callable = module.reached
    monkeypatch.setattr(module, "reached", lambda pieces, roots: [p for p in cut(pieces, roots) if "rms_norm" not in p.binds])
    with pytest.raises(AssertionError, match="the script lacks .'rms_norm'."):
        flatten(package_modules(), config_of())
