"""The configuration of a RandOpt run: what is refused, and that the named configs hold what their table says."""

import re
from pathlib import Path

import pytest

from bitsperbyte.randopt.config import RandOptConfig
from bitsperbyte.run.config import check_settings, config_hash, load_config, resolved_yaml

REPO = Path(__file__).resolve().parents[2]
FOLDER = REPO / "configs" / "randopt"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))

# model, task, train, test, new tokens, population, sigmas, K, secondary K, probes
TABLE = {
    "smoke_1gpu_small": ("Qwen/Qwen2.5-1.5B-Instruct", "gsm8k", 32, 32, 512, 16, {1e-3, 2e-3}, 4, [], 3),
    "tuned_1xh100": ("Qwen/Qwen2.5-7B-Instruct", "gsm8k", 64, 64, 512, 256, {5e-4, 1e-3, 2e-3}, 25, [], 0),
    "run_512_7b_h100": ("Qwen/Qwen2.5-7B-Instruct", "gsm8k", 128, 256, 512, 512, {5e-4, 1e-3, 2e-3}, 25, [10], 5),
    "run_512_7b_math500hard": ("Qwen/Qwen2.5-7B-Instruct", "math500", 64, 192, 2048, 512, {5e-4, 1e-3, 2e-3}, 25, [10], 5),
    "run_512_7b_math500hard_lowsigma": ("Qwen/Qwen2.5-7B-Instruct", "math500", 64, 192, 2048, 512, {5e-4, 1e-4}, 25, [10], 5),
    "standard_8xh100_qwen72b": ("Qwen/Qwen2.5-72B-Instruct", "gsm8k", 200, 200, 1024, 512, {5e-4, 1e-3, 2e-3}, 20, [51], 0),
}
MINIMAL = {"model": {"path": "m"}, "task": {"name": "gsm8k"}, "noise": {"sigmas": [1e-3]}}


def config(name: str) -> RandOptConfig:
    return load_config(FOLDER / f"{name}.yaml", RandOptConfig)


@pytest.mark.parametrize("name", NAMES)
def test_every_config_loads_and_reads_back(name: str, tmp_path: Path) -> None:
    loaded = config(name)
    assert loaded.name == name
    (tmp_path / "again.yaml").write_text(resolved_yaml(loaded))
    assert load_config(tmp_path / "again.yaml", RandOptConfig) == loaded
    assert (FOLDER / f"{name}.yaml").read_text().startswith("# "), "a config says what it is"


@pytest.mark.parametrize("name", TABLE)
def test_the_named_standards_are_those_of_the_table(name: str) -> None:
    c = config(name)
    row = (c.model.path, c.task.name, c.task.num_train, c.task.num_test, c.task.max_new_tokens, c.search.population,
           set(c.noise.sigmas), c.search.top_k, c.search.secondary_k, c.probes.top)
    assert row == TABLE[name]
    assert c.model.dtype == "bfloat16" and c.noise.sigma == "absolute" and c.noise.scheme == "rademacher"
    assert c.controls.random_k and c.controls.base_majority and c.controls.best_single and c.heldout.enabled
    assert c.heldout.num_docs == (32 if name == "smoke_1gpu_small" else 256) and c.heldout.source == "fineweb"


def test_what_only_one_of_them_has() -> None:
    graphs = {name: config(name).decode.graphs for name in TABLE}
    assert graphs.pop("smoke_1gpu_small") == "off" and set(graphs.values()) == {"on"}
    assert {name for name in TABLE if config(name).decode.max_sequences == 512} == {"tuned_1xh100"}
    assert all(config(name).task.levels == ([4, 5] if "math500" in name else None) for name in TABLE)
    big = config("standard_8xh100_qwen72b")
    assert (big.hardware.num_gpus, big.hardware.tensor_parallel, big.model.engine) == (8, 8, "vllm")
    assert (big.search.top_k, big.search.secondary_k) == (512 * 4 // 100, [512 * 10 // 100])
    assert all(config(name).model.engine == "auto" for name in NAMES if name != big.name)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"model": {}}, "either a path or the settings"),
        ({"model": {"path": "m", "golf": {}}}, "either a path or the settings"),
        ({"noise": {"sigmas": [0.0]}}, "above 0"),
        ({"noise": {"sigmas": [float("nan")]}}, "above 0"),
        ({"noise": {"sigmas": [0.1, float("inf")]}}, "holds inf, and noise is float32"),
        ({"noise": {"sigmas": [1e300]}}, "must lie from 1e-30 to 1e\\+30"),
        ({"noise": {"sigmas": [1e-300]}}, "must lie from 1e-30 to 1e\\+30"),
        ({"search": {"population": 10**12}}, "less than or equal to 1000000"),
        ({"controls": {"num_subsets": 10**9}}, "less than or equal to"),
        ({"controls": {"temperature": 1e-300}}, "greater than or equal to 0.000001"),
        ({"noise": {"sigmas": [1e-3, 1e-3]}}, "names one sigma twice"),
        ({"noise": {"sigmas": []}}, "at least 1 item"),
        ({"search": {"population": 4, "top_k": 5}}, "an ensemble of 5 cannot be drawn"),
        ({"search": {"top_k": 8, "secondary_k": [8]}}, "repeats a size"),
        ({"search": {"top_k": 8, "secondary_k": [100]}}, "an ensemble of 100 cannot be drawn"),
        ({"controls": {"control_pool": 4}}, "controls.control_pool 4 must hold at least search.top_k 8"),
        ({"controls": {"num_subsets": 19}}, "greater than or equal to 20"),
        ({"probes": {"top": 65}}, "probes.top 65 exceeds"),
        ({"hardware": {"num_gpus": 3, "tensor_parallel": 2}}, "must be a multiple"),
        ({"task": {"name": "chess"}}, "Input should be"),
    ],
)
def test_settings_that_cannot_work_are_refused(change: dict, expected: str) -> None:
    RandOptConfig.model_validate(MINIMAL)
    with pytest.raises(ValueError, match=expected):
        RandOptConfig.model_validate({**MINIMAL, **change})


def test_a_small_pool_is_fine_without_its_control() -> None:
    off = {**MINIMAL, "controls": {"random_k": False, "control_pool": 1}}
    assert RandOptConfig.model_validate(off).controls.control_pool == 1


@pytest.mark.parametrize(("section", "message"), [
    ({"count": -1}, "workers.count must be greater than or equal to 0, and it is -1"),
    ({"count": "two"}, "workers.count must be a valid integer"),
    ({"cpus_each": 0}, "workers.cpus_each must be greater than or equal to 1, and it is 0"),
    ({"when_fewer": "wait"}, "workers.when_fewer must be 'use' or 'refuse', and it is 'wait'"),
    ({"timeout_s": 0}, "workers.timeout_s must be greater than 0, and it is 0"),
    ({"address": ""}, "workers.address String should match pattern"),
    ({"address": "ray://head:10001"}, "workers.address String should match pattern"),
    ({"max_failures": 0}, "workers.max_failures must be greater than or equal to 1"),
    ({"counts": 2}, "there is no setting workers.counts; did you mean workers.count?"),
])
def test_workers_that_cannot_be_are_refused(section: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        check_settings({**MINIMAL, "workers": section}, RandOptConfig, "a config")


def test_workers_need_a_base_to_rebuild_from() -> None:
    inexact = {**MINIMAL, "noise": {"sigmas": [1e-3], "base": "none"}}
    assert RandOptConfig.model_validate(inexact).workers.count == 0
    with pytest.raises(ValueError, match="noise.base none leaves rounding errors that depend on which models ran before"):
        RandOptConfig.model_validate({**inexact, "workers": {"count": None}})


def test_workers_are_not_part_of_a_runs_identity() -> None:
    configs = [RandOptConfig.model_validate({**MINIMAL, "workers": workers}) for workers in ({}, {"count": 8, "timeout_s": 5})]
    assert configs[0] != configs[1] and config_hash(configs[0]) == config_hash(configs[1])
