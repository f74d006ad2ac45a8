"""The lines of a training log in the challenge's formats, written by a run (train.log) and by a submission's script alike."""

from bitsperbyte.golf.ledger import Ledger
from bitsperbyte.golf.model import ModelConfig, parameter_counts, state_shapes
from bitsperbyte.golf.quantize import fp_bytes, payload_bytes
from bitsperbyte.golf.schedule import Schedule
from bitsperbyte.golf.step import BatchConfig
from bitsperbyte.metric.bpb import Score


def opening_lines(model: ModelConfig, schedule: Schedule, batch: BatchConfig, *, world_size: int, num_micro: int, data_path: str,
                  num_val_tokens: int) -> list[str]:
    """What is trained, on what and for how long. 0 iterations or seconds: no such limit."""
    return [
        f"model_params:{parameter_counts(model)['total']}",
        f"world_size:{world_size} grad_accum_steps:{num_micro}",
        f"val_loader:shards pattern={data_path} tokens:{num_val_tokens - 1}",
        f"train_batch_tokens:{batch.batch_tokens} train_seq_len:{batch.seq_len} iterations:{schedule.max_steps or 0} "
        f"warmup_steps:{schedule.warmup_steps} max_wallclock_seconds:{schedule.wallclock_s or 0:.3f}",
        f"seed:{batch.seed}",
    ]


def step_line(step: int, total: int, loss: float, elapsed_s: float) -> str:
    """One finished step; `total` is the limit of steps, 0 where only the clock ends the run."""
    return f"step:{step}/{total} train_loss:{loss:.4f} train_time:{elapsed_s * 1e3:.0f}ms step_avg:{elapsed_s * 1e3 / step:.2f}ms"


def validation_line(step: int, total: int, score: Score, elapsed_s: float) -> str:
    return (f"step:{step}/{total} val_loss:{score.nats_per_token:.4f} val_bpb:{score.bpb:.4f} train_time:{elapsed_s * 1e3:.0f}ms "
            f"step_avg:{elapsed_s * 1e3 / max(step, 1):.2f}ms")


def cap_line(step: int, total: int, elapsed_s: float) -> str:
    return f"stopping_early: wallclock_cap train_time:{elapsed_s * 1e3:.0f}ms step:{step}/{total}"


def memory_line(allocated_bytes: int, reserved_bytes: int) -> str:
    return f"peak memory allocated: {allocated_bytes // 2**20} MiB reserved: {reserved_bytes // 2**20} MiB"


def size_lines(ledger: Ledger, model: ModelConfig, scheme: str, codec: str) -> list[str]:
    """Bytes before and after quantisation, with the code counted in the ledger."""
    shapes = state_shapes(model)
    raw, payload = fp_bytes(shapes), payload_bytes(shapes, scheme)
    tag = f"{scheme.removeprefix('reference_')}+{codec}"
    return [
        f"Serialized model: {raw} bytes",
        f"Code size: {ledger.code_bytes} bytes",
        f"Total submission size: {raw + ledger.code_bytes} bytes",
        f"Serialized model {tag}: {ledger.weight_bytes} bytes (payload:{payload} raw_torch:{raw} payload_ratio:{raw / payload:.2f}x)",
        f"Total submission size {tag}: {ledger.total_bytes} bytes",
    ]


def roundtrip_lines(scheme: str, codec: str, score: Score, seconds: float) -> list[str]:
    """The score of the artifact as read back from disk, in four digits and in eight."""
    tag = f"final_{scheme.removeprefix('reference_')}_{codec}_roundtrip"
    return [
        f"{tag} val_loss:{score.nats_per_token:.4f} val_bpb:{score.bpb:.4f} eval_time:{seconds * 1e3:.0f}ms",
        f"{tag}_exact val_loss:{score.nats_per_token:.8f} val_bpb:{score.bpb:.8f}",
    ]
