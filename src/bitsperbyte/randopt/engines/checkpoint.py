"""A causal language model and its tokenizer from a folder, a .gguf file or the Hugging Face hub, with its identity.

Weights are read from safetensors or GGUF only: other formats can run code when they are opened. Code that comes with a model runs only
where the config allows it.
"""

import hashlib
import json
import os
import re
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bitsperbyte.randopt.config import ModelSection

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
                   "vocab.txt", "merges.txt", "spiece.model", "chat_template.jinja", "chat_template.json")
UNSAFE_FILES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack")
MAX_HEADER_BYTES = 100_000_000  # as the safetensors library has it
PROGRESS_BYTES = 8 * 2**30  # hashing says how far it is at every such step
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


@dataclass(frozen=True)
class Checkpoint:
    """`names` maps a live parameter's name to the checkpoint's for it; of tied parameters only those that the checkpoint stores are in
    it. `source` is what the config named, `folder` where its files lie (for GGUF the file's folder)."""

    model: nn.Module
    tokenizer: Any
    names: dict[str, str]
    source: str
    revision: str | None
    folder: Path
    weights_sha256: str
    tokenizer_sha256: str


def pick_device(name: str) -> torch.device:
    """cuda or cpu; auto takes the GPU where there is one. ValueError where cuda is asked for and missing."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("model.device is cuda, and torch sees no GPU here: set it to cpu or auto")
    return torch.device("cuda", torch.cuda.current_device()) if name != "cpu" and torch.cuda.is_available() else torch.device("cpu")


@dataclass(frozen=True)
class Files:
    """Where a checkpoint lies: the folder, its weight files, the commit on the hub, and how transformers is told to read it."""

    folder: Path
    weights: list[Path]
    revision: str | None
    options: dict[str, Any]

    def tokenizer_files(self) -> list[Path]:
        return [self.folder / name for name in TOKENIZER_FILES if (self.folder / name).is_file()]


def find_checkpoint(section: ModelSection, say: Callable[[str], None]) -> Files:
    """The files of `section.path`, fetched from the hub where it names a model there. ValueError, in a sentence, for whatever cannot be
    used: other formats, quantised weights, files that are missing."""
    assert section.path is not None, "a model without a path is golf's"
    path = Path(section.path).expanduser()
    revision = None
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"there is no file {path}: check model.path")
        folder, files, options = path.parent, [path], {"gguf_file": path.name}
    else:
        if path.is_dir():
            folder = path
        else:
            folder, revision = _from_hub(section, say)
        files, options = _weight_files(folder, section.path), {"use_safetensors": True}
    _refuse_quantised(folder, section.path, options)
    options["trust_remote_code"] = section.trust_remote_code
    return Files(folder, files, revision, options)


def load_checkpoint(section: ModelSection, device: torch.device, say: Callable[[str], None]) -> Checkpoint:
    """The model on `device`, in evaluation mode and without gradients. ValueError, in a sentence, for whatever cannot be loaded."""
    found = find_checkpoint(section, say)
    stored = None if "gguf_file" in found.options else {name for file in found.weights for name in tensor_names(file)}
    tokenizer = load_tokenizer(found, section.path)
    model = _load_model(found.folder, found.options, live_dtype(section, device), section.path)
    names = checkpoint_names(model, stored)
    model.to(device).eval().requires_grad_(False)
    _require_finite(model, section.path)
    weights = files_sha256(found.weights, say)
    if "gguf_file" in found.options:
        tokenizer_sha256 = hashlib.sha256(_serialised(tokenizer).encode()).hexdigest()
    else:
        tokenizer_sha256 = files_sha256(found.tokenizer_files(), say)
    return Checkpoint(model, tokenizer, names, section.path, found.revision, found.folder, weights, tokenizer_sha256)


def _require_finite(model: nn.Module, source: str) -> None:
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise ValueError(f"{source} has weights that are not finite numbers in {name}, as {str(parameter.dtype).removeprefix('torch.')}: "
                             "fetch it again, or set model.dtype to a type with the range that the weights need")


def live_dtype(section: ModelSection, device: torch.device) -> torch.dtype:
    """The type that weights are kept in."""
    return DTYPES[section.dtype] if section.dtype != "auto" else torch.bfloat16 if device.type == "cuda" else torch.float32


def checkpoint_names(model: nn.Module, stored: set[str] | None) -> dict[str, str]:
    """Live parameter name -> name in the checkpoint, `stored` being the names there (None for GGUF: the names that transformers
    gives). A checkpoint saved without, or with, the prefix of its base model is matched as transformers matches it. ValueError for a
    parameter that the checkpoint does not store as one tensor."""
    live = dict(model.named_parameters(remove_duplicate=False))
    if stored is None:
        return {name: name for name, _ in model.named_parameters()}  # of tied ones the first
    prefix = getattr(model, "base_model_prefix", "") + "."
    names = {}
    for name in live:
        found = next((n for n in (name, name.removeprefix(prefix), prefix + name) if n in stored), None)
        if found is not None:
            names[name] = found
    known = {id(live[name]) for name in names}
    for name, parameter in live.items():
        if id(parameter) not in known:
            raise ValueError(f"transformers builds the parameter {name} from several tensors of the checkpoint, so that noise by checkpoint "
                             "tensor cannot be told: this version needs a model whose parameters are the checkpoint's tensors")
    return names


def tensor_names(path: Path) -> list[str]:
    """Names of the tensors in a safetensors file, from its header. ValueError for a damaged one."""
    return list(tensor_shapes(path))


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors in a safetensors file, from its header. ValueError for a damaged one."""
    length = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        size = struct.unpack("<Q", start)[0] if len(start) == 8 else MAX_HEADER_BYTES + 1
        header = file.read(size) if size <= MAX_HEADER_BYTES else b""
    try:
        if len(header) != size:
            raise ValueError("the header is cut off")
        tensors = {name: facts for name, facts in json.loads(header).items() if name != "__metadata__"}
        if 8 + size + max((facts["data_offsets"][1] for facts in tensors.values()), default=0) != length:
            raise ValueError("the file is longer or shorter than its header says")
        return {name: tuple(facts["shape"]) for name, facts in tensors.items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not a whole safetensors file: fetch it again") from error


def files_sha256(paths: list[Path], say: Callable[[str], None] = lambda line: None) -> str:
    """sha256 of one file's bytes; of several, of the lines that `sha256sum` prints for them, by name."""
    total = sum(path.stat().st_size for path in paths)
    lines, done = [], 0
    for path in sorted(paths, key=lambda p: p.name):
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(2**24):
                digest.update(block)
                if done // PROGRESS_BYTES != (done + len(block)) // PROGRESS_BYTES:
                    say(f"hashing weights: {(done + len(block)) / 2**30:.0f} of {total / 2**30:.0f} GiB")
                done += len(block)
        lines.append(f"{digest.hexdigest()}  {path.name}\n")
    if len(lines) == 1:
        return lines[0].split()[0]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _weight_files(folder: Path, source: str) -> list[Path]:
    """The safetensors files of a checkpoint folder."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is no Hugging Face checkpoint, since it has no config.json: give a folder that has one, a .gguf file, "
                         "or a name on the hub")
    if (folder / INDEX).is_file():
        try:
            shards = sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
            if not shards or any(Path(name).name != name for name in shards):
                raise ValueError("it names no files of this folder")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{folder / INDEX} is damaged: fetch it again") from error
        if missing := [name for name in shards if not (folder / name).is_file()]:
            raise ValueError(f"{source} lacks the weight file {missing[0]} that its index names: fetch it again")
        return [folder / name for name in shards]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if any(found for pattern in UNSAFE_FILES for found in folder.glob(pattern)):
        raise ValueError(f"{source} has its weights only in a format that can run code when it is opened (pickle): convert it to "
                         "safetensors first")
    if found := sorted(folder.glob("*.gguf")):
        raise ValueError(f"{source} has no safetensors weights, but {len(found)} GGUF files: set model.path to one of them, such as {found[0]}")
    raise ValueError(f"{source} has no weights: {folder} holds neither {SINGLE} nor {INDEX}")


def _refuse_quantised(folder: Path, source: str, options: dict[str, Any]) -> None:
    if "gguf_file" in options:
        return  # transformers turns its integers back into floating-point weights
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("quantization_config")
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{folder / 'config.json'} is damaged: fetch it again") from error
    if found:
        method = found.get("quant_method") if isinstance(found, dict) else None
        raise ValueError(f"{source} is quantised ({method or 'unknown method'}), and noise on packed weights and their scales means nothing: "
                         "take the unquantised model")


@contextmanager
def _sentence(source: str, what: str) -> Iterator[None]:
    """Turn what transformers raises for a checkpoint it cannot take into one sentence."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of whatever kind: config checks, the file readers in Rust, arithmetic on absurd sizes
        text = " ".join(str(error).split()) or type(error).__name__
        if "trust_remote_code" in text:
            raise ValueError(f"{source} needs Python code of its own: read that code, then set model.trust_remote_code") from error
        raise ValueError(f"transformers cannot load {what} of {source}: {text[:300]}") from error


def load_tokenizer(files: Files, source: str) -> Any:
    """The tokenizer beside the weights. ValueError where there is none, or transformers cannot load it."""
    from transformers import AutoTokenizer

    folder, options = files.folder, files.options
    if "gguf_file" not in options and not any((folder / name).is_file() for name in TOKENIZER_FILES if name != "tokenizer_config.json"):
        raise ValueError(f"{source} has no tokenizer: put the files of the one it was trained with (tokenizer.json) beside its weights")
    with _sentence(source, "the tokenizer"):
        return AutoTokenizer.from_pretrained(folder, **{k: v for k, v in options.items() if k != "use_safetensors"})


def _load_model(folder: Path, options: dict[str, Any], dtype: torch.dtype, source: str) -> nn.Module:
    from transformers import AutoModelForCausalLM

    with _sentence(source, "the model"):
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True, **options)  # told below, in one sentence
    for kind in ("missing_keys", "mismatched_keys"):
        if found := sorted(str(key if isinstance(key, str) else key[0]) for key in info.get(kind) or []):
            raise ValueError(f"the weights of {source} do not fit its config.json: {len(found)} tensors ({found[0]}, ...) are "
                             f"{'missing' if kind == 'missing_keys' else 'of another shape'}")
    return model


def _serialised(tokenizer: Any) -> str:
    """What a tokenizer that came inside a GGUF file does, as text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return vocabulary + "\n" + (tokenizer.chat_template or "")


def _from_hub(section: ModelSection, say: Callable[[str], None]) -> tuple[Path, str]:
    """(folder in the hub's cache, commit) of a model on the hub; without a connection, the copy that is there."""
    name, revision = section.path, section.revision
    if not _HUB_NAME.fullmatch(name):
        raise ValueError(f"there is no folder {name}, and it is no name on the hub either (organisation/model): check model.path")
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub import errors as hub

    endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or None
    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", *(["*.py"] if section.trust_remote_code else [])]
    nowhere = f"there is no folder {name} here"
    try:
        commit = HfApi(endpoint=endpoint).model_info(name, revision=revision, timeout=30).sha
        say(f"fetching {name} at {commit}")
        # by the name of the revision, so that the cache finds it again without a connection; the folder's name is the commit
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=patterns, endpoint=endpoint))
        return folder, folder.name
    except hub.GatedRepoError as error:
        raise ValueError(f"{name} is gated: accept its terms on its page on the hub, then log in there (hf auth login) or set HF_TOKEN") from error
    except hub.RevisionNotFoundError as error:
        raise ValueError(f"{name} has no revision {revision} on the hub: check model.revision") from error
    except hub.RepositoryNotFoundError as error:
        raise ValueError(f"{nowhere}, and the hub has no model of that name that this machine may see: check model.path, and for a private "
                         "model set HF_TOKEN") from error
    except hub.HFValidationError as error:
        raise ValueError(f"{nowhere}, and it is no name on the hub (organisation/model): check model.path") from error
    except (hub.HfHubHTTPError, hub.OfflineModeIsEnabled, hub.LocalEntryNotFoundError, hub.HTTPError, OSError) as error:
        why = "the hub is switched off (HF_HUB_OFFLINE)" if isinstance(error, hub.OfflineModeIsEnabled) else "the hub cannot be reached"
        try:
            folder = Path(snapshot_download(name, revision=revision, allow_patterns=patterns, local_files_only=True))
        except (hub.LocalEntryNotFoundError, FileNotFoundError, ValueError):
            raise ValueError(f"{nowhere}, {why}, and its cache has no copy of it{f' at {revision}' if revision else ''}: copy the model to this "
                             "machine and set model.path to its folder") from error
        say(f"{why}: taking the copy of {name} in its cache, commit {folder.name}")
        return folder, folder.name
