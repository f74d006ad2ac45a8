"""The configuration of a golf run: one YAML file read into these models. The defaults of network and optimisers are those of their
dataclasses; all others stand here.

The sections become the frozen dataclasses that the bundled modules take (ModelConfig, OptimConfig, Schedule), so that nothing past
this file knows of pydantic.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from bitsperbyte.golf.model import ModelConfig
from bitsperbyte.golf.muon import OptimConfig
from bitsperbyte.golf.schedule import Schedule
from bitsperbyte.golf.step import BatchConfig
from bitsperbyte.run.config import LoggerSection


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DataSection(Section):
    path: str = Field("data/fineweb10B_sp1024", description="folder of token shards made by `bpb data prepare`, or the challenge's own")
    tokenizer: str | None = Field(None, description="tokenizer file, for a folder of shards that has no manifest")


class ModelSection(Section):
    vocab_size: int = ModelConfig.vocab_size
    dim: int = ModelConfig.dim
    num_heads: int = ModelConfig.num_heads
    num_kv_heads: int = ModelConfig.num_kv_heads
    mlp_mult: int = ModelConfig.mlp_mult
    order: list[int] = list(ModelConfig.order)
    skips: list[tuple[int, int]] = list(ModelConfig.skips)
    tie_embeddings: bool = ModelConfig.tie_embeddings
    rope_base: float = ModelConfig.rope_base
    logit_softcap: float = ModelConfig.logit_softcap
    qk_gain_init: float = ModelConfig.qk_gain_init
    tied_embed_init_std: float = ModelConfig.tied_embed_init_std
    attention_window: int | None = ModelConfig.attention_window


class OptimSection(Section):
    matrix_lr: float = Field(OptimConfig.matrix_lr, gt=0)
    scalar_lr: float = Field(OptimConfig.scalar_lr, gt=0)
    embed_lr: float = Field(OptimConfig.embed_lr, gt=0, description="0.6 when the embedding is not tied to the head, in the challenge")
    head_lr: float = Field(OptimConfig.head_lr, gt=0, description="untied head only")
    momentum: float = Field(OptimConfig.momentum, ge=0, lt=1)
    momentum_warmup_start: float = Field(OptimConfig.momentum_warmup_start, ge=0, lt=1)
    momentum_warmup_steps: int = Field(OptimConfig.momentum_warmup_steps, ge=0)
    ns_steps: int = Field(OptimConfig.ns_steps, ge=1, le=20)
    beta1: float = Field(OptimConfig.beta1, ge=0, lt=1)
    beta2: float = Field(OptimConfig.beta2, ge=0, lt=1)
    adam_eps: float = Field(OptimConfig.adam_eps, gt=0)
    weight_decay: float = Field(OptimConfig.weight_decay, ge=0, description="decoupled, on the matrices, after the update")
    grad_clip_norm: float = Field(OptimConfig.grad_clip_norm, ge=0, description="0 turns clipping off")


class WarmdownSection(Section):
    steps: int | None = Field(None, ge=0, description="the challenge's rule: this many steps' worth of time, at the mean so far")
    fraction: float | None = Field(None, ge=0, le=1, description="this share of the budget")

    @model_validator(mode="after")
    def one_of_both(self) -> "WarmdownSection":
        if (self.steps is None) == (self.fraction is None):
            raise ValueError("warmdown takes either steps or fraction: set the other one to null")
        return self


class ScheduleSection(Section):
    wallclock_s: float | None = Field(600.0, gt=0, description="training seconds; null trains by max_steps alone, reproducibly")
    max_steps: int | None = Field(20_000, ge=1)
    warmdown: WarmdownSection = WarmdownSection(steps=1200)
    warmup_steps: int = Field(20, ge=0, description="untimed steps that compile and warm up; all state is restored after them")


class TrainSection(Section):
    batch_tokens: int = Field(524_288, ge=1, description="tokens a step, over all ranks")
    seq_len: int = Field(1024, ge=2)
    micro_batch_tokens: int = Field(65_536, ge=1, description="tokens a rank puts through at once; the result does not depend on it")
    seed: int = Field(1337, ge=0, lt=2**63)
    log_every: int = Field(200, ge=1, description="steps between lines of train.log; metrics.jsonl holds every step")
    checkpoint_every_s: float = Field(60.0, gt=0, description="seconds between checkpoints")
    checkpoint_every_steps: int | None = Field(None, ge=1)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    compile: Literal["auto", "on", "off"] = Field("auto", description="auto compiles on CUDA only")

    @model_validator(mode="after")
    def whole_sequences(self) -> "TrainSection":
        for name in ("batch_tokens", "micro_batch_tokens"):
            if getattr(self, name) % self.seq_len:
                raise ValueError(f"train.{name} {getattr(self, name)} must be a multiple of train.seq_len {self.seq_len}")
        if self.batch_tokens % self.micro_batch_tokens:
            raise ValueError(f"train.batch_tokens {self.batch_tokens} must be a multiple of train.micro_batch_tokens "
                             f"{self.micro_batch_tokens}")
        return self


class EvalSection(Section):
    window: int | None = Field(None, ge=2, description="tokens of context and targets; null takes train.seq_len")
    stride: int | None = Field(None, ge=1, description="sliding windows that score their last `stride` tokens; null does not overlap")
    documents: Literal["across", "isolated"] = "across"
    drop_tail: bool = Field(False, description="true leaves the last, shorter chunk out, as the challenge does")
    batch_tokens: int = Field(65_536, ge=1)
    every_steps: int | None = Field(1000, ge=1, description="validation during training, clock stopped, non-overlapping windows")
    max_tokens: int | None = Field(None, ge=2, description="score the first tokens of the validation split only; null takes all")

    @model_validator(mode="after")
    def stride_within_window(self) -> "EvalSection":
        if self.stride and self.window and self.stride > self.window:
            raise ValueError(f"eval.stride {self.stride} must not exceed eval.window {self.window}: tokens between would go unscored")
        if self.stride and self.drop_tail:
            raise ValueError("eval.drop_tail goes with non-overlapping windows: set eval.stride to null or drop_tail to false")
        return self


class ArtifactSection(Section):
    scheme: Literal["reference_int8", "int8", "int6"] = "reference_int8"
    codec: Literal["zlib", "zstd", "lzma", "brotli"] = "zlib"
    cap_bytes: int = Field(16_000_000, ge=1)


class GolfLoggerSection(LoggerSection):
    every_steps: int = Field(10, ge=1, description="training steps between two that are logged: it is done while the clock runs")


class GolfConfig(Section):
    name: str = Field("golf", pattern=r"^[A-Za-z0-9._-]+$")
    data: DataSection = DataSection()
    model: ModelSection = ModelSection()
    optim: OptimSection = OptimSection()
    schedule: ScheduleSection = ScheduleSection()
    train: TrainSection = TrainSection()
    eval: EvalSection = EvalSection()
    artifact: ArtifactSection = ArtifactSection()
    logger: GolfLoggerSection = GolfLoggerSection()

    @model_validator(mode="after")
    def sections_agree(self) -> "GolfConfig":
        self.model_dataclass()  # each raises a ValueError of its own where its numbers do not fit together
        self.schedule_dataclass()
        window = self.eval.window or self.train.seq_len
        if self.eval.stride and self.eval.stride > window:
            raise ValueError(f"eval.stride {self.eval.stride} must not exceed the window of {window} tokens")
        return self

    def model_dataclass(self) -> ModelConfig:
        return ModelConfig(**self.model.model_dump())

    def optim_dataclass(self) -> OptimConfig:
        return OptimConfig(**self.optim.model_dump())

    def batch_dataclass(self) -> BatchConfig:
        t = self.train
        return BatchConfig(t.batch_tokens, t.seq_len, t.micro_batch_tokens, t.seed, t.compile)

    def schedule_dataclass(self) -> Schedule:
        s = self.schedule
        return Schedule(wallclock_s=s.wallclock_s, max_steps=s.max_steps, warmdown_steps=s.warmdown.steps,
                        warmdown_fraction=s.warmdown.fraction, warmup_steps=s.warmup_steps)
