"""The artifact file: exact round trips, a clear refusal of every damage, bounded memory against hostile files."""

import hashlib
import json
import random
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import bitsperbyte.golf.artifact as artifact_module
from bitsperbyte.golf.artifact import PREFIX, read_artifact, write_artifact
from bitsperbyte.golf.codecs import BEST_LAYOUT, CODECS, LAYOUTS
from bitsperbyte.golf.ledger import Ledger, TensorRow
from bitsperbyte.golf.model import ModelConfig, state_shapes
from bitsperbyte.golf.quantize import SCHEMES, dequantize, payload_bytes, quantize

MODEL = ModelConfig(vocab_size=300, dim=64, num_heads=4, num_kv_heads=2, order=(0, 1, 0), skips=((0, 2),))
SHA = "ab" * 32


def make_state(model: ModelConfig = MODEL, seed: int = 0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: 0.05 * torch.randn(shape, generator=draw) for name, shape in state_shapes(model).items()}


def write(path: Path, **changes: Any) -> Ledger:
    settings = {
        "state": make_state(),
        "model": MODEL,
        "tokenizer_sha256": SHA,
        "scheme": "int6",
        "codec": "zlib",
        "extra": {"step": 7},
    }
    return write_artifact(path, **{**settings, **changes})


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("artifact") / "artifact.bpb"
    write(path)
    return path.read_bytes()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_round_trip_is_exact(tmp_path: Path, scheme: str, codec: str) -> None:
    state, path = make_state(), tmp_path / "deep" / "artifact.bpb"
    expected = dequantize(quantize(state, scheme))
    for layout in LAYOUTS:
        ledger = write(path, scheme=scheme, codec=codec, layout=layout)
        artifact = read_artifact(path, expected_tokenizer_sha256=SHA)
        assert list(artifact.state) == list(state)
        assert all(t.dtype == torch.float32 and torch.equal(t, expected[n]) for n, t in artifact.state.items())
        assert (artifact.model, artifact.scheme, artifact.codec, artifact.layout) == (MODEL, scheme, codec, layout)
        assert (artifact.tokenizer_sha256, artifact.extra) == (SHA, {"step": 7})
        assert ledger.weight_bytes == path.stat().st_size == artifact.file_bytes
    assert [p.name for p in path.parent.iterdir()] == ["artifact.bpb"]


@pytest.mark.parametrize("codec", CODECS)
def test_the_same_input_gives_the_same_bytes(tmp_path: Path, codec: str) -> None:
    state = make_state()
    write(tmp_path / "a", codec=codec, state=state, extra={"x": 1, "y": 2})
    write(tmp_path / "b", codec=codec, state=dict(reversed(state.items())), extra={"y": 2, "x": 1})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_model_without_integers_and_without_skips(tmp_path: Path) -> None:
    model = ModelConfig(vocab_size=20, dim=8, num_heads=2, num_kv_heads=1, order=(0,), skips=(), tie_embeddings=False)
    state = make_state(model)
    write(tmp_path / "a", model=model, state=state, scheme="reference_int8")
    read = read_artifact(tmp_path / "a").state
    assert all(torch.equal(read[n], state[n].half().float() if n.endswith("weight") else state[n]) for n in state)


def test_the_ledger_adds_up(tmp_path: Path) -> None:
    ledger = write(tmp_path / "a", num_code_bytes=12_345)
    assert ledger.code_bytes == 12_345 and ledger.total_bytes == ledger.code_bytes + ledger.weight_bytes
    assert ledger.margin_bytes == 16_000_000 - ledger.total_bytes and ledger.check() is ledger
    assert {row.name: row.shape for row in ledger.rows} == state_shapes(MODEL)
    assert sum(row.payload_bytes for row in ledger.rows) == payload_bytes(MODEL, "int6")
    fc = next(row for row in ledger.rows if row.name == "blocks.0.mlp.fc.weight")
    assert fc.storage == "int6" and 5.0 < fc.bits_per_weight < 6.6
    as_dict = json.loads(json.dumps(ledger.to_dict()))
    assert as_dict["tensors"][0]["name"] == ledger.rows[0].name and as_dict["margin_bytes"] == ledger.margin_bytes


def test_over_the_cap_is_an_error_that_says_by_how_much() -> None:
    row = TensorRow("w", "int8", (4, 4), 16, 24, 24)
    assert Ledger(1_000_000, 15_000_000, (row,)).check().margin_bytes == 0
    with pytest.raises(ValueError, match="1 bytes over the cap.*int6"):
        Ledger(1_000_000, 15_000_001, (row,)).check()


@pytest.mark.parametrize("bits", [3, 4, 5, 6, 8])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("num_values", [1, 2, 3, 4, 5, 1001])
def test_layouts_invert_and_have_the_size_they_say(name: str, bits: int, num_values: int) -> None:
    most = 2 ** (bits - 1) - 1
    values = torch.randint(-most, most + 1, (num_values,), dtype=torch.int8).numpy()
    data = LAYOUTS[name].pack(values, bits)
    assert len(data) == LAYOUTS[name].num_bytes(num_values, bits)
    assert (LAYOUTS[name].unpack(data, num_values, bits) == values).all()


def test_every_codec_has_a_measured_layout() -> None:
    assert set(BEST_LAYOUT) == set(CODECS) and set(BEST_LAYOUT.values()) <= set(LAYOUTS)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("size", [0, 1, 700_000])
def test_codecs_want_exactly_the_announced_bytes(codec: str, size: int) -> None:
    data = random.Random(0).randbytes(size)
    packed = CODECS[codec].compress(data)
    assert CODECS[codec].decompress(packed, size) == data
    for wrong in {size + 1, max(size - 1, 0)} - {size}:
        with pytest.raises(ValueError, match="it decompresses to"):
            CODECS[codec].decompress(packed, wrong)
    for damaged in (packed[:-1], packed + b"x", b""):
        with pytest.raises(ValueError):
            CODECS[codec].decompress(damaged, size)


@pytest.mark.parametrize("codec, package", [("zstd", "zstandard"), ("brotli", "brotli")])
def test_an_absent_codec_package_is_named(monkeypatch: pytest.MonkeyPatch, codec: str, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    for act in (lambda: CODECS[codec].compress(b"x"), lambda: CODECS[codec].decompress(b"x", 1)):
        with pytest.raises(ValueError, match="pip install"):
            act()


def refuse(path: Path, data: bytes, match: str | None = None) -> None:
    path.write_bytes(data)
    with pytest.raises(ValueError, match=match) as caught:
        read_artifact(path)
    assert str(path) in str(caught.value)


def damage(path: Path, content: bytes, seed: int) -> None:
    draw = random.Random(seed)
    flipped = bytearray(content)
    flipped[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    refuse(path, bytes(flipped))
    refuse(path, content[: draw.randrange(len(content))])


@pytest.mark.parametrize("seed", range(6))
def test_flipped_bits_and_truncations_are_refused(tmp_path: Path, content: bytes, seed: int) -> None:
    damage(tmp_path / "damaged.bpb", content, seed)


@pytest.mark.soak
@pytest.mark.parametrize("codec", CODECS)
def test_fifty_flipped_bits_and_truncations_are_refused(tmp_path: Path, codec: str) -> None:
    write(tmp_path / "a", codec=codec)
    for seed in range(50):
        damage(tmp_path / "damaged.bpb", (tmp_path / "a").read_bytes(), 1000 + seed)


def test_files_that_are_no_artifact(tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="absent.bpb: no such artifact"):
        read_artifact(tmp_path / "absent.bpb")
    with pytest.raises(ValueError, match="not a file"):
        read_artifact(tmp_path)
    path = tmp_path / "a.bpb"
    refuse(path, b"", "not a golf artifact")
    refuse(path, b"PK\x03\x04" + content[4:], "not a golf artifact")
    refuse(path, content[:50], "cut short")
    refuse(path, content[:-1], "cut short")
    refuse(path, content + b"x", "another length")
    refuse(path, content[:7] + b"\x02" + content[8:], "version 2.*reads version 1")
    refuse(path, content[:-40] + bytes(8) + content[-32:], "checksum")
    monkeypatch.setattr(artifact_module, "MAX_FILE_BYTES", 1000)
    refuse(path, content, "larger than the 1,000 bytes")


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a")
    with pytest.raises(ValueError, match="tokenizer of sha256 abababab"):
        read_artifact(tmp_path / "a", expected_tokenizer_sha256="cd" * 32)


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"codec": "rar"}, "unknown codec 'rar'.*brotli"),
        ({"scheme": "int9"}, "unknown quantisation scheme"),
        ({"layout": "spiral"}, "unknown layout"),
        ({"tokenizer_sha256": "xyz"}, "64 hexadecimal digits"),
        ({"extra": {"x": float("nan")}}, "plain JSON"),
        ({"extra": {"x": object()}}, "plain JSON"),
        ({"extra": {"x": "y" * 100_000}}, "keep it small"),
        ({"state": {}}, "skip_weights has shape None"),
        ({"state": {**make_state(), "more": torch.ones(1)}}, "tensor more has shape"),
        ({"state": {**make_state(), "tok_emb.weight": torch.ones(3, 3)}}, "tok_emb.weight has shape"),
        (
            {"state": {**make_state(), "tok_emb.weight": torch.full((300, 64), torch.nan)}},
            "tok_emb.weight holds values that are not",
        ),
    ],
)
def test_writing_refuses_and_leaves_no_file(tmp_path: Path, changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        write(tmp_path / "a", **changes)
    assert list(tmp_path.iterdir()) == []


# Hostile files: written with a right checksum, so that only what they say can be refused.


def parts(content: bytes) -> tuple[dict[str, Any], bytes, int]:
    _, _, stored, _, _, body_bytes = PREFIX.unpack_from(content)
    return (
        json.loads(zlib.decompress(content[PREFIX.size : PREFIX.size + stored])),
        content[PREFIX.size + stored : -32],
        body_bytes,
    )


def seal(header: bytes, body: bytes, body_bytes: int, header_bytes: int | None = None) -> bytes:
    stored = zlib.compress(header, 9)
    announced = len(header) if header_bytes is None else header_bytes
    data = PREFIX.pack(b"BPBGOLF", 1, len(stored), announced, len(body), body_bytes) + stored + body
    return data + hashlib.sha256(data).digest()


def edit_table(edit: Callable[[list[Any]], Any]) -> Callable[[dict[str, Any]], Any]:
    return lambda header: header.update(tensors=edit(header["tensors"]))


HOSTILE_HEADERS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "unknown codec": (lambda h: h.update(codec="../../rar"), "codec is"),
    "codec of another type": (lambda h: h.update(codec=["zlib"]), "codec is"),
    "unknown scheme": (lambda h: h.update(scheme="pickle"), "scheme is"),
    "unknown layout": (lambda h: h.update(layout=None), "layout is"),
    "a key more": (lambda h: h.update(code="print()"), "exactly the keys"),
    "a key less": (lambda h: h.pop("extra"), "exactly the keys"),
    "tokenizer": (lambda h: h.update(tokenizer_sha256="AB" * 32), "tokenizer"),
    "extra": (lambda h: h.update(extra=[1]), "extra"),
    "wide": (lambda h: h["model"].update(dim=10**9), "dim"),
    "wide within bounds": (lambda h: h["model"].update(dim=16_384, mlp_mult=64), "not a valid artifact"),
    "many blocks": (lambda h: h["model"].update(order=list(range(100_000))), "order"),
    "order of another type": (lambda h: h["model"].update(order=7), "order"),
    "endless number": (lambda h: h["model"].update(rope_base=10**400), "not a valid artifact"),
    "model of another type": (lambda h: h.update(model=[1, 2]), "mapping"),
    "table of another type": (lambda h: h.update(tensors={}), "table"),
    "tensor missing": (edit_table(lambda t: t[1:]), "table"),
    "tensor twice": (edit_table(lambda t: [t[0], *t[:-1]]), "unknown to its model config or there twice"),
    "name like a path": (
        edit_table(lambda t: [["../../etc/passwd", *t[0][1:]], *t[1:]]),
        "unknown to its model config",
    ),
    "line of another type": (edit_table(lambda t: [None, *t[1:]]), "unknown to its model config"),
    "name of another type": (edit_table(lambda t: [[["x"], *t[0][1:]], *t[1:]]), "unknown to its model config"),
    "shape": (edit_table(lambda t: [[t[0][0], [10**12], t[0][2]], *t[1:]]), "its table says"),
    "storage": (edit_table(lambda t: [[t[0][0], t[0][1], "object"], *t[1:]]), "its table says"),
}


@pytest.mark.parametrize("case", HOSTILE_HEADERS)
def test_hostile_headers_are_refused(tmp_path: Path, content: bytes, case: str) -> None:
    edit, match = HOSTILE_HEADERS[case]
    header, body, body_bytes = parts(content)
    edit(header)
    refuse(tmp_path / "a", seal(json.dumps(header).encode(), body, body_bytes), match)


def test_hostile_json_is_refused(tmp_path: Path, content: bytes) -> None:
    header, body, body_bytes = parts(content)
    text = json.dumps(header)
    cases = {
        "not a valid": b"\xff\xfe",
        "not a valid artifact": b"{",
        "mapping with exactly": b"[]",
        "a key twice": text[:-1].encode() + b', "model": {}}',
        "NaN": text.replace("30.0", "NaN").encode(),
        "checksum is right": b"[" * 1_000_000,
        "string conversion": text.replace("30.0", "3" * 10_000).encode(),
    }
    for match, data in cases.items():
        refuse(tmp_path / "a", seal(data, body, body_bytes), match)
    refuse(tmp_path / "a", seal(text.encode(), body, body_bytes, header_bytes=10**9), "above the limits")
    refuse(tmp_path / "a", seal(text.encode(), body, body_bytes, header_bytes=len(text) - 1), "more than")
    refuse(tmp_path / "a", seal(b" " * (1 << 23), body, body_bytes), "above the limits")


def test_hostile_bodies_are_refused(tmp_path: Path, content: bytes) -> None:
    header, body, body_bytes = parts(content)
    text, raw = json.dumps(header).encode(), zlib.decompress(body)
    refuse(tmp_path / "a", seal(text, body, body_bytes + 1), "its model needs")
    refuse(tmp_path / "a", seal(text, body, 2**60), "above the limits")
    refuse(tmp_path / "a", seal(text, zlib.compress(raw[:-1]), body_bytes), "it decompresses to")
    refuse(tmp_path / "a", seal(text, zlib.compress(raw + b"x"), body_bytes), "more than")
    refuse(tmp_path / "a", seal(text, body + b"x", body_bytes), "behind its compressed data")
    refuse(tmp_path / "a", seal(text, b"junk", body_bytes), "damaged")
    num_scales = sum(shape[0] for _, shape, storage in header["tensors"] if storage.startswith("int"))
    for high in (0x7C, 0xFC, 0x7E, 0x80 | 0x3C):  # infinite, minus infinite, not a number, negative
        bad = bytearray(raw)
        bad[num_scales] = high
        refuse(tmp_path / "a", seal(text, zlib.compress(bytes(bad)), body_bytes), "scale that is not a finite")
    for value in (32, -32, 127):  # six bits hold -31..31; they come first among the integers
        num_eight_bits = 300 * 64
        bad = bytearray(raw)
        bad[-num_eight_bits - 1] = value & 255
        refuse(tmp_path / "a", seal(text, zlib.compress(bytes(bad)), body_bytes), "outside the range of 6 bits")


BOMB = """
import resource, sys
import bitsperbyte.golf.artifact as artifact
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    artifact.read_artifact(sys.argv[1])
except ValueError as error:
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024, error)
"""


@pytest.mark.parametrize("codec", CODECS)
def test_a_decompression_bomb_is_refused_in_little_memory(tmp_path: Path, content: bytes, codec: str) -> None:
    header, _, body_bytes = parts(content)
    header.update(codec=codec, layout="bytes")
    zeros = bytes(1 << 28)
    if codec == "zlib":
        bomb = zlib.compress(zeros, 1)
    elif codec == "zstd":
        import zstandard

        bomb = zstandard.ZstdCompressor(level=1).compress(zeros)
    elif codec == "brotli":
        import brotli

        bomb = brotli.compress(zeros, quality=1)
    else:
        bomb = CODECS["lzma"].compress(zeros[: 1 << 26])
    path = tmp_path / "bomb.bpb"
    path.write_bytes(seal(json.dumps(header).encode(), bomb, body_bytes))
    done = subprocess.run([sys.executable, "-c", BOMB, str(path)], capture_output=True, text=True, check=True)
    megabytes, message = done.stdout.split(" ", 1)
    assert "more than the" in message and str(path) in message
    assert int(megabytes) < 48, f"{len(zeros):,} bytes were kept small, but reading took {megabytes} MB"


def test_the_prefix_is_as_documented(content: bytes) -> None:
    assert content[:8] == b"BPBGOLF\x01" and PREFIX.size == 32
    stored, header_bytes, stored_body, body_bytes = struct.unpack_from("<IIQQ", content, 8)
    assert 32 + stored + stored_body + 32 == len(content) and header_bytes > stored and body_bytes > stored_body
    assert hashlib.sha256(content[:-32]).digest() == content[-32:]
