"""The vLLM engine against the native one: greedy tokens, scores, switches, what it refuses."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from bitsperbyte.randopt.engines.base import Sampling
from bitsperbyte.randopt.engines.vllm_worker import EXTENSION

PROMPTS = [[5, 6, 7, 8], [100, 101], [9] * 20, [2], list(range(10, 63))]
SWITCHES = [(5, 0.02), (2**64 - 1, 0.02), (5, 0.05)]
CONTEXT = 24
SIZES = ({}, {"kind": "llama", "tie_word_embeddings": False, "bos": False}, {"kind": "qwen3"})


@pytest.fixture(scope="module", params=SIZES, ids=["qwen2", "llama untied", "qwen3"])
def pair(request: pytest.FixtureRequest, opened: Callable) -> Iterator[tuple[Any, Any]]:
    native, vllm = (opened(name, **request.param) for name in ("native", "vllm"))
    yield native, vllm
    vllm.close()
    native.close()


def texts(text: str) -> list[str]:
    return [text[:200], "x", "", "Hello world. " * 20, "naïve café 🙂"]


def agree(native: Any, vllm: Any, documents: list[str]) -> None:
    assert vllm.generate(PROMPTS, Sampling(12)) == native.generate(PROMPTS, Sampling(12))
    for context in (CONTEXT, 64):
        for one, other in zip(native.score(documents, context), vllm.score(documents, context), strict=True):
            assert np.array_equal(one.num_bytes, other.num_bytes) and len(one.nats) == len(other.nats)
            assert np.allclose(one.nats, other.nats, atol=1e-4, rtol=0)


def test_tokens_and_scores_are_the_native_engines_under_the_base_and_every_seed(pair: tuple[Any, Any], text: str) -> None:
    native, vllm = pair
    agree(native, vllm, texts(text))
    answers = [vllm.generate(PROMPTS, Sampling(12))]
    for seed, sigma in SWITCHES:
        for engine in pair:
            engine.perturb(seed, sigma)
        agree(native, vllm, texts(text))
        answers.append(vllm.generate(PROMPTS, Sampling(12)))
    assert all(a != b for i, a in enumerate(answers) for b in answers[:i])
    for engine in pair:
        engine.reset()
        engine.verify_base()
    assert vllm.generate(PROMPTS, Sampling(12)) == answers[0]


def test_what_they_say_of_themselves_agrees(pair: tuple[Any, Any]) -> None:
    native, vllm = (engine.describe() for engine in pair)
    for name in ("model", "kind", "dtype", "num_parameters", "num_perturbed", "weights_sha256", "tokenizer_sha256", "context", "prompt_format"):
        assert native[name] == vllm[name], name
    assert {k: v for k, v in native["noise"].items() if k != "writer"} == {k: v for k, v in vllm["noise"].items() if k != "writer"}
    rows = [{row["name"]: row for row in engine.effective_rms(0.02, 7)} for engine in pair]
    assert rows[0].keys() == rows[1].keys()
    for name, row in rows[0].items():
        assert {k: v for k, v in rows[1][name].items() if k != "name"} == pytest.approx({k: v for k, v in row.items() if k != "name"}), name
    assert pair[1].switch_s() > 0.0


def test_stop_texts_and_end_tokens_cut_as_in_the_native_engine(pair: tuple[Any, Any]) -> None:
    native, vllm = pair
    free = native.generate(PROMPTS, Sampling(30))
    stop = next(c for g in free for c in g.text[2:] if c.isascii() and c.isprintable())
    for engine in pair:
        engine.reset()
    found = [engine.generate(PROMPTS, Sampling(30, stop=(stop, "no such text"))) for engine in pair]
    assert found[0] == found[1] and found[0] != free
    assert any(not g.truncated for g in found[0])


def test_samples_depend_on_seed_and_position_alone(pair: tuple[Any, Any]) -> None:
    _, vllm = pair
    hot = Sampling(8, temperature=1.0, top_p=0.95, seed=3)
    first = vllm.generate([PROMPTS[0]] * 6, hot)
    assert len({g.token_ids for g in first}) > 1
    assert vllm.generate([PROMPTS[0]] * 6, hot) == first
    assert vllm.generate([PROMPTS[0]] * 3, hot) == first[:3]
    assert vllm.generate([PROMPTS[0]] * 6, Sampling(8, temperature=1.0, top_p=0.95, seed=4)) != first


def test_prompts_and_windows_that_do_not_fit(pair: tuple[Any, Any]) -> None:
    _, vllm = pair
    (answer,) = vllm.generate([list(range(3, 66))], Sampling(9))
    assert answer.num_tokens == 1
    with pytest.raises(ValueError, match="takes 64 positions"):
        vllm.generate([[3], list(range(3, 67))], Sampling(9))
    with pytest.raises(ValueError, match="at most 64"):
        vllm.score(["x"], 65)
    assert vllm.generate([], Sampling(1)) == []


def test_an_interrupt_leaves_no_request_behind(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    _, vllm = pair
    vllm.reset()
    expected, engine = vllm.generate(PROMPTS, Sampling(12)), vllm.llm.llm_engine
    steps, step = [], engine.step

    def interrupted() -> Any:
        steps.append(1)
        if len(steps) == 4:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        vllm.generate(PROMPTS, Sampling(12))
    monkeypatch.undo()
    vllm.perturb(1, 0.02)
    vllm.reset()
    assert vllm.generate(PROMPTS, Sampling(12)) == expected
    engine.add_request("left", {"prompt_token_ids": [5]}, __import__("vllm").SamplingParams(max_tokens=4, detokenize=False))
    with pytest.raises(RuntimeError, match="1 requests are still running"):
        vllm.perturb(1, 0.02)
    engine.abort_request(list(engine.output_processor.request_states), internal=True)


def test_the_self_test_sees_what_it_is_for(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    _, vllm = pair
    vllm.self_test()
    perturb, reset, read = vllm.perturb, vllm.reset, vllm._window_nats
    with monkeypatch.context() as patch:
        patch.setattr(vllm, "perturb", lambda seed, sigma: perturb(1, sigma))
        with pytest.raises(RuntimeError, match="give equal log-probabilities"):
            vllm.self_test()
    with monkeypatch.context() as patch:
        patch.setattr(vllm, "reset", lambda: None)
        patch.setattr(vllm, "verify_base", lambda: None)
        with pytest.raises(RuntimeError, match="after a seed and a reset"):
            vllm.self_test()
    reset()
    with monkeypatch.context() as patch:

        def under_other_weights(windows: Any) -> Any:
            perturb(99, 0.02)
            return read(windows)

        patch.setattr(vllm, "_window_nats", under_other_weights)
        with pytest.raises(RuntimeError, match="does not compute with the current weights"):
            vllm.self_test()
    reset()
    vllm.self_test()


def test_a_base_that_something_wrote_to_is_seen(pair: tuple[Any, Any]) -> None:
    _, vllm = pair
    vllm.reset()
    vllm.llm.apply_model(change_a_weight)
    with pytest.raises(RuntimeError, match="changed since loading"):
        vllm.verify_base()
    vllm.reset()  # the copy is whole
    vllm.verify_base()


def change_a_weight(model: Any) -> None:
    model.model.norm.weight.data[3] += 1.0


def test_the_extension_is_found_by_name_in_the_installed_package() -> None:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    assert resolve_obj_by_qualname(EXTENSION).__name__ == "PerturbExtension"
