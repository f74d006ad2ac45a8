"""The vLLM engine: models of vLLM over one or several GPUs, their weights perturbed in place inside vLLM's workers.

vLLM is taken as it is. Its workers get the methods of vllm_worker.py; prompts are token ids; answers are read by the same code as the
native engine's. Nothing of a seed's weights may outlive it: prefix caching is off, and no request is left when the weights change.

Scoring asks for the log-probabilities of prompts. A window of n inputs has n targets, and a prompt of n tokens states n - 1 of them: the
last is the one token that the request must generate anyway, which is told to be the target. So a window may fill every position.
"""

from __future__ import annotations

import gc
import hashlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bitsperbyte.metric.windows import plan_windows
from bitsperbyte.randopt.config import RandOptConfig
from bitsperbyte.randopt.engines.base import DocumentNats, Generation, Sampling
from bitsperbyte.randopt.engines.chat import Prompter
from bitsperbyte.randopt.engines.checkpoint import files_sha256, find_checkpoint, live_dtype, load_tokenizer, pick_device, tensor_shapes
from bitsperbyte.randopt.engines.decode import answer_of, limits_of
from bitsperbyte.randopt.engines.forward import max_positions
from bitsperbyte.randopt.engines.selftest import SEEDS, sample_prompts
from bitsperbyte.randopt.engines.vllm_layout import total_squares
from bitsperbyte.randopt.engines.vllm_memory import VllmMemory, plan_vllm
from bitsperbyte.randopt.engines.vllm_worker import EXTENSION, keep_plain_weights

# None of these is forced: what the environment sets is kept, but for the first, which scoring to the last position needs.
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1",
               "VLLM_USE_DEEP_GEMM": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}  # the last two: no compiler is needed at run time
FORCED = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
NEEDED_ARGUMENTS = ("worker_extension_cls", "enable_prefix_caching", "kv_cache_memory_bytes", "max_num_batched_tokens", "generation_config")
# largest difference of a token's log-probability between decoding it and reading it, which use different kernels
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.05}
MAX_SEQUENCES = 1024
CPU_SEQUENCES, CPU_BATCHED_TOKENS = 64, 1024  # the logits of so many tokens of a prompt lie in memory at once when it is scored
CPU_CACHE_SHARE = 0.25  # of the free memory at most
CACHE_SLACK = 256  # positions beyond a sequence's own, for blocks that are partly filled


def open_engine(config: RandOptConfig, run_dir: Path, say: Callable[[str], None]) -> VllmEngine:
    """The engine of a config, loaded, checked against the checkpoint and self-tested. ValueError for a model or a vLLM that cannot be
    used, RuntimeError from the self-test."""
    engine = VllmEngine(config, say)
    try:
        engine.self_test()
    except BaseException:
        engine.close()
        raise
    return engine


class VllmEngine:
    """Engine over a model of vLLM. `llm` lives in this process; with several GPUs its workers are processes of their own."""

    def __init__(self, config: RandOptConfig, say: Callable[[str], None]) -> None:
        if config.model.path is None or config.model.path.endswith(".bpb"):
            raise ValueError("model.engine is vllm, and the model is a golf artifact, which vLLM does not run: set model.engine to auto")
        _require_vllm()
        self._config, self._say, self._source = config, say, str(config.model.path)
        self._world = config.hardware.tensor_parallel
        self._device = pick_device(config.model.device)
        if self._device.type == "cuda" and (num := torch.cuda.device_count()) < self._world:
            raise ValueError(f"hardware.tensor_parallel is {self._world}, and this process sees {num} GPU{'s' if num > 1 else ''}: lower it, or run "
                             "where there are as many")
        if self._device.type == "cpu" and config.decode.graphs == "on":
            raise ValueError("decode.graphs is on, and CUDA graphs need a GPU, which this run does not use: set it to auto")
        self._files = find_checkpoint(config.model, say)
        if "gguf_file" in self._files.options:
            raise ValueError(f"{self._source} is a GGUF file, which the vLLM engine does not read: set model.engine to native, or take a folder "
                             "with safetensors")
        from transformers import AutoConfig

        self._model_config = AutoConfig.from_pretrained(self._files.folder, trust_remote_code=config.model.trust_remote_code)
        self._shapes = {name: shape for file in self._files.weights for name, shape in tensor_shapes(file).items()}
        self._dtype = live_dtype(config.model, self._device)
        tokenizer = load_tokenizer(self._files, self._source)
        self._prompter = Prompter(tokenizer, config.model.prompt_format, say)
        self._eos_ids = self._prompter.eos_ids(_generation_config(self._files.folder, self._model_config))
        if not self._eos_ids:
            say("this model names no end token: answers run to max_new_tokens, or to a stop text of the task")
        self._vocab_size = self._model_config.get_text_config().vocab_size
        self._positions = max_positions(self._model_config)
        self._graphs = self._device.type == "cuda" and config.decode.graphs != "off"
        self._memory = self._plan_memory()
        self._self_test_error: float | None = None
        self.llm = self._start()
        try:
            self._open_workers()
        except BaseException:
            self.close()
            raise
        self._weights_sha256 = files_sha256(self._files.weights, say)
        self._tokenizer_sha256 = files_sha256(self._files.tokenizer_files(), say)

    def describe(self) -> dict[str, Any]:
        import vllm

        ranks = self._rpc("bpb_describe")
        facts = {k: v for k, v in ranks[0].items() if k not in ("names", "switch_s", "num_tensors", "num_perturbed")}
        num_perturbed = sum(rank["num_perturbed"] for rank in ranks)
        noise = {**facts, "num_perturbed": num_perturbed, "num_tensors": len({name for rank in ranks for name in rank["names"]})}
        memory = {} if self._memory is None else {"gpu_memory_utilization": self._memory.utilization, "planned": self._memory.parts}
        return {
            "model": self._source, "kind": self._model_config.get_text_config().model_type, "engine": "vllm", "revision": self._files.revision,
            "dtype": str(self._dtype).removeprefix("torch."), "num_parameters": self._num_parameters, "num_perturbed": num_perturbed,
            "weights_sha256": self._weights_sha256, "tokenizer_sha256": self._tokenizer_sha256, "device": self._device_name(),
            "context": self._positions, "prompt_format": self._prompter.format, "vllm": vllm.__version__, "tensor_parallel": self._world,
            "memory": memory, "decode": {"steps": "vllm", "graphs": self._graphs, "self_test_error": self._self_test_error}, "noise": noise}

    def encode(self, prompts: Sequence[Sequence[dict[str, str]]]) -> list[list[int]]:
        return [self._prompter.encode(messages) for messages in prompts]

    def perturb(self, seed: int, sigma: float) -> None:
        self._require_idle()
        self._rpc("bpb_perturb", seed, sigma)

    def reset(self) -> None:
        self._require_idle()
        self._rpc("bpb_reset")

    def verify_base(self) -> None:
        self._rpc("bpb_verify_base")

    def effective_rms(self, sigma: float, seed: int) -> list[dict[str, Any]]:
        return joined_rms(self._rpc("bpb_effective_rms", sigma, seed))

    def switch_s(self) -> float:
        return max(rank["switch_s"] for rank in self._rpc("bpb_describe"))

    def generate(self, prompt_ids: Sequence[Sequence[int]], sampling: Sampling) -> list[Generation]:
        from vllm import SamplingParams

        limits = limits_of(prompt_ids, sampling.max_new_tokens, self._positions)
        drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p} if sampling.temperature else {"temperature": 0.0}
        wanted = [SamplingParams(**drawn, max_tokens=limit, seed=request_seed(sampling.seed, i) if sampling.temperature else None,
                                 stop=list(sampling.stop) or None, detokenize=bool(sampling.stop), ignore_eos=True,
                                 stop_token_ids=self._eos_ids)
                  for i, limit in enumerate(limits)]
        outputs = self._run(prompt_ids, wanted)
        return [answer_of(list(output.outputs[0].token_ids), len(ids), sampling, self._eos_ids, self._prompter.text_of)
                for ids, output in zip(prompt_ids, outputs, strict=True)]

    def score(self, documents: Sequence[str], context: int) -> list[DocumentNats]:
        """As the protocol says, and as the native engine does: a BOS is context only. ValueError where windows exceed the model's
        positions."""
        if context > self._positions:
            raise ValueError(f"windows of {context} tokens exceed the {self._positions} positions of {self._source}: set the context "
                             f"to at most {self._positions}")
        prefix = self._prompter.prefix
        encoded = [self._prompter.document(text) for text in documents]
        streams = [prefix + ids for ids, _ in encoded]
        nats = [np.zeros(max(0, len(stream) - 1)) for stream in streams]
        work = [(i, window) for i, stream in enumerate(streams) if len(stream) > 1 for window in plan_windows(len(stream), length=context)]
        found = self._window_nats([(streams[i][w.start : w.end], streams[i][w.end]) for i, w in work])
        for (i, w), row in zip(work, found, strict=True):
            nats[i][w.first - 1 : w.end] = row[w.first - w.start - 1 : w.end - w.start]
        skipped = max(0, len(prefix) - 1)  # targets that are special tokens themselves
        return [DocumentNats(n[skipped:], num_bytes[0 if prefix else 1 :]) for n, (_, num_bytes) in zip(nats, encoded, strict=True)]

    def close(self) -> None:
        llm, self.llm = self.llm, None
        if llm is None:
            return
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def self_test(self) -> None:
        """RuntimeError unless two seeds differ, what is decoded (in captured graphs, where there are any) is what reading the same tokens
        gives under each of them, and the base is the base again after a reset. Leaves the base."""
        sigma, prompts = max(self._config.noise.sigmas), sample_prompts(self._vocab_size)
        _, again, before = (self._probe(prompts)[0] for _ in range(3))  # the first is warm-up
        repeats = float(np.abs(before - again).max())  # 0, unless this device does not repeat itself
        if self._config.noise.base == "none":
            repeats = TOLERANCE[self._dtype]  # such a reset subtracts, and is said to be inexact
        by_seed = []
        for seed in SEEDS:
            self.perturb(seed, sigma)
            prompt_logs, decoded, read = self._probe(prompts)
            by_seed.append(prompt_logs)
            error = float(np.abs(decoded - read).max())
            if not error <= TOLERANCE[self._dtype]:
                raise RuntimeError(f"self-test: under seed {seed} the log-probabilities of decoded tokens differ from those of the same tokens when "
                                   f"they are read by {error:.2g} nats: vLLM's captured decode does not compute with the current weights; set "
                                   "decode.graphs to off, and report this")
            self._self_test_error = max(error, self._self_test_error or 0.0)
        self.reset()
        self.verify_base()
        after = self._probe(prompts)[0]
        if not np.abs(by_seed[0] - by_seed[1]).max() > 0.0:
            raise RuntimeError(f"self-test: seeds {SEEDS[0]} and {SEEDS[1]} give equal log-probabilities, so the noise does not reach the weights "
                               "that the model computes with: a larger sigma, or other patterns in noise.include, may be needed")
        if not np.abs(before - after).max() <= repeats:
            raise RuntimeError(f"self-test: after a seed and a reset the base gives other log-probabilities than before (by "
                               f"{np.abs(before - after).max():.2g} nats, where two runs of one model differ by {repeats:.2g}): something of "
                               "the seed's weights or cache is left")

    def _probe(self, prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Log-probabilities: of the prompts' tokens; of a few tokens decoded after them; of these when they are read."""
        from vllm import SamplingParams

        outputs = self._run(prompts, [SamplingParams(temperature=0.0, max_tokens=4, logprobs=0, ignore_eos=True, detokenize=False)] * len(prompts))
        answers = [output.outputs[0] for output in outputs]
        decoded = [[step[token].logprob for token, step in zip(a.token_ids, a.logprobs, strict=True)] for a in answers]
        whole = self._window_nats([([*ids, *a.token_ids[:-1]], a.token_ids[-1]) for ids, a in zip(prompts, answers, strict=True)])
        read = np.concatenate([row[: len(ids) - 1] for row, ids in zip(whole, prompts, strict=True)])
        return -read, np.array(decoded).reshape(-1), -np.concatenate([row[-4:] for row in whole])

    def _window_nats(self, windows: Sequence[tuple[Sequence[int], int]]) -> list[np.ndarray]:
        """Nats of the targets of windows, each its inputs and the target after the last: float64 (number of inputs,)."""
        from vllm import SamplingParams

        wanted = [SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, logprobs=0, allowed_token_ids=[target], ignore_eos=True,
                                 detokenize=False) for _, target in windows]
        found = []
        for (ids, target), output in zip(windows, self._run([ids for ids, _ in windows], wanted), strict=True):
            logs = [step[token].logprob for token, step in zip(ids[1:], output.prompt_logprobs[1:], strict=True)]
            if output.outputs[0].token_ids[0] != target:
                raise RuntimeError(f"vLLM generated token {output.outputs[0].token_ids[0]} where only {target} was allowed: its scores cannot "
                                   "be trusted")
            found.append(-np.array([*logs, output.outputs[0].logprobs[0][target].logprob]))
        return found

    def _run(self, prompt_ids: Sequence[Sequence[int]], wanted: Sequence[Any]) -> list[Any]:
        """Outputs of vLLM, in the prompts' order. Whatever ends it, no request stays behind to go on under other weights."""
        if not prompt_ids:
            return []
        engine = self.llm.llm_engine
        try:
            return self.llm.generate([{"prompt_token_ids": list(ids)} for ids in prompt_ids], list(wanted), use_tqdm=False)
        except BaseException:
            if left := list(engine.output_processor.request_states):
                engine.abort_request(left, internal=True)
            raise

    def _require_idle(self) -> None:
        if num := self.llm.llm_engine.get_num_unfinished_requests():
            raise RuntimeError(f"{num} requests are still running in vLLM, and would go on under other weights: nothing may be evaluated now")

    def _rpc(self, method: str, *args: Any) -> list[Any]:
        """What each worker's method returned, by rank. Raises what the first worker that failed says."""
        answers = self.llm.collective_rpc(method, args=args)
        for answer in answers:
            if "error" in answer:
                kind = {"memory": torch.OutOfMemoryError, "ValueError": ValueError}.get(answer["error"], RuntimeError)
                raise kind(answer["text"])
        return [answer["value"] for answer in answers]

    def _start(self) -> Any:
        os.environ.update(FORCED)
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if self._device.type == "cpu":
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # threads are left to torch and the system
        from vllm import LLM

        keep_plain_weights()  # for a worker in this process, where its module was imported before vLLM
        memory = self._memory
        settings: dict[str, Any] = {"max_num_seqs": self._num_sequences()}
        if memory is None:
            row = (self._positions + CACHE_SLACK) * self._token_bytes()
            settings |= {"max_num_batched_tokens": CPU_BATCHED_TOKENS,
                         "kv_cache_memory_bytes": min(self._cpu_bytes(), max(2, self._num_sequences()) * row)}
        else:
            settings |= {"max_num_batched_tokens": memory.batched_tokens, "gpu_memory_utilization": memory.utilization}
        if self._world > 1:
            settings["distributed_executor_backend"] = "mp"  # its processes are ours, also inside a worker of Ray
        self._say(f"starting vLLM on {self._world} {'CPU worker' if memory is None else 'GPU'}{'s' if self._world > 1 else ''}"
                  + ("" if memory is None else f", {memory.utilization:.0%} of each GPU's memory its own"))
        with _one_sentence(self._source):
            return LLM(model=str(self._files.folder), tokenizer=str(self._files.folder), dtype=str(self._dtype).removeprefix("torch."),
                       tensor_parallel_size=self._world, seed=0, trust_remote_code=self._config.model.trust_remote_code,
                       max_model_len=self._positions + 1, enforce_eager=not self._graphs, enable_prefix_caching=False,
                       worker_extension_cls=EXTENSION, generation_config="vllm", load_format="safetensors", disable_log_stats=True,
                       **settings)

    def _open_workers(self) -> None:
        """Lay out and check every rank's shard, then copy the base."""
        if self.llm.llm_engine.vllm_config.cache_config.enable_prefix_caching:
            raise ValueError("vLLM's prefix cache is on, and it would answer with keys and values of other weights: it must be off")
        noise = self._config.noise
        ranks = [answer["squares"] for answer in self._rpc("bpb_open", [str(path.resolve()) for path in self._files.weights])]
        totals = total_squares(ranks, self._shapes)
        self._num_parameters = sum(num for _, num in totals.values())
        rms = None
        if noise.sigma == "relative":
            rms = {name: float(np.sqrt(total / num)) for name, (total, num) in totals.items()}
        base = "device" if self._memory is None and noise.base == "auto" else self._memory.base if self._memory is not None else noise.base
        if base == "pinned" and noise.base == "auto":
            self._say("the base weights stay in pinned CPU memory, since the GPU has no room for them: each switch copies them over")
        settings = {"scheme": noise.scheme, "sigma": noise.sigma, "base": base, "include": list(noise.include), "exclude": list(noise.exclude),
                    "verify_every": noise.verify_every}
        self._rpc("bpb_prepare", settings, rms)

    def _plan_memory(self) -> VllmMemory | None:
        """None on a CPU. Shortens the context to what the cache holds."""
        if self._device.type == "cpu":
            self._shorten(self._cpu_bytes())
            return None
        total = torch.cuda.get_device_properties(self._device).total_memory
        num = sum(int(np.prod(shape)) for shape in self._shapes.values())
        scores = self._config.heldout.enabled or self._config.task.name == "likelihood"
        memory = plan_vllm(total, -(-num * self._dtype.itemsize // self._world), self._vocab_size, base=self._config.noise.base, scores=scores,
                           graphs=self._graphs)
        memory.require_cache()
        self._shorten(memory.cache_bytes)
        return memory

    def _shorten(self, cache_bytes: int) -> None:
        """Let no sequence be longer than a cache of so many bytes holds. ValueError where that is nothing worth having."""
        held = cache_bytes // self._token_bytes() - CACHE_SLACK
        if held >= self._positions:
            return
        if held < CACHE_SLACK:
            raise ValueError(f"the memory that is left for the cache ({cache_bytes / 2**20:,.0f} MiB) holds no sequence: free some, or split the "
                             "model over more GPUs (hardware.tensor_parallel)")
        self._say(f"the cache holds one sequence of at most {held:,} tokens of the model's {self._positions:,}: longer ones are refused")
        self._positions = held

    def _token_bytes(self) -> int:
        """Bytes of the cache of one token on one rank."""
        text = self._model_config.get_text_config()
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return 2 * text.num_hidden_layers * max(1, heads // self._world) * width * self._dtype.itemsize

    def _num_sequences(self) -> int:
        task, decode = self._config.task, self._config.decode
        most = CPU_SEQUENCES if self._memory is None else min(MAX_SEQUENCES, self._memory.batched_tokens)
        return min(max(task.num_train, task.num_test), decode.max_sequences or most, most)

    def _cpu_bytes(self) -> int:
        """What the cache of one rank may take on a CPU."""
        import psutil

        return int(psutil.virtual_memory().available * min(self._config.decode.memory_share, CPU_CACHE_SHARE)) // self._world

    def _device_name(self) -> str:
        return torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "cpu"


def request_seed(seed: int, position: int) -> int:
    """The seed of one sequence: fixed by the call's and its position, 63 bits."""
    return int.from_bytes(hashlib.sha256(f"{seed} {position}".encode()).digest()[:8], "little") >> 1


def joined_rms(ranks: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Rows of `Perturber.effective_rms` of all ranks, each over other elements, as rows over all of them."""
    rows: dict[str, dict[str, Any]] = {}
    for row in (row for rank in ranks for row in rank):
        before = rows.setdefault(row["name"], {**row, "num_elements": 0})
        num = before["num_elements"] + row["num_elements"]
        share = row["num_elements"] / num
        for name in ("base_rms", "requested_rms", "effective_rms"):
            before[name] = float(np.sqrt((1 - share) * before[name] ** 2 + share * row[name] ** 2))
        before["share_unchanged"] = (1 - share) * before["share_unchanged"] + share * row["share_unchanged"]
        before["num_elements"] = num
    return list(rows.values())


def _require_vllm() -> None:
    """ValueError where vLLM is not installed, or lacks what this engine asks of it."""
    if importlib.util.find_spec("vllm") is None:
        raise ValueError("model.engine is vllm, and the package vllm is not installed here: install it into this environment (pip install vllm), or "
                         "set model.engine to native")
    from dataclasses import fields

    import vllm
    from vllm.engine.arg_utils import EngineArgs

    missing = [name for name in NEEDED_ARGUMENTS if name not in {field.name for field in fields(EngineArgs)}]
    missing += [name for name in ("collective_rpc", "generate") if not hasattr(vllm.LLM, name)]
    if missing:
        raise ValueError(f"the vLLM that is installed ({vllm.__version__}) has no {', '.join(missing)}, which this engine needs: install a newer one")


@contextmanager
def _one_sentence(source: str) -> Iterator[None]:
    """Turn what vLLM raises for a model that it cannot start into one sentence."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (ValueError, RuntimeError, NotImplementedError, AssertionError, KeyError, TypeError, AttributeError, OSError, ImportError) as error:
        text = " ".join(str(error).split())
        raise ValueError(f"vLLM cannot start {source}: {type(error).__name__}: {text[:400]}") from error


def _generation_config(folder: Path, model_config: Any) -> Any:
    """The generation settings beside the weights, or what transformers makes of the model's own."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(folder)
    except OSError:
        return GenerationConfig.from_model_config(model_config)
