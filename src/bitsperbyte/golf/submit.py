"""`bpb golf submit`: the challenge's folder of a finished run, or of the same run under several seeds.

    README.md            generated from the records (submit_readme.py)
    submission.json      the fields below
    train_seed<N>.log    train.log of each seed
    train_gpt.py         one script: trains, packs, scores; `--eval-only artifact.bpb` scores alone
    artifact.bpb         the artifact of one seed, the first
    tokenizer.model      (or tokenizer.json) the tokenizer of the artifact
    requirements.txt     only where the run's codec is not of the standard library

submission.json. The mean over the seeds is the headline; figures of the shipped artifact stand under `artifact`.

    author, github_id, name, blurb, date, track        strings, null where not given
    val_loss, val_bpb                                  mean over the seeds, of the artifacts read back from disk; nats a token, bits a byte
    val_loss_std, val_bpb_std                          sample standard deviation, null for one seed
    pre_quant_val_loss, pre_quant_val_bpb              mean over the seeds, before quantisation
    seeds                                              [1, 2, 3], in the order of seed_results
    seed_results                                       {"1": {val_loss, val_bpb, pre_quant_val_bpb, bytes_artifact, bytes_total,
                                                       artifact_sha256, step_stop, wallclock_seconds, num_resumes, log, log_sha256}}
    bytes_code, bytes_artifact, bytes_total            of this folder: train_gpt.py, artifact.bpb, their sum
    bytes_cap, bytes_margin                            the cap, and what is left under it
    code_form, code_sha256                             plain, minified or compressed; of train_gpt.py
    code_as_recorded                                   whether the records counted this very script; null where they name none
    artifact                                           {file, seed, sha256, scheme, codec, val_loss, val_bpb}
    tokenizer                                          {file, name, sha256, vocab_size}
    evaluation                                         {window, stride, documents, drop_tail, num_tokens, num_bytes, bytes_per_token}
    data                                               {source, train_sha256, val_sha256, scored_split_sha256}
    step_stop, wallclock_seconds                       means over the seeds
    budget_seconds, within_budget                      null for a run without a clock; kept where the last step of each seed began within it,
                                                       as the challenge's own script counts
    num_parameters, train_tokens                       of the network; of the steps of one run, mean over the seeds
    config_sha256, source_sha256, source_commit, source_dirty, bitsperbyte_version
    hardware, pytorch_version, python_version
"""

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitsperbyte.golf.artifact import Artifact, read_artifact
from bitsperbyte.golf.bundle import CODEC_PACKAGES, FORMS, Script, bundle, choose_script, script_config
from bitsperbyte.golf.config import GolfConfig
from bitsperbyte.golf.ledger import CAP_BYTES
from bitsperbyte.golf.session import ARTIFACT, RECORD
from bitsperbyte.golf.submission import SubmissionConfig
from bitsperbyte.golf.submit_readme import render_readme
from bitsperbyte.records.schema import Record, ScoreRow
from bitsperbyte.records.store import read_record
from bitsperbyte.run.config import config_diff, load_config
from bitsperbyte.run.folder import CONFIG, lock_holder, write_atomic
from bitsperbyte.run.metrics import read_metrics
from bitsperbyte.stats.intervals import mean, standard_deviation
from bitsperbyte.text.tokenizers import Tokenizer, load_tokenizer

LOG = "train.log"
CODE_CHOICES = ("auto", *FORMS)
# Settings in which the seeds of one submission may differ: they change nothing about the result, or hashes stand for them.
MAY_DIFFER: dict[str, Any] = {"data": True, "logger": True, "train": {"seed", "micro_batch_tokens", "log_every", "checkpoint_every_s",
                                                      "checkpoint_every_steps"}}
# The challenge's machine and time: only such a run belongs on its track of records.
RECORD_DEVICE, RECORD_NUM_DEVICES, RECORD_SECONDS = "H100 80GB HBM3", 8, 600.0


@dataclass(frozen=True)
class SeedRun:
    """One finished run folder, read and checked."""

    path: Path
    seed: int
    record: Record
    config: GolfConfig
    artifact: Artifact
    tokenizer: Tokenizer
    final: ScoreRow
    before: ScoreRow
    log: bytes
    last_step_began_s: float | None


@dataclass(frozen=True)
class Submitted:
    """A written folder: `facts` is its submission.json."""

    path: Path
    facts: dict[str, Any]
    files: dict[str, int]  # name -> bytes


def submit(run_dir: Path, out: Path, *, code: str = "auto", author: str | None = None, github_id: str | None = None,
           name: str | None = None, blurb: str | None = None) -> Submitted:
    """Write the folder `out` of the run in `run_dir`, or of its seed_* runs. It appears whole or not at all.

    Raises ValueError where `out` exists, a run is not finished, is in use, is over the cap with this form of the script, does not go
    with its record, or where the seeds differ in more than their seed.
    """
    run_dir, out = Path(run_dir), Path(out)
    if code not in CODE_CHOICES:
        raise ValueError(f"there is no form {code!r} of the script: --code takes one of {', '.join(CODE_CHOICES)}")
    if out.exists() or out.is_symlink():
        raise ValueError(f"{out} exists, and a submission is never overwritten: give another --out, or move it away")
    runs = [read_run(path) for path in find_runs(run_dir)]
    _refuse_unequal(runs)
    settings = settings_of(runs[0])
    script = _script(settings, code, runs)
    facts = _facts(runs, script, author=author, github_id=github_id, name=name, blurb=blurb)
    files = _contents(runs, script, facts)
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True)
    try:
        for file_name, content in files.items():
            write_atomic(partial / file_name, content)
        os.rename(partial, out)  # refuses a folder that someone else filled meanwhile
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return Submitted(out, facts, {file_name: len(content) for file_name, content in files.items()})


# -- reading the runs ---------------------------------------------------------------------------------------------------


def find_runs(run_dir: Path) -> list[Path]:
    """The run folder itself, or its seed_N folders in the order of N."""
    if not run_dir.is_dir():
        raise ValueError(f"{run_dir}: there is no such run folder")
    if (run_dir / RECORD).exists() or (run_dir / CONFIG).exists():
        return [run_dir]
    seeds = [(int(path.name[5:]), path) for path in run_dir.glob("seed_*") if path.is_dir() and path.name[5:].isdecimal()]
    if not seeds:
        raise ValueError(f"{run_dir} holds neither {RECORD} nor folders seed_1, seed_2, ...: give the --run-dir of a finished run")
    return [path for _, path in sorted(seeds)]


def read_run(path: Path) -> SeedRun:
    """A finished run whose artifact, tokenizer and log are those of its record; ValueError says what is not."""
    if holder := lock_holder(path):
        raise ValueError(f"{path} is in use by {holder}: submit the run when it has ended")
    record = read_record(path)
    if record.track != "golf":
        raise ValueError(f"{path} holds a {record.track} run, and a submission is made of a golf run")
    _refuse_unfinished(path, record)
    config = load_config(path / CONFIG, GolfConfig, [])
    if differences := config_diff(record.config, _restricted(config.model_dump(mode="json"), record.config)):
        raise ValueError(f"{path / CONFIG} is not the config in {RECORD} ({'; '.join(differences[:5])}): restore the one that was run")
    final, before = record.score("artifact"), record.score("before_quantisation")
    if record.artifact is None or final is None or before is None or record.seed is None:
        raise ValueError(f"{path / RECORD} lacks the artifact, its score, the score before it, or the seed: run again")
    if not (path / ARTIFACT).is_file():
        raise ValueError(f"{path} holds no {ARTIFACT}: put back the artifact that was recorded")
    found = hashlib.sha256((path / ARTIFACT).read_bytes()).hexdigest()
    if found != record.artifact.sha256:
        raise ValueError(f"{path / ARTIFACT} has sha256 {found[:16]}..., and the record beside it is of "
                         f"{str(record.artifact.sha256)[:16]}...: put back the artifact that was recorded, or run again")
    tokenizer = load_tokenizer(path)
    artifact = read_artifact(path / ARTIFACT, expected_tokenizer_sha256=tokenizer.sha256)
    if artifact.model != config.model_dataclass() or (artifact.scheme, artifact.codec) != (config.artifact.scheme, config.artifact.codec):
        raise ValueError(f"{path / ARTIFACT} holds another network, scheme or codec than the config in {RECORD}: run again")
    if not (path / LOG).is_file():
        raise ValueError(f"{path} holds no {LOG}, which a submission must show: restore it from a copy of the run")
    if record.data.val_sha256 is None or record.data.tokenizer_sha256 != tokenizer.sha256:
        raise ValueError(f"{path / RECORD} does not name the validation split, or names another tokenizer than the one beside it")
    metrics = path / "metrics.jsonl"
    steps = read_metrics(metrics).steps if metrics.is_file() else []
    began = steps[-1]["elapsed_s"] - steps[-1]["step_ms"] / 1e3 if steps and steps[-1]["step_ms"] is not None else None
    return SeedRun(path, record.seed, record, config, artifact, tokenizer, final, before, (path / LOG).read_bytes(), began)


def _restricted(config: dict[str, Any], recorded: dict[str, Any]) -> dict[str, Any]:
    """The settings that a record names: one from before a setting existed ran with its default."""
    return {key: _restricted(value, recorded[key]) if isinstance(value, dict) and isinstance(recorded[key], dict) else value
            for key, value in config.items() if key in recorded}


def _refuse_unfinished(path: Path, record: Record) -> None:
    if record.status == "finished":
        return
    what = {
        "over_cap": "ended over the cap, and the challenge takes nothing above it: train a smaller model, or take artifact.scheme int6 "
                    "or another codec",
        "diverged": "diverged: lower the learning rates and start a new run",
        "imported": "was not made here, so there is no script of it to submit",
    }.get(record.status, f"is not finished (its record says {record.status}): go on with `bpb golf train ... --resume`")
    raise ValueError(f"the run in {path} {what}")


def _refuse_unequal(runs: list[SeedRun]) -> None:
    """Several seeds are one submission only if they differ in nothing else."""
    first = runs[0]
    seen: dict[int, Path] = {}
    for run in runs:
        if run.seed in seen:
            raise ValueError(f"{run.path} and {seen[run.seed]} are both of seed {run.seed}: a mean over seeds counts each once")
        seen[run.seed] = run.path
        configs = [r.config.model_dump(mode="json", exclude=MAY_DIFFER) for r in (first, run)]
        if differences := config_diff(*configs):
            raise ValueError(f"{run.path} was trained under another config than {first.path} ({'; '.join(differences[:5])}): a submission "
                             "is one config under several seeds")
        if run.record.data.train_sha256 != first.record.data.train_sha256 or run.tokenizer.sha256 != first.tokenizer.sha256:
            raise ValueError(f"{run.path} was trained on other data or with another tokenizer than {first.path}")
        if run.final.evaluation_key != first.final.evaluation_key or run.before.evaluation_key != first.final.evaluation_key:
            raise ValueError(f"{run.path} was scored on another text or under other windows than {first.path}: their scores have no mean")


# -- what the folder says -----------------------------------------------------------------------------------------------


def settings_of(run: SeedRun) -> SubmissionConfig:
    """The settings of the script of this run."""
    return script_config(run.config, tokenizer_file=run.tokenizer.file_name, tokenizer_sha256=run.tokenizer.sha256,
                         val_sha256=str(run.record.data.val_sha256))


def _script(settings: SubmissionConfig, code: str, runs: list[SeedRun]) -> Script:
    """The script in the form asked for; ValueError where it puts a seed's artifact over the cap."""
    largest = max(runs, key=lambda run: run.artifact.file_bytes)
    cap, size = settings.cap_bytes, largest.artifact.file_bytes
    script = choose_script(settings, code, cap - size)
    over = size + script.num_bytes - cap
    if over > 0:
        smaller = bundle(settings, FORMS[-1])
        if script.form != FORMS[-1] and size + smaller.num_bytes <= cap:
            advice = f"--code {FORMS[-1]} makes the script {smaller.num_bytes:,} bytes and fits"
        else:
            advice = "take fewer or narrower blocks, artifact.scheme int6, or another codec"
        raise ValueError(f"over the cap by {over:,} bytes: the artifact of seed {largest.seed} takes {size:,} and the {script.form} script "
                         f"{script.num_bytes:,} of {cap:,}; {advice}")
    return script


def _facts(runs: list[SeedRun], script: Script, *, author: str | None, github_id: str | None, name: str | None,
           blurb: str | None) -> dict[str, Any]:
    first = runs[0]
    record, config, provenance = first.record, first.config, first.record.provenance
    assert record.artifact is not None
    versions = provenance.get("versions") or {}
    losses, bpbs = [r.final.nats_per_token for r in runs], [r.final.bpb for r in runs]
    total = first.artifact.file_bytes + script.num_bytes
    return {
        "author": author, "github_id": github_id, "name": name or record.name, "blurb": blurb, "date": record.date, "track": track_of(runs),
        "val_loss": mean(losses), "val_bpb": mean(bpbs), "val_loss_std": _deviation(losses), "val_bpb_std": _deviation(bpbs),
        "pre_quant_val_loss": mean([r.before.nats_per_token for r in runs]), "pre_quant_val_bpb": mean([r.before.bpb for r in runs]),
        "seeds": [r.seed for r in runs],
        "seed_results": {str(r.seed): {
            "val_loss": r.final.nats_per_token, "val_bpb": r.final.bpb, "pre_quant_val_bpb": r.before.bpb,
            "bytes_artifact": r.artifact.file_bytes, "bytes_total": r.artifact.file_bytes + script.num_bytes,
            "artifact_sha256": r.record.artifact.sha256 if r.record.artifact else None, "step_stop": r.record.training.num_steps,
            "wallclock_seconds": r.record.training.train_s, "num_resumes": r.record.training.num_resumes,
            "log": log_name(r.seed), "log_sha256": hashlib.sha256(r.log).hexdigest()} for r in runs},
        "bytes_code": script.num_bytes, "bytes_artifact": first.artifact.file_bytes, "bytes_total": total,
        "bytes_cap": config.artifact.cap_bytes, "bytes_margin": config.artifact.cap_bytes - total,
        "code_form": script.form, "code_sha256": script.sha256,
        "code_as_recorded": None if record.artifact.code_sha256 is None else record.artifact.code_sha256 == script.sha256,
        "artifact": {"file": ARTIFACT, "seed": first.seed, "sha256": record.artifact.sha256, "scheme": first.artifact.scheme,
                     "codec": first.artifact.codec, "val_loss": first.final.nats_per_token, "val_bpb": first.final.bpb},
        "tokenizer": {"file": first.tokenizer.file_name, "name": first.tokenizer.name, "sha256": first.tokenizer.sha256,
                      "vocab_size": first.tokenizer.vocab_size},
        "evaluation": {key: getattr(first.final, key) for key in (
            "window", "stride", "documents", "drop_tail", "num_tokens", "num_bytes", "bytes_per_token")},
        "data": {"source": record.data.source, "train_sha256": record.data.train_sha256, "val_sha256": record.data.val_sha256,
                 "scored_split_sha256": first.final.split_sha256},
        "step_stop": _mean_known([r.record.training.num_steps for r in runs]),
        "wallclock_seconds": _mean_known([r.record.training.train_s for r in runs]),
        "budget_seconds": config.schedule.wallclock_s, "within_budget": budget_kept(runs),
        "num_parameters": record.training.num_parameters, "train_tokens": _mean_known([r.record.training.num_tokens for r in runs]),
        "config_sha256": record.config_sha256, "source_sha256": provenance.get("source_sha256"), "source_commit": provenance.get("commit"),
        "source_dirty": provenance.get("dirty"), "bitsperbyte_version": versions.get("bitsperbyte"),
        "hardware": "; ".join(dict.fromkeys(hardware_of(r.record) for r in runs)),
        "pytorch_version": versions.get("torch"), "python_version": provenance.get("python"),
    }


def _deviation(values: Sequence[float]) -> float | None:
    return standard_deviation(values) if len(values) > 1 else None


def _mean_known(values: Sequence[float | None]) -> float | None:
    """The mean, None where one is not known; whole where all are equal."""
    known = [v for v in values if v is not None]
    if len(known) < len(values):
        return None
    return known[0] if len(set(known)) == 1 else mean(known)


def hardware_of(record: Record) -> str:
    """Devices in words: `8 x NVIDIA H100 80GB HBM3`, or the processor and its cores."""
    p = record.provenance
    if p.get("device") in (None, "cpu"):
        return f"CPU: {p.get('cpu_model') or 'unknown'}, {p.get('num_cores') or '?'} cores"
    return f"{p.get('num_devices') or 1} x {p['device']}"


def budget_kept(runs: Sequence[SeedRun]) -> bool | None:
    """Whether the last step of each seed began within the budget; None without a clock. Where the steps' own times are gone, whether
    the whole training time lies within it."""
    budget = runs[0].config.schedule.wallclock_s
    if budget is None:
        return None
    ends = [run.last_step_began_s if run.last_step_began_s is not None else run.record.training.train_s for run in runs]
    return all(end is not None and end <= budget for end in ends)


def track_of(runs: Sequence[SeedRun]) -> str:
    """track_10min_16mb for the challenge's machine, time and cap; everything else is track_non_record_16mb."""
    config = runs[0].config
    on_the_machine = all(RECORD_DEVICE in str(r.record.provenance.get("device")) and r.record.provenance.get("num_devices") == RECORD_NUM_DEVICES
                         for r in runs)
    in_time = config.schedule.wallclock_s is not None and config.schedule.wallclock_s <= RECORD_SECONDS and bool(budget_kept(runs))
    return "track_10min_16mb" if on_the_machine and in_time and config.artifact.cap_bytes <= CAP_BYTES else "track_non_record_16mb"


def log_name(seed: int) -> str:
    return f"train_seed{seed}.log"


def _contents(runs: list[SeedRun], script: Script, facts: dict[str, Any]) -> dict[str, bytes]:
    """Every file of the folder."""
    first = runs[0]
    files = {"train_gpt.py": script.text.encode(), ARTIFACT: (first.path / ARTIFACT).read_bytes(),
             first.tokenizer.file_name: tokenizer_bytes(first.tokenizer)}
    files |= {log_name(run.seed): run.log for run in runs}
    if package := CODEC_PACKAGES.get(first.artifact.codec):
        files["requirements.txt"] = f"{package}\n".encode()
    files["submission.json"] = (json.dumps(facts, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()
    files["README.md"] = render_readme(facts, first.record, {name: len(content) for name, content in files.items()}).encode()
    return files


def tokenizer_bytes(tokenizer: Tokenizer) -> bytes:
    """The file that `tokenizer.save` writes."""
    return tokenizer.model_bytes if hasattr(tokenizer, "model_bytes") else tokenizer.file_bytes()  # type: ignore[attr-defined]
