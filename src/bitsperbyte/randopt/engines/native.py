"""The native engine: any causal language model of transformers on one device, with PyTorch and transformers alone.

Decoding runs through a StepModel: the fused steps of llama.py where the architecture has them, else the transformers forward with a cache
(forward.py), else the same without one; which of them, and why, is said and recorded. Whatever is used must first agree with the whole
forward. Scoring always runs the whole forward of transformers.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from bitsperbyte.metric.windows import Window, plan_windows
from bitsperbyte.randopt.config import RandOptConfig
from bitsperbyte.randopt.engines.base import DocumentNats, Generation, Sampling
from bitsperbyte.randopt.engines.chat import Prompter
from bitsperbyte.randopt.engines.checkpoint import Checkpoint, load_checkpoint, pick_device
from bitsperbyte.randopt.engines.decode import Decoder, StepModel, cache_budget
from bitsperbyte.randopt.engines.forward import CachedSteps, RecomputedSteps, max_positions, padded
from bitsperbyte.randopt.engines.llama import LlamaSteps, fuse_projections, why_not
from bitsperbyte.randopt.engines.selftest import STEP_TOLERANCE, check_graphs, step_error
from bitsperbyte.randopt.layout import Layout
from bitsperbyte.randopt.perturb import Perturber

LOGIT_BYTES = {"cuda": 8 * 2**30, "cpu": 2**29}  # of one forward pass of `score`, unless a single window needs more
SOFTMAX_BYTES = 2**28  # float32 logits that are normalised at once


def open_engine(config: RandOptConfig, run_dir: Path, say: Callable[[str], None]) -> "NativeEngine":
    """The engine of a config, loaded and self-tested. ValueError for a model that cannot be used, RuntimeError from the self-test."""
    device = pick_device(config.model.device)
    if device.type == "cpu" and config.decode.graphs == "on":
        raise ValueError("decode.graphs is on, and CUDA graphs need a GPU, which this run does not use: set it to auto")
    checkpoint = load_checkpoint(config.model, device, say)
    engine = NativeEngine(checkpoint, config, device, say)
    engine.self_test()
    return engine


class NativeEngine:
    """Engine over a loaded checkpoint. Its parameters are laid out for the fused steps here, and never move afterwards."""

    def __init__(self, checkpoint: Checkpoint, config: RandOptConfig, device: torch.device, say: Callable[[str], None]) -> None:
        self._checkpoint, self._config, self._device, self._say = checkpoint, config, device, say
        self._model, self._max_positions = checkpoint.model, max_positions(checkpoint.model.config)
        self._dtype = next(self._model.parameters()).dtype
        self._vocab_size = self._model.get_output_embeddings().weight.shape[0]
        self._prompter = Prompter(checkpoint.tokenizer, config.model.prompt_format, say)
        eos_ids = self._prompter.eos_ids(getattr(self._model, "generation_config", None))
        if not eos_ids:
            say("this model names no end token: answers run to max_new_tokens, or to a stop text of the task")
        reason = why_not(self._model)
        if reason is None:
            fuse_projections(self._model)
        noise = config.noise
        self._base = noise.base if noise.base != "auto" else self._base_place()
        self._perturber = Perturber(Layout.of_module(self._model, checkpoint.names), scheme=noise.scheme, sigma=noise.sigma, base=self._base,
                                    include=tuple(noise.include), exclude=tuple(noise.exclude), verify_every=noise.verify_every)
        self._decoder, self._self_test_error = self._agreeing_decoder(reason, eos_ids), None

    def describe(self) -> dict[str, Any]:
        text = self._model.config.get_text_config()
        return {
            "model": self._checkpoint.source, "kind": text.model_type, "engine": "native", "revision": self._checkpoint.revision,
            "dtype": str(self._dtype).removeprefix("torch."), "num_parameters": sum(p.numel() for p in self._model.parameters()),
            "num_perturbed": self._perturber.num_perturbed, "weights_sha256": self._checkpoint.weights_sha256,
            "tokenizer_sha256": self._checkpoint.tokenizer_sha256, "device": self._device_name(), "context": self._max_positions,
            "prompt_format": self._prompter.format, "attention": self._model.config._attn_implementation,
            "decode": {"steps": self._decoder.model.name, "graphs": self._decoder.graphs, "self_test_error": self._self_test_error},
            "noise": self._perturber.describe()}

    def encode(self, prompts: Sequence[Sequence[dict[str, str]]]) -> list[list[int]]:
        return [self._prompter.encode(messages) for messages in prompts]

    def perturb(self, seed: int, sigma: float) -> None:
        self._perturber.perturb(seed, sigma)

    def reset(self) -> None:
        self._perturber.reset()

    def verify_base(self) -> None:
        self._perturber.verify_base()

    def effective_rms(self, sigma: float, seed: int) -> list[dict[str, Any]]:
        return self._perturber.effective_rms(sigma, seed)

    def switch_s(self) -> float:
        return self._perturber.switch_s()

    def generate(self, prompt_ids: Sequence[Sequence[int]], sampling: Sampling) -> list[Generation]:
        return self._decoder.generate(prompt_ids, sampling)

    def score(self, documents: Sequence[str], context: int) -> list[DocumentNats]:
        """As the protocol says. What the tokenizer puts before a text (a BOS) is context only; without it a document's first token has
        none and is left out, with its bytes. ValueError where windows exceed the model's positions."""
        if context > self._max_positions:
            raise ValueError(f"windows of {context} tokens exceed the {self._max_positions} positions of {self._checkpoint.source}: set the context "
                             f"to at most {self._max_positions}")
        prefix = self._prompter.prefix
        encoded = [self._prompter.document(text) for text in documents]
        streams = [prefix + ids for ids, _ in encoded]
        nats = [np.zeros(max(0, len(stream) - 1)) for stream in streams]
        work = [(i, window) for i, stream in enumerate(streams) if len(stream) > 1 for window in plan_windows(len(stream), length=context)]
        work.sort(key=lambda job: job[1].num_inputs)
        for batch in self._batches(work):
            self._score_batch(batch, streams, nats)
        skipped = max(0, len(prefix) - 1)  # targets that are special tokens themselves
        return [DocumentNats(n[skipped:], num_bytes[0 if prefix else 1 :]) for n, (_, num_bytes) in zip(nats, encoded, strict=True)]

    def close(self) -> None:
        self._decoder = self._perturber = self._model = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def self_test(self) -> None:
        """RuntimeError unless captured steps follow the weights through two seeds. Leaves the base."""
        if self._decoder.graphs:
            sigma = max(self._config.noise.sigmas)
            self._self_test_error = check_graphs(self._decoder, lambda seed: self.perturb(seed, sigma), self._vocab_size, self._dtype)
            self.reset()

    def _agreeing_decoder(self, reason: str | None, eos_ids: list[int]) -> Decoder:
        """The first way to decode that can serve this model and agrees with its whole forward."""
        if reason is not None:
            self._say(f"decoding through the transformers forward: {reason}")
        for steps in ([LlamaSteps] if reason is None else []) + [CachedSteps]:
            try:
                decoder = self._decoder_of(steps(self._model), eos_ids)
                error = step_error(decoder, self._whole_forward, self._vocab_size)
            except (ValueError, TypeError, AttributeError, IndexError, KeyError, RuntimeError) as failure:
                if isinstance(failure, torch.OutOfMemoryError):
                    raise
                why = str(failure)
            else:
                if error <= STEP_TOLERANCE[self._dtype]:
                    return decoder
                why = f"its logits differ from the whole forward's by {error:.2g} (relative)"
            self._say(f"{steps.name}: not for this model: {' '.join(why.split())[:200]}")
        self._say("decoding without a cache, which reads every sequence again at each step: this will be slow")
        return self._decoder_of(RecomputedSteps(self._model), eos_ids)

    def _decoder_of(self, steps: StepModel, eos_ids: list[int]) -> Decoder:
        decode = self._config.decode
        return Decoder(steps, eos_ids=eos_ids, text_of=self._prompter.text_of, max_sequences=decode.max_sequences,
                       budget_bytes=lambda: cache_budget(self._device, decode.memory_share), graphs=decode.graphs != "off")

    @torch.inference_mode()
    def _whole_forward(self, ids: Sequence[int]) -> torch.Tensor:
        return self._model(input_ids=torch.tensor([list(ids)], device=self._device), use_cache=False).logits[0]

    def _batches(self, work: list[tuple[int, Window]]) -> Iterator[list[tuple[int, Window]]]:
        """Windows, ascending in length, in batches of at most the allowed tokens with their padding, at least one window each."""
        row = self._vocab_size * self._dtype.itemsize
        most = max(1, min(self._config.decode.score_tokens, LOGIT_BYTES[self._device.type] // row))
        batch: list[tuple[int, Window]] = []
        for job in work:
            if batch and (len(batch) + 1) * job[1].num_inputs > most:
                yield batch
                batch = []
            batch.append(job)
        if batch:
            yield batch

    @torch.inference_mode()
    def _score_batch(self, batch: list[tuple[int, Window]], streams: list[list[int]], nats: list[np.ndarray]) -> None:
        """Write the nats of the targets of these windows. Log-probabilities are float32, from the logits as the model gives them."""
        ids = padded([streams[i][w.start : w.end] for i, w in batch], self._device)
        logits = self._model(input_ids=ids, use_cache=False).logits
        targets = padded([streams[i][w.start + 1 : w.end + 1] for i, w in batch], self._device)
        flat, flat_targets = logits.flatten(0, 1), targets.flatten()
        step = max(1, SOFTMAX_BYTES // (4 * flat.shape[1]))
        found = torch.cat([
            torch.nn.functional.cross_entropy(flat[at : at + step].float(), flat_targets[at : at + step], reduction="none")
            for at in range(0, len(flat), step)])
        for (i, w), row in zip(batch, found.view(targets.shape).double().cpu().numpy(), strict=True):
            nats[i][w.first - 1 : w.end] = row[w.first - w.start - 1 : w.end - w.start]

    def _base_place(self) -> Literal["device", "pinned"]:
        """Beside the live weights, if half of what is free then remains for the cache; else in page-locked CPU memory."""
        if self._device.type == "cpu":
            return "device"
        weights = sum(p.numel() * p.element_size() for p in self._model.parameters())
        free = torch.cuda.mem_get_info(self._device)[0]
        if 2 * weights <= free:
            return "device"
        self._say(f"the base weights ({weights / 2**30:.1f} GiB) stay in CPU memory, since only {free / 2**30:.1f} GiB of the GPU's are free")
        return "pinned"

    def _device_name(self) -> str:
        return torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "cpu"
