"""What a RandOpt config needs, before anything is loaded: memory by part and GPU, and how fast a seed can be at best.

The times are bounds and not forecasts. A seed of P parameters that answers its prompts in S decode steps takes at least

    max(S * bytes of the weights + bytes of the cache read, over the bandwidth; 2 P T over the arithmetic) + switch

where T counts the tokens of prompts and answers. In decoding, each step reads every weight once, whatever the number of sequences, and
each sequence its own cache: a answer tokens after p prompt tokens read about a (p + a / 2) cached tokens. The switch reads the base and
writes the live weights. Engines in workers share the models of a phase, so that its bound is that of the engine with the most.
"""

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bitsperbyte.randopt.config import ModelSection, RandOptConfig, TaskSection
from bitsperbyte.randopt.engines.decode import PREFILL_TOKENS, WIDTH_STEP
from bitsperbyte.randopt.engines.native import LOGIT_BYTES, SOFTMAX_BYTES
from bitsperbyte.randopt.engines.registry import engine_name
from bitsperbyte.randopt.engines.vllm_memory import GRAPHS_BYTES, plan_vllm
from bitsperbyte.randopt.tasks.registry import open_task

GIB = 2**30
# Of answers and prompts, on average: GSM8K and MATH-500 as recorded for Qwen2.5-7B-Instruct, arithmetic by characters.
ANSWER_TOKENS = {"gsm8k": 251, "math500": 684, "arithmetic": 3}
PROMPT_TOKENS = {"arithmetic": 7}
OTHER_PROMPT_TOKENS = 150
BYTES_PER_TOKEN = 4.5  # of English text under vocabularies of 50,000 to 150,000
DOCUMENT_TOKENS = 1_000  # of a document whose text is not at hand
ARITHMETIC_DOCUMENT_TOKENS = 10  # held-out documents of the arithmetic task are one question and its answer, by characters
MODEL_FLOPS_SHARE = 0.5  # of the peak that a forward pass reaches
HOST_BYTES_PER_S = 40e9  # pinned memory to GPU over PCIe 5; 25 to 55 GB/s are seen
SAMPLING_BYTES = 28  # a logit when sampled: float32 logits and, in float64, probabilities, their sorted copy and their sums


@dataclass(frozen=True)
class Gpu:
    """Peak bandwidth (bytes/s) and dense bfloat16 arithmetic (operations/s), as the vendor states them."""

    bytes_per_s: float
    flops: float


# found in hardware.gpu by these names
GPUS = {"H200": Gpu(4.8e12, 989e12), "H100": Gpu(3.35e12, 989e12), "A100": Gpu(2.04e12, 312e12), "L4": Gpu(300e9, 121e12)}


@dataclass(frozen=True)
class ModelShape:
    """What memory and time depend on. `source` says where it was read; `weight_bytes` of one parameter, None for the type that the
    config names."""

    source: str
    num_parameters: int
    num_layers: int
    width: int
    mlp_width: int
    num_kv_heads: int
    head_width: int
    vocab_size: int
    weight_bytes: int | None = None

    def cache_bytes(self, itemsize: int) -> int:
        """Keys and values of one token."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_width * itemsize


# Published shapes of models that the configs name, so that their plan needs no network: parameters, layers, width, width of the MLP,
# key/value heads, width of a head, vocabulary.
KNOWN_SHAPES = {
    "Qwen/Qwen2.5-0.5B-Instruct": (494_032_768, 24, 896, 4_864, 2, 64, 151_936),
    "Qwen/Qwen2.5-1.5B-Instruct": (1_543_714_304, 28, 1_536, 8_960, 2, 128, 151_936),
    "Qwen/Qwen2.5-3B-Instruct": (3_085_938_688, 36, 2_048, 11_008, 2, 128, 151_936),
    "Qwen/Qwen2.5-7B-Instruct": (7_615_616_512, 28, 3_584, 18_944, 4, 128, 152_064),
    "Qwen/Qwen2.5-14B-Instruct": (14_770_033_664, 48, 5_120, 13_824, 8, 128, 152_064),
    "Qwen/Qwen2.5-32B-Instruct": (32_763_876_352, 64, 5_120, 27_648, 8, 128, 152_064),
    "Qwen/Qwen2.5-72B-Instruct": (72_706_203_648, 80, 8_192, 29_568, 8, 128, 152_064),
    "HuggingFaceTB/SmolLM2-135M-Instruct": (134_515_008, 30, 576, 1_536, 3, 64, 49_152),
}


@dataclass(frozen=True)
class Memory:
    """Bytes on each GPU by part, and `pinned_bytes` in page-locked CPU memory. `num_sequences` decode at once, in rows of `positions`;
    0 where not one fits; both are 0 for tasks without answers. available_bytes None: the config names no GPU."""

    parts: dict[str, int]
    pinned_bytes: int
    num_sequences: int
    positions: int
    available_bytes: int | None

    @property
    def total_bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool | None:
        if self.available_bytes is None:
            return None
        return self.total_bytes <= self.available_bytes and (self.num_sequences > 0 or not self.positions)


@dataclass(frozen=True)
class Work:
    """What one model does in a phase: `num` prompts of `prompt` tokens, with answers of `answer` tokens on average and `longest` at
    most. Documents that are scored are prompts without an answer."""

    num: int
    prompt: int
    answer: int
    longest: int

    @property
    def tokens(self) -> int:
        return self.num * (self.prompt + self.answer)


@dataclass(frozen=True)
class SeedTime:
    """The bound of one seed in seconds, by what causes it."""

    weight_reads_s: float
    cache_reads_s: float
    compute_s: float
    switch_s: float

    @property
    def answering_s(self) -> float:
        return max(self.weight_reads_s + self.cache_reads_s, self.compute_s)

    @property
    def total_s(self) -> float:
        return self.answering_s + self.switch_s


@dataclass(frozen=True)
class Phase:
    """One phase of the run: `num_models` runs over the same `num_items` prompts or documents. `seconds` is the bound of its wall time."""

    name: str
    num_models: int
    num_items: int
    generated_tokens: int
    read_tokens: int  # of prompts, or scored
    seconds: float | None


@dataclass(frozen=True)
class Plan:
    title: str
    shape: ModelShape
    memory: Memory
    num_engines: int
    engines: str
    seed: SeedTime | None
    phases: list[Phase]
    assumptions: list[str]
    warnings: list[str]

    @property
    def generated_tokens(self) -> int:
        return sum(phase.generated_tokens for phase in self.phases)

    @property
    def total_s(self) -> float | None:
        return None if self.seed is None else sum(phase.seconds for phase in self.phases)

    def to_dict(self) -> dict[str, Any]:
        memory = {"total_bytes": self.memory.total_bytes, "fits": self.memory.fits}
        made = asdict(self)
        made["memory"] |= memory
        if self.seed:
            made["seed"] |= {"total_s": self.seed.total_s, "seeds_per_s": self.num_engines / self.seed.total_s}
        return {**made, "generated_tokens": self.generated_tokens, "total_s": self.total_s}

    def rows(self) -> list[tuple[str, str]]:
        """The plan as a table for a person."""
        shape, memory = self.shape, self.memory
        rows = [("model", f"{shape.num_parameters:,} parameters, {shape.num_layers} layers ({shape.source})")]
        rows.append(("engines", self.engines))
        where = "memory" if memory.available_bytes is None else "memory a GPU"
        rows += [(f"{where}, {name}", _size(size)) for name, size in memory.parts.items()]
        if memory.pinned_bytes:
            rows.append(("pinned CPU memory, base weights", _size(memory.pinned_bytes)))
        total = _size(memory.total_bytes)
        if memory.available_bytes is not None:
            total += f" of {_size(memory.available_bytes)}: {'fits' if memory.fits else 'does not fit'}"
        rows.append((f"{where}, total", total))
        if memory.positions:
            rows.append(("sequences at once", f"{memory.num_sequences:,} of {memory.positions:,} tokens"))
        rows += [(phase.name, _phase_text(phase)) for phase in self.phases]
        rows.append(("tokens generated in all", f"{self.generated_tokens:,}"))
        if self.seed:
            t = self.seed
            rows += [("a seed, at best", f"{t.total_s:.3g} s: weights {t.weight_reads_s:.3g} + cache {t.cache_reads_s:.3g} s read, or "
                                         f"{t.compute_s:.3g} s of arithmetic; switch {t.switch_s * 1e3:.2g} ms"),
                     ("seeds/s, at best", f"{self.num_engines / t.total_s:.3g}"), ("the whole run, at least", _duration(self.total_s))]
        return [*rows, *(("assumed", text) for text in self.assumptions)]


def plan(config: RandOptConfig) -> Plan:
    """The plan of a config. ValueError where the model's shape is nowhere to be read, or the task is refused."""
    shape, task, gpu = model_shape(config.model), config.task, gpu_of(config.hardware.gpu)
    if task.name == "likelihood":
        work = Work(task.num_train, _document_tokens(task), 0, 0)
    else:
        limit = task.max_new_tokens or open_task(task).default_max_new_tokens
        prompt, answer = PROMPT_TOKENS.get(task.name, OTHER_PROMPT_TOKENS), ANSWER_TOKENS.get(task.name, limit)
        work = Work(task.num_train, prompt, min(answer, limit), limit)
    memory = plan_memory(config, shape, work.prompt + work.longest if work.longest else 0)

    def seed_time(work: Work) -> SeedTime | None:
        if gpu is None or config.model.device == "cpu":
            return None
        itemsize = _itemsize(config)
        return bound(work, shape.num_parameters, weights=shape.num_parameters * (shape.weight_bytes or itemsize),
                     cache=shape.cache_bytes(itemsize), gpu=gpu, num_gpus=config.hardware.tensor_parallel,
                     num_sequences=max(1, memory.num_sequences), pinned=memory.pinned_bytes > 0)

    return Plan(f"plan of {config.name}", shape, memory, num_engines(config), _engines(config), seed_time(work), _phases(config, work, seed_time),
                _assumptions(config, work, gpu), _warnings(config, memory, gpu))


# -- time -------------------------------------------------------------------------------------------------------------


def bound(work: Work, num_parameters: int, *, weights: int, cache: int, gpu: Gpu, num_gpus: int = 1, num_sequences: int = 1,
          pinned: bool = False) -> SeedTime:
    """The least time of one seed. `weights`: bytes of all weights; `cache`: bytes of keys and values of one token; both and the
    arithmetic are shared by `num_gpus`, and what these say to each other costs nothing here.

    Decode steps: the longest answer's, taken as `work.longest`; prompts beyond `num_sequences` wait for a row, and add the steps that
    their tokens take in full batches.
    """
    batches = work.num / num_sequences
    steps = work.longest + max(0.0, batches - 1) * work.answer
    cached = work.num * work.answer * (work.prompt + work.answer / 2)
    bandwidth = gpu.bytes_per_s * num_gpus
    switch_s = 2 * weights / bandwidth + (weights / (HOST_BYTES_PER_S * num_gpus) if pinned else 0.0)
    return SeedTime(steps * weights / bandwidth, cached * cache / bandwidth,
                    2 * num_parameters * work.tokens / (gpu.flops * num_gpus * MODEL_FLOPS_SHARE), switch_s)


def num_engines(config: RandOptConfig) -> int:
    """As many as there are workers; on GPUs no more than `hardware` has room for."""
    asked, hardware = config.workers.count, config.hardware
    if config.model.device == "cpu" or not hardware.gpu:
        return asked or 1
    room = hardware.num_gpus // hardware.tensor_parallel
    return max(1, room if asked is None else min(asked, room))


def gpu_of(name: str | None) -> Gpu | None:
    """The GPU that a name such as "NVIDIA H100 80GB HBM3" means; None for no name, or one that is not in GPUS."""
    words = (name or "").upper().replace("-", " ").split()
    return next((gpu for key, gpu in GPUS.items() if key in words), None)


def _phases(config: RandOptConfig, train: Work, seed_time: Callable[[Work], SeedTime | None]) -> list[Phase]:
    search, controls = config.search, config.controls
    best = max(search.top_k, *search.secondary_k, config.probes.top)
    pool = min(controls.control_pool, search.population) if controls.random_k else 0
    members = round(best + pool * (1 - best / search.population))  # the pool is expected to hold some of the best
    samples = search.top_k if controls.base_majority and train.answer else 0
    test = replace(train, num=config.task.num_test)
    text = Work(config.heldout.num_docs, _held_out_tokens(config), 0, 0)
    planned = [("base, train set", 1, train, 0), ("search", search.population, train, search.population),
               ("base, test set", 1, test, 0), ("members, test set", members, test, members), ("samples of the base", samples, test, 0),
               ("held-out text", 1 + members if config.heldout.enabled else 0, text, members)]
    phases = []
    for name, num_models, work, num_switches in planned:
        t = seed_time(work)
        share = -(-num_models // num_engines(config)) / max(1, num_models)  # of the engine with the most models
        seconds = None if t is None else share * (num_models * t.answering_s + num_switches * t.switch_s)
        if num_models:
            num = num_models * work.num
            phases.append(Phase(name, num_models, work.num, num * work.answer, num * work.prompt, seconds))
    return phases


# -- memory -----------------------------------------------------------------------------------------------------------


def plan_memory(config: RandOptConfig, shape: ModelShape, positions: int) -> Memory:
    """Memory on each GPU; the cache for as many sequences as the config allows and the share decode.memory_share of what weights and
    base leave holds. `positions`: tokens of a prompt with its answer, 0 for tasks without answers."""
    hardware, decode, itemsize = config.hardware, config.decode, _itemsize(config)
    split = hardware.tensor_parallel
    weights = -(-shape.num_parameters * (shape.weight_bytes or itemsize) // split)
    available = round(hardware.gpu_memory_gib * GIB) if hardware.gpu and config.model.device != "cpu" else None
    place = config.noise.base
    if place == "auto":  # as the native engine decides, with the weights loaded
        place = "pinned" if available is not None and 3 * weights > available else "device"
    if available is not None and engine_name(config.model) == "vllm":
        return _vllm_memory(config, shape, positions, weights, available)
    parts = {"weights": weights, "base weights": weights if place == "device" else 0}
    num_sequences, row = 0, 0
    if positions:
        positions = -(-positions // WIDTH_STEP) * WIDTH_STEP
        row = positions * shape.cache_bytes(itemsize) // min(split, shape.num_kv_heads)
        num_sequences = max(config.task.num_train, config.task.num_test)
        num_sequences = min(num_sequences, decode.max_sequences or num_sequences)
        if available is not None:
            num_sequences = min(num_sequences, max(0, int((available - sum(parts.values())) * decode.memory_share)) // row)
        parts["cache"] = num_sequences * row
        sampled = SAMPLING_BYTES if config.controls.base_majority else 0
        parts["logits of a step"] = num_sequences * shape.vocab_size * (itemsize + sampled)
    if available is not None and decode.graphs != "off" and positions:
        parts["captured graphs"] = GRAPHS_BYTES
    device = "cpu" if available is None else "cuda"
    if config.heldout.enabled or not positions:
        logits = min(decode.score_tokens * shape.vocab_size * itemsize, LOGIT_BYTES[device])
        parts["logits when scoring"] = logits + SOFTMAX_BYTES
    tokens = max(PREFILL_TOKENS[device] if positions else 0, decode.score_tokens if config.heldout.enabled or not positions else 0)
    parts["activations"] = tokens * (2 * shape.mlp_width + 4 * shape.width) * itemsize
    pinned = weights * split if place == "pinned" else 0
    return Memory({name: size for name, size in parts.items() if size}, pinned, num_sequences, positions, available)


def _vllm_memory(config: RandOptConfig, shape: ModelShape, positions: int, weights: int, available: int) -> Memory:
    """As the vLLM engine plans it: a share of each GPU is vLLM's, of which the cache gets what weights and a forward pass leave."""
    scores = config.heldout.enabled or not positions
    itemsize, base = _itemsize(config), config.noise.base
    planned = plan_vllm(available, weights, shape.vocab_size, base=base, scores=scores, graphs=config.decode.graphs != "off")
    row = positions * shape.cache_bytes(itemsize) // min(config.hardware.tensor_parallel, shape.num_kv_heads)
    wanted = max(config.task.num_train, config.task.num_test)
    num_sequences = min(wanted, config.decode.max_sequences or wanted, max(0, planned.cache_bytes) // row) if row else 0
    activations = planned.batched_tokens * (2 * shape.mlp_width + 4 * shape.width) * itemsize
    parts = {"weights": weights, **planned.parts, "cache": num_sequences * row, "activations": activations}
    pinned = weights * config.hardware.tensor_parallel if planned.base == "pinned" else 0
    return Memory({name: size for name, size in parts.items() if size}, pinned, num_sequences, positions, available)


def _itemsize(config: RandOptConfig) -> int:
    dtype = config.model.dtype
    if dtype == "auto":
        dtype = "bfloat16" if config.hardware.gpu and config.model.device != "cpu" else "float32"
    return getattr(torch, dtype).itemsize


# -- shape ------------------------------------------------------------------------------------------------------------


def model_shape(model: ModelSection) -> ModelShape:
    """The shape of a model, without its weights: from a golf run's settings or artifact, a config.json or GGUF header here,
    KNOWN_SHAPES, or the config.json on the hub. ValueError where none of them has it."""
    if engine_name(model.model_copy(update={"engine": "auto"})) == "golf":
        from bitsperbyte.randopt.engines.golf import plan_shape

        return ModelShape(**plan_shape(model))
    if model.path in KNOWN_SHAPES and not Path(model.path).exists():
        return ModelShape("published shape", *KNOWN_SHAPES[model.path])
    return _transformers_shape(model)


def _transformers_shape(model: ModelSection) -> ModelShape:
    from transformers import AutoConfig, AutoModelForCausalLM

    path = Path(model.path).expanduser()
    unreachable = None
    options: dict[str, Any] = {"trust_remote_code": model.trust_remote_code}
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"there is no file {path}: check model.path")
        source, place, options["gguf_file"] = "header of the GGUF file", path.parent, path.name
    elif path.is_dir():
        source, place = "config.json in its folder", path
    else:
        source, place, options["revision"] = "config.json on the hub", model.path, model.revision
        unreachable = _why_no_hub(model)
        options["local_files_only"] = unreachable is not None  # a copy in the hub's cache will do
    try:
        loaded = AutoConfig.from_pretrained(place, **options)
        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(loaded, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        why = " ".join((unreachable or str(error)).split())[:200]
        raise ValueError(f"the shape of {model.path} cannot be read from the {source} ({why}): give a folder with a config.json, a "
                         f".gguf file, or a model known here ({', '.join(KNOWN_SHAPES)})") from error
    text = loaded.get_text_config()
    heads = text.num_attention_heads
    return ModelShape(source, sum(p.numel() for p in built.parameters()), text.num_hidden_layers, text.hidden_size,
                      getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
                      getattr(text, "num_key_value_heads", None) or heads,
                      getattr(text, "head_dim", None) or text.hidden_size // heads, text.vocab_size)


def _why_no_hub(model: ModelSection) -> str | None:
    """None where the hub knows the model and lets it be seen; otherwise why not. One request, since a plan should not wait."""
    from huggingface_hub import HfApi, errors

    try:
        HfApi(endpoint=os.environ.get("HF_ENDPOINT", "").rstrip("/") or None).model_info(model.path, revision=model.revision, timeout=10)
    except (errors.HTTPError, OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None


# -- words ------------------------------------------------------------------------------------------------------------


def _document_tokens(task: TaskSection) -> int:
    """Tokens of a likelihood task's document on average, where its files are here."""
    if any(path is not None and not Path(path).exists() for path in (task.data, task.test_data)):
        return DOCUMENT_TOKENS
    train, test = open_task(task).items()
    return round(sum(len(item.question.encode()) for item in (*train, *test)) / (len(train) + len(test)) / BYTES_PER_TOKEN)


def _held_out_tokens(config: RandOptConfig) -> int:
    return ARITHMETIC_DOCUMENT_TOKENS if config.heldout.source == "arithmetic" else DOCUMENT_TOKENS


def _assumptions(config: RandOptConfig, work: Work, gpu: Gpu | None) -> list[str]:
    texts = []
    if work.answer:
        how = "on average" if config.task.name in ANSWER_TOKENS else "each, which is the limit: an upper bound"
        texts.append(f"{work.prompt} tokens a prompt; {work.answer} an answer {how}; the longest of each seed runs to {work.longest}")
    else:
        texts.append(f"{work.prompt:,} tokens a document")
    if config.heldout.enabled:
        texts.append(f"{_held_out_tokens(config):,} tokens a document of held-out text")
    if gpu is not None:
        texts.append(f"{gpu.bytes_per_s / 1e12:g} TB/s and {MODEL_FLOPS_SHARE:.0%} of {gpu.flops / 1e12:,.0f} TFLOP/s, the vendor's "
                     "peaks; launching, kernels below them and grading come on top")
    return texts


def _engines(config: RandOptConfig) -> str:
    """How many engines, on how many GPUs each."""
    num, split, name = num_engines(config), config.hardware.tensor_parallel, engine_name(config.model)
    what = f"{num} engines of {name}" if num > 1 else f"1 engine of {name}"
    if config.model.device == "cpu":
        return f"{what}, on a CPU"
    if config.hardware.gpu is None:
        return what
    return f"{what}, {'each on ' if num > 1 else 'on '}{split} GPU{'s' if split > 1 else ''}"


def _warnings(config: RandOptConfig, memory: Memory, gpu: Gpu | None) -> list[str]:
    hardware, warnings = config.hardware, []
    used = num_engines(config) * hardware.tensor_parallel
    if hardware.tensor_parallel > 1 and engine_name(config.model) != "vllm":
        warnings.append(f"hardware.tensor_parallel is {hardware.tensor_parallel}, and only the vllm engine splits a model over GPUs: set "
                        "model.engine to vllm, or hardware.tensor_parallel to 1")
    elif hardware.gpu and used < hardware.num_gpus:
        group = f"{hardware.tensor_parallel} of them" if hardware.tensor_parallel > 1 else "of them"
        warnings.append(f"{used} of {hardware.num_gpus} GPUs would be used: set workers.count to null for an engine on each {group}")
    wanted = min(max(config.task.num_train, config.task.num_test), config.decode.max_sequences or config.task.num_test)
    if memory.fits is False:
        warnings.append(f"does not fit: {_what_to_change(config, memory)}")
    elif memory.positions and memory.num_sequences < wanted:
        warnings.append(f"memory holds {memory.num_sequences} of {wanted} sequences at once: the others wait for a free row")
    if memory.pinned_bytes and config.noise.base == "auto":
        warnings.append("the base weights stay in pinned CPU memory, since the GPU has no room for them: each switch copies them over")
    if gpu is None and hardware.gpu:
        warnings.append(f"no times, since the speed of {hardware.gpu} is not known here: known are {', '.join(GPUS)}")
    return warnings


def _what_to_change(config: RandOptConfig, memory: Memory) -> str:
    weights, base = memory.parts["weights"], memory.parts.get("base weights", 0)
    if weights > 0.9 * memory.available_bytes:
        return "the weights alone fill a GPU: raise hardware.tensor_parallel, or take a smaller model or type"
    if base and weights + base > 0.9 * memory.available_bytes:
        return "the base weights take as much again: set noise.base to pinned"
    if memory.positions and not memory.num_sequences:
        return "not one sequence has room: lower task.max_new_tokens, or raise hardware.tensor_parallel"
    return "lower decode.memory_share or decode.score_tokens, or set decode.max_sequences"


def _phase_text(phase: Phase) -> str:
    what = f"{phase.num_models:,} x {phase.num_items:,}"
    what += f", {phase.generated_tokens:,} tokens generated" if phase.generated_tokens else f", {phase.read_tokens:,} tokens scored"
    return what if phase.seconds is None else f"{what}, at least {_duration(phase.seconds)}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:,.2f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:,.2f} MiB"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
