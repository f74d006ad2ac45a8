"""The native engine: scores against an independent computation, answers under switches, what it refuses."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from bitsperbyte.metric.bpb import Score
from bitsperbyte.randopt.engines.base import Sampling
from bitsperbyte.randopt.engines.native import NativeEngine, open_engine
from bitsperbyte.randopt.noise import perturbed_reference

CONTEXT = 24
TEXTS = ["A fox — naïve café.", "東京 🙂 12 + 34 = 46\n", "x", "", " ".join(["The lazy dog, ein Mädchen aß Äpfel."] * 9)]


@pytest.fixture(scope="module")
def open_tiny(checkpoint_folder: Callable[..., Path], run_config: Callable, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., NativeEngine]:
    def opened(said: list[str] | None = None, sections: dict | None = None, **folder: object) -> NativeEngine:
        config = run_config(checkpoint_folder(**folder), **(sections or {}))
        return open_engine(config, tmp_path_factory.mktemp("run"), (said if said is not None else []).append)

    return opened


def independent(folder: Path, text: str, context: int, bos: bool) -> Score:
    """Nats over bytes by the definition: one window at a time, float64 log-softmax, bytes by decoding prefixes of the offsets."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(folder)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    stream = ([1] if bos else []) + encoded["input_ids"]
    ends = [0] * (1 if bos else 0) + [end for _, end in encoded["offset_mapping"]]
    nats, num_bytes, num_tokens = 0.0, 0, 0
    for start in range(0, len(stream) - 1, context):
        inputs, targets = stream[start : start + context], stream[start + 1 : start + context + 1]
        with torch.no_grad():
            logs = model(torch.tensor([inputs])).logits[0].double().log_softmax(-1)
        nats -= sum(logs[i, t].item() for i, t in enumerate(targets))
        num_tokens += len(targets)
    if num_tokens:
        num_bytes = len(text[ends[0] :].encode())
    return Score(nats, num_bytes, num_tokens)


@pytest.mark.parametrize("bos", [True, False])
def test_scores_agree_with_an_independent_computation(open_tiny: Callable, checkpoint_folder: Callable, shared_dir: Path, bos: bool) -> None:
    engine = open_tiny(bos=bos)
    lines = (shared_dir / "data/fineweb/docs_200.jsonl").read_text(encoding="utf-8").splitlines()[:3]
    texts = TEXTS + [json.loads(line)["text"][:600] for line in lines]
    scored = engine.score(texts, CONTEXT)
    for text, document in zip(texts, scored, strict=True):
        expected = independent(checkpoint_folder(bos=bos), text, CONTEXT, bos)
        assert len(document.nats) == len(document.num_bytes) == expected.num_tokens
        assert int(document.num_bytes.sum()) == expected.num_bytes
        assert document.nats.sum() == pytest.approx(expected.nats, rel=1e-6)
    total = Score.total(Score(float(d.nats.sum()), int(d.num_bytes.sum()), len(d.nats)) for d in scored)
    wanted = Score.total(independent(checkpoint_folder(bos=bos), text, CONTEXT, bos) for text in texts)
    assert total.bpb == pytest.approx(wanted.bpb, abs=1e-6)


def test_documents_shorter_longer_and_as_long_as_the_context(open_tiny: Callable, checkpoint_folder: Callable) -> None:
    engine = open_tiny()
    text = TEXTS[-1][:90]
    num_tokens = len(engine._prompter.document(text)[0])  # with a BOS before them, so many inputs
    assert 20 < num_tokens < 64
    for context in (num_tokens - 1, num_tokens, num_tokens + 1, 1):
        document, = engine.score([text], context)
        assert document.nats.sum() == pytest.approx(independent(checkpoint_folder(), text, context, True).nats, rel=1e-6)
    exact = engine._checkpoint.tokenizer.decode(engine._prompter.document(TEXTS[-1])[0][:64])
    assert len(engine._prompter.document(exact)[0]) == 64
    document, = engine.score([exact], 64)  # every position of the model in one window
    assert len(document.nats) == 64 and np.isfinite(document.nats).all()
    with pytest.raises(ValueError, match="at most 64"):
        engine.score([exact], 65)


def test_scores_do_not_depend_on_the_batch(open_tiny: Callable) -> None:
    whole = open_tiny().score(TEXTS, CONTEXT)
    small = open_tiny(sections={"decode": {"score_tokens": 1}}).score(TEXTS, CONTEXT)
    for a, b in zip(whole, small, strict=True):
        assert np.allclose(a.nats, b.nats, rtol=1e-5) and np.array_equal(a.num_bytes, b.num_bytes)


def test_uniform_logits_score_log_of_the_vocabulary(open_tiny: Callable) -> None:
    engine = open_tiny()
    embedding = engine._model.get_input_embeddings().weight
    kept = embedding.clone()
    embedding.zero_()
    document, = engine.score([TEXTS[0]], CONTEXT)
    embedding.copy_(kept)
    assert document.nats == pytest.approx(np.full(len(document.nats), math.log(340)), rel=1e-6)


def answers(engine: NativeEngine) -> list[tuple[int, ...]]:
    prompts = engine.encode([[{"role": "user", "content": text}] for text in TEXTS[:3]])
    return [g.token_ids for g in engine.generate(prompts, Sampling(12))]


def test_a_member_is_the_reference_model_and_a_reset_the_base(open_tiny: Callable, checkpoint_folder: Callable) -> None:
    """Through the public calls alone: under a seed the engine scores and answers as transformers does with weights that the noise's
    reference perturbed under the checkpoint's names."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    engine, folder = open_tiny(), checkpoint_folder()
    base_answers, base_scores = answers(engine), engine.score(TEXTS, CONTEXT)
    stored = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in stored  # tied: the noise is that of the stored name
    for seed in (7, 8):
        engine.perturb(seed, 0.02)
        other = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        state = {name: perturbed_reference(tensor, name, seed, 0.02) for name, tensor in stored.items()}
        other.load_state_dict(state, strict=False)
        other.tie_weights()
        live = dict(engine._model.named_parameters())
        assert all(torch.equal(live[name], state[name]) for name in live) and len(live) == len(state)
        for prompt, generated in zip(engine.encode([[{"role": "user", "content": t}] for t in TEXTS[:3]]), answers(engine), strict=True):
            ids = torch.tensor([prompt])
            wanted = other.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)[0, len(prompt) :]
            assert list(generated) == wanted.tolist()
        assert not np.allclose(engine.score(TEXTS, CONTEXT)[0].nats, base_scores[0].nats, rtol=1e-3)
    engine.reset()
    engine.verify_base()
    assert answers(engine) == base_answers
    assert all(np.array_equal(a.nats, b.nats) for a, b in zip(engine.score(TEXTS, CONTEXT), base_scores, strict=True))
    assert engine.switch_s() > 0.0


def test_it_describes_itself(open_tiny: Callable) -> None:
    said: list[str] = []
    engine = open_tiny(said)
    facts = engine.describe()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["dtype"] == "float32" and facts["context"] == 64 and facts["prompt_format"] == "plain" and facts["kind"] == "qwen2"
    assert facts["num_perturbed"] == facts["num_parameters"] == sum(p.numel() for p in engine._model.parameters())
    assert facts["decode"] == {"steps": "fused steps of the Llama family", "graphs": False, "self_test_error": None}
    assert len([line for line in said if "no chat template" in line]) == 1
    engine.close()


@pytest.mark.parametrize(("kind", "steps"), [("gpt2", "with a cache by row"), ("bloom", "without a cache")])
def test_other_architectures_say_how_they_decode(open_tiny: Callable, kind: str, steps: str) -> None:
    said: list[str] = []
    engine = open_tiny(said, kind=kind)
    assert steps in engine.describe()["decode"]["steps"] and any("no fused decode step" in line for line in said)
    assert len(answers(engine)) == 3


def test_steps_that_are_wrong_are_not_used(open_tiny: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    from bitsperbyte.randopt.engines import layer_ops

    attend = layer_ops.attend
    monkeypatch.setattr(layer_ops, "attend", lambda *arguments: 1.1 * attend(*arguments))
    said: list[str] = []
    engine = open_tiny(said)
    assert engine.describe()["decode"]["steps"] == "transformers forward with a cache by row"
    assert any("fused steps" in line and "differ from the whole forward's" in line for line in said)


def test_excluded_tensors_stay(open_tiny: Callable) -> None:
    engine = open_tiny(sections={"noise": {"exclude": ["*norm*"]}})
    before = {name: p.clone() for name, p in engine._model.named_parameters()}
    engine.perturb(3, 0.02)
    for name, parameter in engine._model.named_parameters():
        assert torch.equal(parameter, before[name]) == ("norm" in name), name


def test_graphs_without_a_gpu_are_refused(run_config: Callable, checkpoint_folder: Callable, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="need a GPU"):
        open_engine(run_config(checkpoint_folder(), decode={"graphs": "on"}), tmp_path, print)


def test_a_prompt_without_room_is_refused(open_tiny: Callable) -> None:
    engine = open_tiny()
    assert len(engine.generate([[5] * 63], Sampling(10))[0].token_ids) == 1
    with pytest.raises(ValueError, match="prompt 1 has 64 tokens"):
        engine.generate([[5], [5] * 64], Sampling(10))
