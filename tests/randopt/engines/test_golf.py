"""The golf engine: its cached network against the network itself, its scores against golf's own, models made first and killed."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bitsperbyte.golf import session
from bitsperbyte.golf.artifact import read_artifact, write_artifact
from bitsperbyte.golf.evaluate import Protocol, evaluate
from bitsperbyte.golf.model import GolfModel, ModelConfig
from bitsperbyte.metric.bpb import Score
from bitsperbyte.randopt.config import GolfSection, ModelSection, RandOptConfig
from bitsperbyte.randopt.engines import golf
from bitsperbyte.randopt.engines.base import Sampling
from bitsperbyte.randopt.engines.golf import CachedNetwork, GolfEngine, golf_config, open_engine
from bitsperbyte.randopt.noise import perturbed_reference
from bitsperbyte.run.outcome import RunFailed
from bitsperbyte.text.tokenizers import ByteTokenizer, SentencePieceTokenizer, train_sentencepiece

SIZES = {"vocab_size": 260, "dim": 24, "num_heads": 4, "num_kv_heads": 2}
NETWORKS = {
    "baseline": ModelConfig(**SIZES, order=(0, 1, 2, 3), skips=((1, 2), (0, 3))),
    "recurrent": ModelConfig(**SIZES, order=(0, 1, 1, 0), skips=((0, 3), (1, 2)), tie_embeddings=False),
    "window": ModelConfig(**SIZES, order=(0, 1), skips=(), attention_window=3),
}
PROMPTS = ["7?12=", "a", "long enough to be a prompt", "49?49=", "", "mid size"]


def model_of(config: ModelConfig, seed: int = 0) -> GolfModel:
    """A model whose every tensor matters: heads and projections start at zero, which would hide most mistakes."""
    torch.manual_seed(seed)
    model = GolfModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return model.requires_grad_(False)


def settings(**changes: Any) -> RandOptConfig:
    return RandOptConfig.model_validate({
        "model": {"path": "somewhere.bpb", "device": "cpu"}, "task": {"name": "arithmetic"},
        "noise": {"sigmas": [0.01], **changes.pop("noise", {})}, **changes,
    })


def engine_of(model: GolfModel, tokenizer: Any = None, **changes: Any) -> GolfEngine:
    return GolfEngine(model, tokenizer or ByteTokenizer(), config=settings(**changes), max_positions=64, facts={"model": "test"})


def greedy(model: GolfModel, ids: Sequence[int], num_tokens: int, stop_at: int) -> list[int]:
    """The tokens after `ids`, without a cache."""
    out = list(ids)
    for _ in range(num_tokens):
        out.append(int(model.logits(model.hidden(torch.tensor([out]))[0, -1:]).argmax()))
        if out[-1] == stop_at:
            break
    return out[len(ids) :]


@pytest.mark.parametrize("name", NETWORKS)
def test_cached_steps_give_the_logits_of_the_whole_network(name: str) -> None:
    model, generator = model_of(NETWORKS[name]), torch.Generator().manual_seed(1)
    lengths = [5, 1, 9, 3, 7]
    rows = [torch.randint(0, 260, (n + 4,), generator=generator) for n in lengths]  # each with four tokens to step through
    network = CachedNetwork(model, 32)
    network.allocate(7, 16)
    for parts in network._cache:
        for part in parts:
            part.fill_(1e9)  # what an earlier call left
    at = [4, 0, 3, 1, 2]  # rows of the cache, in no order
    network.prefill([row[:n].tolist() for row, n in zip(rows, lengths, strict=True)], at)
    held = torch.zeros(5, dtype=torch.int64)
    held[torch.tensor(at)] = torch.tensor(lengths)
    order = {r: i for i, r in enumerate(at)}  # row of the cache -> index
    kept = [0, 1, 2, 3, 4]
    for ahead in range(4):
        if ahead == 2:  # two sequences end
            kept = [0, 2, 3]
            network.keep(torch.tensor(kept))
            held = held[torch.tensor(kept)]
        tokens = torch.stack([rows[order[r]][lengths[order[r]] + ahead] for r in kept])
        logits = network.step(tokens, held, int(held.max()) + 1 + ahead % 2)
        for row, r in enumerate(kept):
            n = lengths[order[r]] + ahead + 1
            expected = model.logits(model.hidden(rows[order[r]][None, :n])[0, -1:])[0]
            torch.testing.assert_close(logits[row], expected, rtol=0, atol=1e-5)
        held = held + 1


@pytest.mark.parametrize("name", NETWORKS)
def test_answers_are_those_of_a_loop_without_a_cache_whatever_the_batch(name: str) -> None:
    model, tokenizer = model_of(NETWORKS[name], seed=3), ByteTokenizer()
    ids = engine_of(model).encode([[{"role": "user", "content": text}] for text in PROMPTS])
    assert ids[0] == [1, *tokenizer.encode("7?12=")] and ids[4] == [1]
    expected = [greedy(model, row, 8, stop_at=1) for row in ids]
    for limit in (None, 1, 4):
        made = engine_of(model, decode={"max_sequences": limit}).generate(ids, Sampling(8))
        assert [list(g.token_ids) for g in made] == expected
        assert [g.truncated for g in made] == [row[-1] != 1 for row in expected]
        assert [g.num_prompt_tokens for g in made] == [len(row) for row in ids]


def test_a_bos_ends_an_answer_and_is_no_part_of_its_text() -> None:
    model = model_of(NETWORKS["baseline"])
    ids = [[1, 10, 11]]
    first, second, third = greedy(model, ids[0], 3, stop_at=-1)
    engine = engine_of(model)
    (whole,) = engine.generate(ids, Sampling(3))
    assert whole.truncated and whole.token_ids == (first, second, third)
    engine._decoder.eos_ids, engine._decoder._eos = frozenset([second]), torch.tensor([second])
    (ended,) = engine.generate(ids, Sampling(3))
    assert ended.token_ids == (first, second) and not ended.truncated
    assert engine_of(model)._decoder.eos_ids == {1} and ByteTokenizer().decode([4 + 65, 1]) == "A"


def test_messages_become_plain_text_behind_a_bos(tmp_path: Path) -> None:
    tokenizer = train_sentencepiece(["one two three four five six"] * 50, 300, tmp_path)
    engine = engine_of(model_of(ModelConfig(**{**SIZES, "vocab_size": 300}, order=(0,), skips=())), tokenizer)
    assert isinstance(tokenizer, SentencePieceTokenizer)
    (ids,) = engine.encode([[{"role": "system", "content": "one two"}, {"role": "user", "content": "three"}]])
    assert ids == [tokenizer.bos_id, *tokenizer.encode("one two\nthree")]


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("score_tokens", [1, 40, 10_000])
def test_scores_equal_those_of_golfs_own_evaluation(name: str, score_tokens: int) -> None:
    model, tokenizer, context = model_of(NETWORKS[name]), ByteTokenizer(), 8
    texts = ["x", "seven b", "eight by", "nine byte", "sixteen bytes ab", "seventeen bytes a", "café " * 12]
    stream = np.concatenate([part for text in texts for part in (np.array([1], np.uint16), tokenizer.encode(text))])
    reference = evaluate(model, stream, tokenizer.table, 1, Protocol(context, None, "isolated"))
    found = engine_of(model, decode={"score_tokens": score_tokens}).score(texts, context)
    assert [len(d.nats) for d in found] == [len(text.encode()) for text in texts]
    np.testing.assert_allclose([d.nats.sum() for d in found], reference.document_nats[1:], rtol=1e-6)
    assert [int(d.num_bytes.sum()) for d in found] == reference.document_bytes[1:].tolist()
    total = Score.total(Score(float(d.nats.sum()), int(d.num_bytes.sum()), len(d.nats)) for d in found)
    assert total.bpb == pytest.approx(reference.score.bpb, rel=1e-6) and total.num_tokens == reference.score.num_tokens
    # token by token: a document alone, without windows, agrees on its first window
    logits = model.logits(model.hidden(torch.tensor(stream[-61:-1][None, :context].astype(np.int64)))[0])
    last = texts[-1].encode()
    alone = engine_of(model).score([texts[-1]], context)[0].nats[:context]
    first = torch.tensor([[1, *(4 + b for b in last[: context - 1])]])
    expected = -torch.log_softmax(model.logits(model.hidden(first)[0]), -1)[range(context), [4 + b for b in last[:context]]]
    np.testing.assert_allclose(alone, expected.numpy(), atol=1e-5)
    assert len(logits) == context


def test_a_perturbed_engine_is_another_model_and_a_reset_one_the_base() -> None:
    model = model_of(NETWORKS["recurrent"])
    before = {name: p.clone() for name, p in model.named_parameters()}
    engine = engine_of(model, noise={"sigmas": [0.5], "exclude": ["tok_emb.*"]})
    base = engine.score(["some text"], 16)[0].nats
    engine.perturb(7, 0.5)
    assert not np.allclose(engine.score(["some text"], 16)[0].nats, base)
    for name, parameter in model.named_parameters():
        reference = before[name]
        if name != "tok_emb.weight":
            reference = perturbed_reference(reference, name, 7, 0.5, scheme="rademacher")
        assert torch.equal(parameter, reference), name
    engine.reset()
    engine.verify_base()
    assert np.array_equal(engine.score(["some text"], 16)[0].nats, base)
    facts = engine.describe()
    assert facts["num_parameters"] - facts["num_perturbed"] == before["tok_emb.weight"].numel()


# -- files, and models that are made first ----------------------------------------------------------------------------


TINY = {
    "model": {"vocab_size": 260, "dim": 16, "num_heads": 2, "num_kv_heads": 1, "order": [0, 1], "skips": [[0, 1]]},
    "schedule": {"wallclock_s": None, "max_steps": 12, "warmdown": {"steps": 6}, "warmup_steps": 0},
    "train": {"batch_tokens": 128, "seq_len": 16, "micro_batch_tokens": 128, "checkpoint_every_steps": 4, "device": "cpu"},
    "eval": {"every_steps": None, "batch_tokens": 1024},
}


def made(**changes: Any) -> RandOptConfig:
    return settings(model={"golf": {"num_docs": 300, "seed": 5, "settings": TINY, **changes}, "device": "cpu"})


def artifact_sha256(run_dir: Path) -> str:
    return open_engine(made(), run_dir, lambda line: None).describe()["weights_sha256"]


def test_a_model_is_made_once_and_the_same_each_time(tmp_path: Path) -> None:
    lines: list[str] = []
    facts = open_engine(made(), tmp_path / "a", lines.append).describe()
    assert facts["trained"]["num_steps"] == 12 and facts["trained"]["corpus"] == "arithmetic" and facts["context"] == 16
    assert len(lines) == 1 and "making the model first: 12 steps" in lines[0]
    files = {p: p.stat().st_mtime_ns for p in (tmp_path / "a").rglob("*") if p.is_file()}
    again = open_engine(made(), tmp_path / "a", lines.append).describe()
    assert again == facts and len(lines) == 1
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "a").rglob("*") if p.is_file()} == files
    elsewhere = open_engine(made(), tmp_path / "b", lines.append).describe()
    assert elsewhere == facts
    other = open_engine(made(seed=6), tmp_path / "c", lines.append).describe()
    assert other["weights_sha256"] != facts["weights_sha256"]


@pytest.mark.parametrize("step", [1, 7])
def test_a_run_stopped_while_it_made_its_model_goes_on_to_the_same_one(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = artifact_sha256(tmp_path / "whole")
    trainer = session.Trainer
    train_step = trainer.train_step

    def stops(self: Any, *arguments: Any) -> Any:
        if self.step == step:
            raise RunFailed("stopped", 143, "interrupted")
        return train_step(self, *arguments)

    monkeypatch.setattr(trainer, "train_step", stops)
    with pytest.raises(RunFailed):
        artifact_sha256(tmp_path / "run")
    assert not (tmp_path / "run/model/artifact.bpb").exists()
    monkeypatch.setattr(trainer, "train_step", train_step)
    assert artifact_sha256(tmp_path / "run") == expected


def test_data_that_were_half_made_are_made_again(tmp_path: Path) -> None:
    expected = artifact_sha256(tmp_path / "whole")
    half = tmp_path / "run/model_data"
    half.mkdir(parents=True)
    shutil.copy(tmp_path / "whole/model_data/val_000000.bin", half / "train_000000.bin")
    (half / "val_000000.bin.tmp").write_bytes(b"torn")
    assert artifact_sha256(tmp_path / "run") == expected


@pytest.mark.parametrize(("changes", "words"), [
    ({"schedule": {"wallclock_s": 5, "max_steps": 3}}, "wallclock_s to null"),
    ({"schedule": {"wallclock_s": None, "max_steps": None}}, "model.golf.settings"),
    ({"model": {**TINY["model"], "dmi": 3}}, r"model.golf.settings: there is no setting model.dmi; did you mean model.dim"),
    ({"model": {**TINY["model"], "num_heads": 3}}, r"model.golf.settings: .*dim 16 must be a multiple of num_heads 3"),
    ({"data": {"path": "x"}}, "data cannot be set"),
    ({"model": {**TINY["model"], "vocab_size": 300}}, "has 260 pieces"),
])
def test_wrong_settings_of_the_golf_run_are_named(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        open_engine(made(settings={**TINY, **changes}), tmp_path, lambda line: None)
    assert not (tmp_path / "model").exists()


def test_the_corpus_is_the_data_whatever_the_name_of_the_folder(tmp_path: Path) -> None:
    config = golf_config(GolfSection(settings=TINY), tmp_path / "data")
    assert config.data.path == str(tmp_path / "data") and config.schedule.max_steps == 12


def test_the_shape_for_a_plan_needs_no_training(tmp_path: Path) -> None:
    model = model_of(NETWORKS["recurrent"])
    write_artifact(tmp_path / "artifact.bpb", state=dict(model.named_parameters()), model=model.config, tokenizer_sha256="0" * 64,
                   scheme="int8", codec="zlib")
    for path in (tmp_path, tmp_path / "artifact.bpb"):
        shape = golf.plan_shape(ModelSection(path=str(path)))
        assert shape["num_parameters"] == sum(p.numel() for p in model.parameters()) and shape["source"] == "header of its artifact"
        c = model.config
        cache = 2 * shape["num_layers"] * shape["num_kv_heads"] * shape["head_width"] * 4
        assert cache == CachedNetwork(model, 8).row_bytes(1) and (shape["width"], shape["vocab_size"]) == (c.dim, c.vocab_size)
    made = golf.plan_shape(ModelSection(golf=GolfSection(settings=TINY)))
    of_settings = GolfModel(golf_config(GolfSection(settings=TINY), tmp_path).model_dataclass())
    assert made["num_parameters"] == sum(p.numel() for p in of_settings.parameters()) and "settings" in made["source"]


def test_artifacts_and_run_folders_are_opened(tmp_path: Path) -> None:
    model, lines = model_of(NETWORKS["recurrent"]), []
    tokenizer = ByteTokenizer()
    tokenizer.save(tmp_path)
    write_artifact(tmp_path / "small.bpb", state=dict(model.named_parameters()), model=model.config, tokenizer_sha256=tokenizer.sha256,
                   scheme="int8", codec="zlib")
    config = settings(model={"path": str(tmp_path / "small.bpb"), "device": "cpu"})
    engine = open_engine(config, tmp_path / "run", lines.append)
    for name, value in read_artifact(tmp_path / "small.bpb").state.items():
        assert torch.equal(dict(engine.model.named_parameters())[name], value), name
    assert engine.describe()["context"] == golf.DEFAULT_CONTEXT and "config.yaml" in lines[0]
    assert not (tmp_path / "run").exists()
    (tmp_path / "tokenizer.json").unlink()
    train_sentencepiece(["one two three four five six"] * 50, 300, tmp_path)
    with pytest.raises(ValueError, match="another tokenizer"):
        open_engine(config, tmp_path / "run", lines.append)
    with pytest.raises(ValueError, match=r"no such artifact"):
        open_engine(settings(model={"path": str(tmp_path / "gone.bpb"), "device": "cpu"}), tmp_path / "run", lines.append)
    with pytest.raises(ValueError, match=r"model\.revision"):
        open_engine(settings(model={"path": "x.bpb", "revision": "main"}), tmp_path / "run", lines.append)


def test_a_run_folder_says_how_long_its_context_is(tmp_path: Path) -> None:
    open_engine(made(), tmp_path, lambda line: None)
    lines: list[str] = []
    engine = open_engine(settings(model={"path": str(tmp_path / "model"), "device": "cpu"}), tmp_path / "x", lines.append)
    assert engine.describe()["context"] == 16 and lines == []
    with pytest.raises(ValueError, match="16 positions"):
        engine.generate([[1] * 16], Sampling(1))


def test_a_saved_engine_is_its_live_weights(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    engine = engine_of(model_of(NETWORKS["recurrent"]))
    engine.perturb(3, 0.1)
    engine.save(tmp_path)
    model = GolfModel(ModelConfig.from_dict(json.loads((tmp_path / "config.json").read_text())["model"]))
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), engine.model.parameters(), strict=True))
    assert (tmp_path / "tokenizer.json").is_file()
