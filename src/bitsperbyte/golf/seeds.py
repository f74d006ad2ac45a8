"""The same config under several seeds, and the spread of their scores."""

from pathlib import Path

from rich.console import Console

from bitsperbyte.golf.config import GolfConfig
from bitsperbyte.golf.session import RECORD, train
from bitsperbyte.records.schema import Record
from bitsperbyte.records.store import read_record
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
    """Train each seed in run_dir/seed_N, one after the other. With `resume`, finished seeds are kept and the rest go on."""
    console = Console(stderr=True)
    records: dict[int, Record] = {}
    for seed, config in configs.items():
        folder = run_dir / f"seed_{seed}"
        path = folder / RECORD
        started = (folder / "config.yaml").exists()
        if resume and path.exists() and read_record(path).status == "finished":
            console.print(f"seed {seed} is finished: kept", highlight=False)
            records[seed] = read_record(path)
        else:
            console.print(f"seed {seed} in {folder}", highlight=False)
            records[seed] = train(config, folder, resume=resume and started, console=console)
    bpbs = [row.bpb for record in records.values() for row in record.scores if row.label == "artifact"]
    if len(bpbs) > 1:
        spread = summarize(bpbs)
        console.print(f"artifact bpb over {len(bpbs)} seeds: mean {spread.mean:.4f}, sd {spread.sd:.4f}, each "
                      + " ".join(f"{bpb:.4f}" for bpb in bpbs), highlight=False)
    return records
