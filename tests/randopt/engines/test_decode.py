"""The decode loop: against transformers' own generate, and against a plain simulation over a model of integers."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitsperbyte.randopt.engines.base import Sampling
from bitsperbyte.randopt.engines.decode import Decoder, draw
from bitsperbyte.randopt.engines.forward import CachedSteps, RecomputedSteps
from bitsperbyte.randopt.engines.llama import LlamaSteps, fuse_projections
from bitsperbyte.randopt.noise import uniforms

VOCAB, CONTEXT, EOS = 23, 40, 4


class IntegerModel:
    """A StepModel without weights: the logits of a token follow from the whole row, so that one wrong, missing or foreign token changes
    everything after it. It holds its callers to the protocol."""

    device, max_positions, can_capture = torch.device("cpu"), CONTEXT, False
    num_steps = 0

    def row_bytes(self, num_positions: int) -> int:
        return 8 * num_positions

    def allocate(self, num_rows: int, num_positions: int) -> None:
        self.cache = torch.full((num_rows, num_positions), -(10**6))

    def prefill(self, ids: Sequence[Sequence[int]], rows: Sequence[int]) -> None:
        assert len(set(rows)) == len(rows) == len(ids) and all(len(x) for x in ids)
        for row, tokens in zip(rows, ids, strict=True):
            self.cache[row, : len(tokens)] = torch.tensor(list(tokens))

    def step(self, tokens: torch.Tensor, lengths: torch.Tensor, longest: int) -> torch.Tensor:
        self.num_steps += 1
        assert int(lengths.max()) + 1 <= longest <= self.cache.shape[1]
        rows = torch.arange(len(tokens))
        self.cache[rows, lengths] = tokens
        seen = torch.where(torch.arange(longest) <= lengths[:, None], self.cache[: len(tokens), :longest], 0)
        return torch.stack([self.logits(row[: n + 1].tolist()) for row, n in zip(seen, lengths.tolist(), strict=True)])

    def keep(self, rows: torch.Tensor) -> None:
        assert torch.equal(rows, rows.sort().values)
        self.cache[: len(rows)] = self.cache[rows]

    @staticmethod
    def logits(ids: list[int]) -> torch.Tensor:
        state = sum((i + 1) * (t + 3) * (t + 7) for i, t in enumerate(ids))
        return torch.tensor([float((state * (v + 2) + v * v) % 31) / 4 for v in range(VOCAB)])


def letters(ids: Sequence[int]) -> str:
    return "".join(chr(ord("a") + t) for t in ids if t != EOS)


def decoder(max_sequences: int | None = None, model: object = None, eos: Sequence[int] = (EOS,), budget: int = 10**9) -> Decoder:
    return Decoder(model or IntegerModel(), eos_ids=eos, text_of=letters, budget_bytes=lambda: budget, max_sequences=max_sequences)


def simulated(prompt: list[int], index: int, sampling: Sampling) -> tuple[str, list[int], bool]:
    """The same answer without any batch: (text, ids, truncated)."""
    ids: list[int] = []
    uniform = uniforms(sampling.seed, index, 0, CONTEXT)
    for step in range(min(sampling.max_new_tokens, CONTEXT - len(prompt))):
        logits = IntegerModel.logits(prompt + ids)
        if sampling.temperature == 0.0:
            ids.append(int(logits.argmax()))
        else:
            p = torch.softmax(logits.double() / sampling.temperature, -1).numpy()
            order = np.argsort(-p, kind="stable") if sampling.top_p < 1 else np.arange(VOCAB)
            sums = np.cumsum(p[order])
            count = int(np.searchsorted(sums, sampling.top_p)) + 1 if sampling.top_p < 1 else VOCAB
            ids.append(int(order[np.searchsorted(sums[:count], uniform[step] * sums[count - 1], side="right")]))
        text = letters(ids)
        if found := [text.find(s) for s in sampling.stop if s in text]:
            return text[: min(found)], ids, False
        if ids[-1] == EOS:
            return text, ids, False
    return letters(ids), ids, True


PROMPTS = st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=CONTEXT - 1), min_size=1, max_size=9)


@settings(max_examples=40, deadline=None)
@given(prompts=PROMPTS, max_new=st.integers(1, 30), max_sequences=st.sampled_from([None, 1, 2, 3, 5]),
       stop=st.lists(st.text("abcdefgh", min_size=1, max_size=2), max_size=2), temperature=st.sampled_from([0.0, 0.0, 0.7, 1.5]),
       top_p=st.sampled_from([1.0, 0.6]), seed=st.integers(0, 2**63))
def test_batches_change_nothing(prompts: list[list[int]], max_new: int, max_sequences: int | None, stop: list[str], temperature: float,
                                top_p: float, seed: int) -> None:
    sampling = Sampling(max_new, temperature, top_p, seed, tuple(stop))
    found = decoder(max_sequences).generate(prompts, sampling)
    assert len(found) == len(prompts)
    for i, (prompt, generation) in enumerate(zip(prompts, found, strict=True)):
        text, ids, truncated = simulated(prompt, i, sampling)
        assert (generation.text, list(generation.token_ids), generation.truncated) == (text, ids, truncated)
        assert generation.num_tokens == len(ids) and generation.num_prompt_tokens == len(prompt)


def test_a_second_call_remembers_nothing_of_the_first() -> None:
    shared = decoder()
    first = shared.generate([[1, 2, 3]] * 6, Sampling(20))
    shared.generate([[9] * 30] * 3, Sampling(5, 1.0))
    assert shared.generate([[1, 2, 3]] * 6, Sampling(20)) == first


def test_ended_sequences_leave_the_batch_and_waiting_ones_take_their_place() -> None:
    sizes = []

    class Counting(IntegerModel):
        def step(self, tokens: torch.Tensor, lengths: torch.Tensor, longest: int) -> torch.Tensor:
            sizes.append(len(tokens))
            return super().step(tokens, lengths, longest)

    prompts = [[i] for i in range(VOCAB)]
    found = decoder(8, Counting()).generate(prompts, Sampling(30))
    lengths = sorted(g.num_tokens for g in found)
    assert len(set(lengths)) > 3 and max(sizes) == 8 and min(sizes) < 8
    assert sum(sizes) < 1.6 * sum(lengths), "rows that have ended are computed on"


def test_memory_cuts_batches_and_too_little_is_refused() -> None:
    rows = []

    class Counting(IntegerModel):
        def allocate(self, num_rows: int, num_positions: int) -> None:
            rows.append(num_rows)
            super().allocate(num_rows, num_positions)

    one_row = 8 * 128 + 24 * 128
    prompts = [[1, i] for i in range(10)]
    assert decoder(model=Counting(), budget=3 * one_row + 5).generate(prompts, Sampling(9)) == decoder().generate(prompts, Sampling(9))
    assert rows == [0, 3]
    with pytest.raises(ValueError, match="one sequence of 128 positions"):
        decoder(budget=one_row - 1).generate(prompts, Sampling(9))


def test_prompts_that_leave_no_room() -> None:
    assert decoder().generate([], Sampling(5)) == []
    last, = decoder(eos=()).generate([[1] * (CONTEXT - 1)], Sampling(5))
    assert last.num_tokens == 1 and last.truncated
    for prompt, words in (([1] * CONTEXT, "nothing is left"), ([], "has no token")):
        with pytest.raises(ValueError, match=words):
            decoder().generate([[1], prompt], Sampling(5))


# -- against transformers ---------------------------------------------------------------------------------------------


def prompts_of(lengths: Sequence[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(1, 97, (length,), generator=generator).tolist() for length in lengths]


def greedy(model: torch.nn.Module, prompts: list[list[int]], num_tokens: int, eos: list[int]) -> list[list[int]]:
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, eos_token_id=eos or None)
        found.append(out[0, len(prompt) :].tolist())
    return found


@pytest.mark.parametrize(("kind", "settings"), [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    ("qwen2", {"tie_word_embeddings": True}), ("qwen3", {}), ("gemma", {}), ("mistral", {"sliding_window": None}), ("mistral", {"sliding_window": 6}),
    ("gemma2", {"sliding_window": 6, "initializer_range": 0.2}), ("gpt2", {}), ("bloom", {})],
    ids=lambda value: value if isinstance(value, str) else ",".join(value))
def test_greedy_tokens_are_those_of_transformers(tiny_model: Callable, kind: str, settings: dict) -> None:
    model = tiny_model(kind, **settings)
    prompts = prompts_of([7, 1, 13, 4, 22, 9, 2])
    free = greedy(model, prompts, 20, [])
    assert len({t for ids in free for t in ids}) > 5, "a model that repeats itself proves little"
    eos = sorted({free[0][6], free[4][2]})  # ends some early, some never
    expected = greedy(model, prompts, 20, eos)
    assert len({len(ids) for ids in expected}) > 1
    if kind in ("llama", "qwen2", "qwen3", "gemma") or settings.get("sliding_window", 1) is None:
        fuse_projections(model)
        steps = [LlamaSteps, CachedSteps]
    else:
        steps = [RecomputedSteps if kind == "bloom" else CachedSteps]
    for make in steps:
        for max_sequences in (None, 3):
            found = decoder(max_sequences, make(model), eos).generate(prompts, Sampling(20))
            assert [list(g.token_ids) for g in found] == expected, (make.name, max_sequences)
            assert [not g.truncated for g in found] == [ids[-1] in eos for ids in expected]


# -- drawing ----------------------------------------------------------------------------------------------------------


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([0.0, 2.0, -1.0, 1.0])
    num = 4096
    uniform = torch.as_tensor((np.arange(num) + 0.5) / num)  # every quantile once: shares must be exact, to one draw
    for temperature in (0.5, 1.0):
        drawn = draw(logits.expand(num, 4), uniform, torch.tensor(temperature), None)
        share = torch.bincount(drawn, minlength=4) / num
        assert torch.allclose(share, torch.softmax(logits / temperature, -1), atol=2 / num)


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    p = torch.tensor([0.1, 0.5, 0.15, 0.25])
    uniform = torch.as_tensor((np.arange(1000) + 0.5) / 1000)
    for top_p, kept in ((0.4, [1]), (0.6, [1, 3]), (0.8, [1, 2, 3]), (0.95, [0, 1, 2, 3])):
        drawn = draw(p.log().expand(1000, 4), uniform, torch.tensor(1.0), torch.tensor(top_p))
        share = torch.bincount(drawn, minlength=4) / 1000
        assert share.nonzero().flatten().tolist() == kept
        assert torch.allclose(share[kept], p[kept] / p[kept].sum(), atol=2e-3)


@pytest.mark.parametrize("top_p", [None, 0.9])
def test_a_token_without_mass_is_never_drawn(top_p: float | None) -> None:
    logits = torch.tensor([float("-inf"), 0.0, float("-inf"), 0.0, float("-inf")]).expand(2, 5)
    ends = torch.tensor([1e-300, 1.0 - 2**-53], dtype=torch.float64)
    drawn = draw(logits, ends, torch.tensor(1.0), None if top_p is None else torch.tensor(top_p))
    assert drawn.tolist() == [1, 3]


def test_a_vanishing_top_p_leaves_the_likeliest_token() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, -1.0], [float("-inf"), float("-inf"), 0.0, float("-inf")]])
    drawn = draw(logits, torch.tensor([0.5, 0.999], dtype=torch.float64), torch.tensor(1.0), torch.tensor(1e-300))
    assert drawn.tolist() == [1, 2]


@pytest.mark.parametrize("max_sequences", [1, 2])
def test_a_trace_of_more_prompts_than_fit_one_batch_is_the_same(max_sequences: int) -> None:
    prompts = prompts_of([3, 9, 1, 5, 2])
    whole, parts = (decoder(n).trace(prompts, 4) for n in (None, max_sequences))
    assert torch.equal(whole[0], parts[0]) and torch.equal(whole[1], parts[1])


def test_a_trace_gives_the_logits_its_tokens_came_from(tiny_model: Callable) -> None:
    model = tiny_model("llama")
    fuse_projections(model)
    prompts = prompts_of([3, 9, 1])
    tokens, logits = decoder(model=LlamaSteps(model)).trace(prompts, 5)
    assert torch.equal(logits.argmax(-1), tokens)
    for prompt, row, seen in zip(prompts, tokens.tolist(), logits, strict=True):
        whole = model(torch.tensor([prompt + row[:-1]])).logits[0, -5:]
        assert torch.allclose(seen, whole, atol=1e-4)
