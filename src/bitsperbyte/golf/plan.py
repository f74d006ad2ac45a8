"""What a config will cost, before any training: parameters, bytes, arithmetic, and on this machine a measured step."""

import math
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from bitsperbyte.golf.bundle import Script, choose_script, script_config
from bitsperbyte.golf.config import GolfConfig
from bitsperbyte.golf.devices import expected_memory_bytes
from bitsperbyte.golf.model import GolfModel, flops_per_token, parameter_counts, state_shapes
from bitsperbyte.golf.muon import ParamGroup, build_optimizers
from bitsperbyte.golf.quantize import fp_bytes, payload_bytes
from bitsperbyte.golf.schedule import describe_warmdown

# File size over payload, lowest and highest measured. Training drives it through the size of the weights, so it is a range.
# reference_int8 + zlib: the challenge's baseline .921, recurrent v5 .749, v6 .734, v7 .709 on 8xH100; here .842 and .603 after
# 240 s on one H200 (records/). The other two are of Gaussian weights at the baseline's shapes and of the demo run's network.
MEASURED_RATIOS: dict[tuple[str, str], tuple[float, float]] = {
    ("reference_int8", "zlib"): (0.60, 0.93),
    ("int8", "zlib"): (0.91, 0.94),
    ("int6", "zstd"): (0.89, 0.94),
}


CPU_TOKENS = 2048  # timed at once on a CPU: enough to fill its cores, seconds for the baseline


@dataclass(frozen=True)
class StepTime:
    """A measured step: seconds for one step of the config, and how it was found."""

    step_s: float
    device: str
    how: str


@dataclass(frozen=True)
class Plan:
    parameters: dict[str, int]
    blocks: tuple[int, int]  # unique, applied
    fp_bytes: int
    int8_bytes: int
    payload_bytes: int
    payload_ratio: float  # training bytes over payload: not a compression ratio of the file
    file_bytes: tuple[int, int] | None  # expected, lowest and highest
    code_bytes: int
    code_form: str
    cap_bytes: int
    flops_per_token: int
    memory_bytes: int
    groups: list[ParamGroup]
    step: StepTime | None
    num_steps: int | None
    num_tokens: int | None
    warmdown: str | None
    warnings: list[str]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def plan(config: GolfConfig, step: StepTime | None = None) -> Plan:
    """The table of a config; with a measured `step` also steps, tokens and warmdown in the budget."""
    model = config.model_dataclass()
    shapes = state_shapes(model)
    payload = payload_bytes(shapes, config.artifact.scheme)
    ratios = MEASURED_RATIOS.get((config.artifact.scheme, config.artifact.codec))
    file_bytes = (round(payload * ratios[0]), round(payload * ratios[1])) if ratios else None
    code = _code(config, file_bytes[1] if file_bytes else payload)
    num_steps = _projected_steps(config, step) if step else config.schedule.max_steps if not config.schedule.wallclock_s else None
    schedule = config.schedule_dataclass()
    with torch.device("meta"):
        groups = build_optimizers(GolfModel(model), config.optim_dataclass()).groups()
    warmdown = describe_warmdown(schedule, step.step_s) if step else None
    return Plan(
        parameters=parameter_counts(model), blocks=(model.num_blocks, len(model.order)), fp_bytes=fp_bytes(shapes),
        int8_bytes=payload_bytes(shapes, "reference_int8"), payload_bytes=payload, payload_ratio=fp_bytes(shapes) / payload,
        file_bytes=file_bytes, code_bytes=code.num_bytes, code_form=code.form, cap_bytes=config.artifact.cap_bytes,
        flops_per_token=flops_per_token(model, config.train.seq_len),
        memory_bytes=expected_memory_bytes(model, config.train.micro_batch_tokens, step.device if step else "cuda"),
        groups=groups, step=step, num_steps=num_steps, num_tokens=num_steps * config.train.batch_tokens if num_steps else None,
        warmdown=warmdown, warnings=_warnings(config, payload, file_bytes, warmdown))


def _code(config: GolfConfig, file_bytes: int) -> Script:
    """The script that a submission would ship beside an artifact of that size; the hashes in it are not known yet and as long."""
    settings = script_config(config, tokenizer_file="tokenizer.model", tokenizer_sha256="0" * 64, val_sha256="0" * 64)
    return choose_script(settings, "auto", config.artifact.cap_bytes - file_bytes)


def _projected_steps(config: GolfConfig, step: StepTime) -> int:
    limits = [config.schedule.max_steps or 2**62]
    if config.schedule.wallclock_s:
        limits.append(math.ceil(config.schedule.wallclock_s / step.step_s))
    return min(limits)


def _warnings(config: GolfConfig, payload: int, file_bytes: tuple[int, int] | None, warmdown: str | None) -> list[str]:
    room = config.artifact.cap_bytes - _code(config, config.artifact.cap_bytes).num_bytes  # beside the smallest form of the script
    warnings = []
    if file_bytes and file_bytes[0] > room:
        warnings.append(f"over the cap: even at the lowest measured ratio the artifact takes {file_bytes[0]:,} of {room:,} bytes")
    elif file_bytes and file_bytes[1] > room:
        warnings.append(f"may end over the cap: at the highest measured ratio the artifact takes {file_bytes[1]:,} of {room:,} bytes")
    elif not file_bytes and payload > room:
        warnings.append(f"may end over the cap: the payload before compression is {payload:,} bytes, {room:,} are free")
    if warmdown and "first step" in warmdown:
        warnings.append(f"the learning rate {warmdown}; consider warmdown: {{steps: null, fraction: 0.087}}")
    return warnings


def measure_step(config: GolfConfig, device: torch.device) -> StepTime:
    """Time a step of `config` on `device`: whole micro-batches after compiling, on a CPU at most CPU_TOKENS at once; the optimiser's
    step; then added up for the batch. Random tokens: the time does not depend on them."""
    model = GolfModel(config.model_dataclass()).place(device)
    optimizers = build_optimizers(model, config.optim_dataclass())
    on_gpu, seq_len = device.type == "cuda", config.train.seq_len
    tokens = config.train.micro_batch_tokens
    if not on_gpu:
        tokens = min(tokens, max(1, CPU_TOKENS // seq_len) * seq_len)
    x = torch.randint(0, config.model.vocab_size, (tokens // seq_len, seq_len), device=device)
    model.prepare(seq_len, device)
    loss_fn = torch.compile(model.loss, dynamic=False) if on_gpu and config.train.compile != "off" else model.loss

    def seconds(run: Any, repeats: int) -> float:
        run()
        times = []
        for _ in range(repeats):
            if on_gpu:
                torch.cuda.synchronize(device)
            begin = time.perf_counter()
            run()
            if on_gpu:
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - begin)
        return sorted(times)[len(times) // 2]

    micro_s = seconds(lambda: loss_fn(x, x).backward(), 3)
    update_s = seconds(lambda: optimizers.step(lr_scale=0.0, momentum=0.9), 3)
    step_s = micro_s * config.train.batch_tokens / tokens + update_s
    how = f"{tokens:,} tokens {micro_s * 1e3:.1f} ms, optimiser {update_s * 1e3:.1f} ms; a step has {config.train.batch_tokens:,}"
    return StepTime(step_s, device.type, how)
