"""What three choices of the golf model's forward and backward pass are worth, each side in the same run.

    python bench/golf_step.py [--micro 64] [--repeats 3] [--only baseline]

Rows: the network as it is; with head widths left as they are instead of padded to a width that flash attention is cut for; in larger
micro-batches; with the rotary table traced into the compiled graph instead of precomputed. Times are for 524,288 tokens, the median of
the repeats, forward and backward only. Needs a GPU: on a CPU nothing is compiled and none of these choices applies.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

import bitsperbyte.golf.model as golf_model
from bitsperbyte.golf.config import GolfConfig
from bitsperbyte.golf.model import FLASH_WIDTHS, GolfModel, ModelConfig, flops_per_token, rotary_table
from bitsperbyte.run.config import load_config

BATCH_TOKENS, SEQ_LEN = 524_288, 1024
DEVICE = torch.device("cuda")


def traced_rotary(model: GolfModel) -> None:
    """Build the table inside the graph, so that the compiler fuses its sines into the kernels that use them."""
    config = model.config
    model.prepare = lambda num, device: (rotary_table(num, config.head_dim, config.rope_base, device), None)  # type: ignore[method-assign]


def step_ms(config: ModelConfig, num_sequences: int, repeats: int, change: Callable[[GolfModel], None] | None = None) -> float:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = GolfModel(config).place(DEVICE)
    if change:
        change(model)
    model.prepare(SEQ_LEN, DEVICE)
    loss = torch.compile(model.loss, dynamic=False)
    x = torch.randint(0, config.vocab_size, (num_sequences, SEQ_LEN), device=DEVICE)
    times = []
    for repeat in range(repeats + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(BATCH_TOKENS // SEQ_LEN // num_sequences):
            loss(x, x).backward()
        torch.cuda.synchronize()
        if repeat:  # the first compiles
            times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--micro", type=int, default=64, help="sequences of a micro-batch")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", help="one config instead of both")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench/golf_step.py needs a GPU, and torch sees none here")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {BATCH_TOKENS:,} tokens, forward and backward")
    print(f"{'config':14} {'variant':34} {'ms':>8} {'against':>8} {'TFLOP/s':>8}")
    for name in [options.only] if options.only else ["baseline", "recurrent_v7"]:
        config = load_config(f"configs/golf/{name}.yaml", GolfConfig).model_dataclass()
        flops = flops_per_token(config, SEQ_LEN) * BATCH_TOKENS
        ours = step_ms(config, options.micro, options.repeats)

        def show(variant: str, ms: float, name: str = name, ours: float = ours, flops: int = flops) -> None:
            print(f"{name:14} {variant:34} {ms:8.1f} {ms / ours:7.2f}x {flops / ms / 1e9:8.0f}", flush=True)

        show(f"as it is, {options.micro} sequences", ours)
        if config.head_dim not in FLASH_WIDTHS:
            golf_model.FLASH_WIDTHS = ()
            show(f"head width {config.head_dim} not padded", step_ms(config, options.micro, options.repeats))
            golf_model.FLASH_WIDTHS = FLASH_WIDTHS
        show(f"as it is, {4 * options.micro} sequences", step_ms(config, 4 * options.micro, options.repeats))
        show("rotary table traced in", step_ms(config, options.micro, options.repeats, traced_rotary))


if __name__ == "__main__":
    main()
