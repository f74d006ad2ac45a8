"""The fake engine keeps the promises of an engine that the tests of search and evaluation rest on."""

import inspect

import numpy as np
import pytest

from bitsperbyte.randopt.engines.base import Engine, Sampling
from bitsperbyte.randopt.engines.fake import BASE_SKILL, CONTEXT, FakeEngine
from bitsperbyte.randopt.population import draw_population

PROMPTS = [[{"role": "user", "content": f"{a}?{a + 7}="}] for a in range(200)]
GREEDY = Sampling(8)


def answers(engine: FakeEngine, sampling: Sampling = GREEDY) -> list[str]:
    return [made.text for made in engine.generate(engine.encode(PROMPTS), sampling)]


def test_it_has_every_method_of_an_engine() -> None:
    for name, promised in inspect.getmembers(Engine, inspect.isfunction):
        if not name.startswith("_"):
            assert list(inspect.signature(getattr(FakeEngine, name)).parameters) == list(inspect.signature(promised).parameters), name


def test_answers_depend_on_the_live_weights_alone() -> None:
    engine = FakeEngine()
    base = answers(engine)
    engine.perturb(1, 0.1)
    first = answers(engine)
    engine.perturb(2, 0.1)
    second = answers(engine)
    engine.perturb(1, 0.2)
    third = answers(engine)
    engine.perturb(1, 0.1)
    assert answers(engine) == first
    engine.reset()
    assert answers(engine) == base and len({tuple(a) for a in (base, first, second, third)}) == 4


def test_some_members_are_better_than_the_base_and_some_worse() -> None:
    engine = FakeEngine()
    skills = []
    for member in draw_population(20, [0.1, 0.2], 0):
        engine.perturb(member.seed, member.sigma)
        skills.append(engine.skill())
        right = sum(text == str(2 * a + 7) for a, text in enumerate(answers(engine))) / len(PROMPTS)
        assert right == pytest.approx(engine.skill(), abs=0.15)  # 4 standard errors of 200 answers
    assert min(skills) < BASE_SKILL - 0.1 and max(skills) > BASE_SKILL + 0.1


def test_samples_depend_on_the_seed_and_greedy_answers_do_not() -> None:
    engine = FakeEngine()
    hot = [answers(engine, Sampling(8, temperature=0.7, seed=seed)) for seed in (1, 2, 1)]
    assert hot[0] == hot[2] != hot[1]
    assert answers(engine, Sampling(8, seed=1)) == answers(engine, Sampling(8, seed=2))


def test_limits_stops_and_room() -> None:
    engine = FakeEngine()
    ids = engine.encode([[{"role": "user", "content": "what?"}]])
    (whole,) = engine.generate(ids, GREEDY)
    (limited,) = engine.generate(ids, Sampling(3))
    (exact,) = engine.generate(ids, Sampling(len("answer 0")))
    (stopped,) = engine.generate(ids, Sampling(20, stop=(" ",)))
    (ended,) = engine.generate(ids, Sampling(20))
    assert whole.truncated and limited.truncated and limited.text == "ans" and limited.num_tokens == 3
    assert exact.truncated and not ended.truncated and ended.num_tokens == len(ended.text) + 1 and stopped.text == "answer"
    assert limited.num_prompt_tokens == len("what?")
    with pytest.raises(ValueError, match="leaves no room"):
        engine.generate([[65] * CONTEXT], GREEDY)


def test_nats_belong_to_the_live_weights_and_bytes_to_the_text() -> None:
    engine = FakeEngine()
    texts = ["a document of some words", "é", "x", ""]
    base = engine.score(texts, 4)
    engine.perturb(1, 0.1)
    other = engine.score(texts, 4)
    for text, a, b in zip(texts, base, other, strict=True):
        assert len(a.nats) == len(a.num_bytes) == max(0, len(text.encode()) - 1) and (a.nats >= 0).all()
        assert np.array_equal(a.num_bytes, b.num_bytes) and a.nats.dtype == np.float64 and a.num_bytes.dtype == np.int64
    assert not np.array_equal(base[0].nats, other[0].nats)
    engine.reset()
    assert all(np.array_equal(a.nats, b.nats) for a, b in zip(base, engine.score(texts, 4), strict=True))


def test_it_fails_where_told_and_nowhere_else() -> None:
    engine = FakeEngine(fail_at=5, error=OSError("no"))
    engine.perturb(4, 0.1)
    answers(engine)
    engine.perturb(5, 0.1)
    with pytest.raises(OSError, match="no"):
        answers(engine)
    with pytest.raises(OSError, match="no"):
        engine.score(["text"], 4)
    engine.close()
    with pytest.raises(AssertionError, match="generate after close"):
        answers(engine)
