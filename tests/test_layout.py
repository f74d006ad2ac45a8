"""The rules of docs/architecture.md, proven by parsing: who imports whom, what nobody does, how long files are.

Each rule is a function from one module's path and source to sentences; it is run over src/ and over small sources that
break it.
"""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from bitsperbyte.golf.ledger import BUNDLED_MODULES

REPO = Path(__file__).resolve().parents[1]
PACKAGE = REPO / "src" / "bitsperbyte"
MODULES = sorted(p.relative_to(PACKAGE).as_posix() for p in PACKAGE.rglob("*.py"))

# folder -> folders of the package that it may import from, beside itself; "" is the package itself (its version)
MAY_IMPORT = {
    "": set(),
    "metric": set(),
    "stats": {"metric"},
    "run": {""},
    "text": {"metric", "run", ""},
    "records": {"metric", "stats", "run", ""},
    "golf": {"metric", "stats", "run", "text", "records", ""},
    "randopt": {"metric", "stats", "run", "text", "records", "golf", ""},
    "cli": {"metric", "stats", "run", "text", "records", "golf", "randopt", ""},
    "__main__": {"cli", "run", ""},
}
TRACKS = {"golf", "randopt"}
RECORDS_FOR_TRACKS = {"records/schema.py", "records/store.py"}
GOLF_FOR_RANDOPT = "randopt/engines/golf.py"
WITHOUT_TORCH = {"records", "stats", "run", "cli", "__main__", ""}
PYDANTIC_AT = {"run/config.py", "golf/config.py", "randopt/config.py", "records/schema.py", "records/score_parts.py", "records/randopt_parts.py",
               "records/store.py"}
BUNDLE_PACKAGES = {"torch", "numpy", "sentencepiece"}
BUNDLE_LAZY = {"zstandard", "brotli"}
LAZY = {"ray", "vllm", "datasets", "matplotlib", "transformers", "tokenizers", "huggingface_hub", "triton", "scipy",
        "sympy", "math_verify", "tensorboard", "wandb", "trackio"}
LAZY_FREE = {"randopt/noise_triton.py", "randopt/engines/layer_ops_triton.py"}
MAX_LINES = 500
# modules tested with a neighbour: module -> the test file that does it, which must at least import its way there
TESTED_IN: dict[str, str] = {
    "__main__.py": "test_main.py",
    "golf/body.py": "golf/test_artifact.py",
    "golf/check/readings.py": "golf/check/test_logs.py",
    "golf/codecs.py": "golf/test_artifact.py",
    "golf/ledger.py": "golf/test_artifact.py",
    "golf/lines.py": "golf/test_logs.py",
    "golf/reduce.py": "golf/test_ranks.py",
    "golf/step.py": "golf/test_train.py",
    "golf/submit_readme.py": "golf/test_submit.py",
    "randopt/jobs.py": "randopt/test_workers.py",
    "randopt/worker.py": "randopt/test_workers.py",
    "records/import_golf.py": "records/test_importers.py",
    "records/import_randopt.py": "records/test_importers.py",
    "records/leaderboard_tables.py": "records/test_leaderboard.py",
    "records/published.py": "records/test_importers.py",
    "records/randopt_parts.py": "records/test_schema.py",
    **{f"records/report/{name}.py": "records/report/test_page.py" for name in (
        "golf_section", "randopt_section", "run_facts", "sources")},
    "records/score_parts.py": "records/test_schema.py",
    "run/log_lines.py": "run/test_train_log.py",
}


@dataclass(frozen=True)
class Import:
    """One imported name: its top-level package, and its file in ours ("run/config.py"), None for others."""

    package: str
    target: str | None
    line: int
    is_lazy: bool  # inside a function, so that it runs only when that function does, or for type checkers alone


def folder_of(path: str) -> str:
    if path == "__main__.py":
        return "__main__"
    return path.partition("/")[0] if "/" in path else ""


def resolve(dotted: str) -> str:
    """The file that defines a dotted name: bitsperbyte.run.config.load_config -> run/config.py."""
    parts = dotted.split(".")[1:]
    while parts:
        for candidate in ("/".join(parts) + ".py", "/".join(parts) + "/__init__.py"):
            if candidate in MODULES:
                return candidate
        if len(parts) == 1 and parts[0] in MAY_IMPORT:
            return f"{parts[0]}/__init__.py"  # a folder yet to be written
        parts = parts[:-1]
    return "__init__.py"


def imports(source: str) -> Iterator[Import]:
    def later(node: ast.AST) -> bool:
        """Whether what stands in `node` does not run on import. An `if TYPE_CHECKING:` with an else counts as run: one of them is."""
        if isinstance(node, ast.If):
            return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING" and not node.orelse
        return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)

    def walk(node: ast.AST, is_lazy: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                names = [alias.name for alias in child.names]
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"line {child.lineno}: a relative import"
                names = [f"{child.module}.{alias.name}" for alias in child.names]
            else:
                names = []
            for name in names:
                package = name.partition(".")[0]
                yield Import(package, resolve(name) if package == "bitsperbyte" else None, child.lineno, is_lazy)
            yield from walk(child, is_lazy or later(child))

    yield from walk(ast.parse(source), False)


# -- the rules --------------------------------------------------------------------------------------------------------


def folders_import_downwards(path: str, source: str) -> Iterator[str]:
    folder = folder_of(path)
    for used in imports(source):
        if used.target is None or (target := folder_of(used.target)) == folder:
            continue
        if path.endswith("__init__.py") and used.target == path:
            continue
        if target not in MAY_IMPORT[folder]:
            yield f"line {used.line}: {folder or 'the package'} imports {used.target}"
        if folder in TRACKS and target == "records" and used.target not in RECORDS_FOR_TRACKS:
            yield f"line {used.line}: a track imports {used.target}"
        if folder == "randopt" and target == "golf" and path != GOLF_FOR_RANDOPT:
            yield f"line {used.line}: randopt imports golf outside {GOLF_FOR_RANDOPT}"


def light_folders_never_load_torch(path: str, source: str) -> Iterator[str]:
    for used in imports(source):
        if folder_of(path) in WITHOUT_TORCH and used.package == "torch":
            yield f"line {used.line}: imports torch"
        if (
            folder_of(path) in ("cli", "__main__")
            and used.target
            and folder_of(used.target) in TRACKS
            and not used.is_lazy
        ):
            yield f"line {used.line}: imports {used.target} before a command runs"


def bundled_modules_need_little(path: str, source: str) -> Iterator[str]:
    if path not in BUNDLED_MODULES:
        return
    for used in imports(source):
        if used.target is not None:
            if used.target not in BUNDLED_MODULES:
                yield f"line {used.line}: imports {used.target}, which is not bundled"
        elif used.package in BUNDLE_LAZY:
            if not used.is_lazy:
                yield f"line {used.line}: imports {used.package} outside the function that needs it"
        elif used.package not in BUNDLE_PACKAGES and used.package not in sys.stdlib_module_names:
            yield f"line {used.line}: imports {used.package}"


def pydantic_stays_at_the_edge(path: str, source: str) -> Iterator[str]:
    for used in imports(source):
        if used.package == "pydantic" and path not in PYDANTIC_AT:
            yield f"line {used.line}: imports pydantic"


def heavy_packages_are_imported_where_used(path: str, source: str) -> Iterator[str]:
    for used in imports(source):
        if used.package in LAZY and not used.is_lazy and path not in LAZY_FREE:
            yield f"line {used.line}: imports {used.package} at the top"


def nothing_read_is_executed(path: str, source: str) -> Iterator[str]:
    for used in imports(source):
        if used.package in ("pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"):
            yield f"line {used.line}: imports {used.package}"
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module == "torch"
            and any(a.name in ("load", "save") for a in node.names)
        ):
            yield f"line {node.lineno}: imports torch.load"
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called in (
            "eval",
            "exec",
            "compile",
            "builtins.eval",
            "builtins.exec",
            "torch.load",
            "torch.save",
            "yaml.unsafe_load",
        ):
            yield f"line {node.lineno}: calls {called}"
        if any(
            k.arg == "allow_pickle" and not (isinstance(k.value, ast.Constant) and k.value.value is False)
            for k in node.keywords
        ):
            yield f"line {node.lineno}: allows pickle"
        if any(
            k.arg == "shell" and not (isinstance(k.value, ast.Constant) and k.value.value is False)
            for k in node.keywords
        ):
            yield f"line {node.lineno}: runs a shell"


def only_the_metric_knows_ln2(path: str, source: str) -> Iterator[str]:
    if path == "metric/bpb.py":
        return
    for node in ast.walk(ast.parse(source)):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Call) and node.args and ast.unparse(node.func).rpartition(".")[2] == "log":
            if any(isinstance(part, ast.Constant) and part.value == 2 for part in node.args):
                yield f"line {line}: takes log(2)"
        if isinstance(node, ast.Constant) and isinstance(node.value, float):
            if abs(node.value - 0.6931472) < 2e-4 or abs(node.value - 1.4426950) < 2e-4:
                yield f"line {line}: writes {node.value}"
        name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        if re.fullmatch(r"_?(ln_?2|log_?of_?2|log2_?e|nats_per_bit|bits_per_nat)", name, re.IGNORECASE):
            yield f"line {line}: uses {name}"


def files_are_short_and_named_by_their_noun(path: str, source: str) -> Iterator[str]:
    num_lines = source.count("\n")
    if num_lines > MAX_LINES:
        yield f"has {num_lines} lines"
    for part in Path(path).with_suffix("").parts:
        if part in ("utils", "util", "common", "helpers", "helper", "misc"):
            yield f"is named {part}"


def errors_are_named(path: str, source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield f"line {node.lineno}: a bare except"


Rule = Callable[[str, str], Iterator[str]]
RULES: list[Rule] = [
    folders_import_downwards,
    light_folders_never_load_torch,
    bundled_modules_need_little,
    pydantic_stays_at_the_edge,
    heavy_packages_are_imported_where_used,
    nothing_read_is_executed,
    only_the_metric_knows_ln2,
    files_are_short_and_named_by_their_noun,
    errors_are_named,
]

# sources that break a rule, and neighbours of them that do not
BREAKS: list[tuple[Rule, str, str]] = [
    (folders_import_downwards, "golf/train.py", "from bitsperbyte.randopt.search import x"),
    (folders_import_downwards, "golf/train.py", "def f():\n    import bitsperbyte.randopt"),
    (folders_import_downwards, "golf/train.py", "from bitsperbyte.records.leaderboard import render"),
    (folders_import_downwards, "golf/train.py", "from bitsperbyte.cli import app"),
    (folders_import_downwards, "run/folder.py", "from bitsperbyte import golf"),
    (folders_import_downwards, "records/store.py", "from bitsperbyte.golf.model import GolfModel"),
    (folders_import_downwards, "text/shards.py", "import bitsperbyte.golf.model"),
    (folders_import_downwards, "metric/bpb.py", "from bitsperbyte.run.config import load_config"),
    (folders_import_downwards, "randopt/search.py", "from bitsperbyte.golf.model import GolfModel"),
    (light_folders_never_load_torch, "run/folder.py", "import torch"),
    (light_folders_never_load_torch, "stats/intervals.py", "def f():\n    from torch import nn"),
    (light_folders_never_load_torch, "cli/golf.py", "from bitsperbyte.golf.session import train"),
    (bundled_modules_need_little, "golf/model.py", "import safetensors"),
    (bundled_modules_need_little, "golf/model.py", "from bitsperbyte.golf.config import GolfConfig"),
    (bundled_modules_need_little, "golf/model.py", "import bitsperbyte"),
    (bundled_modules_need_little, "golf/codecs.py", "import zstandard"),
    (pydantic_stays_at_the_edge, "golf/plan.py", "from pydantic import BaseModel"),
    (heavy_packages_are_imported_where_used, "text/hub.py", "import huggingface_hub"),
    (heavy_packages_are_imported_where_used, "text/hub.py", "if DEBUG:\n    import matplotlib"),
    (heavy_packages_are_imported_where_used, "text/hub.py", "if TYPE_CHECKING:\n    pass\nelse:\n    import matplotlib"),
    (nothing_read_is_executed, "golf/artifact.py", "import pickle"),
    (nothing_read_is_executed, "golf/artifact.py", "import torch\ntorch.load('x')"),
    (nothing_read_is_executed, "golf/artifact.py", "from torch import load"),
    (nothing_read_is_executed, "golf/artifact.py", "eval('1')"),
    (nothing_read_is_executed, "golf/artifact.py", "np.load('x', allow_pickle=True)"),
    (nothing_read_is_executed, "golf/artifact.py", "subprocess.run('ls', shell=True)"),
    (only_the_metric_knows_ln2, "golf/evaluate.py", "x = loss / math.log(2)"),
    (only_the_metric_knows_ln2, "golf/evaluate.py", "x = loss / np.log(2.0)"),
    (only_the_metric_knows_ln2, "golf/evaluate.py", "x = loss / LN2"),
    (only_the_metric_knows_ln2, "golf/evaluate.py", "x = loss / 0.6931"),
    (only_the_metric_knows_ln2, "golf/evaluate.py", "x = loss * 1.442695"),
    (files_are_short_and_named_by_their_noun, "golf/model.py", "x = 1\n" * 501),
    (files_are_short_and_named_by_their_noun, "golf/utils.py", ""),
    (files_are_short_and_named_by_their_noun, "common/model.py", ""),
    (errors_are_named, "golf/model.py", "try:\n    x = 1\nexcept:\n    pass"),
]
HOLDS: list[tuple[Rule, str, str]] = [
    (
        folders_import_downwards,
        "golf/session.py",
        "from bitsperbyte.records.store import x\nfrom bitsperbyte import __version__",
    ),
    (folders_import_downwards, "randopt/engines/golf.py", "from bitsperbyte.golf.model import GolfModel"),
    (light_folders_never_load_torch, "cli/golf.py", "def f():\n    from bitsperbyte.golf.session import train"),
    (bundled_modules_need_little, "golf/codecs.py", "import zlib\ndef f():\n    import zstandard"),
    (bundled_modules_need_little, "golf/evaluate.py", "import torch\nfrom bitsperbyte.metric.bpb import Score"),
    (heavy_packages_are_imported_where_used, "text/hub.py", "if TYPE_CHECKING:\n    from matplotlib.axes import Axes"),
    (pydantic_stays_at_the_edge, "golf/config.py", "from pydantic import BaseModel"),
    (nothing_read_is_executed, "golf/train.py", "model.eval()\ntorch.compile(model)\nnp.load('x', allow_pickle=False)"),
    (only_the_metric_knows_ln2, "metric/bpb.py", "x = loss / math.log(2)"),
    (only_the_metric_knows_ln2, "golf/evaluate.py", "x = math.log(20)"),
    (files_are_short_and_named_by_their_noun, "golf/model.py", "x = 1\n" * 500),
    (errors_are_named, "golf/model.py", "try:\n    x = 1\nexcept ValueError:\n    pass"),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_module_keeps_the_rule(rule: Rule) -> None:
    assert len(MODULES) > 20
    broken = [
        f"{path} {found}" for path in MODULES for found in rule(path, (PACKAGE / path).read_text(encoding="utf-8"))
    ]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(("rule", "path", "source"), BREAKS)
def test_the_rule_sees_what_breaks_it(rule: Rule, path: str, source: str) -> None:
    assert list(rule(path, source))


@pytest.mark.parametrize(("rule", "path", "source"), HOLDS)
def test_the_rule_lets_the_allowed_pass(rule: Rule, path: str, source: str) -> None:
    assert not list(rule(path, source))


def test_every_rule_is_shown_able_to_fail() -> None:
    assert {rule for rule, _, _ in BREAKS} == set(RULES)


def test_the_bundle_names_modules_that_exist() -> None:
    assert set(BUNDLED_MODULES) <= set(MODULES)
    named = {"submission", "step", "model", "muon", "schedule", "clock", "quantize", "artifact", "evaluate"}
    assert {f"golf/{name}.py" for name in named} <= set(BUNDLED_MODULES)


def reached(source: str, read: Callable[[str], str]) -> set[str]:
    """The package's modules that a source imports, directly or through others; `read` gives a module's source."""
    found: set[str] = set()
    waiting = [source]
    while waiting:
        new = {used.target for used in imports(waiting.pop()) if used.target} - found
        found |= new
        waiting += [read(module) for module in new]
    return found


def untested(
    modules: list[str], tests: dict[str, str], tested_in: dict[str, str], read: Callable[[str], str]
) -> list[str]:
    """Modules without a test file of their name in the folder of their name; `tests` maps path to text."""
    missing = []
    for module in modules:
        path = Path(module)
        own = (path.parent / f"test_{path.name}").as_posix()
        if path.name == "__init__.py" or own in tests:
            continue
        if module not in reached(tests.get(tested_in.get(module, ""), ""), read):
            missing.append(module)
    return missing


def test_modules_without_a_test_are_found() -> None:
    sources = {"golf/quantize.py": "from bitsperbyte.golf.codecs import x", "golf/codecs.py": "", "golf/model.py": ""}
    tests = {"golf/test_quantize.py": "from bitsperbyte.golf import quantize"}
    lack = ["golf/codecs.py", "golf/model.py"]
    assert untested(list(sources), tests, {}, sources.__getitem__) == lack
    tested_in = dict.fromkeys(lack, "golf/test_quantize.py")
    assert untested(list(sources), tests, tested_in, sources.__getitem__) == ["golf/model.py"]
    assert untested(list(sources), tests, dict.fromkeys(lack, "gone.py"), sources.__getitem__) == lack


def test_every_module_has_a_test_file_of_its_name() -> None:
    files = (REPO / "tests").rglob("test_*.py")
    tests = {p.relative_to(REPO / "tests").as_posix(): p.read_text(encoding="utf-8") for p in files}
    assert set(TESTED_IN) <= set(MODULES), "TESTED_IN names a module that is gone"
    missing = untested(MODULES, tests, TESTED_IN, lambda module: (PACKAGE / module).read_text(encoding="utf-8"))
    assert not missing, f"no test file for {', '.join(missing)}"


IMPORT_ALL = """
import importlib, json, os, pathlib, signal, subprocess, sys, threading
handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
names = json.loads(sys.argv[1])
for name in names:
    importlib.import_module(name)
import psutil
assert threading.active_count() == 1, threading.enumerate()
assert not psutil.Process().children(), psutil.Process().children()
assert handlers == {n: signal.getsignal(n) for n in handlers}, "a signal handler was set"
assert not any(c.status == "LISTEN" for c in psutil.Process().net_connections()), "something listens"
if "torch" in sys.modules:
    import torch
    assert not torch.cuda.is_initialized() and not torch.distributed.is_initialized()
print(len(names))
"""


def run_python(code: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    environment = {**os.environ, "HOME": str(cwd), "PYTHONPATH": str(REPO / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    environment = {k: v for k, v in environment.items() if not k.startswith("XDG_")}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=cwd, env=environment, capture_output=True, text=True
    )


def test_importing_every_module_starts_nothing_and_writes_nothing(tmp_path: Path) -> None:
    names = [
        "bitsperbyte." + m.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        for m in MODULES
        if m != "__init__.py"
    ]
    done = run_python(IMPORT_ALL, json.dumps(names), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(len(names)) and not done.stderr
    assert not list(tmp_path.rglob("*"))


def test_help_is_quick_because_it_loads_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom bitsperbyte.__main__ import guarded, run_command\n"
        "code = guarded(lambda: run_command(['--help']))\n"
        "heavy = {'torch', 'scipy', 'pyarrow', 'huggingface_hub', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\nsys.exit(code)"
    )
    done = run_python(code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "golf" in done.stdout and "records" in done.stdout
