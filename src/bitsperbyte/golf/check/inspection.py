"""What the code of a submission is and reaches, read without running any of it.

Self-extracting scripts are decoded by evaluating the few expressions they are made of (literals, base64 and its kin, zlib, lzma, bz2,
brotli, zstd) with bounded output, and what comes out is inspected as well. What only running would show is said, not guessed.
"""

import ast
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bitsperbyte.golf.check.literals import CannotEvaluate, Evaluator, is_decoder

MAX_LAYERS = 64  # one inside the other or beside each other
MAX_LOCAL_FILES = 200
SPEAKS_TO_THE_NETWORK = frozenset(
    "socket ssl http urllib urllib2 urllib3 requests httpx aiohttp ftplib smtplib poplib imaplib nntplib telnetlib xmlrpc socketserver "
    "websocket websockets paramiko pycurl gdown wget boto3 botocore s3fs gcsfs huggingface_hub datasets modelscope kagglehub kernels wandb "
    "webbrowser grpc zmq".split())
HARMLESS_PARTS = ("urllib.parse", "urllib.error", "http.HTTPStatus")
DOWNLOADS = frozenset("hf_hub_download snapshot_download load_dataset load_state_dict_from_url download_url_to_file urlopen urlretrieve "
                      "from_pretrained get_encoding encoding_for_model".split())
STARTS_PROCESSES = re.compile(r"(os\.(system|popen|exec\w+|spawn\w+|posix_spawnp?)|subprocess\.(run|Popen|call|check_call|check_output|"
                              r"getoutput|getstatusoutput)|pty\.spawn|asyncio\.create_subprocess_(exec|shell))")
NETWORK_PROGRAMS = frozenset("curl wget aria2c pip pip3 pipx uv conda mamba apt apt-get git ssh scp sftp rsync ftp nc ncat netcat telnet aws "
                             "gsutil gcloud azcopy rclone kaggle hf huggingface-cli docker podman npm".split())
RUNS_TEXT = frozenset({"exec", "eval", "compile", "builtins.exec", "builtins.eval", "builtins.compile", "__builtins__.exec",
                       "__builtins__.eval", "__builtins__.compile"})
NATIVE = ("torch.utils.cpp_extension.", "ctypes.CDLL", "ctypes.cdll.", "ctypes.PyDLL", "cffi.", "marshal.loads")
IMPORTERS = frozenset({"__import__", "importlib.import_module"})


@dataclass(frozen=True)
class Layer:
    """One text of code: a file, or what a literal of another layer decodes to."""

    name: str
    source: str


@dataclass(frozen=True)
class Used:
    """An imported package, by its top-level name; `optional` where a failing import is caught, `is_local` where a dot before its name
    says that it lies in the folder."""

    package: str
    where: str
    optional: bool
    is_local: bool = False


@dataclass
class Inspection:
    """`network`: what can reach the network, each with its place. `unseen`: what could not be read. `broken`: what does not parse.
    `local_files`: further files of the folder that the code imports; they count as code."""

    layers: list[Layer] = field(default_factory=list)
    network: list[str] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    imports: list[Used] = field(default_factory=list)
    local_files: list[Path] = field(default_factory=list)

    def mentions(self, text: str) -> bool:
        """Whether any layer holds `text`."""
        return any(text in layer.source for layer in self.layers)


def inspect_code(script: Path, source: str) -> Inspection:
    """Inspect the script (its text is `source`), what it decodes to, and the files of its folder that it imports. Nothing is run; a
    text that does not parse is listed in `broken`."""
    found = Inspection()
    waiting = [Layer(script.name, source)]
    seen_files, seen_texts = {script.resolve()}, {source}
    while waiting and len(found.layers) < MAX_LAYERS + len(found.local_files):
        layer = waiting.pop(0)
        found.layers.append(layer)
        tree = _parse(layer, found)
        if tree is None:
            continue
        for inner in _inspect_layer(layer, tree, found):
            if inner.source not in seen_texts:
                seen_texts.add(inner.source)
                waiting.append(inner)
        for package in {used.package for used in found.imports}:
            for path in _local_files(script.parent, package):
                if path.resolve() in seen_files or len(found.local_files) >= MAX_LOCAL_FILES:
                    continue
                seen_files.add(path.resolve())
                found.local_files.append(path)
                waiting.append(Layer(path.relative_to(script.parent).as_posix(), path.read_text(encoding="utf-8", errors="replace")))
    found.unseen += [f"{layer.name}: too many layers of code, this one was not opened" for layer in waiting]
    found.local_files.sort()
    return found


def _parse(layer: Layer, found: Inspection) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in a stranger's strings are no concern of ours
            return ast.parse(layer.source)
    except SyntaxError as error:
        found.broken.append(f"{layer.name} line {error.lineno}: {error.msg}")
    except (ValueError, RecursionError, MemoryError) as error:
        found.broken.append(f"{layer.name}: {type(error).__name__}: {error}")
    return None


def _local_files(folder: Path, package: str) -> list[Path]:
    """The folder's own files behind `import package`: a module, or every module of a package. Links are not followed."""
    module, directory = folder / f"{package}.py", folder / package
    if module.is_file() and not module.is_symlink():
        return [module]
    if directory.is_dir() and not directory.is_symlink():
        return sorted(path for path in directory.rglob("*.py") if path.is_file() and not path.is_symlink())[:MAX_LOCAL_FILES]
    return []


def _inspect_layer(layer: Layer, tree: ast.Module, found: Inspection) -> list[Layer]:
    """Fill `found` with what the layer does; the layers it decodes to."""
    evaluator = Evaluator(tree)
    optional = _optional_nodes(tree)
    inner: list[Layer] = []
    inside: set[int] = set()  # nodes below an expression that was decoded as a whole
    for node in ast.walk(tree):
        where = f"{layer.name} line {getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            for alias in node.names:
                _note_import(alias.name, where, node in optional, found)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            for alias in node.names:
                _note_import(f"{node.module}.{alias.name}", where, node in optional, found)
        elif isinstance(node, ast.ImportFrom):  # from .module import name, or from . import module
            for alias in node.names:
                found.imports.append(Used((node.module or alias.name).partition(".")[0], where, node in optional, is_local=True))
        elif isinstance(node, ast.Call) and id(node) not in inside:
            text = _decoded(node, evaluator, where, found)
            if text is not None:
                inner.append(Layer(f"{layer.name}, decoded at line {node.lineno}", text))
                inside.update(id(part) for part in ast.walk(node))
            else:
                _note_call(node, evaluator, where, node in optional, found)
    return inner


def _decoded(call: ast.Call, evaluator: Evaluator, where: str, found: Inspection) -> str | None:
    """The code that an exec, or a decoder outside of one, stands for; None where the call is neither or cannot be decoded."""
    name = evaluator.dotted(call.func)
    runs_text = name in RUNS_TEXT
    if not runs_text and not is_decoder(name):
        return None
    if runs_text and not call.args:
        return None
    target: ast.expr = call
    while runs_text and isinstance(target, ast.Call) and evaluator.dotted(target.func) in RUNS_TEXT and target.args:
        target = target.args[0]  # exec(compile(text, ...))
    try:
        value = evaluator.value(target)
    except CannotEvaluate as error:
        if runs_text:
            found.unseen.append(f"{where} runs text that cannot be decoded without running it ({error})")
        return None
    text = value.decode("utf-8", errors="replace") if isinstance(value, bytes) else value
    if not isinstance(text, str) or (not runs_text and not _looks_like_code(text)):
        return None
    return text


def _looks_like_code(text: str) -> bool:
    return re.search(r"^\s*(import |from \w[\w.]* import |def |class )", text, re.MULTILINE) is not None


def _optional_nodes(tree: ast.Module) -> set[ast.AST]:
    """Nodes in the body of a try whose handlers catch a failing import."""
    found: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Try) and any(_catches_imports(handler) for handler in node.handlers):
            found.update(part for statement in node.body for part in ast.walk(statement))
    return found


def _catches_imports(handler: ast.ExceptHandler) -> bool:
    caught = {"BaseException"} if handler.type is None else {part.id for part in ast.walk(handler.type) if isinstance(part, ast.Name)}
    return bool(caught & {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"})


def _note_import(dotted: str, where: str, optional: bool, found: Inspection) -> None:
    package = dotted.partition(".")[0]
    found.imports.append(Used(package, where, optional))
    if (package in SPEAKS_TO_THE_NETWORK and not dotted.startswith(HARMLESS_PARTS)) or dotted.startswith("torch.hub"):
        found.network.append(f"{where} imports {dotted.removesuffix('.*')}")
    elif dotted.rpartition(".")[2] in DOWNLOADS:
        found.network.append(f"{where} imports {dotted}")


def _note_call(call: ast.Call, evaluator: Evaluator, where: str, optional: bool, found: Inspection) -> None:
    name = evaluator.dotted(call.func)
    last = name.rpartition(".")[2] if name else call.func.attr if isinstance(call.func, ast.Attribute) else ""
    if name in IMPORTERS:
        _note_dynamic_import(call, evaluator, where, optional, found)
    elif name and (name.startswith("torch.hub.") or name.startswith("torch.utils.model_zoo.")):
        found.network.append(f"{where} calls {name}")
    elif last in DOWNLOADS and not _only_local(call):
        found.network.append(f"{where} calls {name or last}")
    elif name and STARTS_PROCESSES.fullmatch(name):
        words = list(_words(call, evaluator))
        programs = sorted({Path(word).name for word in words} & NETWORK_PROGRAMS)
        if programs:
            found.network.append(f"{where} starts {', '.join(programs)} ({name})")
        elif not words:
            found.unseen.append(f"{where} starts a process whose command is computed ({name})")
    elif name and name.startswith(NATIVE) and not (name == "ctypes.CDLL" and not call.args):
        found.unseen.append(f"{where} loads code that is not Python ({name})")


def _note_dynamic_import(call: ast.Call, evaluator: Evaluator, where: str, optional: bool, found: Inspection) -> None:
    try:
        name = evaluator.value(call.args[0]) if call.args else None
    except CannotEvaluate:
        name = None
    if isinstance(name, str) and name:
        _note_import(name, where, optional, found)
    else:
        found.unseen.append(f"{where} imports a module whose name is computed")


def _only_local(call: ast.Call) -> bool:
    return any(k.arg == "local_files_only" and isinstance(k.value, ast.Constant) and k.value.value is True for k in call.keywords)


def _words(call: ast.Call, evaluator: Evaluator) -> Iterator[str]:
    """Words of the literal strings in a call's arguments, names followed to what was assigned to them."""
    waiting: list[ast.AST] = [*call.args, *(k.value for k in call.keywords if k.arg in (None, "args"))]
    followed: set[str] = set()
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
            text = node.value.decode("latin-1") if isinstance(node.value, bytes) else node.value
            yield from re.split(r"[\s;|&()'\"]+", text.strip())
        elif isinstance(node, ast.Name) and node.id not in followed:
            followed.add(node.id)
            waiting += evaluator.assigned(node.id)
        elif isinstance(node, ast.Subscript):
            waiting.append(node.value)  # the key names a variable of the environment or a place, and is no word of the command
            continue
        elif isinstance(node, ast.Call) and evaluator.dotted(node.func) in ("os.environ.get", "os.getenv"):
            continue
        waiting += ast.iter_child_nodes(node)
