"""On an NVIDIA GPU: kernels against the torch operations, captured steps against eager ones and against transformers, under seeds."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bitsperbyte.randopt.config import RandOptConfig
from bitsperbyte.randopt.engines import layer_ops
from bitsperbyte.randopt.engines.base import Sampling
from bitsperbyte.randopt.engines.decode import Decoder, cache_budget
from bitsperbyte.randopt.engines.forward import CachedSteps
from bitsperbyte.randopt.engines.llama import LlamaSteps, fuse_projections
from bitsperbyte.randopt.engines.native import NativeEngine, open_engine
from bitsperbyte.randopt.engines.selftest import check_graphs
from bitsperbyte.randopt.layout import Layout
from bitsperbyte.randopt.perturb import Perturber

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
DTYPES = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 1e-3}
SIZES = {"vocab_size": 260, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
         "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None, "initializer_range": 0.3}


def make_model(kind: str, dtype: torch.dtype = torch.float32, **settings: object) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    heads = {"head_dim": 16} if kind in ("qwen3", "gemma", "gemma2") else {}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **heads, **settings}), dtype=dtype)
    model.eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter += 0.1 * torch.randn_like(parameter)
    return model.to(CUDA)


def prompts_of(num: int, longest: int = 60) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, longest, (num,), generator=generator).tolist()
    return [torch.randint(1, 260, (length,), generator=generator).tolist() for length in lengths]


def decoder_of(steps: object, eos: list[int] = (), **options: object) -> Decoder:
    return Decoder(steps, eos_ids=eos, text_of=str, budget_bytes=lambda: cache_budget(CUDA, 0.5), **options)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernels_equal_the_torch_operations(dtype: torch.dtype) -> None:
    from bitsperbyte.randopt.engines import layer_ops_triton as kernels

    torch.manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=CUDA).to(dtype)

    pairs = []
    for width in (896, 40, 3584):
        x, y, weight, both = normal(33, width), normal(33, width), normal(width), normal(9, 2 * width)
        for shifted in (False, True):
            pairs.append((kernels.norm(x, weight, 1e-6, shifted), layer_ops.norm(x, weight, 1e-6, shifted)))
            sums = x.clone(), x.clone()
            pairs.append((kernels.add_norm(sums[0], y, weight, 1e-6, shifted), layer_ops.add_norm(sums[1], y, weight, 1e-6, shifted)))
            pairs.append(sums)
        pairs += [(kernels.gated(both, name), layer_ops.gated(both, name)) for name in layer_ops.ACTIVATIONS]
    rows, positions = torch.tensor([3, 1, 0, 2, 4, 5], device=CUDA), torch.tensor([0, 5, 699, 370, 64, 63], device=CUDA)
    for num_q, num_kv, width in ((14, 2, 64), (7, 1, 24), (3, 3, 128), (8, 1, 256)):
        cos, sin = torch.randn(2, 700, width // 2, device=CUDA)
        for norms in ([None, None], [normal(width), normal(width)]):
            qkv = normal(6, (num_q + 2 * num_kv) * width)
            caches = torch.zeros(2, 2, 6, num_kv, 700, width, dtype=dtype, device=CUDA)
            queries = [ops.rotate_and_store(qkv.clone(), cos, sin, rows, positions, *cache, *norms, 1e-6)
                       for ops, cache in zip((kernels, layer_ops), caches, strict=True)]
            pairs += [tuple(queries), tuple(caches)]
        keys, values = normal(6, num_kv, 700, width), normal(6, num_kv, 700, width)
        exact = layer_ops.attend(queries[0].double(), keys.double(), values.double(), positions, 700, width**-0.5)
        pairs.append((kernels.attend(queries[0], keys, values, positions, 700, width**-0.5), exact))
    assert all(error(*pair) < DTYPES[dtype] for pair in pairs)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma", "gemma2"])
def test_greedy_tokens_are_those_of_transformers_in_float32(kind: str) -> None:
    model = make_model(kind, **({"sliding_window": 16, "initializer_range": 0.15} if kind == "gemma2" else {}))
    prompts = prompts_of(40)

    def generate(eos: list[int]) -> list[list[int]]:
        found = []
        for prompt in prompts:
            ids = torch.tensor([prompt], device=CUDA)
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False, eos_token_id=eos or None)
            found.append(out[0, len(prompt) :].tolist())
        return found

    free = generate([])
    eos = sorted({ids[3 + 2 * i] for i, ids in enumerate(free[:12])})
    expected = [ids[: next((n for n, t in enumerate(ids, 1) if t in eos), 40)] for ids in free]
    assert len({len(ids) for ids in expected}) > 4
    steps = [CachedSteps(model)]
    if kind != "gemma2":
        fuse_projections(model)
        steps.append(LlamaSteps(model))
    for step in steps:
        for options in ({}, {"max_sequences": 12}, {"graphs": False}):
            decoder = decoder_of(step, eos, **options)
            found = decoder.generate(prompts, Sampling(40))
            assert decoder.graphs == (options != {"graphs": False}) and (decoder.num_captured > 0) == decoder.graphs
            same = [list(g.token_ids) == ids for g, ids in zip(found, expected, strict=True)]
            assert sum(same) >= 39, (step.name, options, same)  # two logits may lie closer than float32 sums in another order


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", [LlamaSteps, CachedSteps])
def test_one_capture_serves_every_seed(make: type, dtype: torch.dtype) -> None:
    model = make_model("qwen2", dtype)
    fuse_projections(model)
    perturber, decoder, prompts = Perturber(Layout.of_module(model)), decoder_of(make(model)), prompts_of(24)
    seen = []
    for seed in range(5):
        perturber.perturb(seed, 0.02)
        captured, eager = (decoder.trace(prompts, 1, graphs=graphs)[1] for graphs in (True, False))
        assert error(captured, eager) < 1e-3
        seen.append(captured)
    assert decoder.num_captured == 1
    assert all(error(a, b) > 0.01 for i, a in enumerate(seen) for b in seen[:i])
    perturber.reset()
    assert error(decoder.trace(prompts, 1)[1], seen[0]) > 0.01


def test_the_self_test_catches_a_graph_over_old_weights() -> None:
    model = make_model("llama")
    decoder = decoder_of(CachedSteps(model))

    def moved_elsewhere(seed: int) -> None:  # as an engine would that replaced its tensors instead of writing into them
        torch.manual_seed(seed)
        for parameter in model.parameters():
            kept.append(parameter.data)  # the graph's memory stays what it was
            parameter.data = parameter.data + 0.02 * torch.randn_like(parameter)

    kept: list[torch.Tensor] = []
    with pytest.raises(RuntimeError, match="does not compute with the current weights"):
        check_graphs(decoder, moved_elsewhere, 260, torch.float32)


def test_draws_do_not_depend_on_batches_or_graphs() -> None:
    model = make_model("qwen3")
    fuse_projections(model)
    prompts = prompts_of(20)
    for top_p in (1.0, 0.8):
        sampling = Sampling(30, 0.9, top_p, seed=5)
        whole = decoder_of(LlamaSteps(model)).generate(prompts, sampling)
        for options in ({"graphs": False}, {"max_sequences": 3}):
            other = decoder_of(LlamaSteps(model), **options).generate(prompts, sampling)
            assert sum(a.token_ids == b.token_ids for a, b in zip(whole, other, strict=True)) >= 19
        assert len({g.token_ids for g in whole}) > 10


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={"<s>": 0, "</s>": 1, **{c: i + 2 for i, c in enumerate(alphabet)}}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(tmp_path / "model")
    make_model("qwen2", eos_token_id=1, tie_word_embeddings=True).cpu().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def opened(folder: Path, tmp_path: Path) -> Callable[..., NativeEngine]:
    def engine(device: str = "cuda", dtype: str = "auto", graphs: str = "auto") -> NativeEngine:
        config = RandOptConfig.model_validate({
            "model": {"path": str(folder), "device": device, "dtype": dtype}, "task": {"name": "gsm8k"}, "noise": {"sigmas": [0.02]},
            "decode": {"graphs": graphs}})
        return open_engine(config, tmp_path, print)

    return engine


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_an_engine_tests_itself_and_answers_as_without_graphs(opened: Callable, dtype: str) -> None:
    engine, plain = opened(dtype=dtype), opened(dtype=dtype, graphs="off")
    facts = engine.describe()
    assert facts["dtype"] == ("bfloat16" if dtype == "auto" else dtype) and facts["decode"]["graphs"] and facts["decode"]["self_test_error"] < 0.01
    assert not plain.describe()["decode"]["graphs"]
    prompts = engine.encode([[{"role": "user", "content": f"What is {i} + {i}?"}] for i in range(50)])
    for seed in (3, 4):
        engine.perturb(seed, 0.02)
        plain.perturb(seed, 0.02)
        found = [e.generate(prompts, Sampling(20)) for e in (engine, plain)]
        assert sum(a == b for a, b in zip(*found, strict=True)) >= (45 if dtype == "auto" else 49)
    captured = engine._decoder.num_captured
    for seed in (5, 6, 7):
        engine.perturb(seed, 0.02)
        engine.generate(prompts, Sampling(20))
    assert engine._decoder.num_captured <= captured + 2, "sizes that were not met before, and nothing for a seed"
    engine.reset()
    engine.verify_base()


def test_scores_are_those_of_the_cpu(opened: Callable) -> None:
    texts = ["A fox — naïve café. " * n for n in (1, 7, 40)]
    engines = opened("cuda", "float32"), opened("cpu", "float32")
    for engine in engines:
        engine.perturb(9, 0.02)
    for a, b in zip(*(engine.score(texts, 100) for engine in engines), strict=True):
        assert a.nats.sum() == pytest.approx(b.nats.sum(), rel=1e-5) and (a.num_bytes == b.num_bytes).all()
