import ast
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitsperbyte.metric import bpb as module
from bitsperbyte.metric.bpb import Score, bits

SCORES = st.builds(Score, st.floats(0, 1e9), st.integers(0, 10**9), st.integers(0, 10**9))


def test_bits_of_a_fair_coin():
    assert bits(-math.log(0.5)) == 1.0
    assert bits(-math.log(1 / 1024)) == pytest.approx(10.0, rel=1e-15)


def test_derived_figures():
    score = Score(nats=10 * math.log(2), num_bytes=20, num_tokens=5)
    assert score.bpb == pytest.approx(0.5, rel=1e-15)
    assert score.nats_per_token == pytest.approx(2 * math.log(2), rel=1e-15)
    assert score.bytes_per_token == 4.0
    assert score.to_dict() == {"nats": score.nats, "num_bytes": 20, "num_tokens": 5, "bpb": score.bpb,
                               "nats_per_token": score.nats_per_token, "bytes_per_token": 4.0}


@given(SCORES, SCORES)
def test_scores_add_and_zero_is_neutral(a: Score, b: Score):
    both = a + b
    assert (both.nats, both.num_bytes, both.num_tokens) == (a.nats + b.nats, a.num_bytes + b.num_bytes,
                                                            a.num_tokens + b.num_tokens)
    assert a + Score.zero() == a == Score.total([a])
    assert Score.total([a, b, b]) == Score.total([b, a, b])
    assert sum([a, b], Score.zero()) == both


def test_numpy_figures_become_python_ones_in_float64():
    score = Score(np.float32(0.1), np.int32(3), np.uint8(2))
    assert [type(v) for v in (score.nats, score.num_bytes, score.num_tokens)] == [float, int, int]
    big = Score(0.0, np.int32(2**31 - 1), 1) + Score(0.0, np.int32(2**31 - 1), 1)
    assert big.num_bytes == 2**32 - 2


@pytest.mark.parametrize("nats", [-1e-9, math.nan, math.inf, -math.inf])
def test_impossible_losses_are_refused(nats: float):
    with pytest.raises(ValueError, match="finite and not negative"):
        Score(nats, 1, 1)


def test_impossible_counts_are_refused():
    with pytest.raises(ValueError, match="num_bytes is -1"):
        Score(1.0, -1, 1)
    with pytest.raises(ValueError, match="num_tokens is -2"):
        Score(1.0, 1, -2)
    with pytest.raises(TypeError):
        Score(1.0, 1.5, 1)


def test_no_bytes_give_no_bpb():
    with pytest.raises(ValueError, match="stand for 0 bytes"):
        _ = Score(1.0, 0, 1).bpb
    with pytest.raises(ValueError, match="no token was scored"):
        _ = Score.zero().nats_per_token


@pytest.mark.parametrize(("num_bytes", "num_tokens"), [(8, 10), (24, 10), (120, 10)])
def test_check_passes_plausible_text(num_bytes: int, num_tokens: int):
    score = Score(1.0, num_bytes, num_tokens)
    assert score.check() is score


@pytest.mark.parametrize(("num_bytes", "cause"), [(79, "less text"), (1201, "more text")])
def test_check_names_the_likely_cause(num_bytes: int, cause: str):
    with pytest.raises(ValueError, match=rf"validation.*another tokenizer.*{cause}"):
        Score(1.0, num_bytes, 100).check("validation")


def test_the_referee_needs_only_the_standard_library():
    tree = ast.parse(Path(module.__file__).read_text())
    imported = [name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]
    imported += [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert imported and all(name.split(".")[0] in sys.stdlib_module_names | {"numpy"} for name in imported)
