"""Exported members: loaded with transformers alone they are the member that the search evaluated, and nothing half-made is left."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bitsperbyte.golf.model import GolfModel, ModelConfig
from bitsperbyte.randopt import export
from bitsperbyte.randopt.config import RandOptConfig
from bitsperbyte.randopt.engines.base import Engine, Sampling
from bitsperbyte.randopt.engines.registry import open_engine
from bitsperbyte.randopt.export import export_member
from bitsperbyte.randopt.noise import perturbed_reference

QUESTIONS = ["What is 12 + 34?", "name a city", "the lazy dog", "x"]
TEXT = "What is the name of a city? The quick brown fox jumps over the lazy dog. 12 + 34 = 46, x, y and z. "


def make_checkpoint(folder: Path, *, tied: bool, max_shard_size: str = "5GB") -> Path:
    """A random Llama with an end token and a byte-level tokenizer with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.train_from_iterator([TEXT], trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<pad>", "<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    fast.chat_template = ("{% for m in messages %}<s>{{ m.role }}: {{ m.content }}{% endfor %}"
                          "{% if add_generation_prompt %}answer:{% endif %}")
    fast.save_pretrained(folder)
    torch.manual_seed(4)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=len(fast), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, initializer_range=0.3, tie_word_embeddings=tied, eos_token_id=2, bos_token_id=1, pad_token_id=0))
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def run_of(config: RandOptConfig, folder: Path, engine: Engine, **changes: Any) -> SimpleNamespace:
    """The record of a finished run with two members, as far as export reads it."""
    part = {"engine": engine.describe(), "selection": {"members": [
        {"rank": 1, "index": 5, "seed": 2**40 + 3, "sigma": 0.05}, {"rank": 2, "index": 1, "seed": 77, "sigma": 0.02}]}}
    return SimpleNamespace(**{"track": "randopt", "status": "finished", "name": "test", "config": config.model_dump(mode="json"),
                              "randopt": SimpleNamespace(model_dump=lambda: part), **changes})


@pytest.fixture
def record_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Path, SimpleNamespace, Engine]]:
    """record_of(model section, noise section) -> (path of the record, the record, the engine of the run)."""

    def make(model: dict[str, Any], noise: dict[str, Any] | None = None, run_dir: Path | None = None,
             **changes: Any) -> tuple[Path, SimpleNamespace, Engine]:
        config = RandOptConfig.model_validate({"model": {"device": "cpu", **model}, "task": {"name": "arithmetic"},
                                               "noise": {"sigmas": [0.05, 0.02], **(noise or {})}})
        run_dir = run_dir or tmp_path / "run"
        engine = open_engine(config, run_dir, lambda line: None)
        record = run_of(config, run_dir, engine, **changes)
        monkeypatch.setattr(export, "read_record", lambda path: record)
        return run_dir / "record.json", record, engine

    return make


def answers_alone(folder: Path) -> list[list[int]]:
    """Greedy answers with transformers alone, one prompt at a time."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    found = []
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        made = model.generate(**ids, max_new_tokens=12, do_sample=False)
        found.append(made[0, ids["input_ids"].shape[1] :].tolist())
    return found


def answers_inside(engine: Engine) -> list[list[int]]:
    ids = engine.encode([[{"role": "user", "content": question}] for question in QUESTIONS])
    return [list(g.token_ids) for g in engine.generate(ids, Sampling(12))]


@pytest.mark.parametrize(("tied", "noise", "dtype"), [
    (True, {}, "float32"), (False, {"sigma": "relative", "scheme": "binomial"}, "float32"),
    (False, {"exclude": ["*norm*", "lm_head.weight"]}, "bfloat16"),
])
def test_a_member_alone_is_the_member_of_the_search(
    tied: bool, noise: dict[str, Any], dtype: str, record_of: Callable, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    base = make_checkpoint(tmp_path / "base", tied=tied, max_shard_size="40KB")
    assert len(list(base.glob("*.safetensors"))) > 1
    path, _, engine = record_of({"path": str(base), "dtype": dtype}, noise)
    told = export_member(path, 1, tmp_path / "member")
    assert "rank 1" in told and "member 5" in told
    engine.perturb(2**40 + 3, 0.05)
    inside = answers_inside(engine)
    if dtype == "float32":  # in bfloat16 two ways to multiply may choose another token, so there the weights are compared
        assert answers_alone(tmp_path / "member") == inside and answers_alone(base) != inside
    stored = {name: tensor for file in base.glob("*.safetensors") for name, tensor in load_file(file).items()}
    made = {name: tensor for file in (tmp_path / "member").glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert set(made) == set(stored) and ("lm_head.weight" in made) == (not tied)
    rms = engine.describe()["noise"]["rms"]
    for name, tensor in stored.items():
        expected = tensor.to(getattr(torch, dtype))
        if name != "lm_head.weight" and "norm" not in name or not noise.get("exclude"):
            factor = rms[name] if rms else 1.0
            expected = perturbed_reference(expected, name, 2**40 + 3, 0.05 * factor, scheme=noise.get("scheme", "rademacher"))
        assert torch.equal(made[name], expected), name
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "member" / name).read_bytes() == (base / name).read_bytes()
    assert json.loads((tmp_path / "member/config.json").read_text())["dtype"] == dtype


def test_a_golf_member_is_its_weights_and_its_tokenizer(record_of: Callable, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    golf = {"num_docs": 100, "settings": {
        "model": {"vocab_size": 260, "dim": 16, "num_heads": 2, "num_kv_heads": 1, "order": [0, 0], "skips": [[0, 1]]},
        "schedule": {"wallclock_s": None, "max_steps": 2, "warmdown": {"steps": 1}, "warmup_steps": 0},
        "train": {"batch_tokens": 64, "seq_len": 16, "micro_batch_tokens": 64, "device": "cpu"},
        "eval": {"every_steps": None, "batch_tokens": 1024}}}
    path, _, engine = record_of({"golf": golf}, {"sigma": "relative"})
    export_member(path, 2, tmp_path / "member")
    engine.perturb(77, 0.02)
    model = GolfModel(ModelConfig.from_dict(json.loads((tmp_path / "member/config.json").read_text())["model"]))
    model.load_state_dict(load_file(tmp_path / "member/model.safetensors"))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), engine.model.parameters(), strict=True))
    # elsewhere the model that the run made is missing, and must be named instead of being trained again
    record = tmp_path / "records/record.json"
    with pytest.raises(ValueError, match="does not hold the model that the run made.*--model"):
        export_member(record, 2, tmp_path / "elsewhere")
    export_member(record, 2, tmp_path / "elsewhere", model=str(tmp_path / "run/model"))
    assert (tmp_path / "elsewhere/model.safetensors").read_bytes() == (tmp_path / "member/model.safetensors").read_bytes()


def test_another_base_model_is_refused_and_leaves_nothing(record_of: Callable, tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", tied=True)
    path, _, _ = record_of({"path": str(base)})
    moved = tmp_path / "moved"
    shutil.copytree(base, moved)
    shutil.rmtree(base)
    with pytest.raises(ValueError, match=r"base.*check model\.path|base.*no folder"):
        export_member(path, 1, tmp_path / "member")
    export_member(path, 1, tmp_path / "member", model=str(moved))
    weights = bytearray((moved / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (moved / "model.safetensors").write_bytes(weights)
    with pytest.raises(ValueError, match="not the one that the run used: its weights_sha256"):
        export_member(path, 1, tmp_path / "other", model=str(moved))
    assert sorted(p.name for p in tmp_path.iterdir() if "other" in p.name) == []


@pytest.mark.parametrize(("section", "key"), [("config", "noise"), ("config", "model"), ("engine", "dtype"), ("engine", "weights_sha256")])
def test_a_record_that_does_not_say_what_a_member_is_made_of(record_of: Callable, tmp_path: Path, section: str, key: str) -> None:
    path, record, _ = record_of({"path": str(make_checkpoint(tmp_path / "base", tied=True))})
    part = record.randopt.model_dump()
    record.randopt = SimpleNamespace(model_dump=lambda: part)
    del (record.config if section == "config" else part["engine"])[key]
    with pytest.raises(ValueError, match="does not say which model and noise its members are made of"):
        export_member(path, 1, tmp_path / "member")
    assert not (tmp_path / "member").exists()


def test_what_is_there_is_kept(record_of: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _, _ = record_of({"path": str(make_checkpoint(tmp_path / "base", tied=True))})
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    for name in ("full", "file"):
        with pytest.raises(ValueError, match="is there and not empty"):
            export_member(path, 1, tmp_path / name)
    assert (tmp_path / "full/mine").read_text() == (tmp_path / "file").read_text() == "mine"

    copyfile = export.shutil.copyfile

    def fails(*_: Any) -> None:
        raise OSError(28, "the disk is full")

    monkeypatch.setattr(export.shutil, "copyfile", fails)
    before = sorted(tmp_path.iterdir())
    for name in ("empty", "new"):
        with pytest.raises(OSError, match="the disk is full"):
            export_member(path, 1, tmp_path / name)
    assert sorted(tmp_path.iterdir()) == before and not any((tmp_path / "empty").iterdir())
    monkeypatch.setattr(export.shutil, "copyfile", copyfile)
    export_member(path, 1, tmp_path / "empty")
    assert (tmp_path / "empty/model.safetensors").is_file()


@pytest.mark.parametrize(("changes", "rank", "words"), [
    ({"status": "interrupted"}, 1, "a randopt run that is interrupted"), ({"track": "golf", "randopt": None}, 1, "a golf run"),
    ({}, 3, "no member of rank 3: it keeps ranks 1 to 2"),
])
def test_records_without_that_member_are_refused(
    changes: dict[str, Any], rank: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RandOptConfig.model_validate({"model": {"path": "x"}, "task": {"name": "arithmetic"}, "noise": {"sigmas": [1.0]}})
    record = run_of(config, tmp_path, SimpleNamespace(describe=lambda: {}), **changes)
    monkeypatch.setattr(export, "read_record", lambda path: record)
    with pytest.raises(ValueError, match=words):
        export_member(tmp_path / "record.json", rank, tmp_path / "member")
    assert list(tmp_path.iterdir()) == []
