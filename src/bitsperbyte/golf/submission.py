"""The main program of a submission's script: train, pack, read back, score, in the challenge's log format.

bundle.py flattens this module and all that it needs into one train_gpt.py, behind a SubmissionConfig written out as a literal.
The environment sets what the challenge's harness sets and no hyperparameter: DATA_PATH, TOKENIZER_PATH, RUN_ID, SEED, and
torchrun's RANK, WORLD_SIZE and LOCAL_RANK.
"""

import argparse
import dataclasses
import os
import platform
import sys
import uuid
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import numpy as np
import torch

from bitsperbyte.golf.artifact import read_artifact, write_artifact
from bitsperbyte.golf.clock import Clock, agree_max
from bitsperbyte.golf.evaluate import Evaluation, Protocol, evaluate
from bitsperbyte.golf.lines import cap_line, memory_line, opening_lines, roundtrip_lines, size_lines, step_line, validation_line
from bitsperbyte.golf.model import GolfModel, ModelConfig
from bitsperbyte.golf.muon import OptimConfig
from bitsperbyte.golf.ranks import Ranks, join_ranks, peak_memory_bytes, reserved_memory_bytes
from bitsperbyte.golf.schedule import Schedule, is_finished, lr_scale
from bitsperbyte.golf.step import BatchConfig, Stepper
from bitsperbyte.text.loader import TokenStream
from bitsperbyte.text.shards import DataFolder, open_shard
from bitsperbyte.text.tokenizers import Tokenizer


@dataclass(frozen=True)
class SubmissionConfig:
    """All settings of the recorded run. `protocol` cuts the validation text for the final scores; during training windows of the same
    length do not overlap. The hashes are those of the run's tokenizer and validation split."""

    name: str
    model: ModelConfig
    optim: OptimConfig
    schedule: Schedule
    batch: BatchConfig
    protocol: Protocol
    eval_batch_tokens: int
    eval_every_steps: int | None
    eval_max_tokens: int | None
    log_every: int
    scheme: str
    codec: str
    cap_bytes: int
    device: str
    data_path: str
    tokenizer_file: str
    tokenizer_sha256: str
    val_sha256: str


class ScriptLog:
    """Lines of the main rank on stdout and, once `keep` is called, in logs/RUN_ID.txt."""

    def __init__(self, ranks: Ranks) -> None:
        run_id = os.environ.get("RUN_ID") or str(uuid.uuid4())
        if Path(run_id).name != run_id:
            raise ValueError(f"RUN_ID {run_id!r} must be a name without slashes: it names the log file")
        self.ranks, self.is_main, self.file = ranks, ranks.is_main, None
        self.path, self.artifact = Path("logs") / f"{run_id}.txt", Path("logs") / f"{run_id}.artifact.bpb"

    def keep(self) -> None:
        """Begin logs/RUN_ID.txt with this script's source."""
        if not self.is_main:
            return
        ranks, path = self.ranks, self.path
        path.parent.mkdir(exist_ok=True)
        self.file = path.open("w", encoding="utf-8")
        device = torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else platform.machine()
        rule = "=" * 100
        self.file.write(f"{Path(__file__).read_text(encoding='utf-8')}\n{rule}\nPython {sys.version}\nPyTorch {torch.__version__}\n"
                        f"{ranks.world_size} x {device}\n{rule}\n")
        print(path, flush=True)

    def line(self, text: str) -> None:
        if not self.is_main:
            return
        print(text, flush=True)
        if self.file:
            self.file.write(text + "\n")
            self.file.flush()


def open_data(config: SubmissionConfig, ranks: Ranks, splits: tuple[str, ...]) -> tuple[DataFolder, Tokenizer]:
    """The folder of shards named by DATA_PATH, its `splits` checked by the main rank while the others wait. The tokenizer, named by
    TOKENIZER_PATH or lying beside this script, must be the run's: ValueError otherwise."""
    beside = Path(__file__).resolve().parent / config.tokenizer_file
    given = os.environ.get("TOKENIZER_PATH") or (beside if beside.is_file() else None)
    data = DataFolder.open(os.environ.get("DATA_PATH") or config.data_path, tokenizer_path=given)
    tokenizer = data.tokenizer
    if tokenizer.sha256 != config.tokenizer_sha256:
        raise ValueError(f"the tokenizer of {data.path} has sha256 {tokenizer.sha256[:16]}..., and the recorded run's has "
                         f"{config.tokenizer_sha256[:16]}...: name the right files with DATA_PATH and TOKENIZER_PATH")
    if ranks.is_main:
        for split in splits:
            data.verify(split)
    ranks.barrier()
    return data, tokenizer


def validation_tokens(config: SubmissionConfig, data: DataFolder, log: ScriptLog) -> np.ndarray:
    """The tokens to score, after a line that says whether they are the recorded run's."""
    if log.is_main:
        found = data.split_sha256("val")
        same = "as recorded" if found == config.val_sha256 else f"NOT the recorded {config.val_sha256}: scores do not compare"
        log.line(f"val_sha256:{found} {same}")
    return np.concatenate([open_shard(info.path) for info in data.shards("val")])


def fit(config: SubmissionConfig, stepper: Stepper, val_tokens: np.ndarray, tokenizer: Tokenizer, log: ScriptLog) -> float:
    """Train until a limit ends the run; the training seconds. FloatingPointError for a loss that is not finite."""
    schedule, total = config.schedule, config.schedule.max_steps or 0
    clock, batch = Clock(stepper.ranks.synchronize), None
    if schedule.warmup_steps:
        stepper.take_warmup_steps(log.line)
    while True:
        elapsed = agree_max([clock.elapsed_s])[0]
        reason = is_finished(schedule, stepper.step, elapsed)
        if reason:
            if clock.running:
                clock.pause()
            if reason == "wallclock_cap":
                log.line(cap_line(stepper.step, total, elapsed))
            return clock.elapsed_s
        if config.eval_every_steps and stepper.step % config.eval_every_steps == 0:
            with clock.paused():
                during = Protocol(config.protocol.window)
                score = scored(config, stepper.model, stepper.ranks, val_tokens, tokenizer, during).score
                log.line(validation_line(stepper.step, total, score, elapsed))
        if not clock.running:
            clock.start()
        loss = stepper.train_step(batch or stepper.next_batch(), lr_scale(schedule, step=stepper.step, elapsed_s=elapsed))
        batch = stepper.next_batch()  # fetched while the device still computes
        value = loss.item()
        stepper.step += 1
        if not isfinite(value):
            raise FloatingPointError(f"the loss is {value} after step {stepper.step}: training diverged")
        if stepper.step <= 10 or stepper.step % config.log_every == 0:
            log.line(step_line(stepper.step, total, value, clock.elapsed_s))


def scored(config: SubmissionConfig, model: GolfModel, ranks: Ranks, val_tokens: np.ndarray, tokenizer: Tokenizer,
           protocol: Protocol) -> Evaluation:
    return evaluate(model, val_tokens[: config.eval_max_tokens], tokenizer.table, tokenizer.bos_id, protocol, rank=ranks.rank,
                    batch_tokens=config.eval_batch_tokens, world_size=ranks.world_size)


def score_artifact(config: SubmissionConfig, path: Path, model: GolfModel, ranks: Ranks, val_tokens: np.ndarray, tokenizer: Tokenizer,
                   log: ScriptLog) -> None:
    """Read the artifact at `path` from the disk (the main rank, which hands the weights on) into `model`, and score it."""
    if ranks.is_main:
        artifact = read_artifact(path, expected_tokenizer_sha256=tokenizer.sha256)
        if artifact.model != config.model:
            raise ValueError(f"{path}: its network is another than this script's: score it with the script of its own run")
        model.load_state_dict(artifact.state)
    ranks.share(list(model.parameters()))
    result = scored(config, model, ranks, val_tokens, tokenizer, config.protocol)
    log.line(f"scored tokens:{result.score.num_tokens} bytes:{result.score.num_bytes} windows:{config.protocol.describe()}")
    for line in roundtrip_lines(config.scheme, config.codec, result.score, result.seconds):
        log.line(line)


def run_training(config: SubmissionConfig, ranks: Ranks) -> int:
    """Train, write the artifact to logs/RUN_ID.artifact.bpb, read it back, score it. The exit code: 1 over the cap."""
    log = ScriptLog(ranks)
    if log.is_main and log.path.exists():
        raise ValueError(f"{log.path} exists: set another RUN_ID, or move the log away")
    data, tokenizer = open_data(config, ranks, ("train", "val"))
    log.keep()
    val_tokens = validation_tokens(config, data, log)
    stepper = Stepper(config.model, config.optim, config.schedule, config.batch, ranks, TokenStream(data.shards("train")))
    for line in opening_lines(config.model, config.schedule, config.batch, world_size=ranks.world_size, num_micro=stepper.num_micro,
                              data_path=str(data.path), num_val_tokens=len(val_tokens)):
        log.line(line)
    elapsed_s = fit(config, stepper, val_tokens, tokenizer, log)
    before = scored(config, stepper.model, ranks, val_tokens, tokenizer, config.protocol)
    log.line(validation_line(stepper.step, config.schedule.max_steps or 0, before.score, elapsed_s))
    log.line(memory_line(peak_memory_bytes(ranks.device), reserved_memory_bytes(ranks.device)))
    margin_bytes = 0
    if ranks.is_main:
        ledger = write_artifact(log.artifact, state={n: p.detach().float().cpu() for n, p in stepper.model.named_parameters()},
                                model=config.model, tokenizer_sha256=tokenizer.sha256, scheme=config.scheme, codec=config.codec,
                                extra={"name": config.name}, num_code_bytes=Path(__file__).stat().st_size)
        ledger = dataclasses.replace(ledger, cap_bytes=config.cap_bytes)
        for line in size_lines(ledger, config.model, config.scheme, config.codec):
            log.line(line)
        log.line(f"artifact written to {log.artifact}")
        margin_bytes = ledger.margin_bytes
    ranks.barrier()
    path = log.artifact if ranks.is_main else Path()
    score_artifact(config, path, stepper.model, ranks, val_tokens, tokenizer, log)
    if margin_bytes < 0:
        log.line(f"over the cap by {-margin_bytes} bytes, code included")
    return int(agree_max([float(margin_bytes < 0)])[0])


def run_evaluation(config: SubmissionConfig, ranks: Ranks, path: Path) -> int:
    """Score an artifact without training."""
    log = ScriptLog(ranks)
    data, tokenizer = open_data(config, ranks, ("val",))
    val_tokens = validation_tokens(config, data, log)
    model = GolfModel(config.model).place(ranks.device)
    score_artifact(config, path, model, ranks, val_tokens, tokenizer, log)
    return 0


def main(config: SubmissionConfig) -> int:
    """The script's entry: its exit code is 0, 1 where training diverged or the artifact is over the cap, 2 for input that cannot work, 3 where
    the system refuses a file."""
    parser = argparse.ArgumentParser(description=f"{config.name}: trains the network of the settings at the end of this file, packs it, and "
                                     "scores the file as read back. Environment: DATA_PATH, TOKENIZER_PATH, RUN_ID, SEED.")
    parser.add_argument("--eval-only", metavar="ARTIFACT", type=Path, help="score this artifact and train nothing")
    arguments = parser.parse_args()
    seed = os.environ.get("SEED") or str(config.batch.seed)
    try:
        if not seed.isdecimal():
            raise ValueError(f"SEED {seed!r} must be a whole number")
        config = dataclasses.replace(config, batch=dataclasses.replace(config.batch, seed=int(seed)))
        ranks = join_ranks(config.device)
        try:
            return run_evaluation(config, ranks, arguments.eval_only) if arguments.eval_only else run_training(config, ranks)
        finally:
            ranks.close()
    except (ValueError, FloatingPointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 3 if isinstance(error, OSError) else 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
