"""The configuration of a RandOpt run: one YAML file read into these models. Every default stands here, once."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from bitsperbyte.run.config import LoggerSection

MIN_SIGMA, MAX_SIGMA = 1e-30, 1e30  # float32 keeps 24 bits of a number there, and of its product with a tensor's RMS
MAX_POPULATION = 1_000_000  # it is drawn whole, in memory


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class GolfSection(Section):
    """A golf run that makes the model, in the folder of the run that uses it: on documents of a generated task, one token a byte. Its
    schedule counts steps instead of seconds, so that the same section makes the same model."""

    corpus: Literal["arithmetic"] = Field("arithmetic", description="the task whose training documents it learns")
    num_docs: int = Field(100_000, ge=10)
    seed: int = Field(0, ge=0, lt=2**63, description="of the documents; the network's is settings.train.seed")
    settings: dict[str, Any] = Field({}, description="of the golf run, as in configs/golf but without `data`")


class ModelSection(Section):
    path: str | None = Field(None, description="folder, hub name (org/name), .gguf file, golf artifact (.bpb) or golf run folder")
    revision: str | None = Field(None, description="branch, tag or commit on the hub; resolved once and recorded")
    engine: Literal["auto", "native", "golf", "vllm"] = Field("auto", description="auto: golf for golf artifacts, native for others")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field("auto", description="auto: bfloat16 on CUDA, float32 on a CPU")
    device: Literal["auto", "cpu", "cuda"] = "auto"
    trust_remote_code: bool = Field(False, description="run Python code that comes with the model")
    prompt_format: Literal["auto", "chat", "plain"] = Field("auto", description="auto: the chat template where the tokenizer has one")
    golf: GolfSection | None = Field(None, description="a golf run that makes the model first, in place of `path`")

    @model_validator(mode="after")
    def one_source(self) -> "ModelSection":
        if (self.path is None) == (self.golf is None):
            raise ValueError("model takes either a path or the settings of a golf run that makes it: set one of model.path, model.golf")
        return self


class TaskSection(Section):
    name: Literal["gsm8k", "math500", "countdown", "arithmetic", "likelihood", "jsonl"]
    data: str | None = Field(None, description="file or folder of the task's data; null takes the hub's, for generated tasks nothing")
    num_train: int = Field(64, ge=1)
    num_test: int = Field(256, ge=2)
    max_new_tokens: int | None = Field(None, ge=1, description="null takes the task's own limit")
    seed: int = Field(0, ge=0, lt=2**63, description="of generated questions and of the split, where the task draws one")
    levels: list[int] | None = Field(None, description="math500: difficulty levels to take, e.g. [4, 5]")
    system: str | None = Field(None, description="a system message before the question; null leaves it out")
    question_field: str = Field("question", description="jsonl")
    answer_field: str = Field("answer", description="jsonl")
    test_data: str | None = Field(None, description="jsonl, likelihood: test questions or documents from a file of their own")
    answers: Literal["text", "number", "math"] = Field("text", description="jsonl: how answers are compared")
    context: int = Field(1024, ge=2, description="likelihood: tokens of a window")


class NoiseSection(Section):
    scheme: Literal["rademacher", "binomial"] = "rademacher"
    sigma: Literal["absolute", "relative"] = Field("absolute", description="relative multiplies by each tensor's RMS")
    sigmas: list[float] = Field(min_length=1)
    include: list[str] = Field(["*"], min_length=1, description="shell patterns over checkpoint tensor names")
    exclude: list[str] = []
    base: Literal["auto", "device", "pinned", "none"] = Field(
        "auto", description="where the base weights lie; none subtracts instead of rebuilding, which is inexact and flagged")
    verify_every: int = Field(64, ge=1, description="seeds between two checksums of the base")

    @model_validator(mode="after")
    def distinct_sigmas(self) -> "NoiseSection":
        if not all(s > 0 for s in self.sigmas):
            raise ValueError(f"noise.sigmas {self.sigmas} must all be above 0: the base itself is always evaluated")
        if outside := [s for s in self.sigmas if not MIN_SIGMA <= s <= MAX_SIGMA]:
            raise ValueError(f"noise.sigmas holds {outside[0]:g}, and noise is float32: a sigma must lie from {MIN_SIGMA:g} to {MAX_SIGMA:g}")
        if len(set(self.sigmas)) != len(self.sigmas):
            raise ValueError(f"noise.sigmas {self.sigmas} names one sigma twice")
        return self


class SearchSection(Section):
    population: int = Field(64, ge=1, le=MAX_POPULATION)
    seed: int = Field(42, ge=0, lt=2**63, description="of the population, the control pool and every other draw")
    top_k: int = Field(8, ge=1, description="members that vote: the headline, fixed before the run")
    secondary_k: list[int] = Field([], description="other ensemble sizes, reported as secondary")

    @model_validator(mode="after")
    def within_population(self) -> "SearchSection":
        for k in (self.top_k, *self.secondary_k):
            if not 1 <= k <= self.population:
                raise ValueError(f"an ensemble of {k} cannot be drawn from search.population {self.population}")
        if len({self.top_k, *self.secondary_k}) != 1 + len(self.secondary_k):
            raise ValueError("search.secondary_k repeats a size, or the headline's search.top_k")
        return self


class DecodeSection(Section):
    max_sequences: int | None = Field(None, ge=1, description="sequences in one batch at most; null lets the memory decide")
    graphs: Literal["auto", "on", "off"] = Field("auto", description="capture the decode step as a CUDA graph; auto: on CUDA")
    memory_share: float = Field(0.85, gt=0, lt=1, description="share of the device's free memory that weights and KV cache may take")
    score_tokens: int = Field(16_384, ge=1, description="tokens scored at once")


class ControlsSection(Section):
    random_k: bool = Field(True, description="votes of uniformly drawn members")
    control_pool: int = Field(32, ge=1, description="members drawn uniformly from the population and run on the test set")
    num_subsets: int = Field(20, ge=20, le=100_000, description="random K-subsets of the pool that vote")
    base_majority: bool = Field(True, description="majority vote over K samples of the base model")
    temperature: float = Field(0.7, ge=1e-6, description="of those samples")
    top_p: float = Field(1.0, gt=0, le=1)
    best_single: bool = Field(True, description="the member of the best train reward alone")


class HeldoutSection(Section):
    enabled: bool = True
    path: str = Field("data/slices/fineweb_256.jsonl", description="a slice made by `bpb data slice`, with its manifest beside it")
    source: str = Field("fineweb", description="fineweb | fineweb-edu | embedded | arithmetic (that task's documents) | a file or folder")
    num_docs: int = Field(256, ge=2)
    build_if_missing: bool = True
    context: int = Field(2048, ge=2, description="tokens of a window")
    random_mixtures: int = Field(5, ge=2, le=10_000, description="mixtures of K members drawn from the control pool")


class ProbesSection(Section):
    top: int = Field(0, ge=0, description="best members by train reward that are run alone on the test set, with their bpb")


class HardwareSection(Section):
    """What the run is meant for; `bpb randopt plan` reckons with it."""

    num_gpus: int = Field(1, ge=1)
    gpu: str | None = None
    gpu_memory_gib: float = Field(80.0, gt=0, le=1e6)
    tensor_parallel: int = Field(1, ge=1)


class WorkersSection(Section):
    """Engines in Ray workers, which share a population. Nothing here changes a result, so that all of it may change on --resume."""

    count: int | None = Field(0, ge=0, description="0: one engine in this process, without Ray; null: as many as the cluster has room for")
    cpus_each: int = Field(1, ge=1, description="processors, and threads, of each; a worker on GPUs takes hardware.tensor_parallel of them")
    address: str | None = Field(None, pattern=r"^(auto|[^/\s]+:[0-9]+)$", description="auto or host:port of a Ray cluster; null: one of its own")
    when_fewer: Literal["use", "refuse"] = Field("use", description="where there is room for fewer workers than asked for")
    timeout_s: float = Field(3600.0, gt=0, description="for one model over one set of items; a worker that takes longer is replaced")
    start_timeout_s: float = Field(1800.0, gt=0, description="to load an engine, and to wait for room in the cluster")
    max_failures: int = Field(3, ge=1, description="workers lost at one model, or in a row before they are ready, that end the run")


class RandOptLoggerSection(LoggerSection):
    every_steps: int = Field(1, ge=1, description="evaluated seeds between two that are logged")


class RandOptConfig(Section):
    name: str = Field("randopt", pattern=r"^[A-Za-z0-9._-]+$")
    model: ModelSection
    task: TaskSection
    noise: NoiseSection
    search: SearchSection = SearchSection()
    decode: DecodeSection = DecodeSection()
    controls: ControlsSection = ControlsSection()
    heldout: HeldoutSection = HeldoutSection()
    probes: ProbesSection = ProbesSection()
    hardware: HardwareSection = HardwareSection()
    workers: WorkersSection = WorkersSection()
    logger: RandOptLoggerSection = RandOptLoggerSection()

    @model_validator(mode="after")
    def sections_agree(self) -> "RandOptConfig":
        if self.probes.top > self.search.population:
            raise ValueError(f"probes.top {self.probes.top} exceeds search.population {self.search.population}")
        if self.controls.random_k and self.controls.control_pool < self.search.top_k <= self.search.population:
            raise ValueError(f"controls.control_pool {self.controls.control_pool} must hold at least search.top_k {self.search.top_k} "
                             "members, so that a random ensemble of that size can be drawn: raise it, or turn controls.random_k off")
        if self.workers.count != 0 and self.noise.base == "none":
            raise ValueError("noise.base none leaves rounding errors that depend on which models ran before, so that workers would give "
                             "other results than one engine: take pinned or device, or set workers.count to 0")
        if self.hardware.num_gpus % self.hardware.tensor_parallel:
            raise ValueError(f"hardware.num_gpus {self.hardware.num_gpus} must be a multiple of hardware.tensor_parallel "
                             f"{self.hardware.tensor_parallel}")
        return self
