"""Checkpoints: folders, GGUF files and a hub on this machine; names and hashes; every refusal as a sentence."""

import hashlib
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bitsperbyte.randopt.config import ModelSection
from bitsperbyte.randopt.engines import checkpoint
from bitsperbyte.randopt.engines.checkpoint import Checkpoint, checkpoint_names, files_sha256, load_checkpoint, tensor_names

CPU = torch.device("cpu")


def load(path: Path | str, said: list[str] | None = None, **settings: Any) -> Checkpoint:
    return load_checkpoint(ModelSection(path=str(path), device="cpu", **settings), CPU, (said if said is not None else []).append)


@pytest.fixture
def own_folder(checkpoint_folder: Callable, tmp_path: Path) -> Path:
    """A checkpoint that a test may spoil."""
    return Path(shutil.copytree(checkpoint_folder(), tmp_path / "model"))


def test_a_folder_is_loaded_with_its_names_and_hashes(checkpoint_folder: Callable) -> None:
    from safetensors.torch import load_file

    folder = checkpoint_folder()
    found = load(folder)
    stored = load_file(folder / "model.safetensors")
    live = dict(found.model.named_parameters(remove_duplicate=False))
    assert set(found.names.values()) == set(stored) and "lm_head.weight" in live and "lm_head.weight" not in found.names
    assert all(torch.equal(live[name], stored[stored_name]) for name, stored_name in found.names.items())
    assert not any(p.requires_grad for p in found.model.parameters()) and not found.model.training
    assert next(found.model.parameters()).dtype == torch.float32 and found.revision is None
    assert found.weights_sha256 == hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert load(folder, dtype="float16").model.dtype == torch.float16


def test_several_files_hash_as_sha256sum_lists_them(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        (tmp_path / name).write_bytes(name.encode() * 1000)
    listed = subprocess.run(["sha256sum", "a", "b", "c"], cwd=tmp_path, capture_output=True, check=True).stdout
    assert files_sha256([tmp_path / name for name in ("b", "c", "a")]) == hashlib.sha256(listed).hexdigest()


def test_shards_are_one_checkpoint(checkpoint_folder: Callable, own_folder: Path) -> None:
    whole = load(checkpoint_folder())
    whole.model.save_pretrained(own_folder, max_shard_size="60KB")
    (own_folder / "model.safetensors").unlink()
    shards = sorted(own_folder.glob("model-*.safetensors"))
    assert len(shards) > 1
    found = load(own_folder)
    assert found.names == whole.names and found.weights_sha256 == files_sha256(shards) != whole.weights_sha256
    assert found.tokenizer_sha256 == whole.tokenizer_sha256
    shards[0].unlink()
    with pytest.raises(ValueError, match=f"lacks the weight file {shards[0].name}"):
        load(own_folder)


def test_a_checkpoint_of_the_base_model_keeps_its_own_names(tiny_model: Callable) -> None:
    """GPT-2 is published without the prefix that the live model puts before its names."""
    model = tiny_model("gpt2")
    stored = {name.removeprefix("transformer.") for name, _ in model.named_parameters()}
    names = checkpoint_names(model, stored)
    assert names["transformer.wte.weight"] == "wte.weight" and set(names.values()) == stored


def test_parameters_made_of_several_tensors_are_refused(tiny_model: Callable) -> None:
    model = tiny_model("llama")
    stored = {name for name, _ in model.named_parameters()} - {"model.layers.1.mlp.up_proj.weight"}
    with pytest.raises(ValueError, match=r"builds the parameter model.layers.1.mlp.up_proj.weight from several"):
        checkpoint_names(model, stored)


def spoil_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def drop_tensor(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def index(folder: Path, text: str) -> None:
    (folder / "model.safetensors.index.json").write_text(text)


def weights(folder: Path, change: Callable[[bytes], bytes]) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(change(path.read_bytes()))


def only_pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def no_tokenizer(folder: Path) -> None:
    for path in folder.glob("*token*"):
        path.unlink()


@pytest.mark.parametrize(("spoil", "words"), [
    (lambda f: (f / "config.json").unlink(), "has no config.json: give a folder that has one"),
    (lambda f: (f / "config.json").write_text("{"), "config.json is damaged"),
    (only_pickled, "can run code when it is opened .*convert it to safetensors"),
    (lambda f: (f / "model.safetensors").unlink(), "has no weights"),
    (lambda f: (f / "model.safetensors").rename(f / "x.gguf"), "set model.path to one of them, such as .*x.gguf"),
    (lambda f: (f / "model.safetensors").write_bytes(b"\x08" + bytes(7) + b"garbage!"), "not a whole safetensors file: fetch it again"),
    (lambda f: spoil_config(f, quantization_config={"quant_method": "awq"}), r"quantised \(awq\).*take the unquantised model"),
    (lambda f: spoil_config(f, intermediate_size=49), "do not fit its config.json|cannot load the model"),
    (lambda f: spoil_config(f, model_type="nonesuch"), "transformers cannot load"),
    (lambda f: spoil_config(f, auto_map={"AutoConfig": "x.Y"}, model_type="own"), "set model.trust_remote_code"),
    (drop_tensor, r"1 tensors \(model.norm.weight, ...\) are missing"),
    (no_tokenizer, "has no tokenizer: put the files"),
    (lambda f: (f / "config.json").write_text("[]"), "config.json is damaged"),
    (lambda f: spoil_config(f, quantization_config="x"), "is quantised"),
    (lambda f: spoil_config(f, vocab_size=100), r"do not fit its config.json: .*embed_tokens.* of another shape"),
    (lambda f: spoil_config(f, hidden_size="x"), "transformers cannot load the "),
    (lambda f: spoil_config(f, hidden_size=0), "transformers cannot load the |do not fit its config.json"),
    (lambda f: spoil_config(f, num_hidden_layers=3), "transformers cannot load the |do not fit its config.json"),
    (lambda f: index(f, "[]"), "index.json is damaged"),
    (lambda f: index(f, '{"weight_map": {"a": 5}}'), "index.json is damaged"),
    (lambda f: index(f, '{"weight_map": {}}'), "index.json is damaged"),
    (lambda f: index(f, '{"weight_map": {"a": "../x.safetensors"}}'), "index.json is damaged"),
    (lambda f: weights(f, lambda raw: raw[: len(raw) // 2]), "not a whole safetensors file: fetch it again"),
    (lambda f: weights(f, lambda raw: raw + b"x"), "not a whole safetensors file: fetch it again"),
    (lambda f: weights(f, lambda raw: b"\x01" + bytes(7) + b"5"), "not a whole safetensors file: fetch it again"),
    (lambda f: weights(f, lambda raw: (200_000).to_bytes(8, "little") + b"[" * 200_000), "not a whole safetensors file: fetch it again"),
    (lambda f: weights(f, lambda raw: raw[:-4] + b"\0\0\xc0\x7f"), r"weights that are not finite numbers in model\..*, as float32: fetch it again"),
], ids=range(27))
def test_what_cannot_be_used_gets_a_sentence(own_folder: Path, spoil: Callable[[Path], object], words: str) -> None:
    spoil(own_folder)
    with pytest.raises(ValueError, match=words):
        load(own_folder)


def test_code_of_a_model_does_not_run_unasked(own_folder: Path, tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    (own_folder / "x.py").write_text(f"open({str(trace)!r}, 'w')\nclass Y: pass\n")
    spoil_config(own_folder, auto_map={"AutoConfig": "x.Y", "AutoModelForCausalLM": "x.Y"}, model_type="own")
    with pytest.raises(ValueError):
        load(own_folder)
    assert not trace.exists()


def test_a_header_that_lies_about_its_length_takes_no_memory(tmp_path: Path) -> None:
    for content in (b"", b"abc", (2**60).to_bytes(8, "little") + b"{}", (50).to_bytes(8, "little") + b"{}"):
        (tmp_path / "x").write_bytes(content)
        with pytest.raises(ValueError, match="not a whole safetensors file"):
            tensor_names(tmp_path / "x")


def test_cuda_without_a_gpu() -> None:
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="torch sees no GPU"):
            checkpoint.pick_device("cuda")
    assert checkpoint.pick_device("cpu") == CPU


# -- GGUF -------------------------------------------------------------------------------------------------------------


def write_gguf(path: Path, model: torch.nn.Module, tokenizer: Any) -> None:
    """A Qwen2 model as llama.cpp names its parts."""
    import gguf

    config, writer = model.config, gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    vocabulary = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    merges = [" ".join(pair) for pair in json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if i < 3 else 1 for i in range(len(vocabulary))])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    ours = {"embed_tokens": "token_embd", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "o_proj": "attn_output",
            "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down",
            "norm": "output_norm"}
    for name, tensor in model.named_parameters():
        _, *block, part, kind = name.replace("self_attn.", "").replace("mlp.", "").split(".")
        place = f"blk.{block[1]}." if block else ""
        writer.add_tensor(f"{place}{ours[part]}.{kind}", tensor.numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_is_the_model_it_was_made_of(checkpoint_folder: Callable, tmp_path: Path) -> None:
    whole = load(checkpoint_folder())
    path = tmp_path / "tiny.gguf"
    write_gguf(path, whole.model, whole.tokenizer)
    found = load(path)
    ids = torch.arange(20)[None] + 3
    assert torch.allclose(found.model(ids).logits, whole.model(ids).logits, atol=1e-5)
    assert found.names == {name: name for name in whole.names}, "the names that transformers gives the tensors"
    assert found.weights_sha256 == hashlib.sha256(path.read_bytes()).hexdigest() and len(found.tokenizer_sha256) == 64
    text = "The quick brown fox — naïve"
    assert found.tokenizer(text, add_special_tokens=False)["input_ids"] == whole.tokenizer(text, add_special_tokens=False)["input_ids"]
    with pytest.raises(ValueError, match="there is no file"):
        load(tmp_path / "other.gguf")


# -- the hub ----------------------------------------------------------------------------------------------------------

COMMIT = "c" * 40


class FakeHub(ThreadingHTTPServer):
    """One model repository, org/tiny, whose files are a folder's; or an error for everything."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.error, self.paths = folder, "", []


class Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        self.server.paths.append(path)
        if self.server.error:
            return self.answer({"GatedRepo": 403, "RepoNotFound": 401}.get(self.server.error, 404), b"{}", {"X-Error-Code": self.server.error})
        if match := re.fullmatch(r"/api/models/org/tiny(?:/revision/(.*))?", path):
            if match[1] not in (None, "main", COMMIT):
                return self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            files = [{"rfilename": p.name} for p in self.server.folder.iterdir()]
            return self.answer(200, json.dumps({"id": "org/tiny", "sha": COMMIT, "siblings": files}).encode(), {})
        if path == f"/api/models/org/tiny/tree/{COMMIT}":
            rows = [{"type": "file", "path": p.name, "size": p.stat().st_size, "oid": "0" * 40} for p in self.server.folder.iterdir()]
            return self.answer(200, json.dumps(rows).encode(), {})
        if match := re.fullmatch(rf"/org/tiny/resolve/{COMMIT}/(.*)", path):
            content = (self.server.folder / match[1]).read_bytes()
            return self.answer(200, content, {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT})
        self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


@pytest.fixture
def fake_hub(checkpoint_folder: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    import huggingface_hub.constants as constants

    server = FakeHub(checkpoint_folder())
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_model_of_the_hub_is_pinned_and_kept(fake_hub: FakeHub, checkpoint_folder: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    (fake_hub.folder / "x.py").write_text("raise SystemExit")
    said: list[str] = []
    found = load("org/tiny", said, revision="main")
    (fake_hub.folder / "x.py").unlink()
    assert found.revision == COMMIT and COMMIT in said[0] and found.folder.name == COMMIT
    assert found.weights_sha256 == load(checkpoint_folder()).weights_sha256
    assert not any(path.endswith(".py") for path in fake_hub.paths), "code is not even fetched"
    fake_hub.shutdown()  # nobody answers any more
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    again = load("org/tiny", said, revision="main")
    assert again.revision == COMMIT and again.weights_sha256 == found.weights_sha256
    assert "cannot be reached: taking the copy" in said[-1] and COMMIT in said[-1]


@pytest.mark.parametrize(("error", "words"), [
    ("GatedRepo", "is gated: accept its terms"), ("RepoNotFound", "no model of that name"), ("RevisionNotFound", "has no revision v9")])
def test_what_the_hub_refuses_gets_a_sentence(fake_hub: FakeHub, error: str, words: str) -> None:
    fake_hub.error = error
    with pytest.raises(ValueError, match=words):
        load("org/tiny", revision="v9")


def test_without_a_connection_or_a_copy(fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants as constants

    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ValueError, match="the hub cannot be reached, and its cache has no copy of it: copy the model"):
        load("org/other")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"switched off \(HF_HUB_OFFLINE\), and its cache has no copy of it at v1"):
        load("org/other", revision="v1")


def test_neither_a_folder_nor_a_name() -> None:
    with pytest.raises(ValueError, match="there is no folder ./models/none"):
        load("./models/none")

