"""What a search asks of an engine: a model whose weights can be switched to a seed's, that generates and that scores.

Everything that crosses this line is plain data (numbers, strings, lists, numpy arrays), so that an engine may as well live in another
process, on another machine, or be a serving engine that shards the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

MIN_TEMPERATURE = 1e-6


@dataclass(frozen=True)
class Sampling:
    """How to decode. temperature 0 is greedy; otherwise `seed` and a sequence's position in the call fix its draws, whatever the
    batch it lands in. `stop` texts end a sequence (the text before the first of them is kept)."""

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}, and at least one token must be generated")
        if not (self.temperature == 0.0 or self.temperature >= MIN_TEMPERATURE):
            raise ValueError(f"a temperature of {self.temperature} means nothing: 0 is greedy, 1 the model's own distribution, and between "
                             f"0 and {MIN_TEMPERATURE:g} the quotient leaves the range of float32")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p is {self.top_p}, and must lie above 0 and at most at 1")


@dataclass(frozen=True)
class Generation:
    """One answer. `num_tokens` counts what was generated, an end token included; `truncated`: it ran into max_new_tokens (or the
    model's context) without ending."""

    text: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    num_tokens: int
    truncated: bool


@dataclass(frozen=True)
class DocumentNats:
    """The scored tokens of one document, in order: `nats` float64 (N,) negative log-likelihoods, `num_bytes` int64 (N,) the UTF-8 bytes
    each of them stands for. A token without context (the first, where the tokenizer has no BOS) is in neither."""

    nats: np.ndarray
    num_bytes: np.ndarray


class Engine(Protocol):
    """One model on one device or group of devices."""

    def describe(self) -> dict[str, Any]:
        """Facts for the record: model, kind, engine, revision, dtype, num_parameters, num_perturbed, weights_sha256 (of the
        checkpoint's files), tokenizer_sha256, device, context (positions the model takes), prompt_format, decode (how a step runs)."""
        ...

    def encode(self, prompts: Sequence[Sequence[dict[str, str]]]) -> list[list[int]]:
        """Token ids of prompts, each a list of {"role", "content"} messages: through the chat template, or as plain text."""
        ...

    def perturb(self, seed: int, sigma: float) -> None:
        """Make the live weights base + sigma * noise(seed), whatever they were before."""
        ...

    def reset(self) -> None:
        """Make the live weights the base again, every byte."""
        ...

    def verify_base(self) -> None:
        """RuntimeError unless the base weights still have the checksum that they were loaded with."""
        ...

    def effective_rms(self, sigma: float, seed: int) -> list[dict[str, Any]]:
        """By tensor group: name, num_elements, base_rms, requested_rms, effective_rms, share_unchanged of what `perturb` writes."""
        ...

    def generate(self, prompt_ids: Sequence[Sequence[int]], sampling: Sampling) -> list[Generation]:
        """One generation for each prompt, in their order. ValueError for a prompt that leaves no room to generate."""
        ...

    def score(self, documents: Sequence[str], context: int) -> list[DocumentNats]:
        """Nats and bytes of each document's tokens, documents isolated, non-overlapping windows of `context` tokens."""
        ...

    def switch_s(self) -> float:
        """Mean seconds of a weight switch so far; 0.0 before the first."""
        ...

    def close(self) -> None:
        """Give the device's memory back."""
        ...
