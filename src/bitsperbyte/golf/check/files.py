"""What a submission folder must hold, and whether its code is what it may be: the findings `files` and `code`."""

import re
import sys
from collections.abc import Iterable
from pathlib import Path

from bitsperbyte.golf.check.folder import FACTS, SCRIPT, Submission, sha256_of
from bitsperbyte.golf.check.inspection import Inspection
from bitsperbyte.golf.findings import Finding

# Packages of the challenge's machines, and those that public submissions install by hand and say so in their README.
KNOWN_PACKAGES = frozenset(
    "torch torchvision torchaudio torchao numpy sentencepiece triton flash_attn flash_attn_interface flash_attn_3 zstandard zstd brotli "
    "brotlicffi tqdm typing_extensions safetensors einops scipy sklearn tiktoken transformers tokenizers datasets huggingface_hub kernels "
    "psutil setuptools packaging pyarrow regex lz4 xxhash numba cupy cuda mlx ml_dtypes wandb requests constriction yaml nvidia "
    "pynvml liger_kernel cutlass apex xformers transformer_engine bitsandbytes matplotlib pandas".split())
MAX_SHOWN = 4


def check_files(found: Submission, code: Inspection | None) -> Finding:
    """Every file of a submission present and readable, and nothing missing that the code or submission.json names."""
    problems = [*found.problems, *_missing_modules(found, code), *_other_files(found)]
    if problems:
        return Finding("files", False, _joined(problems))
    names = [SCRIPT, "README.md", FACTS, *(log.name for log in found.logs)]
    names += [path.name for path in (found.artifact, found.tokenizer) if path]
    return Finding("files", True, ", ".join(names))


def check_code(code: Inspection | None) -> Finding:
    """Whether the code parses and, as far as reading shows, leaves the network alone."""
    if code is None:
        return Finding("code", None, f"there is no readable {SCRIPT}")
    if code.broken:
        return Finding("code", False, f"it does not parse: {_joined(code.broken)}")
    if code.network:
        return Finding("code", False, f"it reaches for the network: {_joined(code.network)}")
    if code.unseen:
        return Finding("code", None, f"no call onto the network is seen, but not all of it can be read: {_joined(code.unseen)}")
    decoded = sum("decoded" in layer.name for layer in code.layers)
    parts = [f"{len(code.layers) - decoded} file{'s' if len(code.layers) - decoded > 1 else ''}"]
    parts += [f"{decoded} wrapped text{'s' if decoded > 1 else ''} inside"] if decoded else []
    return Finding("code", True, f"parses ({', '.join(parts)}), and no call onto the network is seen")


def _missing_modules(found: Submission, code: Inspection | None) -> Iterable[str]:
    """Modules that the code needs and that neither the folder, nor Python, nor requirements.txt, nor the challenge's machine has."""
    if code is None:
        return
    required = _required_packages(found.path / "requirements.txt")
    seen: set[str] = set()
    for used in code.imports:
        name = used.package
        if used.optional or name in seen:
            continue
        seen.add(name)
        if _lies_in(found.path, name, code):
            continue
        if used.is_local or not (name in sys.stdlib_module_names or name in KNOWN_PACKAGES or name.lower() in required):
            yield f"{used.where} imports {name}, which is neither in the folder nor in requirements.txt"


def _lies_in(folder: Path, name: str, code: Inspection) -> bool:
    beside = {path.parent for path in code.local_files} | {folder}
    return any((at / f"{name}.py").is_file() or (at / name).is_dir() or any(at.glob(f"{name}.*.so")) for at in beside)


def _required_packages(path: Path) -> set[str]:
    """Names in requirements.txt as an import would write them."""
    if not path.is_file() or path.is_symlink():
        return set()
    names = (re.match(r"\s*([A-Za-z0-9][\w.\-]*)", line) for line in path.read_text(encoding="utf-8", errors="replace").splitlines()[:1000])
    return {re.sub(r"[-.]", "_", match[1]).lower() for match in names if match}


def _other_files(found: Submission) -> Iterable[str]:
    """Files that are not those whose hashes submission.json gives, though of the size that it gives: another size is `sizes`'s finding."""
    if found.claims is None:
        return
    named = [(found.path / SCRIPT if found.script is not None else None, found.claims.text("code_sha256"), "bytes_code", found.script_size)]
    named += [(found.artifact, found.claims.text("artifact", "sha256"), "bytes_artifact", found.artifact_size),
              (found.tokenizer, found.claims.text("tokenizer", "sha256"), None, None)]
    for path, claimed, size_key, size in named:
        if path is None or claimed is None or not re.fullmatch(r"[0-9a-f]{64}", claimed):
            continue
        if size_key and found.claims.facts.get(size_key) not in (None, size):
            continue
        if (sha256 := sha256_of(path)) != claimed:
            yield f"{path.name} has sha256 {sha256[:16]}..., and {FACTS} names {claimed[:16]}..."


def _joined(parts: list[str]) -> str:
    more = f"; and {len(parts) - MAX_SHOWN} more" if len(parts) > MAX_SHOWN else ""
    return "; ".join(parts[:MAX_SHOWN]) + more
