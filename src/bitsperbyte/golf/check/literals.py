"""Values of the expressions that self-extracting scripts are made of, found without running them.

Only literals, their concatenation and slices, and a fixed list of decoders are evaluated, each with bounded output and memory; anything
else is CannotEvaluate.
"""

import ast
import base64
import binascii
import bz2
import lzma
import zlib
from collections.abc import Callable
from typing import Any

MAX_BYTES = 1 << 24  # of any value: as much as a whole submission may hold
MAX_ALL_BYTES = 1 << 28  # of all values of one module together
MAX_DICTIONARY_BYTES = 1 << 26  # of an lzma decoder
MAX_DEPTH = 100
LZMA_NAMES = ("FORMAT_", "FILTER_", "CHECK_", "MODE_", "MF_", "PRESET_")
TEXT_METHODS = frozenset({"decode", "encode", "join", "replace", "strip", "lstrip", "rstrip"})


class CannotEvaluate(ValueError):
    """An expression outside the few that are known, or one whose decoder refuses its input."""


def _bounded(decoder: Any, data: bytes) -> bytes:
    """Output of a decompressor object that takes a limit; what does not end within MAX_BYTES is refused."""
    out = decoder.decompress(data, MAX_BYTES + 1)
    if len(out) > MAX_BYTES:
        raise CannotEvaluate(f"it decompresses to more than {MAX_BYTES:,} bytes")
    if not decoder.eof:
        raise CannotEvaluate("its compressed data end too early")
    return out


def _unzlib(data: bytes, wbits: int = zlib.MAX_WBITS, bufsize: int = 0) -> bytes:
    return _bounded(zlib.decompressobj(wbits), data)


def _ungzip(data: bytes) -> bytes:
    return _unzlib(data, 16 + zlib.MAX_WBITS)


def _unbz2(data: bytes) -> bytes:
    return _bounded(bz2.BZ2Decompressor(), data)


def _unlzma(data: bytes, format: int = lzma.FORMAT_AUTO, memlimit: int | None = None, filters: list[dict] | None = None) -> bytes:
    if format != lzma.FORMAT_RAW:
        return _bounded(lzma.LZMADecompressor(format, memlimit=2 * MAX_DICTIONARY_BYTES), data)
    chain = [dict(part) for part in filters or []]
    if any(part.get("dict_size", 0) > MAX_DICTIONARY_BYTES for part in chain):
        raise CannotEvaluate(f"its decoder wants more than {MAX_DICTIONARY_BYTES:,} bytes of memory")
    decoder = lzma.LZMADecompressor(format, filters=chain)
    out = decoder.decompress(data, MAX_BYTES + 1)  # raw streams of some filters carry no end mark, so eof is not asked for
    if len(out) > MAX_BYTES:
        raise CannotEvaluate(f"it decompresses to more than {MAX_BYTES:,} bytes")
    return out


def _unbrotli(data: bytes) -> bytes:
    import brotli

    try:
        decoder = brotli.Decompressor()
        out = bytearray(decoder.process(data, output_buffer_limit=1 << 18))
        while not decoder.is_finished() and len(out) <= MAX_BYTES:
            piece = decoder.process(b"", output_buffer_limit=1 << 18)
            if not piece:
                raise CannotEvaluate("its compressed data end too early")
            out += piece
    except brotli.error as error:
        raise CannotEvaluate(f"its brotli data are damaged ({error})") from None
    if len(out) > MAX_BYTES:
        raise CannotEvaluate(f"it decompresses to more than {MAX_BYTES:,} bytes")
    return bytes(out)


def _unzstd(data: bytes) -> bytes:
    import zstandard

    try:
        with zstandard.ZstdDecompressor(max_window_size=MAX_DICTIONARY_BYTES).stream_reader(data) as reader:
            out = reader.read(MAX_BYTES + 1)
    except zstandard.ZstdError as error:
        raise CannotEvaluate(f"its zstd data are damaged ({error})") from None
    if len(out) > MAX_BYTES:
        raise CannotEvaluate(f"it decompresses to more than {MAX_BYTES:,} bytes")
    return out


DECOMPRESSORS: dict[str, Callable[..., bytes]] = {
    "zlib.decompress": _unzlib, "gzip.decompress": _ungzip, "bz2.decompress": _unbz2, "lzma.decompress": _unlzma,
    "brotli.decompress": _unbrotli, "zstandard.decompress": _unzstd, "zstandard.ZstdDecompressor.decompress": _unzstd,
}
DECODERS: dict[str, Callable[..., bytes]] = {
    **DECOMPRESSORS,
    **{f"base64.{name}": getattr(base64, name) for name in ("b64decode", "standard_b64decode", "urlsafe_b64decode", "b32decode",
                                                            "b16decode", "b85decode", "a85decode", "decodebytes")},
    "binascii.a2b_base64": binascii.a2b_base64, "binascii.unhexlify": binascii.unhexlify, "binascii.a2b_hex": binascii.a2b_hex,
    "bytes.fromhex": bytes.fromhex,
}
REFUSALS = (ValueError, TypeError, LookupError, OverflowError, EOFError, ImportError, zlib.error, lzma.LZMAError, OSError, MemoryError)


def is_decoder(dotted: str | None) -> bool:
    """Whether a call of this name turns a literal into other bytes or text."""
    return dotted in DECODERS


class Evaluator:
    """Values of expressions of one parsed module: names stand for what an import or a single assignment gave them."""

    def __init__(self, tree: ast.Module) -> None:
        self._imported: dict[str, str] = {}
        self._assigned: dict[str, list[ast.expr]] = {}
        self._values: dict[int, Any] = {}
        self._num_bytes = 0  # of all texts found so far
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self._imported[alias.asname or alias.name.partition(".")[0]] = alias.name if alias.asname else alias.name.partition(".")[0]
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    self._imported[alias.asname or alias.name] = f"{node.module}.{alias.name}"
            elif isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    self._assign(target, node.value)
            elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
                self._assigned.setdefault(node.target.id, []).extend([node.value] * 2)  # more than one value: not followed

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            self._assigned.setdefault(target.id, []).append(value)
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for part, part_value in zip(target.elts, value.elts, strict=True):
                self._assign(part, part_value)

    def assigned(self, name: str) -> list[ast.expr]:
        """Every expression assigned to a name anywhere."""
        return self._assigned.get(name, [])

    def dotted(self, node: ast.expr, depth: int = 0) -> str | None:
        """The full name that an expression stands for, aliases of imports and of single assignments resolved: `L.decompress` after
        `import lzma as L` is "lzma.decompress"; None where it is no name."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        head: str | None = None
        if isinstance(node, ast.Name):
            values = self._assigned.get(node.id, [])
            if node.id in self._imported:
                head = self._imported[node.id]
            elif len(values) == 1 and depth < MAX_DEPTH:
                head = self.dotted(values[0], depth + 1) or node.id
            else:
                head = node.id
        elif isinstance(node, ast.Call):
            called = self.dotted(node.func, depth + 1) if depth < MAX_DEPTH else None
            if called in ("__import__", "importlib.import_module") and node.args and isinstance(node.args[0], ast.Constant):
                head = str(node.args[0].value)
            elif called == "zstandard.ZstdDecompressor":
                head = called
        return ".".join([head, *reversed(parts)]) if head else None

    def value(self, node: ast.expr, depth: int = 0) -> Any:
        """The value of an expression; CannotEvaluate for anything but the known few."""
        if depth > MAX_DEPTH:
            raise CannotEvaluate("it is nested too deep")
        if id(node) not in self._values:
            if self._num_bytes > MAX_ALL_BYTES:
                raise CannotEvaluate(f"the texts before it take more than {MAX_ALL_BYTES:,} bytes")
            try:
                found = self._evaluate(node, depth + 1)
            except CannotEvaluate:
                raise
            except REFUSALS as error:
                raise CannotEvaluate(f"{type(error).__name__}: {error}") from None
            if not isinstance(node, ast.Name | ast.Constant):
                self._num_bytes += len(found) if isinstance(found, str | bytes) else 0
            self._values[id(node)] = found
        return self._values[id(node)]

    def _evaluate(self, node: ast.expr, depth: int) -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                values = self._assigned.get(node.id, [])
                if len(values) != 1:
                    raise CannotEvaluate(f"{node.id} is not assigned exactly once")
                return self.value(values[0], depth)
            case ast.List() | ast.Tuple():
                return [self.value(part, depth) for part in node.elts]
            case ast.Dict():
                if None in node.keys:
                    raise CannotEvaluate("a mapping unpacks another")
                return {self.value(k, depth): self.value(v, depth) for k, v in zip(node.keys, node.values, strict=True)}
            case ast.BinOp(op=ast.Add()):
                return _add(self.value(node.left, depth), self.value(node.right, depth))
            case ast.UnaryOp(op=ast.USub()):
                return -self.value(node.operand, depth)
            case ast.Subscript(slice=ast.Slice() as cut):
                bounds = [None if part is None else self.value(part, depth) for part in (cut.lower, cut.upper, cut.step)]
                return self.value(node.value, depth)[slice(*bounds)]
            case ast.Attribute():
                name = (self.dotted(node) or "").removeprefix("lzma.")
                if name.startswith(LZMA_NAMES) and isinstance(getattr(lzma, name, None), int):
                    return getattr(lzma, name)
            case ast.Call():
                return self._call(node, depth)
        raise CannotEvaluate(f"{type(node).__name__} is not a literal")

    def _call(self, node: ast.Call, depth: int) -> Any:
        name = self.dotted(node.func) or ""
        function = DECODERS.get(name)
        is_method = function is None and isinstance(node.func, ast.Attribute) and node.func.attr in TEXT_METHODS
        if function is None and not is_method:
            raise CannotEvaluate(f"{name or 'a computed function'} is not among the decoders known here")
        if any(isinstance(part, ast.Starred) for part in node.args) or any(k.arg is None for k in node.keywords):
            raise CannotEvaluate("its arguments are unpacked")
        arguments = [self.value(part, depth) for part in node.args]
        options = {k.arg: self.value(k.value, depth) for k in node.keywords if k.arg}
        if function is not None:
            return function(*arguments, **options)
        owner = self.value(node.func.value, depth)
        if not isinstance(owner, str | bytes):
            raise CannotEvaluate(f"{node.func.attr} of something that is no text")
        if node.func.attr == "replace" and len(owner) + owner.count(arguments[0]) * len(arguments[1]) > MAX_BYTES:
            raise CannotEvaluate("a replacement makes it too long")
        if node.func.attr == "join" and sum(len(part) + len(owner) for part in arguments[0]) > MAX_BYTES:
            raise CannotEvaluate("a join makes it too long")
        return getattr(owner, node.func.attr)(*arguments, **options)


def _add(left: Any, right: Any) -> Any:
    if not isinstance(left, str | bytes) or type(left) is not type(right):
        raise CannotEvaluate("a sum of something other than text")
    if len(left) + len(right) > MAX_BYTES:
        raise CannotEvaluate("a sum makes it too long")
    return left + right
