"""A run with an engine that needs no model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bitsperbyte.randopt.config import RandOptConfig

VOLATILE = ("created_utc", "command", "provenance", "phases_s", "attempts", "config", "config_sha256")


def make_config(**overrides: Any) -> RandOptConfig:
    """A small run of the arithmetic task; overrides are whole sections, or dotted keys with __ for the dot."""
    values: dict[str, Any] = {
        "name": "tiny", "model": {"path": "fake"}, "task": {"name": "arithmetic", "num_train": 12, "num_test": 16},
        "noise": {"sigmas": [0.1, 0.2]}, "search": {"population": 12, "top_k": 3, "secondary_k": [2]},
        "controls": {"control_pool": 6}, "heldout": {"enabled": False}}
    for key, value in overrides.items():
        section, dot, name = key.partition("__")
        values[section] = {**values.get(section, {}), name: value} if dot else value
    return RandOptConfig.model_validate(values)


@pytest.fixture
def config() -> Callable[..., RandOptConfig]:
    return make_config


def without_times(value: Any) -> Any:
    """The value without what differs between two equal runs: times, rates, and where and when they ran."""
    if isinstance(value, dict):
        return {k: without_times(v) for k, v in value.items()
                if k not in VOLATILE and k != "seconds" and not k.endswith("_s")}
    return [without_times(v) for v in value] if isinstance(value, list) else value


@pytest.fixture
def timeless() -> Callable[[Any], Any]:
    return without_times


@pytest.fixture
def slice_path(tmp_path: Path) -> Path:
    """A held-out slice of three documents, with its manifest."""
    from bitsperbyte.text.slices import Request, make_slice

    source = tmp_path / "source.jsonl"
    source.write_text("".join(json.dumps({"text": f"document {i} " + "words " * (20 + i)}) + "\n" for i in range(3)))
    path = tmp_path / "slice.jsonl"
    make_slice(Request(str(source), num_docs=3, min_chars=1), path)
    return path


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 30,000 parameters in a folder, with a byte-level tokenizer. For reading."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny_llama")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.train_from_iterator(["words of a document"], trainers.BpeTrainer(
        vocab_size=270, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    torch.manual_seed(4)
    LlamaForCausalLM(LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.3, eos_token_id=1, bos_token_id=0)).save_pretrained(folder)
    return folder
