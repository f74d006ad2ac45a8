"""Files from the Hugging Face hub: raw FineWeb text, and the challenge's own shards and tokenizers.

HF_ENDPOINT names another hub and is read at each call. A revision is resolved once to a commit, and everything after
that names the commit. FineWeb and single tokenizers go to the hub's cache (HF_HOME), so several data folders share one
download; the challenge's shards are fetched into the data folder itself. A connection that breaks is taken up where it
broke; a file that was interrupted by the end of the program starts again, finished files are never fetched twice.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from inspect import signature
from pathlib import Path
from typing import Any

FINEWEB_REPO, FINEWEB_FOLDER = "HuggingFaceFW/fineweb", "sample/10BT"
CHALLENGE_REPO = "willdepueoai/parameter-golf"
CHALLENGE_TOKENIZER = "sp1024"
DEFAULT_ENDPOINT = "https://huggingface.co"
_SHARD_NAME = re.compile(r"([^/]+)/fineweb_(train|val)_\d+\.bin$")  # the folder's name ends in the tokenizer's
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class HubFile:
    path: str  # inside the repository
    num_bytes: int
    sha256: str | None  # as the hub lists it (files in large-file storage), else None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or DEFAULT_ENDPOINT


def resolve_revision(repo: str, revision: str | None) -> str:
    """The commit that a branch, tag or commit of a dataset repository stands for now (default: main)."""
    if revision and _COMMIT.fullmatch(revision):
        return revision
    with _helpful_errors(repo, revision or "main"):
        sha = _api().dataset_info(repo, revision=revision or "main", timeout=30).sha
    if not sha or not _COMMIT.fullmatch(sha):
        raise ValueError(f"{endpoint()} did not name a commit for {repo} at {revision or 'main'!r}, so nothing can be "
                         "pinned")
    return sha


def list_files(repo: str, commit: str, folder: str | None = None) -> list[HubFile]:
    """All files of a dataset repository at a commit (below a folder of it), sorted by path."""
    with _helpful_errors(repo, commit):
        rows = list(_api().list_repo_tree(repo, folder, recursive=True, revision=commit, repo_type="dataset"))
    files = [HubFile(row.path, row.size, row.lfs.sha256 if row.lfs else None)
             for row in rows if hasattr(row, "blob_id")]  # folders have none
    return sorted(files, key=lambda file: file.path)


def fetch(repo: str, commit: str, file: HubFile, local_dir: Path | None = None,
          advance: Callable[[int], None] = lambda num_bytes: None) -> tuple[Path, str]:
    """(path, sha256) of a file, from the cache or the hub; into `local_dir` where given.

    Its bytes are hashed, and compared with the listing where that has a hash; a file that differs is removed.
    `advance` is told of bytes as they arrive, if the installed client can.
    """
    from huggingface_hub import hf_hub_download

    with _helpful_errors(repo, commit, file.path):
        bar = {"tqdm_class": _reporting_bar(advance)} if "tqdm_class" in signature(hf_hub_download).parameters else {}
        path = Path(hf_hub_download(repo, file.path, repo_type="dataset", revision=commit, endpoint=endpoint(),
                                    local_dir=local_dir, **bar))
    found = file_sha256(path)
    if file.sha256 is not None and found != file.sha256:
        for copy in {path, path.resolve()}:  # in the cache, a link and what it points to
            copy.unlink(missing_ok=True)
        raise ValueError(f"{repo}: {file.path} arrived with the sha256 {found[:16]}... and the hub lists "
                         f"{file.sha256[:16]}...; it was removed; run the same command again, and if it repeats, check "
                         "what HF_ENDPOINT serves")
    return path, found


def fineweb_files(files: list[HubFile], num_files: int) -> list[HubFile]:
    """The first Parquet files of FineWeb's sample."""
    found = [file for file in files if file.path.endswith(".parquet")]
    if not found:
        raise ValueError(f"{FINEWEB_REPO} has no Parquet file below {FINEWEB_FOLDER} at this revision; name another "
                         "--revision")
    if num_files > len(found):
        raise ValueError(f"{FINEWEB_REPO} has {len(found)} Parquet files below {FINEWEB_FOLDER}, so --num-shards "
                         f"{num_files} is too many")
    return found[:num_files]


def challenge_shards(files: list[HubFile], name: str, num_train: int) -> tuple[list[HubFile], list[HubFile]]:
    """(train, val) shards of the challenge under the tokenizer `name` (sp1024): the first `num_train`, and all of val.

    They are found by name wherever the repository keeps them: NAME stands at the end of the folder's name.
    """
    split_files: dict[str, list[HubFile]] = {"train": [], "val": []}
    seen = set()
    for file in files:
        if match := _SHARD_NAME.search(file.path):
            seen.add(match[1])
            if match[1] == name or match[1].endswith("_" + name):
                split_files[match[2]].append(file)
    train, val = split_files["train"], split_files["val"]
    if not train or not val:
        raise ValueError(f"{CHALLENGE_REPO} has no shards for the tokenizer {name!r}; it has "
                         f"{', '.join(sorted(seen)) or 'none at all'}")
    if len({file.path.rsplit("/", 1)[0] for file in train + val}) > 1:
        raise ValueError(f"{CHALLENGE_REPO} has several folders of shards for {name!r}, and which one is meant cannot "
                         "be known")
    if num_train > len(train):
        raise ValueError(f"{CHALLENGE_REPO} has {len(train)} train shards for {name!r}, so --num-shards {num_train} is "
                         "too many")
    return train[:num_train], val


def challenge_tokenizer(files: list[HubFile], name: str) -> HubFile:
    """The SentencePiece model of the challenge that `name` (sp1024) stands for."""
    wanted = f"fineweb_{name.removeprefix('sp')}_bpe.model"
    found = [file for file in files if file.path.rsplit("/", 1)[-1] == wanted]
    if len(found) != 1:
        have = ", ".join(file.path for file in files if file.path.endswith(".model")) or "none"
        raise ValueError(f"{CHALLENGE_REPO} has {len(found)} files {wanted} for the tokenizer {name!r}; its models: "
                         f"{have}")
    return found[0]


def fetch_all(repo: str, commit: str, files: list[HubFile], progress: Callable[[str, int, int | None], None],
              local_dir: Path | None = None) -> Iterator[tuple[HubFile, Path, str]]:
    """Fetch files one after another: (file, path, sha256) as each is complete. Progress counts bytes."""
    total, before, arrived = sum(file.num_bytes for file in files), 0, 0

    def advance(num_bytes: int) -> None:
        nonlocal arrived
        arrived += num_bytes
        progress("fetching", before + arrived, total)

    progress("fetching", 0, total)
    for file in files:
        path, sha256 = fetch(repo, commit, file, local_dir, advance)
        before, arrived = before + file.num_bytes, 0
        progress("fetching", before, total)
        yield file, path, sha256


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _reporting_bar(advance: Callable[[int], None]) -> type:
    """A progress bar for the client that draws nothing and passes on what it is told."""
    from huggingface_hub.utils import tqdm

    class ReportingBar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> None:
            advance(int(n or 0))

    return ReportingBar


def _api() -> Any:
    from huggingface_hub import HfApi

    return HfApi(endpoint=endpoint())


@contextmanager
def _helpful_errors(repo: str, revision: str, path: str = "") -> Iterator[None]:
    """Turn what the client raises into one sentence that says what to do."""
    from huggingface_hub import errors

    what = f"{repo}{'/' + path if path else ''}"
    try:
        yield
    except errors.GatedRepoError as error:
        raise ValueError(f"{what} is gated: accept its terms at {endpoint()}/datasets/{repo} and set HF_TOKEN to a "
                         "token of "
                         "that account") from error
    except errors.RepositoryNotFoundError as error:
        raise ValueError(f"{what} does not exist on {endpoint()} or is private; check the name, HF_ENDPOINT and "
                         "HF_TOKEN") from error
    except errors.RevisionNotFoundError as error:
        raise ValueError(f"{repo} has no revision {revision!r}; name a branch, a tag or a commit with "
                         "--revision") from error
    except errors.EntryNotFoundError as error:
        if isinstance(error, errors.LocalEntryNotFoundError):
            raise _unreachable(what, error) from error
        raise ValueError(f"{what} does not exist at revision {revision}; name another --revision") from error
    except (errors.HTTPError, OSError) as error:  # HTTPError: the base class of the client's HTTP library
        raise _unreachable(what, error) from error


def _unreachable(what: str, error: Exception) -> ValueError:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return ValueError(f"{what} cannot be fetched from {endpoint()} ({lines[0]}); check the network and HF_ENDPOINT and "
                      "run the "
                      "same command again (finished files are kept), or use --source embedded, a file or a folder")
