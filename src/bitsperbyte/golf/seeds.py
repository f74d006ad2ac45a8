"""The same config under several seeds, and the spread of their scores."""

from pathlib import Path

from bitsperbyte.golf.config import GolfConfig
from bitsperbyte.golf.devices import Ranks, join_ranks
from bitsperbyte.golf.session import RECORD, train
from bitsperbyte.records.schema import Record
from bitsperbyte.records.store import read_record
from bitsperbyte.run.config import LOGGER
from bitsperbyte.run.console import SteadyConsole
from bitsperbyte.run.folder import check_same_config
from bitsperbyte.run.outcome import RunFailed
from bitsperbyte.stats.intervals import summarize


def parse_seeds(text: str) -> list[int]:
    """`1,2,3` as distinct whole numbers; ValueError otherwise."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() for part in parts):
        raise ValueError(f"--seeds {text!r} must be whole numbers with commas between them, e.g. 1,2,3")
    seeds = [int(part) for part in parts]
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"--seeds {text!r} names a seed twice")
    return seeds


def train_seeds(configs: dict[int, GolfConfig], run_dir: Path, *, resume: bool = False) -> dict[int, Record]:
    """Train each seed in run_dir/seed_N, one after the other. With `resume`, seeds that ended are kept and the rest go on.

    Raises what `train` does, ValueError where a kept seed was trained under another config, and at the end RunFailed where a
    kept one is over the cap.
    """
    ranks = join_ranks(next(iter(configs.values())).train.device)  # once: torchrun's ranks cannot meet a second time
    try:
        return _train_seeds(configs, run_dir, resume, ranks)
    finally:
        ranks.close()


def _train_seeds(configs: dict[int, GolfConfig], run_dir: Path, resume: bool, ranks: Ranks) -> dict[int, Record]:
    console = SteadyConsole(stderr=True, quiet=not ranks.is_main)
    records: dict[int, Record] = {}
    for seed, config in configs.items():
        folder = run_dir / f"seed_{seed}"
        path = folder / RECORD
        started = (folder / "config.yaml").exists()
        kept = read_record(path) if resume and path.exists() else None
        ranks.barrier()  # all ranks have looked before one of them begins to write there
        if kept and kept.status in ("finished", "over_cap"):
            check_same_config(kept.config, config.model_dump(mode="json"), may_change=(LOGGER,))
            console.print(f"seed {seed} is {kept.status.replace('_', ' ')}: kept", highlight=False)
            records[seed] = kept
        else:
            console.print(f"seed {seed} in {folder}", highlight=False)
            try:
                records[seed] = train(config, folder, resume=resume and started, console=console, ranks=ranks)
            except RunFailed as failure:
                if failure.status != "over_cap":
                    raise
                console.print(str(failure), highlight=False)  # the other seeds are still worth training
                ranks.barrier()
                records[seed] = read_record(path)
    bpbs = [row.bpb for record in records.values() for row in record.scores if row.label == "artifact"]
    if len(bpbs) > 1:
        spread = summarize(bpbs)
        console.print(f"artifact bpb over {len(bpbs)} seeds: mean {spread.mean:.4f}, sd {spread.sd:.4f}, each "
                      + " ".join(f"{bpb:.4f}" for bpb in bpbs), highlight=False)
    over = [str(seed) for seed, record in records.items() if record.status == "over_cap"]
    if over:
        raise RunFailed(f"the artifacts of seeds {', '.join(over)} are over the cap: see {run_dir}", status="over_cap")
    return records
