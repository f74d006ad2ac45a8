"""The vLLM engine where there is no vLLM, and its parts that need none. tests/vllm holds it against the native engine."""

import importlib.util
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bitsperbyte.randopt.config import RandOptConfig
from bitsperbyte.randopt.engines import vllm
from bitsperbyte.randopt.engines.vllm import VllmEngine, joined_rms, open_engine, request_seed
from bitsperbyte.randopt.layout import Layout
from bitsperbyte.randopt.perturb import Perturber


def test_without_vllm_one_sentence_says_what_to_do(run_config: Callable[..., RandOptConfig], checkpoint_folder: Callable,
                                                   monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(vllm.importlib.util, "find_spec", lambda name: None if name == "vllm" else find(name))
    with pytest.raises(ValueError, match=r"the package vllm is not installed here: .*pip install vllm.*native"):
        open_engine(run_config(checkpoint_folder(), model={"engine": "vllm"}), tmp_path, print)
    with pytest.raises(ValueError, match="a golf artifact, which vLLM does not run"):
        open_engine(run_config("run/artifact.bpb", model={"engine": "vllm"}), tmp_path, print)


def test_what_is_refused_before_vllm_starts(run_config: Callable[..., RandOptConfig], checkpoint_folder: Callable, monkeypatch: pytest.MonkeyPatch,
                                            tmp_path: Any) -> None:
    monkeypatch.setattr(vllm, "_require_vllm", lambda: None)
    with pytest.raises(ValueError, match="decode.graphs is on"):
        open_engine(run_config(checkpoint_folder(), decode={"graphs": "on"}), tmp_path, print)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="GGUF file, which the vLLM engine does not read"):
        open_engine(run_config(tmp_path / "model.gguf"), tmp_path, print)


def test_a_vllm_without_what_is_needed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    from dataclasses import make_dataclass

    monkeypatch.setattr(vllm.importlib.util, "find_spec", lambda name: object())
    old = SimpleNamespace(__version__="0.4.2", LLM=type("LLM", (), {"generate": None}))
    monkeypatch.setitem(sys.modules, "vllm", old)
    monkeypatch.setitem(sys.modules, "vllm.engine", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", SimpleNamespace(EngineArgs=make_dataclass("EngineArgs", ["enable_prefix_caching"])))
    with pytest.raises(ValueError, match=r"\(0.4.2\) has no worker_extension_cls, .*collective_rpc, which this engine needs: install a newer one"):
        vllm._require_vllm()


def test_rows_of_all_ranks_are_rows_of_the_whole(tiny_model: Callable) -> None:
    """Effective noise over thirds of each tensor, joined, is that over the tensors."""
    whole = Perturber(Layout.of_module(tiny_model("qwen2").bfloat16()))
    ranks: list[list] = [[], [], []]
    for piece in whole.pieces:
        for i, part in enumerate(piece.cut(-(-piece.num_elements // 3))):
            ranks[min(i, 2)].append(part)
    parts = Perturber(_cut_layout(tiny_model("qwen2").bfloat16(), ranks))
    joined = joined_rms([parts.effective_rms(0.01, 5, frozenset(rank)) for rank in ranks])
    expected = {row["name"]: row for row in whole.effective_rms(0.01, 5)}
    assert len(joined) == len(expected)
    for row in joined:
        assert row["num_elements"] == expected[row["name"]]["num_elements"]
        for name in ("base_rms", "requested_rms", "effective_rms", "share_unchanged"):
            assert row[name] == pytest.approx(expected[row["name"]][name], rel=1e-9, abs=1e-12)


def _cut_layout(model: torch.nn.Module, ranks: list[list]) -> Layout:
    from bitsperbyte.randopt.layout import LiveTensor

    pieces: dict[str, list] = {}
    for piece in (piece for rank in ranks for piece in rank):
        pieces.setdefault(piece.name, []).append(piece)
    layout = Layout.of_module(model)
    return Layout(tuple(LiveTensor(live.name, live.tensor, tuple(pieces[live.pieces[0].name])) for live in layout.tensors), {})


def test_seeds_of_requests_are_distinct_and_fit() -> None:
    seeds = {request_seed(seed, position) for seed in range(40) for position in range(40)}
    assert len(seeds) == 1600 and all(0 <= seed < 2**63 for seed in seeds)
    assert request_seed(1, 11) != request_seed(11, 1) != request_seed(111, 0)


class FakeLLM:
    """Workers that answer what they are told to."""

    def __init__(self, answers: list[dict[str, Any]], left: int = 0) -> None:
        self.answers, self.calls = answers, []
        self.llm_engine = SimpleNamespace(get_num_unfinished_requests=lambda: left, engine_core=SimpleNamespace(shutdown=lambda: None))

    def collective_rpc(self, method: str, args: tuple) -> list[dict[str, Any]]:
        self.calls.append((method, args))
        return self.answers


def engine_over(llm: FakeLLM) -> VllmEngine:
    engine = VllmEngine.__new__(VllmEngine)
    engine.llm, engine._device = llm, torch.device("cpu")
    return engine


@pytest.mark.parametrize(("kind", "raised"), [("ValueError", ValueError), ("RuntimeError", RuntimeError), ("memory", torch.OutOfMemoryError)])
def test_what_a_worker_says_is_raised_as_it_was(kind: str, raised: type[Exception]) -> None:
    engine = engine_over(FakeLLM([{"value": None}, {"error": kind, "text": "the second rank says why"}]))
    with pytest.raises(raised, match="the second rank says why"):
        engine.perturb(1, 0.1)
    engine.close()
    engine.close()


def test_weights_do_not_change_under_running_requests() -> None:
    engine = engine_over(FakeLLM([{"value": None}], left=2))
    for switch in (lambda: engine.perturb(1, 0.1), engine.reset):
        with pytest.raises(RuntimeError, match="2 requests are still running"):
            switch()
    assert engine.llm.calls == []


def test_windows_ask_for_every_target_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The targets after the first input of a window come from its prompt, the last from the token that must be generated."""
    import sys

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=lambda **settings: SimpleNamespace(**settings)))
    engine = engine_over(FakeLLM([]))

    def outputs(prompts: list, wanted: list) -> list:
        made = []
        for ids, settings in zip(prompts, wanted, strict=True):
            logs = [None, *({token: SimpleNamespace(logprob=-float(token))} for token in ids[1:])]
            (target,) = settings.allowed_token_ids
            answer = SimpleNamespace(token_ids=[target], logprobs=[{target: SimpleNamespace(logprob=-float(target))}])
            made.append(SimpleNamespace(prompt_logprobs=logs, outputs=[answer]))
        return made

    engine._run = outputs
    engine._prompter = SimpleNamespace(prefix=[1], document=lambda text: ([int(c) for c in text], np.ones(len(text), np.int64)))
    engine._positions, engine._source = 4, "tiny"
    found = engine.score(["23456789", "", "7"], 4)
    assert [document.nats.tolist() for document in found] == [[2, 3, 4, 5, 6, 7, 8, 9], [], [7]]
    with pytest.raises(ValueError, match="at most 4"):
        engine.score(["2"], 5)


def test_a_context_that_no_cache_holds_is_shortened_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, said = engine_over(FakeLLM([])), []
    engine._say, engine._token_bytes, engine._positions = said.append, lambda: 1000, 4096
    engine._shorten(1000 * (4096 + vllm.CACHE_SLACK))
    assert engine._positions == 4096 and not said
    engine._shorten(1000 * (4095 + vllm.CACHE_SLACK))
    assert engine._positions == 4095 and "at most 4,095 tokens of the model's 4,096" in said[0]
    with pytest.raises(ValueError, match="holds no sequence"):
        engine._shorten(1000 * vllm.CACHE_SLACK)
