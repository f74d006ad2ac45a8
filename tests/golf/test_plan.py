"""The plan: published sizes, arithmetic counted by torch itself, a measured step, and what it warns of."""

import json
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from bitsperbyte.golf.bundle import bundle, script_config
from bitsperbyte.golf.config import GolfConfig
from bitsperbyte.golf.model import GolfModel, ModelConfig, flops_per_token
from bitsperbyte.golf.plan import MEASURED_RATIOS, StepTime, measure_step, plan
from bitsperbyte.run.config import load_config

TINY = {"model": {"vocab_size": 64, "dim": 32, "num_heads": 2, "num_kv_heads": 1, "order": [0, 1, 1, 0], "skips": [[0, 3], [1, 2]]},
        "train": {"batch_tokens": 256, "seq_len": 32, "micro_batch_tokens": 64}}


def tiny(**sections) -> GolfConfig:
    return GolfConfig.model_validate({**TINY, **sections})


# name -> parameters, int8 payload, training bytes over payload
PUBLISHED = {"baseline": (17_059_912, 17_178_912, 3.91), "recurrent_v2": (17_316_896, None, 3.89),
             "recurrent_v4": (7_874_592, 7_932_032, 3.84), "recurrent_v5": (7_874_592, 7_932_032, 3.84),
             "recurrent_v6": (14_541_744, 14_637_248, 3.89), "recurrent_v7": (14_541_744, 14_637_248, 3.89)}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(repo_dir: Path, name: str) -> None:
    parameters, payload, ratio = PUBLISHED[name]
    made = plan(load_config(repo_dir / f"configs/golf/{name}.yaml", GolfConfig))
    assert made.parameters["total"] == parameters == sum(n for part, n in made.parameters.items() if part != "total")
    assert payload in (None, made.int8_bytes) and made.int8_bytes == made.payload_bytes
    assert round(made.payload_ratio, 2) == ratio
    lowest, highest = MEASURED_RATIOS["reference_int8", "zlib"]
    assert made.file_bytes == (round(lowest * made.payload_bytes), round(highest * made.payload_bytes))
    assert sum(group.num_parameters for group in made.groups) == parameters
    assert made.step is made.num_steps is made.num_tokens is made.warmdown is None  # nothing was measured


@pytest.mark.parametrize("window", [None, 5, 24])
@pytest.mark.parametrize("mlp_mult", [2, 3])
def test_arithmetic_equals_torchs_own_count(window: int | None, mlp_mult: int) -> None:
    """Ours counts, of causal attention, the scores that are needed: on average (T + 1) / 2 for each query, or fewer in a window.
    torch's counter takes the whole square of T x T, which its math kernel computes. All else must agree."""
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=96, dim=48, num_heads=4, num_kv_heads=2, mlp_mult=mlp_mult, order=(0, 1, 2, 1, 0),
                         skips=((0, 4),), attention_window=window)
    model, T = GolfModel(config), 24
    tokens = torch.randint(0, 96, (2, T))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model.loss(tokens, tokens).backward()
    seen = min(window or T, T)
    mean_context = sum(min(t + 1, seen) for t in range(T)) / T
    attention = len(config.order) * 12 * config.dim  # per token and token of context, forward and backward
    expected = flops_per_token(config, T) + attention * (T - mean_context)
    assert counter.get_total_flops() / tokens.numel() == pytest.approx(expected, rel=1e-3)


def test_a_block_counts_each_time_it_is_applied() -> None:
    once, twice = (flops_per_token(ModelConfig(order=order, skips=()), 1024) for order in ((0, 1), (0, 1, 1, 0)))
    head = 6 * 1024 * 512
    assert twice - head == 2 * (once - head)


def test_a_measured_step_gives_steps_and_tokens() -> None:
    config = tiny(schedule={"wallclock_s": 5.0, "max_steps": None, "warmdown": {"steps": None, "fraction": 0.2}})
    step = measure_step(config, torch.device("cpu"))
    assert step.device == "cpu" and 0 < step.step_s < 5 and f"{config.train.micro_batch_tokens} tokens" in step.how
    made = plan(config, step)
    assert (made.num_steps - 1) * step.step_s < 5.0 <= made.num_steps * step.step_s * (1 + 1e-9)
    assert made.num_tokens == made.num_steps * 256
    assert made.warmdown == "the last 1.0 s (20.0%) of 5 s" and not made.warnings


@pytest.mark.parametrize("step_s, steps", [(0.5, 20), (0.3, 34), (20.0, 1), (0.001, 100)])
def test_projected_steps_end_with_the_first_limit(step_s: float, steps: int) -> None:
    """The run ends at the first step after which the clock stands at 10 s or more."""
    config = tiny(schedule={"wallclock_s": 10.0, "max_steps": 100, "warmdown": {"steps": 0}})
    assert plan(config, StepTime(step_s, "cpu", "")).num_steps == steps


def test_without_a_clock_the_steps_need_no_measurement() -> None:
    made = plan(tiny(schedule={"wallclock_s": None, "max_steps": 7, "warmdown": {"steps": 0}}))
    assert (made.num_steps, made.num_tokens) == (7, 7 * 256)


def test_over_the_cap_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    over = tiny(artifact={"cap_bytes": 1_000})
    assert [w.partition(" the artifact")[0] for w in plan(over).warnings] == ["over the cap: even at the lowest measured ratio"]
    monkeypatch.setattr("bitsperbyte.golf.plan.MEASURED_RATIOS", {})  # a scheme and codec that nobody has measured yet
    made = plan(over)
    assert made.file_bytes is None
    assert [w.partition(" is ")[0] for w in made.warnings] == ["may end over the cap: the payload before compression"]


def test_between_the_measured_ratios_it_may_end_over_the_cap() -> None:
    payload = plan(tiny()).payload_bytes
    lowest, highest = MEASURED_RATIOS["reference_int8", "zlib"]
    settings = script_config(tiny(), tokenizer_file="tokenizer.model", tokenizer_sha256="0" * 64, val_sha256="0" * 64)
    smallest = bundle(settings, "compressed").num_bytes
    cap = smallest + round(payload * (lowest + highest) / 2)
    assert [w[:24] for w in plan(tiny(artifact={"cap_bytes": cap})).warnings] == ["may end over the cap: at"]
    assert not plan(tiny(artifact={"cap_bytes": smallest + payload})).warnings


def test_a_rate_that_falls_from_the_first_step_is_a_warning() -> None:
    """The challenge's 1,200 steps of warmdown in 600 s: above half a second a step, the rate falls from the start."""
    slow, fast = (plan(tiny(), StepTime(step_s, "cpu", "")) for step_s in (0.6, 0.4))
    assert slow.warmdown.startswith("decays from the first step") and any("first step" in w for w in slow.warnings)
    assert fast.warmdown.startswith("the last 480.0 s") and not fast.warnings


def test_the_plan_is_plain_data() -> None:
    made = plan(tiny(), StepTime(0.5, "cpu", "guessed")).to_dict()
    assert json.loads(json.dumps(made))["step"] == {"step_s": 0.5, "device": "cpu", "how": "guessed"}
