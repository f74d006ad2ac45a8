"""An engine without a model: what it answers is a hash of prompt, seed and sigma. Search, journal and evaluation are tested on it.

A question of the form `12 + 30` (or `12?30=`) is answered rightly, by the sum, with a probability that is the member's own; some
members are better than the base, some worse. Tokens are UTF-8 bytes. Every call is kept in `calls`.
"""

import hashlib
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bitsperbyte.randopt.engines.base import DocumentNats, Generation, Sampling

CONTEXT = 4096
SUM = re.compile(r"(\d+) ?[+?] ?(\d+)")
BASE_SKILL, SKILL_RANGE = 0.5, 0.3


class FakeEngine:
    """`delay_s`: seconds of each generate and score. `fail_at`: the seed at which these raise `error`. `on_call` sees each call as it
    begins, e.g. to interrupt it."""

    def __init__(self, delay_s: float = 0.0, *, fail_at: int | None = None, error: Exception | None = None,
                 on_call: Callable[[tuple[Any, ...]], None] | None = None) -> None:
        self.delay_s, self.fail_at, self.on_call = delay_s, fail_at, on_call
        self.error = error or RuntimeError("the fake engine fails at this seed")
        self.live: tuple[int, float] | None = None  # None is the base
        self.calls: list[tuple[Any, ...]] = []
        self.closed = False

    def describe(self) -> dict[str, Any]:
        return {"model": "fake", "kind": "fake", "engine": "fake", "revision": None, "dtype": "float32", "num_parameters": 1000,
                "num_perturbed": 1000, "weights_sha256": _hash("weights").hex(), "tokenizer_sha256": _hash("bytes").hex(),
                "device": "none", "context": CONTEXT, "prompt_format": "plain", "decode": "by hashing"}

    def encode(self, prompts: Sequence[Sequence[dict[str, str]]]) -> list[list[int]]:
        return [list("\n".join(message["content"] for message in prompt).encode()) for prompt in prompts]

    def perturb(self, seed: int, sigma: float) -> None:
        self._begin("perturb", seed, sigma)
        self.live = (seed, sigma)

    def reset(self) -> None:
        self._begin("reset")
        self.live = None

    def verify_base(self) -> None:
        self._begin("verify_base")

    def effective_rms(self, sigma: float, seed: int) -> list[dict[str, Any]]:
        return [{"name": "weights", "num_elements": 1000, "base_rms": 0.02, "requested_rms": sigma, "effective_rms": sigma,
                 "share_unchanged": 0.0}]

    def generate(self, prompt_ids: Sequence[Sequence[int]], sampling: Sampling) -> list[Generation]:
        self._begin("generate", self.live, len(prompt_ids), sampling)
        self._work()
        return [self._answer(ids, position, sampling) for position, ids in enumerate(prompt_ids)]

    def score(self, documents: Sequence[str], context: int) -> list[DocumentNats]:
        self._begin("score", self.live, len(documents), context)
        self._work()
        return [self._nats(text, context) for text in documents]

    def switch_s(self) -> float:
        return 0.0

    def close(self) -> None:
        self.closed = True

    def skill(self) -> float:
        """The live member's probability of a right answer."""
        if self.live is None:
            return BASE_SKILL
        return BASE_SKILL + SKILL_RANGE * (2 * _uniform("skill", self.live) - 1)

    def _begin(self, *call: Any) -> None:
        assert not self.closed, f"{call[0]} after close"
        self.calls.append(call)
        if self.on_call:
            self.on_call(call)

    def _work(self) -> None:
        time.sleep(self.delay_s)
        if self.fail_at is not None and self.live is not None and self.live[0] == self.fail_at:
            raise self.error

    def _answer(self, prompt_ids: Sequence[int], position: int, sampling: Sampling) -> Generation:
        room = min(sampling.max_new_tokens, CONTEXT - len(prompt_ids))
        if room < 1:
            raise ValueError(f"a prompt of {len(prompt_ids)} tokens leaves no room to generate in a context of {CONTEXT}")
        prompt = bytes(prompt_ids).decode()
        draw = (prompt, self.live) if sampling.temperature == 0 else (prompt, self.live, sampling.seed, position)
        found = SUM.findall(prompt)
        if found:
            a, b = map(int, found[-1])
            text = str(a + b) if _uniform("right", draw) < self.skill() else str(a - b)
        else:
            text = f"answer {int(_uniform('word', draw) * 5)}"
        for stop in sampling.stop:
            text = text.partition(stop)[0]
        ids = (*text.encode(), 0)[:room]  # 0 ends an answer
        return Generation(text[:room], ids, len(prompt_ids), len(ids), truncated=ids[-1] != 0)

    def _nats(self, text: str, context: int) -> DocumentNats:
        raw = text.encode()
        num = max(0, len(raw) - 1)  # without a BOS the first token has no context
        rng = np.random.Generator(np.random.Philox(key=int.from_bytes(_hash("nats", text, self.live)[:16], "little")))
        nats = rng.exponential(2.0 - self.skill(), num)
        nats[np.arange(num) % context == 0] += 1.0  # the start of a window knows less
        return DocumentNats(nats, np.ones(num, dtype=np.int64))


def _hash(*parts: Any) -> bytes:
    return hashlib.sha256(repr(parts).encode()).digest()


def _uniform(*parts: Any) -> float:
    return int.from_bytes(_hash(*parts)[:8], "little") / 2**64
