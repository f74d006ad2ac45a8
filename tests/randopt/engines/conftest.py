"""Tiny models for the engines' tests: random transformers models, and a checkpoint folder with a tokenizer trained on the spot."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bitsperbyte.randopt.config import RandOptConfig

# architecture -> settings that its tiny model needs beside the shared ones
SMALL = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None, "initializer_range": 0.5}
OWN = {"gpt2": {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": None, "eos_token_id": None,
                "initializer_range": 0.3},
       "bloom": {"vocab_size": 97, "hidden_size": 32, "n_layer": 2, "n_head": 4, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
                 "initializer_range": 0.3}}
WIDE_HEADS = ("qwen3", "gemma", "gemma2")
TEXT = ("The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs! How vexingly quick daft zebras jump; "
        "ein Mädchen aß Äpfel — 東京 is a city, naïve café, 12 + 34 = 46.\n\tNew line, tab and  two blanks. 🙂 ")


def make_model(kind: str, seed: int = 0, **settings: Any) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {**OWN.get(kind, SMALL), **({"head_dim": 8} if kind in WIDE_HEADS else {}), **settings}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings)).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() == 1:  # biases of 0 and norms of 1 would hide what ignores them
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def make_tokenizer(bos: bool) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([TEXT] * 3, trainers.BpeTrainer(
        vocab_size=340, special_tokens=["<pad>", "<s>", "</s>"], initial_alphabet=alphabet, show_progress=False))
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", **({"bos_token": "<s>"} if bos else {}))


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., torch.nn.Module]:
    """make_model(architecture, seed, **settings)."""
    return make_model


@pytest.fixture(scope="session")
def tokenizer_of() -> Callable[[bool], Any]:
    """make_tokenizer(bos): byte-level BPE of 340 entries, that puts <s> first or not."""
    return make_tokenizer


@pytest.fixture(scope="session")
def checkpoint_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A folder with a random model, tied unless told otherwise, and its tokenizer: made once for each set of arguments. For reading."""
    made: dict[tuple, Path] = {}

    def folder(kind: str = "qwen2", bos: bool = True, **settings: Any) -> Path:
        key = (kind, bos, *sorted(settings.items()))
        if key not in made:
            made[key] = tmp_path_factory.mktemp(kind)
            settings = {"vocab_size": 340, "eos_token_id": 2, "tie_word_embeddings": True, "initializer_range": 0.2, **settings}
            make_model(kind, 1, **settings).save_pretrained(made[key])
            make_tokenizer(bos).save_pretrained(made[key])
        return made[key]

    return folder


@pytest.fixture(scope="session")
def run_config() -> Callable[..., RandOptConfig]:
    """A config over a model's path; `sections` replace settings, such as decode={"max_sequences": 2}."""

    def config(path: Path | str, sigmas: tuple[float, ...] = (0.02,), **sections: Any) -> RandOptConfig:
        model = {"path": str(path), "device": "cpu", **sections.pop("model", {})}
        noise = {"sigmas": list(sigmas), **sections.pop("noise", {})}
        return RandOptConfig.model_validate({"model": model, "task": {"name": "gsm8k"}, "noise": noise, **sections})

    return config
