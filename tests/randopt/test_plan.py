"""The plan: figures by hand, a published table of bounds, shapes from every place they can be read."""

import json
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch

from bitsperbyte.randopt.config import ModelSection, RandOptConfig
from bitsperbyte.randopt.engines.native import LOGIT_BYTES
from bitsperbyte.randopt.plan import GIB, GPUS, GRAPHS_BYTES, KNOWN_SHAPES, ModelShape, Work, bound, gpu_of, model_shape, plan, plan_memory
from bitsperbyte.run.config import load_config

SEVEN = ModelShape("published shape", *KNOWN_SHAPES["Qwen/Qwen2.5-7B-Instruct"])


def named(repo_dir: Path, name: str, *overrides: str) -> RandOptConfig:
    return load_config(repo_dir / f"configs/randopt/{name}.yaml", RandOptConfig, overrides)


# 7.6B parameters, 150 prompt tokens, half of the peak arithmetic: what the recorded 7B runs are held against
@pytest.mark.parametrize(
    ("gpu", "prompts", "answer", "longest", "reads_s", "compute_s", "switch_ms"),
    [("H100", 128, 251, 512, 2.33, 1.58, 9), ("H100", 64, 684, 2048, 9.31, 1.64, 9), ("H200", 128, 251, 512, 1.62, 1.58, 6),
     ("H200", 64, 684, 2048, 6.50, 1.64, 6)],
)
def test_the_published_bounds_come_out(gpu: str, prompts: int, answer: int, longest: int, reads_s: float, compute_s: float,
                                       switch_ms: int) -> None:
    made = bound(Work(prompts, 150, answer, longest), SEVEN.num_parameters, weights=2 * SEVEN.num_parameters, cache=0, gpu=GPUS[gpu],
                 num_sequences=prompts)
    assert (round(made.weight_reads_s, 2), round(made.compute_s, 2), round(made.switch_s * 1e3)) == (reads_s, compute_s, switch_ms)
    assert made.cache_reads_s == 0 and made.total_s == made.weight_reads_s + made.switch_s


def test_cache_reads_are_the_sum_over_steps() -> None:
    work, cache = Work(3, 10, 4, 4), SEVEN.cache_bytes(2)
    made = bound(work, 1, weights=0, cache=cache, gpu=GPUS["H100"], num_sequences=3)
    by_step = sum(3 * (10 + step) * cache for step in range(4))  # cached tokens before each step's own
    assert made.cache_reads_s == pytest.approx((by_step + 3 * 4 * cache / 2) / 3.35e12)  # a / 2 counts half of the step's own token


def test_gpus_share_reads_and_arithmetic_and_rows_that_wait_cost_steps() -> None:
    work = Work(100, 150, 200, 512)
    costs = dict(weights=10**10, cache=10**5, gpu=GPUS["H100"])
    one, four = (bound(work, 5 * 10**9, **costs, num_gpus=n, num_sequences=100) for n in (1, 4))
    for name in ("weight_reads_s", "cache_reads_s", "compute_s", "switch_s"):
        assert getattr(four, name) == pytest.approx(getattr(one, name) / 4)
    half = bound(work, 5 * 10**9, **costs, num_sequences=50)
    assert half.weight_reads_s / one.weight_reads_s == pytest.approx((512 + 200) / 512)
    pinned = bound(work, 5 * 10**9, **costs, num_sequences=100, pinned=True)
    assert pinned.switch_s - one.switch_s == pytest.approx(10**10 / 40e9)


def test_memory_of_the_7b_standard_by_hand(repo_dir: Path) -> None:
    made = plan(named(repo_dir, "run_512_7b_h100"))
    parts = made.memory.parts
    assert parts["weights"] == parts["base weights"] == 2 * 7_615_616_512  # 15.2 GB each
    token = 2 * 28 * 4 * 128 * 2  # keys and values, layers, heads, width, bytes
    assert parts["cache"] == 256 * 768 * token  # 256 test questions; 150 + 512 tokens, rounded up to a multiple of 128
    assert parts["captured graphs"] == GRAPHS_BYTES and parts["logits of a step"] == 256 * 152_064 * (2 + 28)
    assert parts["logits when scoring"] == 16_384 * 152_064 * 2 + 2**28 < LOGIT_BYTES["cuda"]
    assert (made.memory.num_sequences, made.memory.positions, made.memory.fits) == (256, 768, True)
    assert made.memory.total_bytes == sum(parts.values()) < 79 * GIB
    assert made.warnings == []


def test_work_of_the_7b_standard_by_hand(repo_dir: Path) -> None:
    phases = {phase.name: phase for phase in plan(named(repo_dir, "run_512_7b_h100")).phases}
    assert phases["search"].generated_tokens == 512 * 128 * 251 and phases["search"].read_tokens == 512 * 128 * 150
    assert phases["members, test set"].num_models == 55  # the best 25, and of a pool of 32 those 30.4 that are not among them
    assert phases["samples of the base"].generated_tokens == 25 * 256 * 251
    assert phases["held-out text"].num_models == 56 and phases["held-out text"].generated_tokens == 0
    off = plan(named(repo_dir, "run_512_7b_h100", "controls.random_k=false", "controls.base_majority=false", "heldout.enabled=false"))
    assert [phase.name for phase in off.phases] == ["base, train set", "search", "base, test set", "members, test set"]
    assert off.phases[-1].num_models == 25
    assert off.total_s == pytest.approx(sum(phase.seconds for phase in off.phases))


def test_the_72b_standard_is_split_over_its_gpus(repo_dir: Path) -> None:
    made = plan(named(repo_dir, "standard_8xh100_qwen72b"))
    assert made.memory.parts["weights"] == -(-2 * 72_706_203_648 // 8)
    assert made.memory.parts["cache"] == 200 * ((150 + 1024) * 2 * 80 * 8 * 128 * 2 // 8) and made.memory.fits
    assert made.memory.parts["logits when scoring"] == 3 * 4 * 2048 * 152_064 and made.memory.parts["captured graphs"] == GRAPHS_BYTES
    assert made.memory.total_bytes <= 79 * GIB and made.warnings == []
    assert "engine of vllm" in dict(made.rows())["engines"] and "8 GPUs" in dict(made.rows())["engines"]
    assert any("pinned CPU memory" in w for w in plan(named(repo_dir, "standard_8xh100_qwen72b", "hardware.tensor_parallel=4")).warnings)
    one = plan(named(repo_dir, "standard_8xh100_qwen72b", "hardware.num_gpus=1", "hardware.tensor_parallel=1"))
    assert one.memory.fits is False and any("raise hardware.tensor_parallel" in w for w in one.warnings)
    native = plan(named(repo_dir, "standard_8xh100_qwen72b", "model.engine=native"))
    assert "only the vllm engine splits a model over GPUs" in native.warnings[0]


@pytest.mark.parametrize(
    ("gib", "settings", "place", "rows", "expected"),
    [
        (79.0, {}, "device", 256, None),
        (40.0, {}, "pinned", 256, "stay in pinned CPU memory"),
        (40.0, {"base": "device"}, "device", None, "lower decode.memory_share or decode.score_tokens"),
        (29.0, {"base": "device"}, "device", None, "set noise.base to pinned"),
        (14.5, {}, "pinned", None, "raise hardware.tensor_parallel"),
    ],
)
def test_where_the_base_lies_and_what_to_change(repo_dir: Path, gib: float, settings: dict, place: str, rows: int | None,
                                                expected: str | None) -> None:
    config = named(repo_dir, "run_512_7b_h100", f"hardware.gpu_memory_gib={gib}", *(f"noise.{k}={v}" for k, v in settings.items()))
    made = plan(config)
    assert ("base weights" in made.memory.parts) == (place == "device")
    assert made.memory.pinned_bytes == (2 * SEVEN.num_parameters if place == "pinned" else 0)
    if rows is not None:
        assert made.memory.num_sequences == rows and made.memory.fits
    if expected is None:
        assert made.warnings == []
    else:
        assert any(expected in warning for warning in made.warnings), made.warnings


def test_the_cache_takes_no_more_than_its_share(repo_dir: Path) -> None:
    for share in (0.1, 0.5):
        config = named(repo_dir, "run_512_7b_h100", "hardware.gpu_memory_gib=40", "noise.base=device", f"decode.memory_share={share}")
        memory = plan_memory(config, SEVEN, 662)
        free = 40 * GIB - 4 * SEVEN.num_parameters
        row = memory.parts["cache"] // memory.num_sequences
        assert memory.num_sequences == int(free * share) // row < 256
        waits = f"memory holds {memory.num_sequences} of 256 sequences at once"
        assert any(warning.startswith(waits) for warning in plan(config).warnings) == (share == 0.1) == memory.fits


def test_known_shapes_are_those_of_the_networks() -> None:
    """Parameters counted from the other figures: embedding, layers of projections with biases, MLPs and norms."""
    heads = {"0.5B": 14, "1.5B": 12, "3B": 16, "7B": 28, "14B": 40, "32B": 40, "72B": 64, "135M": 9}
    for name, (num_parameters, layers, width, mlp, kv_heads, head, vocabulary) in KNOWN_SHAPES.items():
        size = name.split("-")[1]
        q, kv = heads[size] * head, kv_heads * head
        biases = q + 2 * kv if name.startswith("Qwen") else 0
        layer = width * (q + 2 * kv) + biases + q * width + 3 * width * mlp + 2 * width
        tied = size in ("0.5B", "1.5B", "3B", "135M")
        assert num_parameters == vocabulary * width * (1 if tied else 2) + layers * layer + width, name


def test_shapes_from_a_folder_and_a_golf_run(tmp_path: Path, repo_dir: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=96, hidden_size=32, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4,
                         num_key_value_heads=2, head_dim=8)
    config.save_pretrained(tmp_path)
    found = model_shape(ModelSection(path=str(tmp_path)))
    with torch.device("meta"):
        expected = sum(p.numel() for p in LlamaForCausalLM(config).parameters())
    assert found == ModelShape("config.json in its folder", expected, 3, 32, 80, 2, 8, 96)
    golf = plan(named(repo_dir, "smoke_cpu"))
    assert golf.shape.num_parameters == 329_224 and golf.shape.weight_bytes == 4 and "settings" in golf.shape.source
    assert golf.memory.fits is None and golf.seed is golf.total_s is None  # no GPU is named: nothing to hold it against


def test_the_shape_of_a_gguf_file_is_its_header(tmp_path: Path) -> None:
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.add_block_count(3)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(80)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_vocab_size(96)
    writer.add_tensor("token_embd.weight", np.zeros((96, 32), np.float32))  # without output.weight the head is tied to it
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    layer = 32 * (32 + 2 * 16) + 32 * 32 + 3 * 32 * 80 + 2 * 32
    expected = ModelShape("header of the GGUF file", 96 * 32 + 3 * layer + 32, 3, 32, 80, 2, 8, 96)
    assert model_shape(ModelSection(path=str(tmp_path / "tiny.gguf"))) == expected


def test_a_hub_out_of_reach_is_asked_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    class Closed(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(503)

        def log_message(self, *words: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Closed) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        with pytest.raises(ValueError, match=r"shape of org/none cannot be read from the config.json on the hub .*503"):
            model_shape(ModelSection(path="org/none"))
        server.shutdown()
    assert asked == ["/api/models/org/none"]


@pytest.mark.parametrize(("path", "expected"), [("no_such.gguf", "there is no file"), (None, "cannot be read from the config.json in its folder")])
def test_shapes_that_cannot_be_read(tmp_path: Path, path: str | None, expected: str) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=expected):
        model_shape(ModelSection(path=str(tmp_path / path) if path else str(tmp_path)))


def test_likelihood_is_arithmetic_alone(repo_dir: Path, tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"{i:02} " + "word " * 899}) for i in range(8)]  # 4,498 bytes, about 1,000 tokens
    (tmp_path / "a.jsonl").write_text("\n".join(lines[:4]))
    (tmp_path / "b.jsonl").write_text("\n".join(lines[4:]))
    made = plan(named(repo_dir, "smollm2_books", f"task.data={tmp_path}/a.jsonl", f"task.test_data={tmp_path}/b.jsonl", "task.num_train=4",
                      "task.num_test=4", "noise.base=pinned"))
    assert made.generated_tokens == 0 and made.phases[0].read_tokens == 4 * 1_000
    assert made.seed.answering_s == pytest.approx(2 * 134_515_008 * 4_000 / (989e12 / 2)) and made.seed.weight_reads_s == 0
    assert "cache" not in made.memory.parts and made.memory.fits and "samples of the base" not in {p.name for p in made.phases}
    away = plan(named(repo_dir, "smollm2_books", "task.data=gone.jsonl", "task.test_data=gone.jsonl", "task.num_train=4"))
    assert away.phases[0].read_tokens == 4_000


def test_gpus_are_known_by_a_word_of_their_name(repo_dir: Path) -> None:
    assert gpu_of("NVIDIA H100 80GB HBM3") is gpu_of("h100") is GPUS["H100"]
    assert gpu_of("NVIDIA L40S") is gpu_of(None) is None
    made = plan(named(repo_dir, "run_512_7b_h100", "hardware.gpu=NVIDIA L40S"))
    assert made.seed is made.total_s is None and any("speed of NVIDIA L40S" in warning for warning in made.warnings)


def test_the_plan_is_data_and_a_table(repo_dir: Path) -> None:
    made = plan(named(repo_dir, "run_512_7b_h100"))
    data = json.loads(json.dumps(made.to_dict()))
    assert data["memory"]["fits"] is True and data["memory"]["total_bytes"] == made.memory.total_bytes
    assert data["seed"]["seeds_per_s"] == pytest.approx(1 / made.seed.total_s) and data["total_s"] == made.total_s
    rows = dict(made.rows())
    assert "fits" in rows["memory a GPU, total"] and "(published shape)" in rows["model"]
    assert float(rows["seeds/s, at best"]) == pytest.approx(data["seed"]["seeds_per_s"], rel=1e-2)
    assert "of memory" not in " ".join(dict(replace(made, memory=replace(made.memory, available_bytes=None)).rows()))


def test_workers_share_the_models_of_a_phase(repo_dir: Path) -> None:
    one = plan(named(repo_dir, "run_512_7b_h100", "hardware.num_gpus=8"))
    assert one.num_engines == 1 and any("1 of 8 GPUs would be used: set workers.count to null" in w for w in one.warnings)
    eight = plan(named(repo_dir, "run_512_7b_h100", "hardware.num_gpus=8", "workers.count=null"))
    assert eight.num_engines == 8 and eight.warnings == [] and eight.memory == one.memory
    for alone, shared in zip(one.phases, eight.phases, strict=True):
        assert shared.seconds == pytest.approx(alone.seconds * -(-alone.num_models // 8) / alone.num_models)
    assert eight.to_dict()["seed"]["seeds_per_s"] == pytest.approx(8 * one.to_dict()["seed"]["seeds_per_s"])
    few = plan(named(repo_dir, "run_512_7b_h100", "hardware.num_gpus=8", "hardware.tensor_parallel=2", "workers.count=3",
                     "model.engine=vllm"))
    assert few.num_engines == 3 and any("6 of 8 GPUs" in w and "each 2 of them" in w for w in few.warnings)
    assert plan(named(repo_dir, "smoke_cpu", "workers.count=2")).num_engines == 2
