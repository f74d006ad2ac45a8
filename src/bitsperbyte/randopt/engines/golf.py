"""Golf artifacts as an engine: the network with a key/value cache, and models that a golf run makes first.

Shapes: B rows, T tokens, D width, E head width, K key/value heads, S cached positions, N scored tokens.

This is the only module of the track that knows of golf.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bitsperbyte.golf import session
from bitsperbyte.golf.artifact import read_artifact
from bitsperbyte.golf.config import GolfConfig
from bitsperbyte.golf.devices import pick_device
from bitsperbyte.golf.model import GolfModel, apply_rotary, attend, parameter_counts, rms_norm, rotary_table, window_mask
from bitsperbyte.golf.scoring import trained_window
from bitsperbyte.metric.windows import plan_windows
from bitsperbyte.randopt.config import GolfSection, ModelSection, RandOptConfig
from bitsperbyte.randopt.engines.base import DocumentNats, Generation, Sampling
from bitsperbyte.randopt.engines.decode import Decoder, cache_budget
from bitsperbyte.randopt.engines.selftest import check_graphs
from bitsperbyte.randopt.layout import Layout
from bitsperbyte.randopt.perturb import Perturber
from bitsperbyte.randopt.tasks.arithmetic import training_documents
from bitsperbyte.records.schema import Record
from bitsperbyte.records.store import readable_record
from bitsperbyte.run.config import check_settings
from bitsperbyte.run.folder import CONFIG, write_atomic
from bitsperbyte.text.encode import write_splits
from bitsperbyte.text.hub import file_sha256
from bitsperbyte.text.shards import FORMAT, FORMAT_VERSION, MANIFEST
from bitsperbyte.text.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer

MODEL_FOLDER, DATA_FOLDER = "model", "model_data"  # in the run folder, of a model that is made first
DEFAULT_CONTEXT = 1024  # positions of an artifact that is not in its run folder: the challenge's
NUM_VAL_DOCS = 1_000
SHARD_TOKENS = 100_000_000


class CachedNetwork:
    """decode.StepModel of a GolfModel: its network with keys and values kept. Each position in `order` has a cache of its own, since
    a recurrent block sees other activations each time it runs."""

    can_capture = True

    def __init__(self, model: GolfModel, max_positions: int) -> None:
        c = model.config
        self.model, self.max_positions, self.device = model, max_positions, model.tok_emb.weight.device
        self._skip_into = {to: (row, start) for row, (start, to) in enumerate(c.skips)}
        self.allocate(0, 0)

    def row_bytes(self, num_positions: int) -> int:
        c = self.model.config
        return 2 * len(c.order) * c.kv_dim * num_positions * self.model.compute_dtype.itemsize

    def allocate(self, num_rows: int, num_positions: int) -> None:
        c = self.model.config
        self._rotary = rotary_table(num_positions, c.head_dim, c.rope_base, self.device)
        self._cache = [tuple(torch.zeros(num_rows, c.num_kv_heads, num_positions, c.head_dim, dtype=self.model.compute_dtype,
                                         device=self.device) for _ in "kv") for _ in c.order]

    def prefill(self, ids: Sequence[Sequence[int]], rows: Sequence[int]) -> None:
        T = max(map(len, ids))
        padded = [[*row, *[0] * (T - len(row))] for row in ids]  # on the right, which no earlier token sees
        tokens_BT = torch.tensor(padded, device=self.device)
        rows_B = torch.tensor(rows, device=self.device)
        window = self.model.config.attention_window
        mask = window_mask(T, window, torch.device("cpu")).to(self.device) if window and window < T else None

        def attention(position: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._cache[position]
            keys[rows_B, :, :T], values[rows_B, :, :T] = k, v
            return attend(q, k, v, mask)

        self._hidden(tokens_BT, (self._rotary[0][:T], self._rotary[1][:T]), attention)

    def step(self, tokens: Tensor, lengths: Tensor, longest: int) -> Tensor:
        B, window = len(tokens), self.model.config.attention_window
        distance = lengths[:, None] - torch.arange(longest, device=self.device)
        visible = distance >= 0
        if window:
            visible &= distance < window
        mask_B11S = visible[:, None, None, :]
        at = lengths[:, None, None, None].expand(B, self.model.config.num_kv_heads, 1, self.model.config.head_dim)

        def attention(position: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = (part[:B] for part in self._cache[position])
            keys.scatter_(2, at, k)
            values.scatter_(2, at, v)
            return attend(q, keys[:, :, :longest], values[:, :, :longest], mask_B11S)

        rotary = (self._rotary[0][lengths][:, None], self._rotary[1][lengths][:, None])  # (B, 1, 1, E/2)
        return self.model.logits(self._hidden(tokens[:, None], rotary, attention)[:, 0])

    def keep(self, rows: Tensor) -> None:
        for parts in self._cache:
            for part in parts:
                part[: len(rows)] = part[rows]

    def _hidden(self, tokens_BT: Tensor, rotary: tuple[Tensor, Tensor],
                attention: Callable[[int, Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """GolfModel.hidden (B, T, D) with `attention(position, q, k, v)` in place of attention over these tokens alone."""
        model, c = self.model, self.model.config
        B, T = tokens_BT.shape
        x = x0 = rms_norm(model.tok_emb(tokens_BT).to(model.compute_dtype))
        outputs: dict[int, Tensor] = {}
        for position, index in enumerate(c.order):
            if position in self._skip_into:
                row, start = self._skip_into[position]
                x = x + model.skip_weights[row].to(x.dtype) * outputs[start]
            block, attn = model.blocks[index], model.blocks[index].attn
            mix = block.resid_mix.to(x.dtype)
            x = mix[0] * x + mix[1] * x0
            normed = rms_norm(x)
            q = apply_rotary(rms_norm(attn.c_q(normed).view(B, T, c.num_heads, c.head_dim).float()), rotary) * attn.q_gain[:, None]
            k = apply_rotary(rms_norm(attn.c_k(normed).view(B, T, c.num_kv_heads, c.head_dim).float()), rotary)
            v = attn.c_v(normed).view(B, T, c.num_kv_heads, c.head_dim)
            y = attention(position, q.to(v.dtype).transpose(1, 2), k.to(v.dtype).transpose(1, 2), v.transpose(1, 2))
            x = x + block.attn_scale.to(x.dtype) * attn.proj(y.transpose(1, 2).reshape(B, T, c.dim))
            x = x + block.mlp_scale.to(x.dtype) * block.mlp(rms_norm(x))
            outputs[position] = x
        return rms_norm(x)


class GolfEngine:
    """engines.base.Engine for a golf model. Prompts are the contents of their messages, joined by newlines, after a BOS; a BOS also
    ends an answer, since that is what follows a document in training."""

    def __init__(self, model: GolfModel, tokenizer: Tokenizer, *, config: RandOptConfig, max_positions: int,
                 facts: dict[str, Any]) -> None:
        device = pick_device(config.model.device)
        self.model = model.to(device)
        self.model.compute_dtype = _compute_dtype(config.model.dtype, device)
        self.model.requires_grad_(False)
        self.tokenizer, self._facts = tokenizer, facts
        self._max_positions, self._score_tokens = max_positions, config.decode.score_tokens
        noise = config.noise
        self.perturber = Perturber(Layout.of_module(model), scheme=noise.scheme, sigma=noise.sigma, include=noise.include,
                                   base="device" if noise.base == "auto" else noise.base, exclude=noise.exclude,
                                   verify_every=noise.verify_every)
        self._decoder = Decoder(CachedNetwork(model, max_positions), eos_ids=[tokenizer.bos_id], text_of=tokenizer.decode,
                                budget_bytes=lambda: cache_budget(device, config.decode.memory_share),
                                max_sequences=config.decode.max_sequences, graphs=config.decode.graphs != "off")

    def describe(self) -> dict[str, Any]:
        device = self.model.tok_emb.weight.device
        return {**self._facts, "kind": "golf", "engine": "golf", "dtype": str(self.model.compute_dtype).removeprefix("torch."),
                "num_parameters": sum(p.numel() for p in self.model.parameters()), "num_perturbed": self.perturber.num_perturbed,
                "tokenizer_sha256": self.tokenizer.sha256, "device": _name_of(device), "context": self._max_positions,
                "prompt_format": "plain", "noise": self.perturber.describe(),
                "decode": {"steps": "golf network with a cache by position", "graphs": self._decoder.graphs}}

    def encode(self, prompts: Sequence[Sequence[dict[str, str]]]) -> list[list[int]]:
        texts = ["\n".join(message["content"] for message in prompt) for prompt in prompts]
        return [[self.tokenizer.bos_id, *ids.tolist()] for ids in self.tokenizer.encode_batch(texts)]

    def perturb(self, seed: int, sigma: float) -> None:
        self.perturber.perturb(seed, sigma)

    def reset(self) -> None:
        self.perturber.reset()

    def verify_base(self) -> None:
        self.perturber.verify_base()

    def effective_rms(self, sigma: float, seed: int) -> list[dict[str, Any]]:
        return self.perturber.effective_rms(sigma, seed)

    def switch_s(self) -> float:
        return self.perturber.switch_s()

    def generate(self, prompt_ids: Sequence[Sequence[int]], sampling: Sampling) -> list[Generation]:
        return self._decoder.generate(prompt_ids, sampling)

    def score(self, documents: Sequence[str], context: int) -> list[DocumentNats]:
        encoded = self.tokenizer.encode_batch(list(documents))
        bos = np.array([self.tokenizer.bos_id], np.uint16)
        tokens = np.concatenate([part for ids in encoded for part in (bos, ids)])
        plan = plan_windows(tokens, length=context, documents="isolated", bos_id=self.tokenizer.bos_id)
        nats = np.zeros(len(tokens))  # by the position of the target in the stream
        order = np.argsort(plan.starts - plan.ends, kind="stable")  # longest first
        per_batch = max(1, self._score_tokens // context)
        for begin in range(0, len(order), per_batch):
            rows = order[begin : begin + per_batch]
            self._score_windows(tokens, plan.starts[rows], plan.ends[rows], nats)
        num_bytes = np.concatenate([[0], self.tokenizer.table.target_bytes(tokens[:-1], tokens[1:])])
        starts = np.cumsum([0, *(1 + len(ids) for ids in encoded[:-1])])
        return [DocumentNats(nats[s + 1 : s + 1 + len(ids)], num_bytes[s + 1 : s + 1 + len(ids)])
                for s, ids in zip(starts, encoded, strict=True)]

    def _score_windows(self, tokens: np.ndarray, starts: np.ndarray, ends: np.ndarray, nats: np.ndarray) -> None:
        """Put the nats of all targets of the windows in their places: window i feeds starts[i]..ends[i]-1, its targets follow each."""
        lengths = ends - starts
        columns = starts[:, None] + np.arange(lengths.max())
        real = columns < ends[:, None]
        inputs = tokens[np.where(real, columns, starts[:, None])].astype(np.int64)  # padded on the right, which no earlier token sees
        device = self.model.tok_emb.weight.device
        with torch.inference_mode():
            hidden_ND = self.model.hidden(torch.from_numpy(inputs).to(device))[torch.from_numpy(real).to(device)]
            targets = torch.from_numpy(tokens[columns[real] + 1].astype(np.int64)).to(device)
            losses = F.cross_entropy(self.model.logits(hidden_ND), targets, reduction="none")
        nats[columns[real] + 1] = losses.double().cpu().numpy()

    def self_test(self, sigma: float) -> None:
        """RuntimeError unless captured steps, where there are any, follow the weights through two seeds. Leaves the base."""
        if self._decoder.graphs:
            check_graphs(self._decoder, lambda seed: self.perturb(seed, sigma), self.model.config.vocab_size, self.model.compute_dtype)
            self.reset()

    def close(self) -> None:
        self._decoder.model.allocate(0, 0)
        if self.model.tok_emb.weight.is_cuda:
            self.model.to("cpu")
            torch.cuda.empty_cache()

    def save(self, folder: Path) -> None:
        """Write the live weights into `folder`: model.safetensors (float32, by parameter name), config.json (the network's settings
        under "model"), and the tokenizer's file."""
        from safetensors.torch import save_file

        save_file({name: p.detach().cpu().contiguous() for name, p in self.model.named_parameters()}, folder / "model.safetensors",
                  metadata={"format": "pt"})
        settings = {"format": "bitsperbyte.golf", "version": 1, "model": self.model.config.to_dict()}
        (folder / "config.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
        self.tokenizer.save(folder)


def open_engine(config: RandOptConfig, run_dir: Path, say: Callable[[str], None]) -> GolfEngine:
    """The engine of `config.model`: a golf artifact or run folder, or a model that is trained first, in `run_dir`."""
    if config.model.revision:
        raise ValueError("model.revision is for models of the hub, and a golf model is a file on this machine: leave it out")
    if config.model.golf is not None:
        run = make_model(config.model.golf, run_dir, say)
        record = readable_record(run / session.RECORD)
        facts = {"model": record.name, "revision": None, "trained": {"corpus": config.model.golf.corpus, **_outcome(record)}}
        path = run / session.ARTIFACT
    else:
        path = Path(config.model.path)
        path = path / session.ARTIFACT if path.is_dir() else path
        facts = {"model": config.model.path, "revision": None}
    artifact = read_artifact(path)
    tokenizer = load_tokenizer(path.parent)
    if tokenizer.sha256 != artifact.tokenizer_sha256:
        raise ValueError(f"{path}: it was trained with another tokenizer than the one beside it; put its own tokenizer file there")
    model = GolfModel(artifact.model)
    model.load_state_dict(artifact.state)
    context = DEFAULT_CONTEXT
    if (path.parent / CONFIG).exists():
        context = trained_window(path.parent)
    else:
        say(f"{path.parent} holds no {CONFIG} that says how long the sequences were that {path.name} was trained on: {context} tokens "
            "are taken for its context")
    engine = GolfEngine(model, tokenizer, config=config, max_positions=context, facts={**facts, "weights_sha256": file_sha256(path)})
    engine.self_test(max(config.noise.sigmas))
    return engine


def make_model(section: GolfSection, run_dir: Path, say: Callable[[str], None]) -> Path:
    """The folder of the finished golf run of `section`, trained now, or further, as far as it is not there yet. Steps are counted and
    not timed, so that the same section gives the same artifact on the same kind of machine."""
    run, data = run_dir / MODEL_FOLDER, run_dir / DATA_FOLDER
    config = golf_config(section, data)
    if not is_made(run_dir):
        say(f"making the model first: {config.schedule.max_steps:,} steps on {section.num_docs:,} documents of {section.corpus}")
        _prepare_corpus(section, data)
        session.train(config, run, resume=(run / CONFIG).exists())
    return run


def is_made(run_dir: Path) -> bool:
    """Whether `make_model` has finished there."""
    record = readable_record(run_dir / MODEL_FOLDER / session.RECORD)
    return record is not None and record.status == "finished"


def golf_config(section: GolfSection, data: Path) -> GolfConfig:
    """The golf run's config, its data in the folder `data`. ValueError names each setting that is wrong."""
    if "data" in section.settings:
        raise ValueError("model.golf.settings.data cannot be set: the corpus is the data")
    config = check_settings({"name": "model", **section.settings, "data": {"path": str(data)}}, GolfConfig, "model.golf.settings")
    if config.schedule.wallclock_s is not None or config.schedule.max_steps is None:
        raise ValueError("model.golf.settings.schedule must set wallclock_s to null and max_steps to a number: a model trained by the "
                         "clock would be another one in every run")
    return config


def plan_shape(model: ModelSection) -> dict[str, Any]:
    """The fields of plan.ModelShape for a golf model, from its artifact or from the settings of the run that makes it: nothing is
    trained. Weights stay float32; each place in the order of blocks has a cache of its own."""
    if model.golf is not None:
        source, c = "settings of the golf run that makes it", golf_config(model.golf, Path("data")).model_dataclass()
    else:
        path = Path(model.path)
        source, c = "header of its artifact", read_artifact(path / session.ARTIFACT if path.is_dir() else path).model
    return {"source": source, "num_parameters": parameter_counts(c)["total"], "num_layers": len(c.order), "width": c.dim,
            "mlp_width": c.mlp_mult * c.dim, "num_kv_heads": c.num_kv_heads, "head_width": c.head_dim, "vocab_size": c.vocab_size,
            "weight_bytes": torch.float32.itemsize}


def _prepare_corpus(section: GolfSection, folder: Path) -> None:
    """Shards of the corpus under the byte tokenizer. The manifest comes last; a folder without one is made anew.

    The documents of a generated task are few and come again and again, so that validation holds none that training has not.
    """
    path = folder / MANIFEST
    if path.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = ByteTokenizer()
    num_val = max(1, min(NUM_VAL_DOCS, section.num_docs // 10))
    documents = training_documents(section.num_docs + num_val, section.seed)
    split = (("val" if i < num_val else "train", text) for i, text in enumerate(documents))
    splits, proofs = write_splits(split, tokenizer, folder, SHARD_TOKENS, lambda what, done, total: None)
    entry = {"file": tokenizer.save(folder).name, "name": tokenizer.name, "sha256": tokenizer.sha256,
             "vocab_size": tokenizer.vocab_size}
    manifest = {"format": FORMAT, "version": FORMAT_VERSION, "source": section.corpus, "revision": None, "tokenizer": entry,
                "splits": splits, "proof": proofs, "num_duplicates_dropped": 0, "skipped": {},
                "parameters": {"corpus": section.corpus, "num_docs": section.num_docs, "seed": section.seed}}
    write_atomic(path, json.dumps(manifest, indent=1) + "\n")


def _outcome(record: Record) -> dict[str, Any]:
    """What a record keeps of the run that made its model."""
    score = next(row for row in record.scores if row.label == "artifact")
    return {"num_steps": record.training.num_steps, "validation_bpb": score.bpb}


def _compute_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, name)


def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
