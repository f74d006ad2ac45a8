"""The configs that ship, the sections against the dataclasses they become, and what a config refuses."""

import dataclasses
import json
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from bitsperbyte.golf.config import GolfConfig, ModelSection, OptimSection, ScheduleSection, TrainSection, WarmdownSection
from bitsperbyte.golf.model import ModelConfig, parameter_counts
from bitsperbyte.golf.muon import OptimConfig
from bitsperbyte.golf.schedule import Schedule
from bitsperbyte.run.config import load_config, resolved_yaml

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "golf"
NAMES = ["baseline", "recurrent_v2", "recurrent_v4", "recurrent_v5", "recurrent_v6", "recurrent_v7", "seq2048", "window_attention",
         "int6", "four_hours", "demo_cpu"]


def load(name: str) -> GolfConfig:
    return load_config(CONFIGS / f"{name}.yaml", GolfConfig)


def test_these_configs_ship() -> None:
    assert sorted(path.stem for path in CONFIGS.glob("*.yaml")) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_config_loads_and_survives_being_written(name: str, tmp_path: Path) -> None:
    config = load(name)
    assert config.name == name
    (tmp_path / "again.yaml").write_text(resolved_yaml(config), encoding="utf-8")
    assert load_config(tmp_path / "again.yaml", GolfConfig) == config
    assert GolfConfig.model_validate(json.loads(config.model_dump_json())) == config


@pytest.mark.parametrize(("name", "total"), [
    ("baseline", 17_059_912), ("recurrent_v2", 17_316_896), ("recurrent_v4", 7_874_592), ("recurrent_v5", 7_874_592),
    ("recurrent_v6", 14_541_744), ("recurrent_v7", 14_541_744)])
def test_parameter_counts_of_the_published_runs(name: str, total: int) -> None:
    assert parameter_counts(load(name).model_dataclass())["total"] == total


@pytest.mark.parametrize(("name", "stride", "weight_decay", "rates"), [
    ("baseline", None, 0.0, (0.04, 0.04, 0.05)), ("recurrent_v2", None, 0.0, (0.04, 0.04, 0.05)),
    ("recurrent_v4", 512, 0.04, (0.04, 0.04, 0.05)), ("recurrent_v5", 512, 0.04, (0.04, 0.04, 0.05)),
    ("recurrent_v6", 512, 0.04, (0.04, 0.04, 0.05)), ("recurrent_v7", 256, 0.04, (0.02, 0.02, 0.03))])
def test_settings_of_the_published_runs(name: str, stride: int | None, weight_decay: float, rates: tuple[float, ...]) -> None:
    config = load(name)
    assert (config.eval.stride, config.optim.weight_decay) == (stride, weight_decay)
    assert (config.optim.matrix_lr, config.optim.scalar_lr, config.optim.embed_lr) == rates
    assert (config.train.batch_tokens, config.train.seq_len, config.train.seed) == (524_288, 1024, 1337)
    assert (config.schedule.wallclock_s, config.schedule.max_steps, config.schedule.warmup_steps) == (600.0, 20_000, 20)
    assert config.schedule.warmdown.steps == 1200 and config.artifact.scheme == "reference_int8" and config.artifact.codec == "zlib"


def test_what_the_other_configs_are_for() -> None:
    assert load("seq2048").train.seq_len == 2048 and load("window_attention").model.attention_window is not None
    assert load("int6").artifact.scheme == "int6" and load("four_hours").schedule.wallclock_s == 4 * 3600


# -- defaults that stand in two places -------------------------------------------------------------------------------


@pytest.mark.parametrize(("section", "dataclass"), [(ModelSection, ModelConfig), (OptimSection, OptimConfig)])
def test_a_section_and_its_dataclass_agree_field_by_field(section: type[BaseModel], dataclass: type) -> None:
    defaults = dataclasses.asdict(dataclass())
    assert set(section.model_fields) == set(defaults)
    stated = section().model_dump()
    for name, value in defaults.items():
        assert json.loads(json.dumps(stated[name])) == json.loads(json.dumps(value)), name


def test_the_schedule_agrees_with_its_dataclass() -> None:
    assert GolfConfig().schedule_dataclass() == Schedule(warmdown_steps=1200)
    assert {f.name for f in dataclasses.fields(Schedule)} == set(ScheduleSection.model_fields) - {"warmdown"} | {
        f"warmdown_{name}" for name in WarmdownSection.model_fields}


def test_every_setting_reaches_its_dataclass() -> None:
    model = {"vocab_size": 300, "dim": 24, "num_heads": 6, "num_kv_heads": 3, "mlp_mult": 3, "order": [0, 1, 0], "skips": [[0, 2]],
             "tie_embeddings": False, "rope_base": 5.0, "logit_softcap": 6.0, "qk_gain_init": 7.0, "tied_embed_init_std": 8.0,
             "attention_window": 9}
    optim = {name: 0.5 ** (i + 1) for i, name in enumerate(OptimSection.model_fields)}
    optim |= {"momentum_warmup_steps": 3, "ns_steps": 4}
    schedule = {"wallclock_s": 5.0, "max_steps": 6, "warmdown": {"fraction": 0.25}, "warmup_steps": 7}
    config = GolfConfig.model_validate({"model": model, "optim": optim, "schedule": schedule})
    assert config.model_dataclass().to_dict() == model
    assert dataclasses.asdict(config.optim_dataclass()) == optim
    assert config.schedule_dataclass() == Schedule(5.0, 6, None, 0.25, 7)


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("values", "match"), [
    ({"model": {"dim": 100, "num_heads": 3}}, "dim 100 must be a multiple of num_heads 3"),
    ({"model": {"order": [0, 2]}}, "order must use every block"),
    ({"model": {"skips": [[4, 3]]}}, "must go from an earlier to a later"),
    ({"model": {"dimm": 3}}, "dimm"),
    ({"train": {"batch_tokens": 1000}}, "train.batch_tokens 1000 must be a multiple of train.seq_len 1024"),
    ({"train": {"batch_tokens": 3072, "micro_batch_tokens": 2048}}, "3072 must be a multiple of train.micro_batch_tokens 2048"),
    ({"train": {"seed": -1}}, "seed"),
    ({"train": {"device": "tpu"}}, "device"),
    ({"schedule": {"warmdown": {"steps": 3, "fraction": 0.5}}}, "either steps or fraction"),
    ({"schedule": {"warmdown": {}}}, "either steps or fraction"),
    ({"schedule": {"wallclock_s": None, "max_steps": None}}, "the run would never end"),
    ({"schedule": {"wallclock_s": 0}}, "wallclock_s"),
    ({"eval": {"stride": 2000}}, "eval.stride 2000 must not exceed the window of 1024"),
    ({"eval": {"stride": 600, "window": 512}}, "eval.stride 600 must not exceed eval.window 512"),
    ({"eval": {"stride": 64, "drop_tail": True}}, "drop_tail goes with non-overlapping"),
    ({"optim": {"matrix_lr": 0}}, "matrix_lr"),
    ({"optim": {"momentum": 1.0}}, "momentum"),
    ({"artifact": {"scheme": "int5"}}, "int6"),
    ({"name": "a/b"}, "name"),
])
def test_settings_that_do_not_fit_are_refused(values: dict, match: str) -> None:
    with pytest.raises(ValidationError) as caught:
        GolfConfig.model_validate(values)
    assert match in str(caught.value)


def test_a_config_cannot_be_changed_once_it_is_read() -> None:
    with pytest.raises(ValidationError):
        GolfConfig().train.seed = 3


def test_the_whole_batch_in_one_go_is_allowed() -> None:
    assert TrainSection(batch_tokens=2048, micro_batch_tokens=2048).micro_batch_tokens == 2048
