"""Step time of the golf model on several ranks of this host against one, in one run.

    python bench/golf_ranks.py [--ranks 2] [--config baseline] [--steps 20] [--batch-tokens 524288] [--no-compile]

Both sides take the same global batch: with n ranks each has an n-th of it. Rank processes are started by torch.distributed.run, over NCCL
on GPUs and gloo on a CPU (there give each rank as many threads as it would have: OMP_NUM_THREADS). Medians of whole steps, the optimisers
included; tokens are random.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import numpy as np
import torch

from bitsperbyte.golf.config import GolfConfig
from bitsperbyte.golf.ranks import join_ranks
from bitsperbyte.golf.step import BatchConfig, Stepper
from bitsperbyte.run.config import load_config

WARM_UP = 5


class RandomTokens:
    """As a TokenStream of random tokens."""

    def __init__(self, length: int, vocab_size: int) -> None:
        self.length, self._tokens = length, np.random.default_rng(0).integers(0, vocab_size, 2 * length + 1).astype(np.uint16)

    def read(self, position: int, count: int) -> np.ndarray:
        return self._tokens[position % self.length :][:count]


def timed(options: argparse.Namespace) -> None:
    """What one rank does; the main one prints its median."""
    config = load_config(f"configs/golf/{options.config}.yaml", GolfConfig)
    ranks = join_ranks("auto")
    batch = BatchConfig(options.batch_tokens, config.train.seq_len, config.train.micro_batch_tokens, 0, "off" if options.no_compile else "auto")
    stepper = Stepper(config.model_dataclass(), config.optim_dataclass(), config.schedule_dataclass(), batch, ranks,
                      RandomTokens(options.batch_tokens + 1, config.model.vocab_size))
    times = []
    for step in range(WARM_UP + options.steps):
        data = stepper.next_batch()
        ranks.synchronize()
        ranks.barrier()
        begin = time.perf_counter()
        stepper.train_step(data, 1.0)
        ranks.synchronize()
        stepper.step += 1
        if step >= WARM_UP:
            times.append((time.perf_counter() - begin) * 1e3)
    if ranks.is_main:
        print(json.dumps({"ms": statistics.median(times), "device": str(ranks.device)}))
    ranks.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--config", default="baseline")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-tokens", type=int, default=524_288)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--timed", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.timed:
        timed(options)
        return
    gpus = torch.cuda.device_count()
    if torch.cuda.is_available() and gpus < options.ranks:
        raise SystemExit(f"bench/golf_ranks.py --ranks {options.ranks} needs as many GPUs, and torch sees {gpus}")
    ms = {}
    for world in (1, options.ranks):
        made = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world), *sys.argv, "--timed"],
                              stdout=subprocess.PIPE, text=True, env={"OMP_NUM_THREADS": "1", **os.environ})
        if made.returncode:
            raise SystemExit(f"{world} ranks failed (see above)")
        ms[world] = json.loads(made.stdout.splitlines()[-1])["ms"]
        print(f"{options.config}, {options.batch_tokens:,} tokens a step, {world} rank{'s' * (world > 1)}: {ms[world]:.1f} ms "
              f"({ms[1] / ms[world]:.2f}x)", flush=True)


if __name__ == "__main__":
    main()
