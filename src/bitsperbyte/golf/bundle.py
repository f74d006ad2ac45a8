"""The one script of a submission: the bundled modules flattened into a single file, in three forms of the same program.

    plain       the sources as written, comments included, in the order of their imports
    minified    without comments, docstrings and annotations that nothing reads; one space of indentation
    compressed  the minified text in lzma and base85, which unpacks and executes itself

Flattening is by parsing, never by running. What the program cannot reach from its entry is left out, whole definitions at a time.
Every name stands for one thing in the whole file, which is asserted and not assumed: two modules that define the same name, an
import that means different things, or a module that uses a name which another module defines by accident are refused.
"""

import ast
import base64
import builtins
import dataclasses
import functools
import hashlib
import lzma
import symtable
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

from bitsperbyte.golf.config import GolfConfig
from bitsperbyte.golf.evaluate import Protocol
from bitsperbyte.golf.ledger import BUNDLED_MODULES
from bitsperbyte.golf.submission import SubmissionConfig

PACKAGE = "bitsperbyte"
ENTRY = "main"  # of golf/submission.py
FORMS = ("plain", "minified", "compressed")  # the most readable first
CODEC_PACKAGES = {"zstd": "zstandard", "brotli": "brotli>=1.2"}  # what a codec needs beside the standard library
OLDEST_PYTHON = "3.11"  # that the sources are written for
LINE_WIDTH = 120
# The smallest of lzma's containers. lc, lp and pb fit text; the dictionary only has to hold the script.
LZMA_CHAIN = [{"id": lzma.FILTER_LZMA1, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 1 << 20, "lc": 3, "lp": 0, "pb": 0}]


@dataclass(frozen=True)
class Piece:
    """One top-level statement of a module: the names that it binds and those that it reads, and its text with the comments before."""

    module: str
    node: ast.stmt
    text: str
    binds: frozenset[str]
    reads: frozenset[str]


@dataclass(frozen=True)
class Imported:
    """What one name of an import stands for: `import module [as name]`, or `from module import attribute [as name]`."""

    module: str
    attribute: str | None
    name: str

    def statement(self) -> str:
        if self.attribute is None:
            return f"import {self.module}" + (f" as {self.name}" if self.name != self.module.partition(".")[0] else "")
        return f"from {self.module} import {self.attribute}" + (f" as {self.name}" if self.name != self.attribute else "")


@dataclass(frozen=True)
class Module:
    path: str
    doc: str
    pieces: tuple[Piece, ...]
    imported: tuple[Imported, ...]
    uses: tuple[tuple[str, str], ...]  # (module, name) of the package


@dataclass(frozen=True)
class Script:
    """The script in one form."""

    form: str
    text: str

    @property
    def num_bytes(self) -> int:
        return len(self.text.encode())

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


def script_config(config: GolfConfig, *, tokenizer_file: str, tokenizer_sha256: str, val_sha256: str) -> SubmissionConfig:
    """The settings of a run as its script holds them. A data path of this machine is of no use elsewhere: only its last part stays."""
    path = Path(config.data.path)
    return SubmissionConfig(
        name=config.name, model=config.model_dataclass(), optim=config.optim_dataclass(), schedule=config.schedule_dataclass(),
        batch=config.batch_dataclass(),
        protocol=Protocol(config.eval.window or config.train.seq_len, config.eval.stride, config.eval.documents, config.eval.drop_tail),
        eval_batch_tokens=config.eval.batch_tokens, eval_every_steps=config.eval.every_steps, eval_max_tokens=config.eval.max_tokens,
        log_every=config.train.log_every, scheme=config.artifact.scheme, codec=config.artifact.codec,
        cap_bytes=config.artifact.cap_bytes, device=config.train.device,
        data_path=f"data/{path.name}" if path.is_absolute() or ".." in path.parts else path.as_posix(),
        tokenizer_file=tokenizer_file, tokenizer_sha256=tokenizer_sha256, val_sha256=val_sha256)


def choose_script(config: SubmissionConfig, form: str, room_bytes: int) -> Script:
    """The script in that form; `auto` takes the most readable one of at most `room_bytes` bytes, or else the smallest."""
    if form != "auto":
        return bundle(config, form)
    for name in FORMS:
        script = bundle(config, name)
        if script.num_bytes <= room_bytes:
            break
    return script


@functools.lru_cache(maxsize=16)
def bundle(config: SubmissionConfig, form: str) -> Script:
    """The script of `config` in one of FORMS; equal settings and sources give equal bytes. ValueError for another form."""
    if form not in FORMS:
        raise ValueError(f"there is no form {form!r} of the script: choose one of {', '.join(FORMS)}, or auto")
    if form == "plain":
        text = flatten(package_modules(), config)
    elif form == "minified":
        text = minify(bundle(config, "plain").text)
    else:
        text = compress(bundle(config, "minified").text)
    return Script(form, text)


# -- reading the modules ------------------------------------------------------------------------------------------------


@functools.cache
def package_modules() -> tuple[Module, ...]:
    """The bundled modules, each after those that it imports."""
    package = Path(__file__).resolve().parents[1]
    sources = {}
    for path in BUNDLED_MODULES:
        if not (package / path).is_file():
            raise ValueError(f"the module {path} is not in {package}, so there is no script to make of it: install the package again")
        sources[path] = (package / path).read_text(encoding="utf-8")
    return in_order(read_module(path, source) for path, source in sources.items())


def read_module(path: str, source: str) -> Module:
    """Cut a module into pieces. AssertionError for what flattening cannot keep the meaning of."""
    tree, lines = ast.parse(source), source.splitlines()
    doc = ast.get_docstring(tree) or ""
    pieces: list[Piece] = []
    imported: list[Imported] = []
    uses: list[tuple[str, str]] = []
    end = 0  # lines before this one belong to earlier statements
    for node in tree.body:
        decorators = getattr(node, "decorator_list", [])
        begin = min([node.lineno, *(d.lineno for d in decorators)]) - 1
        before, end = (end, node.end_lineno or 0)
        if isinstance(node, ast.Import | ast.ImportFrom):
            _read_import(path, node, imported, uses)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign):
            text = "\n".join(lines[_with_comments(lines, begin, before) : end])
            pieces.append(Piece(path, node, text, frozenset(_bound(node)), frozenset(_read(node))))
        else:
            is_doc = node is tree.body[0] and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            assert is_doc, f"{path} line {node.lineno}: a top-level {type(node).__name__} cannot be flattened"
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and node not in tree.body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            assert not any(name.partition(".")[0] == PACKAGE for name in names), (
                f"{path} line {node.lineno}: imports the package inside a function")
    bound = [name for piece in pieces for name in piece.binds]
    twice = {name for name in bound if bound.count(name) > 1}
    assert not twice, f"{path}: binds {sorted(twice)} more than once"
    module = Module(path, doc, tuple(pieces), tuple(imported), tuple(uses))
    known = {name for piece in pieces for name in piece.binds} | {i.name for i in imported} | {name for _, name in uses}
    unknown = global_names(source, path) - known - set(dir(builtins)) - {"__file__", "__name__"}
    assert not unknown, f"{path}: uses {sorted(unknown)}, which it neither defines nor imports"
    return module


def _read_import(path: str, node: ast.Import | ast.ImportFrom, imported: list[Imported], uses: list[tuple[str, str]]) -> None:
    for alias in node.names:
        if isinstance(node, ast.Import):
            assert alias.name.partition(".")[0] != PACKAGE, f"{path} line {node.lineno}: import names out of {alias.name}"
            assert alias.asname or "." not in alias.name, f"{path} line {node.lineno}: import {alias.name} needs a name of its own"
            imported.append(Imported(alias.name, None, alias.asname or alias.name))
            continue
        assert node.level == 0 and node.module and alias.name != "*", f"{path} line {node.lineno}: name what is imported, from where"
        if node.module == "__future__":
            continue  # annotations alone are used, and hoisted for the whole file
        if node.module.partition(".")[0] == PACKAGE:
            assert alias.asname in (None, alias.name), f"{path} line {node.lineno}: {alias.name} would have two names in one file"
            uses.append((node.module.partition(".")[2].replace(".", "/") + ".py", alias.name))
        else:
            imported.append(Imported(node.module, alias.name, alias.asname or alias.name))


def _with_comments(lines: list[str], begin: int, before: int) -> int:
    """The line where the comments directly above line `begin` start."""
    while begin > before and lines[begin - 1].startswith("#"):
        begin -= 1
    return begin


def _bound(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    else:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        for target in targets:
            yield from (n.id for n in ast.walk(target) if isinstance(n, ast.Name))


def _read(node: ast.AST) -> Iterator[str]:
    """Every name in the statement, local ones included: too many keep a definition too many and never miss one."""
    yield from (n.id for n in ast.walk(node) if isinstance(n, ast.Name))


def global_names(source: str, path: str) -> set[str]:
    """Names that a module's code looks up in its globals, as Python's own symbol table says; at its top level only those that it does
    not assign."""
    found: set[str] = set()

    def visit(table: symtable.SymbolTable) -> None:
        at_top = table.get_type() == "module"
        for symbol in table.get_symbols():  # what the module itself assigns is bound; from Python 3.12 on also what a comprehension does
            if symbol.is_referenced() and (not symbol.is_assigned() if at_top else symbol.is_global()):
                found.add(symbol.get_name())
        for child in table.get_children():
            visit(child)

    visit(symtable.symtable(source, path, "exec"))
    return found


def in_order(modules: Iterable[Module]) -> tuple[Module, ...]:
    """Each module after those that it imports, otherwise by name; AssertionError for a name that is not one thing."""
    by_path = {module.path: module for module in modules}
    for module in by_path.values():
        for path, name in module.uses:
            assert path in by_path, f"{module.path} imports {name} from {path}, which is not bundled"
            assert any(name in piece.binds for piece in by_path[path].pieces), f"{module.path} imports {name}, not defined in {path}"
    _refuse_clashes(by_path.values())
    sorter = TopologicalSorter({path: sorted({used for used, _ in by_path[path].uses}) for path in sorted(by_path)})
    return tuple(by_path[path] for path in sorter.static_order())


def _refuse_clashes(modules: Iterable[Module]) -> None:
    meaning: dict[str, str] = {name: "a builtin" for name in dir(builtins)}
    for module in modules:
        own = [(name, f"defined in {module.path}") for name in dict.fromkeys(n for piece in module.pieces for n in sorted(piece.binds))]
        for name, what in own + [(i.name, i.statement()) for i in module.imported]:
            assert meaning.setdefault(name, what) == what, (
                f"{module.path}: the name {name} ({what}) stands for something else in the script ({meaning[name]}): rename one of them")


# -- the plain form -----------------------------------------------------------------------------------------------------


def flatten(modules: tuple[Module, ...], config: SubmissionConfig) -> str:
    """The plain form: every reached definition as written, the settings, and the call of the entry."""
    pieces = {module.path: [_for_codec(piece, config.codec) for piece in module.pieces] for module in modules}
    settings = f"CONFIG = {literal(config)}"
    roots = {ENTRY, *_read(ast.parse(settings))}
    kept = reached([piece for group in pieces.values() for piece in group], roots)
    names = {name for piece in kept for name in piece.reads}
    imported = sorted({i.statement() for module in modules for i in module.imported if i.name in names},
                      key=lambda line: (line.startswith("from"), line))
    packages = ["numpy", "sentencepiece", "torch"]
    ours = [line for line in imported if line.split()[1].partition(".")[0] in packages]
    parts = [_banner(config), "from __future__ import annotations",
             "\n".join(line for line in _joined(imported) if line.split()[1].partition(".")[0] not in packages), "\n".join(_joined(ours))]
    for module in modules:
        texts = [piece for piece in pieces[module.path] if piece in kept]
        if texts:
            parts.append("\n" + _comment(f"==== {module.path} " + "=" * (LINE_WIDTH - len(module.path) - 8)) + "\n" + _comment(module.doc))
            parts += [("\n" if isinstance(p.node, ast.FunctionDef | ast.ClassDef) else "") + p.text for p in texts]
    parts += ["\n" + _comment("==== settings of the run " + "=" * (LINE_WIDTH - 27)), settings,
              f'if __name__ == "__main__":\n    raise SystemExit({ENTRY}(CONFIG))']
    text = "\n\n".join(parts) + "\n"
    assert not (lost := _unbound(text)), f"the script lacks {sorted(lost)}"
    return text


def _unbound(text: str) -> set[str]:
    """Globals that a script reads and never binds."""
    tree = ast.parse(text)
    bound = {name for node in tree.body for name in _bound(node)}
    bound |= {(a.asname or a.name).partition(".")[0] for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom) for a in node.names}
    return global_names(text, "train_gpt.py") - bound - set(dir(builtins)) - {"__file__", "__name__"}


def reached(pieces: list[Piece], roots: set[str]) -> list[Piece]:
    """The pieces that the names in `roots` need, directly or through others, in their order."""
    by_name = {name: piece for piece in pieces for name in piece.binds}
    waiting, seen = [name for name in roots if name in by_name], set()
    kept: set[int] = set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        kept.add(id(by_name[name]))
        waiting += [other for other in by_name[name].reads | by_name[name].binds if other in by_name]
    return [piece for piece in pieces if id(piece) in kept]


def _for_codec(piece: Piece, codec: str) -> Piece:
    """CODECS with the run's own codec and zlib, in which the header is stored: so a script imports only what its run needs."""
    node = piece.node
    if piece.binds != {"CODECS"} or not isinstance(node, ast.AnnAssign) or not isinstance(node.value, ast.Dict):
        return piece
    rows = [(k, v) for k, v in zip(node.value.keys, node.value.values, strict=True) if isinstance(k, ast.Constant) and k.value in ("zlib", codec)]
    assert len(rows) == len({"zlib", codec}), f"the codecs of {piece.module} do not hold {codec}"
    body = "".join(f"    {ast.unparse(k)}: {ast.unparse(v)},\n" for k, v in rows if k)
    text = f"CODECS: {ast.unparse(node.annotation)} = {{\n{body}}}"
    return Piece(piece.module, ast.parse(text).body[0], text, piece.binds, frozenset(_read(ast.parse(text))))


def literal(value: Any, indent: str = "") -> str:
    """A frozen dataclass of plain values as Python that makes an equal one."""
    if not dataclasses.is_dataclass(value):
        assert value is None or isinstance(value, bool | int | float | str | tuple), f"a setting is a {type(value).__name__}"
        return repr(value)
    inner = indent + "    "
    rows = [f"{inner}{field.name}={literal(getattr(value, field.name), inner)}," for field in dataclasses.fields(value)]
    return "\n".join([f"{type(value).__name__}(", *rows, f"{indent})"])


def _banner(config: SubmissionConfig) -> str:
    extra = [CODEC_PACKAGES[config.codec]] if config.codec in CODEC_PACKAGES else []
    packages = [f"Python {OLDEST_PYTHON} or later", "numpy", "torch", "sentencepiece", *extra]
    return (f"# {config.name}: a golf submission, flattened from the modules of bitsperbyte. It needs {', '.join(packages)} and nothing else.\n"
            "# Train, pack, read back and score: DATA_PATH=... SEED=... torchrun --standalone --nproc-per-node=8 train_gpt.py\n"
            "# Score alone:                     DATA_PATH=... python train_gpt.py --eval-only artifact.bpb")


def _comment(text: str) -> str:
    return "\n".join(f"# {line}".rstrip() for line in text.splitlines())


def _joined(statements: list[str]) -> list[str]:
    """`from m import a` and `from m import b` as one line."""
    joined: dict[str, str] = {}
    for line in statements:
        head, mark, name = line.partition(" import ")
        if mark and head in joined:
            joined[head] += f", {name}"
        else:
            joined[head if mark else line] = line
    return list(joined.values())


# -- the minified form --------------------------------------------------------------------------------------------------


class _Minifier(ast.NodeTransformer):
    """Drops docstrings, and annotations outside class bodies: within one, a dataclass or a named tuple reads them."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        a = node.args
        for argument in [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]:
            argument.annotation = None
        self._drop_doc(node)
        node.body = [kept for child in node.body for kept in self._statement(child)] or [ast.Pass()]
        node.decorator_list = [self.visit(d) for d in node.decorator_list]
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self._drop_doc(node)
        node.body = [child if isinstance(child, ast.AnnAssign) else self.visit(child) for child in node.body] or [ast.Pass()]
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is None:
            return node
        return ast.copy_location(ast.Assign([node.target], node.value), node)

    def _statement(self, node: ast.stmt) -> list[ast.stmt]:
        return [self.visit(node)]

    @staticmethod
    def _drop_doc(node: ast.FunctionDef | ast.ClassDef) -> None:
        if ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]


def minify(text: str) -> str:
    """The same program without what a computer does not read. The comment at its top stays."""
    # The text is written anew by this Python, which may use a syntax of f-strings that only it and later ones read.
    python = f"Python {sys.version_info.major}.{sys.version_info.minor} or later"
    banner = text[: text.index("\n\n")].replace(f"Python {OLDEST_PYTHON} or later", python)
    tree = ast.fix_missing_locations(_Minifier().visit(ast.parse(text)))
    pieces = [Piece("", node, "", frozenset(_bound(node)), frozenset(_read(node))) for node in tree.body]
    kept = {id(piece.node) for piece in reached(pieces, {ENTRY, "CONFIG"})}
    names = {name for piece in pieces if id(piece.node) in kept for name in piece.reads}
    body = []
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom) and getattr(node, "module", "") != "__future__":
            node.names = [a for a in node.names if (a.asname or a.name) in names]
            if not node.names:
                continue
        elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign) and id(node) not in kept:
            continue
        body.append(node)
    tree.body = body
    lines = [line for line in ast.unparse(tree).splitlines() if line.strip()]
    small = "\n".join(" " * ((len(line) - len(line.lstrip(" "))) // 4) + line.lstrip(" ") for line in lines) + "\n"
    assert ast.dump(ast.parse(small)) == ast.dump(ast.parse(ast.unparse(tree))), "a line of the script is not what its indentation says"
    assert not (lost := _unbound(small)), f"the minified script lacks {sorted(lost)}"
    return f"{banner}\n{small}"


# -- the compressed form ------------------------------------------------------------------------------------------------


def compress(text: str) -> str:
    """A script that unpacks `text`, keeps it as SOURCE, and executes it."""
    packed = base64.b85encode(lzma.compress(text.encode(), format=lzma.FORMAT_ALONE, filters=LZMA_CHAIN)).decode()
    banner = text[: text.index("\n", text.index("\n", text.index("\n") + 1) + 1)]
    return (f"{banner}\n# Its source is in SOURCE: python -c \"import runpy; print(runpy.run_path('train_gpt.py')['SOURCE'])\"\n"
            f"import base64, lzma\nSOURCE = lzma.decompress(base64.b85decode(\"{packed}\")).decode()\n"
            'exec(compile(SOURCE, __file__, "exec"))\n')
