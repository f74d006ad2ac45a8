"""A golf run from a config to a record: open the folder and the data, train, pack, read back, score what was read, record.

Every way to end leaves a record.json: finished, over_cap, diverged, interrupted, crashed; a run that was killed says running.
"""

import hashlib
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

import bitsperbyte
from bitsperbyte.golf.artifact import Ledger, read_artifact, write_artifact
from bitsperbyte.golf.bundle import Script, bundle, choose_script, script_config
from bitsperbyte.golf.clock import agree_max
from bitsperbyte.golf.config import GolfConfig
from bitsperbyte.golf.devices import describe_device, require_memory
from bitsperbyte.golf.evaluate import Evaluation, Protocol
from bitsperbyte.golf.lines import memory_line, opening_lines, roundtrip_lines, size_lines
from bitsperbyte.golf.logs import RunLog
from bitsperbyte.golf.model import GolfModel, ModelConfig, parameter_counts, state_shapes
from bitsperbyte.golf.quantize import payload_bytes
from bitsperbyte.golf.ranks import Ranks, is_lost_rank, join_ranks, peak_memory_bytes, reserved_memory_bytes
from bitsperbyte.golf.schedule import describe_warmdown
from bitsperbyte.golf.submission import SubmissionConfig
from bitsperbyte.golf.train import Trainer
from bitsperbyte.records.schema import Record, ScoreRow
from bitsperbyte.records.store import continue_record, readable_record, write_record
from bitsperbyte.run.config import LOGGER, config_hash, resolved_yaml
from bitsperbyte.run.console import SteadyConsole
from bitsperbyte.run.folder import CONFIG, IDENTITY, RunFolder, check_same_config, read_identity, require_disk_space
from bitsperbyte.run.metrics import read_metrics
from bitsperbyte.run.outcome import EXIT_FAILED, RunFailed
from bitsperbyte.run.provenance import collect
from bitsperbyte.run.trackers import open_tracker, require_installed
from bitsperbyte.text.loader import BatchLoader, TokenStream
from bitsperbyte.text.shards import DataFolder, open_shard
from bitsperbyte.text.tokenizers import Tokenizer, load_tokenizer

RECORD, ARTIFACT = "record.json", "artifact.bpb"
IDENTITY_PARTS = ("config", "data", "versions")


def train(config: GolfConfig, run_dir: Path, *, resume: bool = False, console: Console | None = None,
          ranks: Ranks | None = None) -> Record:
    """Run `config` in `run_dir` to its end and return the record (also written there).

    Raises ValueError for input that cannot work (before anything is trained) and RunFailed, with an exit code, for a run that
    was interrupted, diverged or ended over the cap; the folder then holds everything so far. `ranks`, where given, stay joined.
    """
    console = console or SteadyConsole(stderr=True)
    joined = ranks or join_ranks(config.train.device)
    try:
        if not joined.is_main:
            _await_main(joined)
            return _train(config, run_dir, None, joined, resume, console)
        with RunFolder.open(run_dir, resume=resume, kind="golf") as folder:
            return _train(config, run_dir, folder, joined, resume, console)
    finally:
        if ranks is None:
            joined.close()


def _await_main(ranks: Ranks) -> None:
    """The main rank opens the folder and checks the data first; where it refuses them, it is the one to say why."""
    try:
        ranks.barrier()
    except RuntimeError as error:
        raise RunFailed(f"rank {ranks.rank} stops: the main rank ended before training began and says why") from error


def _train(config: GolfConfig, run_dir: Path, folder: RunFolder | None, ranks: Ranks, resume: bool, console: Console) -> Record:
    began = time.perf_counter()
    if folder:
        require_installed(config.logger)
    window = config.eval.window or config.train.seq_len
    require_memory(config.model_dataclass(), config.train.micro_batch_tokens, ranks,
                   eval_tokens=max(config.eval.batch_tokens, window), eval_window=window)
    data = DataFolder.open(Path(config.data.path), tokenizer_path=config.data.tokenizer)
    tokenizer = data.tokenizer
    if tokenizer.vocab_size != config.model.vocab_size:
        raise ValueError(f"the tokenizer of {config.data.path} has {tokenizer.vocab_size} pieces and model.vocab_size is "
                         f"{config.model.vocab_size}: set them equal")
    if folder:
        weights = parameter_counts(config.model_dataclass())["total"] * 4
        require_disk_space(run_dir, 9 * weights + 2 * config.artifact.cap_bytes, "three checkpoints and the artifact")
        console.print(f"checking the data in {config.data.path}", highlight=False)
        data.verify("train")
        data.verify("val")
        BatchLoader(TokenStream(data.shards("train")), batch_tokens=config.train.batch_tokens, seq_len=config.train.seq_len,
                    world_size=ranks.world_size)  # ValueError where they do not fit, before the folder holds a run
        bundle(script_of(config, tokenizer, data), "plain")  # what cannot be made a script of must not show after hours of training
        _open_identity(folder, config, data, tokenizer, resume)
        ranks.barrier()
    record = _new_record(config, data, tokenizer, ranks)
    if folder and resume:
        continue_record(record, folder.path / RECORD, lambda text: console.print(text, highlight=False))
    _write(folder, record)
    log = RunLog(folder, console, max_steps=config.schedule.max_steps, wallclock_s=config.schedule.wallclock_s,
                 log_every=config.train.log_every)
    if folder:
        log.track(open_tracker(config.logger, run_dir, name=f"{config.name}-seed{config.train.seed}", config=record.config, say=log.say),
                  config.logger.every_steps)
    val_tokens = np.concatenate([open_shard(info.path, vocab_size=tokenizer.vocab_size) for info in data.shards("val")])
    trainer: Trainer | None = None
    try:
        trainer = Trainer(config, ranks, run_dir, log, TokenStream(data.shards("train")), val_tokens, tokenizer)
        _introduce(log, config, data, tokenizer, trainer)
        if resume:
            trainer.resume()
        trainer.phases_s["setup"] = trainer.phases_s.get("setup", 0.0) + time.perf_counter() - began
        if not trainer.finished:
            trainer.warm_up()
            trainer.run()
        _finish(record, trainer, run_dir, data)
    except RunFailed as failure:
        record.status, record.error = failure.status, str(failure)
        raise
    except KeyboardInterrupt:
        record.status, record.error = "interrupted", "stopped outside the training loop; --resume goes on from the last checkpoint"
        raise
    except torch.OutOfMemoryError as error:
        record.status, record.error = "crashed", f"out of memory on {ranks.device}"
        raise RunFailed(f"out of memory on {ranks.device}: lower train.micro_batch_tokens (now {config.train.micro_batch_tokens}) or "
                        "eval.batch_tokens in a new run; everything so far is kept", EXIT_FAILED, "crashed") from error
    except Exception as error:
        record.status, record.error = "crashed", f"{type(error).__name__}: {error}"
        if ranks.world_size > 1 and is_lost_rank(error):
            record.error = "another rank ended, and this one cannot go on without it"
            raise RunFailed(f"rank {ranks.rank} stops: another rank has ended (what it printed says why); when that is mended, go on with "
                            "--resume", EXIT_FAILED, "crashed") from error
        raise
    finally:
        for update in (lambda: _fill_training(record, trainer, run_dir, time.perf_counter() - began), lambda: _write(folder, record)):
            try:
                try:
                    update()
                except KeyboardInterrupt:  # torchrun signals again when a rank is lost: how the run ended is still to be written
                    update()
            except (OSError, ValueError) as error:
                if record.status == "finished":
                    raise
                # said, not raised: the first error is the one that says why the run ended
                console.print(f"{RECORD} could not be brought up to date: {error}", highlight=False)
        log.close(failed=record.status != "finished")
    return record


def _open_identity(folder: RunFolder, config: GolfConfig, data: DataFolder, tokenizer: Tokenizer, resume: bool) -> None:
    """Write what makes the run this run, or refuse to resume under anything else."""
    identity = {"config": config.model_dump(mode="json"), "data": _data_identity(data, tokenizer),
                "versions": {"bitsperbyte": bitsperbyte.__version__, "torch": torch.__version__}}
    if resume:
        check_same_config(read_identity(folder.path, IDENTITY_PARTS), identity, may_change=(f"config.{LOGGER}",))
        earlier = readable_record(folder.path / RECORD)
        if earlier and earlier.status in ("finished", "over_cap"):
            raise ValueError(f"the run in {folder.path} is finished: see its record.json, or take another --run-dir")
        tokenizer.save(folder.path)  # the same one, as the identity says: the copy may have been lost
        folder.write_atomic(CONFIG, resolved_yaml(config))  # the logger may be another
        return
    folder.write_json_atomic(IDENTITY, identity)
    tokenizer.save(folder.path)
    folder.write_atomic(CONFIG, resolved_yaml(config))  # last: its presence says that the folder holds a run


def _data_identity(data: DataFolder, tokenizer: Tokenizer) -> dict[str, Any]:
    return {"source": data.manifest.get("source"), "train_sha256": data.split_sha256("train"),
            "val_sha256": data.split_sha256("val"), "tokenizer_sha256": tokenizer.sha256, "tokenizer_name": tokenizer.name,
            "vocab_size": tokenizer.vocab_size}


def _new_record(config: GolfConfig, data: DataFolder, tokenizer: Tokenizer, ranks: Ranks) -> Record:
    facts = collect()
    return Record(track="golf", name=config.name, status="running", created_utc=datetime.now(UTC).isoformat(timespec="seconds"),
                  command=facts["command"], config=config.model_dump(mode="json"), config_sha256=config_hash(config),
                  provenance={**facts, **describe_device(ranks.device, ranks.world_size)}, seed=config.train.seed,
                  data=_data_identity(data, tokenizer))


def _write(folder: RunFolder | None, record: Record) -> None:
    if folder:
        write_record(folder.path / RECORD, record)


def _introduce(log: RunLog, config: GolfConfig, data: DataFolder, tokenizer: Tokenizer, trainer: Trainer) -> None:
    num_parameters, num_val = parameter_counts(config.model_dataclass())["total"], len(trainer.val_tokens)
    log.say(f"{config.name}: {num_parameters:,} parameters on {trainer.ranks.device} x {trainer.ranks.world_size}, tokenizer "
            f"{tokenizer.name}, {trainer.stream.length:,} training tokens, {num_val:,} validation tokens")
    for line in opening_lines(trainer.model.config, trainer.schedule, trainer.batch, world_size=trainer.ranks.world_size,
                              num_micro=trainer.num_micro, data_path=config.data.path, num_val_tokens=num_val):
        log.line(line)


def protocol_of(config: GolfConfig) -> Protocol:
    """How the config's final scores cut the validation text."""
    ev = config.eval
    return Protocol(ev.window or config.train.seq_len, ev.stride, ev.documents, ev.drop_tail)


def score_row(label: str, evaluation: Evaluation, text: str, split_sha256: str) -> ScoreRow:
    """The record's row of one evaluation."""
    p = evaluation.protocol
    return ScoreRow(label=label, text=text, split_sha256=split_sha256, window=p.window, stride=p.stride, documents=p.documents,
                    drop_tail=p.drop_tail, seconds=evaluation.seconds, per_position=evaluation.by_position.to_dict(),
                    **evaluation.score.to_dict())


def _finish(record: Record, trainer: Trainer, run_dir: Path, data: DataFolder) -> None:
    """Score, quantise, write, read back, score what was read; RunFailed when the artifact is over the cap."""
    config, ranks, log = trainer.config, trainer.ranks, trainer.log
    protocol, tokenizer = protocol_of(config), trainer.tokenizer
    tokens = trainer.val_tokens[: config.eval.max_tokens]
    split = data.split_sha256("val") + (f":first-{len(tokens)}" if len(tokens) < len(trainer.val_tokens) else "")

    def score(label: str) -> Evaluation:
        log.say(f"scoring {label.replace('_', ' ')}: {len(tokens):,} tokens, {protocol.describe()}")
        with trainer.phase("final_evaluation"):
            result = trainer.score(tokens, protocol)
        record.scores.append(score_row(label, result, f"validation split of {config.data.path}", split))
        return result

    final = score("before_quantisation").score
    elapsed_s = trainer.clock.elapsed_s
    log.validation(trainer.step, final, elapsed_s)
    log.line(memory_line(peak_memory_bytes(ranks.device), reserved_memory_bytes(ranks.device)))
    path = run_dir / ARTIFACT
    with trainer.phase("artifact"):
        if ranks.is_main:
            ledger = write_artifact(path, state={n: p.detach().float().cpu() for n, p in trainer.model.named_parameters()},
                                    model=config.model_dataclass(), tokenizer_sha256=tokenizer.sha256,
                                    scheme=config.artifact.scheme, codec=config.artifact.codec, extra={"name": config.name})
            script = choose_script(script_of(config, tokenizer, data), "auto", config.artifact.cap_bytes - ledger.weight_bytes)
            ledger = replace(ledger, cap_bytes=config.artifact.cap_bytes, code_bytes=script.num_bytes)
            for line in size_lines(ledger, config.model_dataclass(), config.artifact.scheme, config.artifact.codec):
                log.line(line)
            record.artifact = artifact_section(path, ledger, script, config)
        ranks.barrier()
        artifact = read_artifact(path, expected_tokenizer_sha256=tokenizer.sha256)
        trainer.model.load_state_dict(artifact.state)  # what is scored below came from the disk
    result = score("artifact")
    for line in roundtrip_lines(config.artifact.scheme, config.artifact.codec, result.score, result.seconds):
        log.line(line)
    log.artifact(trainer.step, result.score, record.artifact)
    record.status = "finished"
    over = int(agree_max([float(-ledger.margin_bytes) if ranks.is_main else 0.0])[0])  # all ranks end alike
    if over > 0:
        raise RunFailed(f"the artifact is over the cap: {over:,} bytes too many, code included; take "
                        f"fewer or narrower blocks, artifact.scheme int6, or another codec",
                        EXIT_FAILED, "over_cap")


def script_of(config: GolfConfig, tokenizer: Tokenizer, data: DataFolder) -> SubmissionConfig:
    """The settings of the script that a submission of this run ships, whose bytes are the run's code."""
    return script_config(config, tokenizer_file=tokenizer.file_name, tokenizer_sha256=tokenizer.sha256, val_sha256=data.split_sha256("val"))


def artifact_section(path: Path, ledger: Ledger, script: Script, config: GolfConfig) -> dict[str, Any]:
    """The record's artifact part. `code_form` and `code_sha256` say which script the code bytes are those of."""
    shapes = state_shapes(config.model_dataclass())
    return {"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "scheme": config.artifact.scheme,
            "codec": config.artifact.codec, "payload_bytes": payload_bytes(shapes, config.artifact.scheme),
            "code_form": script.form, "code_sha256": script.sha256, **ledger.to_dict()}


def _fill_training(record: Record, trainer: Trainer | None, run_dir: Path, total_s: float) -> None:
    if trainer is None:
        return  # it failed while it was being built
    metrics = read_metrics(run_dir / "metrics.jsonl")
    config = trainer.config
    timed = [row["step_ms"] for row in metrics.steps if row["step_ms"] is not None]
    step_ms = np.array(timed) if timed else None
    num_steps = metrics.steps[-1]["step"] if metrics.steps else trainer.step
    record.training = {
        "num_steps": num_steps, "num_tokens": num_steps * config.train.batch_tokens,
        "batch_tokens": config.train.batch_tokens, "num_parameters": parameter_counts(config.model_dataclass())["total"],
        "step_ms_p50": None if step_ms is None else float(np.percentile(step_ms, 50)),
        "step_ms_p95": None if step_ms is None else float(np.percentile(step_ms, 95)),
        "train_s": trainer.clock.elapsed_s, "budget_s": config.schedule.wallclock_s, "max_steps": config.schedule.max_steps,
        "stopped_by": trainer.finished, "charged_lost_s": trainer.clock.charged_s, "lost_steps": metrics.num_lost_steps,
        "num_resumes": metrics.num_resumes, "peak_memory_bytes": peak_memory_bytes(trainer.ranks.device),
        "final_train_loss": metrics.steps[-1]["loss"] if metrics.steps else None,
        "warmdown": describe_warmdown(trainer.schedule, trainer.clock.elapsed_s / num_steps if num_steps else 0.0),
    }
    record.phases_s = {**trainer.phases_s, "train": trainer.clock.elapsed_s, "this_attempt": total_s}


def load_run(run_dir: Path) -> tuple[GolfModel, Tokenizer, ModelConfig]:
    """The scored model of a finished run: its artifact, read from disk, and its tokenizer. ValueError where either is missing or they
    do not belong together."""
    path = run_dir / ARTIFACT
    if not path.exists():
        raise ValueError(f"{run_dir} holds no {ARTIFACT}: the run is not finished; go on with `bpb golf train ... --resume`")
    tokenizer = load_tokenizer(run_dir)
    artifact = read_artifact(path, expected_tokenizer_sha256=tokenizer.sha256)
    model = GolfModel(artifact.model)
    model.load_state_dict(artifact.state)
    return model, tokenizer, artifact.model
