"""One member of a finished search as a checkpoint of its own: the weights that the search evaluated, to the last bit."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bitsperbyte.randopt.config import RandOptConfig
from bitsperbyte.randopt.engines.checkpoint import TOKENIZER_FILES, load_checkpoint
from bitsperbyte.randopt.engines.registry import engine_name
from bitsperbyte.randopt.layout import Layout
from bitsperbyte.randopt.perturb import Perturber
from bitsperbyte.records.schema import Record
from bitsperbyte.records.store import read_record
from bitsperbyte.run.config import check_settings
from bitsperbyte.run.folder import sync_directory


def export_member(record_path: Path, rank: int, out: Path, *, model: str | None = None,
                  say: Callable[[str], None] = lambda line: None) -> str:
    """Write the member of `rank` (1 is the best by train reward) of the run whose record (or folder) is at `record_path` into the new
    folder `out`, and return what was written in one sentence.

    For a Hugging Face model that is a checkpoint in the type that the search ran in, with its tokenizer, which transformers loads by
    itself; for a golf model see GolfEngine.save. `model` says where the base model lies now, if that is elsewhere. The folder appears
    whole or not at all. ValueError where the record is of no finished run or has no such member, the base model's files are not those
    that the run used, or something is at `out`.
    """
    record_path = record_path / "record.json" if record_path.is_dir() else record_path
    record = read_record(record_path)
    member = _member(record, record_path, rank)
    config = _config(record, record_path, model)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is there and not empty: name a new folder for the member")
    with _new_folder(out) as folder:
        write = _write_golf if engine_name(config.model) == "golf" else _write_hugging_face
        write(record, config, member, record_path.parent, folder, say)
    return f"{out}: member {member['index']} of {record.name} (rank {rank}, seed {member['seed']}, sigma {member['sigma']:g})"


def _write_golf(record: Record, config: RandOptConfig, member: dict[str, Any], run_dir: Path, folder: Path,
                say: Callable[[str], None]) -> None:
    from bitsperbyte.randopt.engines.golf import open_engine

    engine = open_engine(config, run_dir, say)
    _require_same_base(record, engine.describe())
    engine.perturb(member["seed"], member["sigma"])
    engine.save(folder)


def _write_hugging_face(record: Record, config: RandOptConfig, member: dict[str, Any], run_dir: Path, folder: Path,
                        say: Callable[[str], None]) -> None:
    """Perturbs the model as transformers loads it, which is what engines do; serving layouts have no part in it."""
    checkpoint = load_checkpoint(config.model, torch.device("cpu"), say)
    _require_same_base(record, {"weights_sha256": checkpoint.weights_sha256, "tokenizer_sha256": checkpoint.tokenizer_sha256})
    noise = config.noise
    rms = _engine_facts(record)["noise"]["rms"] if noise.sigma == "relative" else None
    perturber = Perturber(Layout.of_module(checkpoint.model, checkpoint.names), scheme=noise.scheme, sigma=noise.sigma, base="none",
                          include=noise.include, exclude=noise.exclude, rms=rms)
    perturber.perturb(member["seed"], member["sigma"])
    checkpoint.model.save_pretrained(folder)
    if Path(checkpoint.source).suffix == ".gguf":
        checkpoint.tokenizer.save_pretrained(folder)
        return
    for path in checkpoint.folder.iterdir():
        if path.name in TOKENIZER_FILES or path.suffix == ".py":  # as they are: written anew they could encode differently
            shutil.copyfile(path, folder / path.name)


def _member(record: Record, path: Path, rank: int) -> dict[str, Any]:
    if record.track != "randopt" or record.status != "finished" or record.randopt is None:
        raise ValueError(f"{path} is the record of a {record.track} run that is {record.status}: members are those of finished randopt "
                         "runs")
    members = record.randopt.model_dump()["selection"]["members"]
    found = [member for member in members if member["rank"] == rank]
    if not found:
        raise ValueError(f"{path} has no member of rank {rank}: it keeps ranks 1 to {len(members)}")
    return found[0]


def _engine_facts(record: Record) -> dict[str, Any]:
    """What the run's engine said of itself (Engine.describe)."""
    return record.randopt.model_dump()["engine"]


def _config(record: Record, path: Path, model: str | None) -> RandOptConfig:
    """The run's config for one switch on the CPU: in the type that the run's weights had, since that decides how noise is rounded, and
    without a copy of the base, which one switch does not need."""
    try:
        settings = {**record.config, "noise": {**record.config["noise"], "base": "none"}}
        section = {**record.config["model"], "device": "cpu", "dtype": _engine_facts(record)["dtype"]}
        section["golf"], _engine_facts(record)["weights_sha256"], _engine_facts(record)["tokenizer_sha256"]
    except (LookupError, TypeError) as error:
        raise ValueError(f"{path} does not say which model and noise its members are made of ({error} is missing): only the record of a run "
                         "of this program does, and an imported one does not") from error
    if model is not None:
        section |= {"path": model, "golf": None, "revision": None}
    elif section["golf"] and not (path.parent / "model" / "artifact.bpb").exists():
        raise ValueError(f"{path.parent} does not hold the model that the run made (model/artifact.bpb): export from the run's own "
                         "folder, or say where the model lies with --model")
    return check_settings({**settings, "model": section}, RandOptConfig, f"the config in {path}")


def _require_same_base(record: Record, facts: dict[str, Any]) -> None:
    for name in ("weights_sha256", "tokenizer_sha256"):
        then, now = _engine_facts(record)[name], facts[name]
        if then != now:
            raise ValueError(f"the base model is not the one that the run used: its {name} is {str(now)[:16]}... and was "
                             f"{str(then)[:16]}...; say with --model where the run's model lies")


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """A folder beside `out` that becomes `out` at the end, and is removed where anything goes wrong."""
    out = out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = out.with_name(f".{out.name}.{os.getpid()}.partial")
    beside.mkdir()
    try:
        yield beside
        for path in beside.rglob("*"):
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        os.rename(beside, out)  # onto nothing or an empty folder
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    sync_directory(out.parent)
