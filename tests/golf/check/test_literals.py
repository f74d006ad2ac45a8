"""The evaluator of literals: what Python would compute, for the few expressions it knows; refusal, bounded, for all others."""

import ast
import base64
import bz2
import lzma
import zlib

import brotli
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from bitsperbyte.golf.check import literals
from bitsperbyte.golf.check.literals import MAX_BYTES, CannotEvaluate, Evaluator, is_decoder

IMPORTS = "import base64, binascii, bz2, gzip, lzma, zlib, brotli, zstandard\nimport lzma as L\nfrom base64 import b85decode as B\n"


def value(expression: str, before: str = ""):
    tree = ast.parse(f"{IMPORTS}{before}\nresult = {expression}")
    return Evaluator(tree).value(tree.body[-1].value)


@settings(deadline=None, max_examples=40)
@given(st.binary(max_size=300))
def test_every_codec_gives_back_what_was_packed(data: bytes) -> None:
    packed = {
        "zlib.decompress": zlib.compress(data), "bz2.decompress": bz2.compress(data), "lzma.decompress": lzma.compress(data),
        "L.decompress": lzma.compress(data, format=lzma.FORMAT_ALONE), "brotli.decompress": brotli.compress(data),
        "zstandard.decompress": zstandard.compress(data), "zstandard.ZstdDecompressor().decompress": zstandard.compress(data),
        "base64.b85decode": base64.b85encode(data), "B": base64.b85encode(data), "base64.b64decode": base64.b64encode(data),
        "bytes.fromhex": data.hex(), "binascii.unhexlify": data.hex(),
    }
    for name, literal in packed.items():
        assert value(f"{name}({literal!r})") == data, name


def test_raw_streams_with_their_filters() -> None:
    data = b"def f():\n    pass\n" * 20
    chain = [{"id": lzma.FILTER_LZMA2, "preset": 9}]
    literal = lzma.compress(data, format=lzma.FORMAT_RAW, filters=chain)
    assert value(f"L.decompress({literal!r}, format=L.FORMAT_RAW, filters=[{{'id': L.FILTER_LZMA2, 'preset': 9}}])") == data
    huge = f"L.decompress({literal!r}, format=L.FORMAT_RAW, filters=[{{'id': L.FILTER_LZMA2, 'dict_size': {1 << 30}}}])"
    with pytest.raises(CannotEvaluate, match="memory"):
        value(huge)


@pytest.mark.parametrize("expression", [
    "'a' + 'b' 'c'", "'abcdef'[1:-1:2]", "-3", "b'x'.decode().replace('x', 'yz').strip('y')", "''.join(['p', 'q'])", "{'a': [1, 2]}",
])
def test_plain_expressions_equal_python(expression: str) -> None:
    assert value(expression) == ast.literal_eval(expression) if expression[0] in "-{" else value(expression) == {
        "'a' + 'b' 'c'": "abc", "'abcdef'[1:-1:2]": "bd", "b'x'.decode().replace('x', 'yz').strip('y')": "z", "''.join(['p', 'q'])": "pq",
    }[expression]


@pytest.mark.parametrize(("before", "expression"), [
    ("", "open('/etc/passwd').read()"), ("", "__import__('os').getcwd()"), ("x = 1\nx = 2", "x"), ("x = 'a'\nx += 'b'", "x"),
    ("", "unknown"), ("", "[1, *[2]]"), ("", "'a' * 10"), ("", "zlib.decompress(b'not zlib')"), ("", "lzma.decompress(b'')"),
    ("", "brotli.decompress(b'\\x00\\x01')"), ("", "zstandard.decompress(b'zz')"), ("", "(lambda: 'a')()"), ("", "f'{1}'"),
    ("", "base64.b64decode(b'YQ==').__class__"), ("x = x + 'a'", "x"), ("", "(1).join(['a'])"),
])
def test_everything_else_is_refused(before: str, expression: str) -> None:
    with pytest.raises(CannotEvaluate):
        value(expression, before)


@pytest.mark.parametrize("pack", ["zlib", "lzma", "bz2", "brotli", "zstandard"])
def test_a_bomb_is_refused(pack: str) -> None:
    data = bytes(MAX_BYTES + 1)
    literal = {"zlib": zlib.compress, "lzma": lzma.compress, "bz2": bz2.compress, "brotli": lambda d: brotli.compress(d, quality=1),
               "zstandard": zstandard.compress}[pack](data)
    with pytest.raises(CannotEvaluate, match=f"more than {MAX_BYTES:,}"):
        value(f"{pack}.decompress({literal!r})")


def test_many_large_values_are_refused_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(literals, "MAX_ALL_BYTES", 10_000)
    literal = zlib.compress(bytes(4_000))
    tree = ast.parse(IMPORTS + "\n".join(f"a{i} = zlib.decompress({literal!r})" for i in range(9)))
    evaluator = Evaluator(tree)
    done = []
    with pytest.raises(CannotEvaluate, match="take more than"):
        for statement in tree.body[-9:]:
            done.append(evaluator.value(statement.value))
    assert len(done) == 3  # the third passes the limit, and the fourth is refused


def test_a_deep_expression_is_refused_and_not_followed_to_the_end() -> None:
    with pytest.raises(CannotEvaluate, match="deep"):
        value("+".join(["'a'"] * 500))


def test_decoders_are_known_by_their_full_names() -> None:
    tree = ast.parse("import lzma as L\nfrom base64 import b85decode as B\nd = L.decompress\nL.decompress(x)\nB(x)\nd(x)\nM.decompress(x)")
    evaluator = Evaluator(tree)
    assert [is_decoder(evaluator.dotted(statement.value.func)) for statement in tree.body[3:]] == [True, True, True, False]
