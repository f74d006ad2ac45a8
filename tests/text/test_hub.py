"""The real client against a small hub on this machine: pinning, hashes, cut connections, what is said on failure."""

import hashlib
import io
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import huggingface_hub.constants
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from bitsperbyte.text import hub
from bitsperbyte.text.corpora import embedded_documents
from bitsperbyte.text.prepare import prepare
from bitsperbyte.text.shards import DataFolder, write_shard
from bitsperbyte.text.slices import HUB_SAMPLES, Request, make_slice, read_slice
from bitsperbyte.text.tokenizers import load_tokenizer, train_sentencepiece

OLD, NEW = "a" * 40, "b" * 40


class FakeHub(ThreadingHTTPServer):
    """Dataset repositories as {repo: {commit: {path: bytes}}}; `main` names a commit, `cut` breaks downloads off."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, dict[str, dict[str, bytes]]] = {}
        self.main: dict[str, str] = {}
        self.lies: dict[str, bytes] = {}  # path -> what is served instead of what is listed
        self.cut: Counter[str] = Counter()  # path -> how many downloads break off in the middle
        self.error_code: str | None = None
        self.requests: list[tuple[str, str, str | None]] = []  # (method, path in the repository or url, Range)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def fetched(self) -> list[str]:
        return [path for method, path, _ in self.requests if method == "GET" and not path.startswith("/api")]


class Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub_server, path = self.server, unquote(self.path.split("?")[0])
        if hub_server.error_code:
            self.requests_add(path)
            return self.answer(
                403 if hub_server.error_code == "GatedRepo" else 401, b"{}", {"X-Error-Code": hub_server.error_code}
            )
        if match := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/(revision|tree)/([^/]+)(?:/(.*))?", path):
            self.requests_add(path)
            return self.api(*match.groups())
        match = re.fullmatch(r"/datasets/([^/]+/[^/]+)/resolve/([^/]+)/(.*)", path)
        assert match, path
        repo, commit, name = match.groups()
        self.requests_add(name)
        content = hub_server.repos[repo].get(commit, {}).get(name)
        if content is None:
            return self.answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        etag = hashlib.sha256(content).hexdigest()
        content = hub_server.lies.get(name, content)
        start = int(re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "bytes=0-"))[1])
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        cut = self.command == "GET" and hub_server.cut[name] > 0
        hub_server.cut[name] -= cut
        self.answer(206 if start else 200, content[start:], headers, cut)

    def api(self, repo: str, what: str, revision: str, folder: str | None) -> None:
        commits = self.server.repos.get(repo)
        if commits is None:
            return self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        commit = self.server.main[repo] if revision == "main" else revision
        if commit not in commits:
            return self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        if what == "revision":
            return self.answer(200, json.dumps({"id": repo, "sha": commit, "siblings": []}).encode(), {})
        rows = [{"type": "directory", "path": "sample", "oid": "0" * 40}]
        for path, content in commits[commit].items():
            if path.startswith(folder or ""):
                lfs = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
                rows.append(
                    {
                        "type": "file",
                        "path": path,
                        "size": len(content),
                        "oid": "0" * 40,
                        **({} if path.endswith(".txt") else {"lfs": lfs}),
                    }
                )
        self.answer(200, json.dumps(rows).encode(), {})

    def requests_add(self, path: str) -> None:
        self.server.requests.append((self.command, path, self.headers.get("Range")))

    def answer(self, status: int, body: bytes, headers: dict[str, str], cut: bool = False) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), "Content-Type": "application/json", **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[: len(body) // 2] if cut else body)
        self.close_connection = True


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    server = FakeHub()
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name, value in (
        ("HF_HUB_CACHE", str(tmp_path / "cache")),
        ("HF_HUB_DISABLE_XET", True),
        ("HF_HUB_DISABLE_TELEMETRY", True),
        ("HF_TOKEN_PATH", str(tmp_path / "no_token")),
    ):
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def challenge_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A repository like the challenge's: three train shards and one of val, under two tokenizers."""
    folder = tmp_path_factory.mktemp("challenge")
    texts = embedded_documents()[:400]
    tokenizer = train_sentencepiece(texts, 512, folder / "fineweb_1024_bpe.model")
    files = {"tokenizers/fineweb_1024_bpe.model": tokenizer.model_bytes, "README.txt": b"read me"}
    for number, name in enumerate(("train_000000", "train_000001", "train_000002", "val_000000")):
        tokens = [part for text in texts[number::20] for part in ([tokenizer.bos_id], tokenizer.encode(text))]
        write_shard(folder / "s.bin", np.concatenate(tokens))
        for variant in ("fineweb10B_sp1024", "fineweb10B_sp8192"):
            files[f"datasets/{variant}/fineweb_{name}.bin"] = (folder / "s.bin").read_bytes()
    return files


def serve(fake: FakeHub, repo: str, files: dict[str, bytes], commit: str = OLD) -> None:
    fake.repos.setdefault(repo, {})[commit] = files
    fake.main[repo] = commit


def test_the_challenge_from_the_hub(fake: FakeHub, challenge_files: dict[str, bytes], tmp_path: Path) -> None:
    serve(fake, hub.CHALLENGE_REPO, challenge_files)
    seen: list[tuple[str, int, int | None]] = []
    manifest = prepare("challenge", out=tmp_path / "data", num_shards=2, progress=lambda *row: seen.append(row))
    data = DataFolder.open(tmp_path / "data")
    assert data.manifest == manifest and manifest["revision"] == OLD
    assert [row["file"] for row in manifest["splits"]["train"]["files"]] == [
        "fineweb_train_000000.bin",
        "fineweb_train_000001.bin",
    ]
    for split in ("train", "val"):
        data.verify(split)
        documents = [embedded_documents()[:400][number::20] for number in ((0, 1) if split == "train" else (3,))]
        part = manifest["splits"][split]
        assert part["num_documents"] == sum(map(len, documents))
        assert part["counted_bytes"] == sum(
            len(data.tokenizer.decode(data.tokenizer.encode(text)).encode()) for texts in documents for text in texts
        )
    content = challenge_files["datasets/fineweb10B_sp1024/fineweb_val_000000.bin"]
    assert (tmp_path / "data/fineweb_val_000000.bin").read_bytes() == content
    assert not any("sp8192" in path or "000002" in path for path in fake.fetched())
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == [
        "fineweb_1024_bpe.model",
        "fineweb_train_000000.bin",
        "fineweb_train_000001.bin",
        "fineweb_val_000000.bin",
        "manifest.json",
    ]
    whats, totals = {row[0] for row in seen}, {row[2] for row in seen if row[0] == "fetching"}
    assert whats == {"fetching", "checking shards"} and len(totals) == 1 and ("fetching", *totals, *totals) in seen
    fetching = [done for what, done, _ in seen if what == "fetching"]
    assert fetching == sorted(fetching) and len(fetching) > 4

    fake.requests.clear()
    assert prepare("challenge", out=tmp_path / "data", num_shards=2) == manifest and not fake.requests  # already there
    with pytest.raises(ValueError, match="already holds other data .*num_shards: there 2, asked 3"):
        prepare("challenge", out=tmp_path / "data", num_shards=3)


def test_files_are_found_under_another_prefix(fake: FakeHub, challenge_files: dict[str, bytes], tmp_path: Path) -> None:
    moved = {"v2/" + path.replace("datasets/", "data/"): content for path, content in challenge_files.items()}
    serve(fake, hub.CHALLENGE_REPO, moved)
    assert prepare("challenge", out=tmp_path / "data")["splits"]["val"]["num_tokens"] > 100


def test_a_cut_connection_is_taken_up_where_it_broke(
    fake: FakeHub, challenge_files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 100)  # only whole pieces are kept
    serve(fake, hub.CHALLENGE_REPO, challenge_files)
    path = "datasets/fineweb10B_sp1024/fineweb_train_000000.bin"
    fake.cut[path] = 1
    prepare("challenge", out=tmp_path / "data")
    DataFolder.open(tmp_path / "data").verify("train")
    ranges = [found for method, name, found in fake.requests if method == "GET" and name == path]
    assert ranges == [None, f"bytes={len(challenge_files[path]) // 2 // 100 * 100}-"]


def test_an_interrupted_fetch_keeps_its_commit_and_its_finished_files(
    fake: FakeHub, challenge_files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(fake, hub.CHALLENGE_REPO, challenge_files)
    stopper = "datasets/fineweb10B_sp1024/fineweb_train_000000.bin"
    real = hub.fetch

    def fetch(repo: str, commit: str, file: hub.HubFile, *rest: object) -> tuple[Path, str]:
        if file.path == stopper:
            raise KeyboardInterrupt
        return real(repo, commit, file, *rest)

    monkeypatch.setattr(hub, "fetch", fetch)
    with pytest.raises(KeyboardInterrupt):
        prepare("challenge", out=tmp_path / "data")
    with pytest.raises(ValueError, match="has not finished"):
        DataFolder.open(tmp_path / "data")
    monkeypatch.setattr(hub, "fetch", real)
    serve(fake, hub.CHALLENGE_REPO, {"README.txt": b"all is gone"}, NEW)  # main moves on in between
    fake.requests.clear()
    assert prepare("challenge", out=tmp_path / "data")["revision"] == OLD
    assert fake.fetched() == [stopper]


def test_wrong_bytes_are_refused_and_fetched_again(
    fake: FakeHub, challenge_files: dict[str, bytes], tmp_path: Path
) -> None:
    serve(fake, hub.CHALLENGE_REPO, challenge_files)
    path = "datasets/fineweb10B_sp1024/fineweb_val_000000.bin"
    wrong = bytearray(challenge_files[path])
    wrong[2000] ^= 1
    fake.lies[path] = bytes(wrong)
    with pytest.raises(ValueError, match="fineweb_val_000000.bin arrived with the sha256"):
        prepare("challenge", out=tmp_path / "data")
    fake.lies.clear()
    prepare("challenge", out=tmp_path / "data")
    DataFolder.open(tmp_path / "data").verify("val")


def parquet(texts: list[str]) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": texts, "url": texts}), file)
    return file.getvalue()


def test_fineweb_with_the_challenges_tokenizer(
    fake: FakeHub, challenge_files: dict[str, bytes], tmp_path: Path
) -> None:
    texts = list(embedded_documents()[:90])
    serve(fake, hub.CHALLENGE_REPO, challenge_files)
    serve(
        fake,
        hub.FINEWEB_REPO,
        {
            "sample/10BT/000_00000.parquet": parquet(texts[:60]),
            "data/x.parquet": b"",
            "sample/10BT/001_00000.parquet": parquet(texts[60:]),
            "sample/10BT/note.txt": b"1",
        },
    )
    manifest = prepare("fineweb", "sp1024", tmp_path / "a", val_docs=5, limit_docs=50)
    assert manifest["revision"] == OLD and fake.fetched().count("sample/10BT/000_00000.parquet") == 1
    assert "sample/10BT/001_00000.parquet" not in fake.fetched()
    assert manifest["source_sha256"] == {
        "sample/10BT/000_00000.parquet": hashlib.sha256(parquet(texts[:60])).hexdigest()
    }
    data = DataFolder.open(tmp_path / "a")
    assert data.tokenizer.sha256 == hashlib.sha256(challenge_files["tokenizers/fineweb_1024_bpe.model"]).hexdigest()
    assert data.tokenizer.vocab_size == 512
    assert [manifest["splits"][split]["num_documents"] for split in ("train", "val")] == [45, 5]
    both = prepare("fineweb", "byte", tmp_path / "b", val_docs=5, num_shards=2)
    assert both["splits"]["train"]["num_documents"] == 85
    assert both["splits"]["train"]["counted_bytes"] == sum(len(text.encode()) for text in texts[5:])
    assert fake.fetched().count("sample/10BT/000_00000.parquet") == 1  # one download for both folders
    with pytest.raises(ValueError, match="num-shards 3 is too many"):
        prepare("fineweb", "byte", tmp_path / "c", num_shards=3)


@pytest.mark.parametrize("source", HUB_SAMPLES)
def test_a_slice_is_of_the_last_file_of_a_sample_and_stays_pinned(source: str, fake: FakeHub, tmp_path: Path) -> None:
    repo, folder = HUB_SAMPLES[source]
    first, last = ([f"{name} {n} " + "word " * (10 + n) for n in range(40)] for name in ("first", "last"))
    files = {f"{folder}/000_00000.parquet": parquet(first), f"{folder}/001_00000.parquet": parquet(last), "data/z.parquet": b"",
             f"{folder}/note.txt": b"1"}
    serve(fake, repo, files)
    out, request = tmp_path / "slice.jsonl", Request(source, 12, min_chars=80, max_chars=170, skip_docs=3)
    manifest, there = make_slice(request, out)
    fitting = [text for text in last if 80 <= len(text) <= 170]
    assert not there and read_slice(out).documents == tuple(fitting[3:15])
    assert manifest["revision"] == OLD and fake.fetched() == [f"{folder}/001_00000.parquet"]
    assert manifest["source_files"] == {f"{folder}/001_00000.parquet": hashlib.sha256(files[f"{folder}/001_00000.parquet"]).hexdigest()}
    fake.requests.clear()
    assert make_slice(request, out) == (manifest, True) and not fake.requests
    serve(fake, repo, {f"{folder}/001_00000.parquet": parquet(first)}, NEW)  # main moves on
    out.unlink()
    assert make_slice(request, out)[0] == manifest and read_slice(out).documents == tuple(fitting[3:15])
    assert make_slice(request, tmp_path / "new.jsonl")[0]["revision"] == NEW
    with pytest.raises(ValueError, match="no Parquet file below"):
        serve(fake, repo, {f"{folder}/note.txt": b"1"}, OLD)
        make_slice(Request(source, 1, revision=OLD), tmp_path / "none.jsonl")


def test_a_cached_file_whose_bytes_changed_is_fetched_again(fake: FakeHub, tmp_path: Path) -> None:
    serve(fake, hub.FINEWEB_REPO, {"sample/10BT/0.parquet": b"right bytes"})
    [file] = hub.list_files(hub.FINEWEB_REPO, OLD, hub.FINEWEB_FOLDER)
    path, _ = hub.fetch(hub.FINEWEB_REPO, OLD, file)
    path.resolve().write_bytes(b"wrong bytes")
    with pytest.raises(ValueError, match="it was removed"):
        hub.fetch(hub.FINEWEB_REPO, OLD, file)
    assert hub.fetch(hub.FINEWEB_REPO, OLD, file)[0].read_bytes() == b"right bytes"


def test_what_cannot_be_had_is_said_in_one_sentence(
    fake: FakeHub, challenge_files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(sentence: str, **options: object) -> None:
        with pytest.raises(ValueError, match=sentence) as caught:
            prepare("challenge", out=tmp_path / "data", **options)
        assert "\n" not in str(caught.value)

    refused("does not exist on http://127.0.0.1.* or is private")
    serve(fake, hub.CHALLENGE_REPO, challenge_files)
    refused("no revision 'v9'", revision="v9")
    refused("no shards for the tokenizer 'sp4096'; it has fineweb10B_sp1024, fineweb10B_sp8192", tokenizer="sp4096")
    refused("0 files fineweb_8192_bpe.model", tokenizer="sp8192")
    refused("num-shards 80 is too many", num_shards=80)
    refused("come with their own tokenizer", tokenizer="byte")
    fake.error_code = "GatedRepo"
    refused("is gated: accept its terms at .* HF_TOKEN")
    fake.error_code = None
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    refused("cannot be fetched from http://127.0.0.1:9 .*check the network and HF_ENDPOINT.*--source embedded")


def test_a_file_missing_at_a_revision_and_one_offline(
    fake: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(fake, hub.CHALLENGE_REPO, {"a.model": b"x"})
    with pytest.raises(ValueError, match="b.model does not exist at revision"):
        hub.fetch(hub.CHALLENGE_REPO, OLD, hub.HubFile("b.model", 1, None))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="a.model cannot be fetched from .*check the network"):
        hub.fetch(hub.CHALLENGE_REPO, OLD, hub.HubFile("a.model", 1, None), tmp_path)


def test_the_official_tokenizer_has_the_name_that_is_looked_for(shared_dir: Path) -> None:
    found = hub.challenge_tokenizer(
        [hub.HubFile("tokenizers/fineweb_1024_bpe.model", 1, None)], hub.CHALLENGE_TOKENIZER
    )
    assert load_tokenizer(shared_dir / "data/fineweb" / Path(found.path).name).vocab_size == 1024
