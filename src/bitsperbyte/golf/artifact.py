"""The artifact: one self-describing file of quantised weights, read without running anything it holds.

    8 bytes   magic "BPBGOLF" and the version
    4 + 4     bytes of the header as stored (zlib) and as JSON          little-endian, unsigned
    8 + 8     bytes of the body as stored (the header's codec) and raw
    header    model config, scheme, codec, layout, tokenizer sha256, table of tensors, a small `extra`
    body      row scales | kept float16 | kept float32, each as byte planes | integers, by bits
    32        sha256 of everything before

Streams of one kind lie together because each has its own histogram. The header comes first and separately, so that what
the shapes need is known, and compared with the sizes above, before the body is decompressed.
"""

import hashlib
import json
import os
import struct
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from bitsperbyte.golf.body import body_size, check_table, join_body, split_body, table_of
from bitsperbyte.golf.codecs import BEST_LAYOUT, CODECS, LAYOUTS
from bitsperbyte.golf.ledger import Ledger, TensorRow
from bitsperbyte.golf.model import ModelConfig
from bitsperbyte.golf.quantize import SCHEMES, dequantize, quantize

NAME, VERSION = b"BPBGOLF", 1
PREFIX = struct.Struct("<7sBIIQQ")
SHA_BYTES = 32
# The cap is 16 MB; these bounds only keep a hostile or mistaken file from taking the machine's memory.
MAX_FILE_BYTES, MAX_BODY_BYTES, MAX_HEADER_BYTES, MAX_EXTRA_BYTES = 1 << 28, 1 << 28, 1 << 22, 1 << 16
HEADER_KEYS = {"model", "scheme", "codec", "layout", "tokenizer_sha256", "tensors", "extra"}


@dataclass(frozen=True)
class Artifact:
    """A read artifact; `state` holds float32 tensors by name, in the model's order."""

    model: ModelConfig
    state: dict[str, Tensor]
    scheme: str
    codec: str
    layout: str
    tokenizer_sha256: str
    extra: dict[str, Any]
    file_bytes: int


def write_artifact(
    path: str | Path,
    *,
    state: Mapping[str, Tensor],
    model: ModelConfig,
    tokenizer_sha256: str,
    scheme: str,
    codec: str,
    extra: Mapping[str, Any] | None = None,
    layout: str | None = None,
    num_code_bytes: int = 0,
) -> Ledger:
    """Quantise `state` and write it to `path` (beside, then renamed: a reader sees the old file or the new one, whole).

    The same input gives the same bytes. Returns the ledger, with `num_code_bytes` of code, unchecked: `Ledger.check` raises when it is over the cap.
    Raises ValueError when the state is not the model's, a weight is not finite, or a name is unknown.
    """
    path = Path(path)
    if codec not in CODECS:
        raise ValueError(f"unknown codec {codec!r}: choose one of {', '.join(CODECS)}")
    layout = layout or BEST_LAYOUT[codec]
    if layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}: choose one of {', '.join(LAYOUTS)}")
    if not _is_sha256(tokenizer_sha256):
        raise ValueError(
            f"the tokenizer's sha256 must be 64 hexadecimal digits in lower case, not {tokenizer_sha256!r}"
        )
    entries = table_of(model, scheme)
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    expected = {entry.name: entry.shape for entry in entries}
    for name in [*expected, *shapes]:
        if expected.get(name) != shapes.get(name):
            raise ValueError(
                f"tensor {name} has shape {shapes.get(name)} in the state, but {expected.get(name)} in the model config"
            )
    tensors = quantize({entry.name: state[entry.name] for entry in entries}, scheme)

    body = join_body(tensors, LAYOUTS[layout])
    if len(body) > MAX_BODY_BYTES:
        raise ValueError(
            f"the model needs {len(body):,} bytes before compression, above the {MAX_BODY_BYTES:,} an artifact may hold"
        )
    compress = CODECS[codec].compress
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:  # the codecs release Python's lock
        whole = pool.submit(compress, body)
        alone = list(pool.map(lambda tensor: len(compress(join_body([tensor], LAYOUTS[layout]))), tensors))
        packed = whole.result()

    header = _header_json(
        {
            "model": model.to_dict(),
            "scheme": scheme,
            "codec": codec,
            "layout": layout,
            "tokenizer_sha256": tokenizer_sha256,
            "tensors": [[e.name, list(e.shape), str(e.storage)] for e in entries],
            "extra": dict(extra or {}),
        }
    )
    stored_header = zlib.compress(header, 9)
    content = (
        PREFIX.pack(NAME, VERSION, len(stored_header), len(header), len(packed), len(body)) + stored_header + packed
    )
    content += hashlib.sha256(content).digest()
    _replace_file(path, content)
    rows = tuple(
        TensorRow(e.name, str(e.storage), e.shape, e.num_elements, e.storage.payload_bytes(e.shape), size)
        for e, size in zip(entries, alone, strict=True)
    )
    return Ledger(num_code_bytes, len(content), rows)


def read_artifact(path: str | Path, *, expected_tokenizer_sha256: str | None = None) -> Artifact:
    """Read and check an artifact. Nothing in it is trusted: every size is bounded, and the body must be what the
    config's shapes need, to the byte, before it is decompressed. Raises ValueError, naming the file and what to do, for
    anything else."""
    path = Path(path)
    content = _read_file(path)
    try:
        artifact = _parse(content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if expected_tokenizer_sha256 is not None and artifact.tokenizer_sha256 != expected_tokenizer_sha256:
        raise ValueError(
            f"{path}: it was trained with the tokenizer of sha256 {artifact.tokenizer_sha256[:16]}..., not "
            f"{expected_tokenizer_sha256[:16]}...: use the tokenizer of its own run folder"
        )
    return artifact


def _read_file(path: Path) -> bytes:
    if not path.exists():
        raise ValueError(f"{path}: no such artifact; train one with `bpb golf train`, or correct the path")
    if not path.is_file():
        raise ValueError(f"{path}: not a file; give the artifact itself (artifact.bpb in a run folder)")
    with path.open("rb") as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(
            f"{path}: larger than the {MAX_FILE_BYTES:,} bytes an artifact may have; is it another kind of file?"
        )
    return content


def _parse(content: bytes) -> Artifact:
    if content[: len(NAME)] != NAME:
        raise ValueError(
            "not a golf artifact (its first bytes are others); give an artifact.bpb written by `bpb golf train`"
        )
    if len(content) < PREFIX.size + SHA_BYTES:
        raise ValueError(f"only {len(content)} bytes long: it was cut short; copy it again from where it was written")
    _, version, stored_header, header_bytes, stored_body, body_bytes = PREFIX.unpack_from(content)
    if version != VERSION:
        raise ValueError(
            f"artifact version {version}, but this program reads version {VERSION}: install a version that matches"
        )
    if PREFIX.size + stored_header + stored_body + SHA_BYTES != len(content):
        raise ValueError(
            f"{len(content):,} bytes long, but it announces another length: it was cut short or damaged; copy it "
            f"again from where it was written"
        )
    if hashlib.sha256(memoryview(content)[:-SHA_BYTES]).digest() != content[-SHA_BYTES:]:
        raise ValueError(
            "its checksum does not match its content: it is damaged; copy it again from where it was written"
        )
    # From here on the file is what its writer made; a writer may still be hostile.
    try:
        if header_bytes > MAX_HEADER_BYTES or body_bytes > MAX_BODY_BYTES:
            raise ValueError(
                f"it announces {header_bytes:,} and {body_bytes:,} bytes of header and body, above the limits"
            )
        start = PREFIX.size
        header = _load_header(CODECS["zlib"].decompress(content[start : start + stored_header], header_bytes))
        model = ModelConfig.from_dict(header["model"])
        entries = check_table(header["tensors"], table_of(model, header["scheme"]))
        layout = LAYOUTS[header["layout"]]
        needed = body_size(entries, layout)
        if needed != body_bytes:
            raise ValueError(f"its model needs {needed:,} bytes of weights, but it announces {body_bytes:,}")
        body = CODECS[header["codec"]].decompress(content[start + stored_header : -SHA_BYTES], body_bytes)
        state = dequantize(split_body(body, entries, layout))
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(
            f"not a valid artifact, though its checksum is right: {error}; do not use it, and write it anew"
        ) from error
    return Artifact(
        model,
        state,
        header["scheme"],
        header["codec"],
        header["layout"],
        header["tokenizer_sha256"],
        header["extra"],
        len(content),
    )


def _header_json(header: dict[str, Any]) -> bytes:
    try:
        extra = json.dumps(header["extra"], allow_nan=False)
        text = json.dumps(header, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the artifact's extra must be plain JSON ({error})") from None
    if len(extra) > MAX_EXTRA_BYTES:
        raise ValueError(
            f"the artifact's extra takes {len(extra):,} bytes of JSON, above {MAX_EXTRA_BYTES:,}; keep it small"
        )
    return text.encode()


def _load_header(data: bytes) -> dict[str, Any]:
    header = json.loads(data.decode(), parse_constant=_refuse_constant, object_pairs_hook=_unique_pairs)
    if not isinstance(header, dict) or set(header) != HEADER_KEYS:
        raise ValueError(f"its header must be a mapping with exactly the keys {', '.join(sorted(HEADER_KEYS))}")
    for key, known in (("scheme", SCHEMES), ("codec", CODECS), ("layout", LAYOUTS)):
        if not isinstance(header[key], str) or header[key] not in known:
            raise ValueError(
                f"its {key} is {str(header[key])[:80]!r}, which this program does not know ({', '.join(known)})"
            )
    if not _is_sha256(header["tokenizer_sha256"]):
        raise ValueError("its tokenizer sha256 is not 64 hexadecimal digits")
    if not isinstance(header["extra"], dict) or len(json.dumps(header["extra"])) > MAX_EXTRA_BYTES:
        raise ValueError(f"its extra must be a mapping of at most {MAX_EXTRA_BYTES:,} bytes")
    return header


def _refuse_constant(text: str) -> None:
    raise ValueError(f"its header holds {text}, which is not JSON")


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError("its header names a key twice")
    return dict(pairs)


def _is_sha256(value: object) -> bool:
    return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")


def _replace_file(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
