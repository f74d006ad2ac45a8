"""Generated tokens a second: the native engine's decoder against transformers' generate (static cache, compiled), in the same run.

    python bench/decode.py [--shape qwen2-0.5b] [--prompts 128 64 512] [--prompt-tokens 150] [--new-tokens 256] [--skip-transformers]

Random bfloat16 weights, greedy, end of text ignored, prefill included. Each side is called once to compile or capture, then timed; the
decoder's logits are compared with the transformers forward first. Needs a GPU.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bitsperbyte.randopt.engines.base import Sampling
from bitsperbyte.randopt.engines.decode import Decoder, cache_budget
from bitsperbyte.randopt.engines.forward import CachedSteps
from bitsperbyte.randopt.engines.llama import LlamaSteps, fuse_projections

SHAPES = {
    "qwen2-0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
                   "num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True},
    "qwen2-7b": {"hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28, "num_attention_heads": 28,
                 "num_key_value_heads": 4, "vocab_size": 152_064, "tie_word_embeddings": False},
}  # fmt: skip
DEVICE = torch.device("cuda")


def random_model(shape: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen2", max_position_embeddings=4096, bos_token_id=None, eos_token_id=None, pad_token_id=0, **SHAPES[shape])
    with DEVICE:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval().requires_grad_(False)


def random_prompts(num: int, length: int, vocab_size: int) -> list[list[int]]:
    return torch.randint(1, vocab_size, (num, length), generator=torch.Generator().manual_seed(1)).tolist()


def seconds(call: Callable[[], object], repeats: int) -> float:
    call()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def decoder_of(steps: object) -> Decoder:
    return Decoder(steps, eos_ids=[], text_of=str, budget_bytes=lambda: cache_budget(DEVICE, 0.8))


@torch.inference_mode()
def logit_error(model: torch.nn.Module, decoder: Decoder, prompts: list[list[int]], num_tokens: int) -> float:
    """Relative error of the captured step's logits against the whole forward's."""
    tokens, logits = decoder.trace(prompts, num_tokens)
    ids = torch.cat([torch.tensor(prompts, device=DEVICE), tokens[:, :-1]], 1)
    expected = model(input_ids=ids, use_cache=False).logits[:, -num_tokens:].float()
    return ((logits - expected).norm() / expected.norm()).item()


def transformers_seconds(model: torch.nn.Module, prompts: list[list[int]], num_tokens: int, repeats: int) -> float:
    ids = torch.tensor(prompts, device=DEVICE)
    return seconds(lambda: model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, min_new_tokens=num_tokens,
                                          do_sample=False, cache_implementation="static"), repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen2-0.5b")
    parser.add_argument("--prompts", type=int, nargs="+", default=[128])
    parser.add_argument("--prompt-tokens", type=int, default=150)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--skip-transformers", action="store_true", help="its compilation takes a minute")
    parser.add_argument("--general", action="store_true", help="also time the steps that serve other architectures")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench/decode.py needs a GPU, and torch sees none here")
    model = random_model(options.shape)
    vocab_size = model.config.vocab_size
    rows: list[tuple[int, str, float]] = []
    fuse_projections(model)
    decoders = {"decoder, fused steps": decoder_of(LlamaSteps(model))}
    if options.general:
        decoders["decoder, transformers steps"] = decoder_of(CachedSteps(model))
    for num in options.prompts:
        prompts = random_prompts(num, options.prompt_tokens, vocab_size)
        for name, decoder in decoders.items():
            begin = time.perf_counter()
            error = logit_error(model, decoder, prompts[:16], 8)
            print(f"{name}: relative error of logits {error:.5f} against the whole forward, {time.perf_counter() - begin:.1f} s", flush=True)
            if not error < 0.05:
                raise SystemExit("the decoder's logits are wrong")
            rows.append((num, name, seconds(lambda d=decoder, p=prompts: d.generate(p, Sampling(options.new_tokens)), options.repeats)))
        if not options.skip_transformers:
            begin = time.perf_counter()
            rows.append((num, "transformers, static cache, compiled", transformers_seconds(model, prompts, options.new_tokens, options.repeats)))
            print(f"transformers: {time.perf_counter() - begin:.1f} s in all", flush=True)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {options.shape}, prompts of {options.prompt_tokens} tokens, "
          f"{options.new_tokens} new, median of {options.repeats}")
    print(f"{'prompts':>8}  {'what':<40}{'s':>9}{'tok/s':>10}{'x transformers':>16}")
    for num, name, took in rows:
        theirs = next((t for n, other, t in rows if n == num and other.startswith("transformers")), None)
        ratio = f"{theirs / took:.2f}" if theirs else "-"
        print(f"{num:>8}  {name:<40}{took:>9.3f}{num * options.new_tokens / took:>10,.0f}{ratio:>16}")


if __name__ == "__main__":
    main()
