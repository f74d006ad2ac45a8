"""Seeds a second of Ray workers against one engine in this process, on the same config, each with grading and a synced journal.

    python bench/ray_workers.py [--config configs/randopt/smollm2_gsm8k.yaml] [--set key=value ...] [--workers 1 2] [--members 64]

Without --config: a random Llama of 2.7 million parameters that answers sums, on the CPU. Loading is not part of the time: before it begins
each worker is ready and every engine has run a few members. `ratio` is seeds/s over those of one engine, which on a CPU has as many
threads as a worker (workers.cpus_each). Run it twice: the spread of two runs is what a ratio is worth.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bitsperbyte.randopt.config import RandOptConfig
from bitsperbyte.randopt.engines.base import Engine, Sampling
from bitsperbyte.randopt.engines.registry import open_engine
from bitsperbyte.randopt.journal import Journal
from bitsperbyte.randopt.population import Member, draw_population
from bitsperbyte.randopt.rollout import run_members
from bitsperbyte.randopt.tasks.grading import Grader
from bitsperbyte.randopt.tasks.registry import open_task
from bitsperbyte.randopt.workers import Fleet
from bitsperbyte.run.config import load_config, resolved_yaml


def small_config(folder: Path) -> Path:
    """A config of a random Llama with a byte-level tokenizer, both made in `folder`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.train_from_iterator(["12 + 30 = 42"], trainers.BpeTrainer(
        vocab_size=270, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder / "model")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=192, intermediate_size=512, num_hidden_layers=6, num_attention_heads=6,
        num_key_value_heads=3, max_position_embeddings=256, eos_token_id=1, bos_token_id=0)).save_pretrained(folder / "model")
    config = RandOptConfig.model_validate({
        "model": {"path": str(folder / "model"), "device": "cpu"}, "noise": {"sigmas": [0.01]},
        "task": {"name": "arithmetic", "num_train": 32, "max_new_tokens": 16}, "heldout": {"enabled": False}})
    path = folder / "small.yaml"
    path.write_text(resolved_yaml(config))
    return path


def measure(engine: Engine | Fleet, config: RandOptConfig, members: list[Member], folder: Path) -> float:
    """Seeds/s of all but the first few members, which only warm up."""
    task = open_task(config.task)
    items = task.items()[0]
    sampling = Sampling(config.task.max_new_tokens or task.default_max_new_tokens, stop=task.stop)
    num_warm = 4 * config.workers.count if config.workers.count else 2
    with Journal.open(folder / f"journal_{config.workers.count}.jsonl", {}) as journal, Grader(task) as grader:
        def run(some: list[Member]) -> None:
            run_members(engine, task, grader, journal, "search", items, some, lambda member: sampling)

        run(members[:num_warm])
        begin = time.perf_counter()
        run(members[num_warm:])
        return (len(members) - num_warm) / (time.perf_counter() - begin)


def fleet_of(config: RandOptConfig, folder: Path) -> Fleet:
    """A fleet whose workers are all ready."""
    fleet = Fleet.open(config, folder, lambda line: None, open_engine)
    fleet.wait_for(config.workers.count)
    return fleet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--members", type=int, default=64)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = options.config or small_config(folder)
        rates: dict[str, float] = {}
        base: RandOptConfig = load_config(path, RandOptConfig, options.set)
        members: list[Any] = draw_population(options.members, base.noise.sigmas, base.search.seed)
        for num in options.workers:
            config = base.model_copy(update={"workers": base.workers.model_copy(update={"count": num, "when_fewer": "refuse"})})
            fleet = fleet_of(config, folder)
            rates[f"{num} worker{'s' * (num > 1)}"] = measure(fleet, config, members, folder)
            device = fleet.describe()["device"]
            fleet.close()
        if device == "cpu":
            torch.set_num_threads(base.workers.cpus_each)
        engine = open_engine(base, folder, lambda line: None)
        alone = measure(engine, base.model_copy(update={"workers": base.workers.model_copy(update={"count": 0})}), members, folder)
        engine.close()
    print(f"{options.members} members of {base.task.name} ({base.task.num_train} questions), {device}")
    for what, rate in {"one engine in this process": alone, **rates}.items():
        print(f"{what:<28}{rate:8.3f} seeds/s   ratio {rate / alone:.2f}")


if __name__ == "__main__":
    main()
