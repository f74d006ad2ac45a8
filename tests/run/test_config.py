import json
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, model_validator

from bitsperbyte.golf.config import GolfConfig
from bitsperbyte.run.config import check_settings, config_diff, config_hash, load_config, read_yaml, resolved_yaml


class Warmdown(BaseModel):
    model_config = ConfigDict(extra="forbid")
    steps: int | None = None
    fraction: float | None = None

    @model_validator(mode="after")
    def not_both(self) -> "Warmdown":
        if self.steps is not None and self.fraction is not None:
            raise ValueError("warmdown takes either steps or fraction")
        return self


class Schedule(BaseModel):
    model_config = ConfigDict(extra="forbid")
    wallclock_s: float | None = Field(600.0, gt=0)
    warmdown: Warmdown | None = None


class Optim(BaseModel):
    model_config = ConfigDict(extra="forbid")
    matrix_lr: float = 0.04
    order: list[int] = [0, 1]
    compile: Literal["auto", "on", "off"] = "auto"


class Config(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = "run"
    tied: bool = True
    schedule: Schedule = Schedule()
    optim: Optim = Optim()


@pytest.fixture
def write(tmp_path: Path):
    def write(name: str, text: str) -> Path:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
        return tmp_path / name

    return write


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(ValueError) as caught:
        load_config(path, Config, overrides)
    message = str(caught.value)
    assert "\n" not in message and "pydantic.dev" not in message
    return message


def test_extends_chain_merges_mappings_and_replaces_lists(write) -> None:
    write("base.yaml", "name: base\noptim: {matrix_lr: 0.02, order: [0, 1, 2]}\nschedule: {wallclock_s: 60}")
    write("sub/middle.yaml", "extends: ../base.yaml\noptim: {order: [5]}")
    leaf = write("sub/leaf.yaml", "extends: middle.yaml\nname: leaf\nschedule:\n  warmdown: {steps: 3}")
    loaded = load_config(leaf, Config, ["schedule.wallclock_s=null", "optim.compile=off"])
    assert loaded == Config(
        name="leaf",
        optim=Optim(matrix_lr=0.02, order=[5], compile="off"),
        schedule=Schedule(wallclock_s=None, warmdown=Warmdown(steps=3)),
    )


def test_later_overrides_win_and_sections_can_be_set_whole(write) -> None:
    path = write("a.yaml", "name: a")
    loaded = load_config(path, Config, ["optim={matrix_lr: 1, order: [1, 2]}", "optim.matrix_lr=2", "name='x=y'"])
    assert loaded.optim == Optim(matrix_lr=2, order=[1, 2]) and loaded.name == "x=y"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1E5", 1e5),
        ("-2e+2", -200.0),
        (".5", 0.5),
        (".5e1", 5.0),
        ("1.", 1.0),
        ("3", 3.0),
        ("1_000.5", 1000.5),
    ],
)
def test_numbers_are_read_as_numbers(write, text: str, value: float) -> None:
    assert load_config(write("a.yaml", f"optim: {{matrix_lr: {text}}}"), Config).optim.matrix_lr == value
    assert load_config(write("b.yaml", "name: b"), Config, [f"optim.matrix_lr={text}"]).optim.matrix_lr == value


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_float_survives_its_own_spelling(tmp_path_factory, value: float) -> None:
    path = tmp_path_factory.getbasetemp() / "floats.yaml"
    path.write_text(f"optim: {{matrix_lr: {value!r}}}")
    assert load_config(path, Config).optim.matrix_lr == value


@pytest.mark.parametrize("word", ["on", "off", "yes", "no", "2020-01-01", "1:30", "null_", "e3", "1e", "0o7"])
def test_words_stay_words(write, word: str) -> None:
    assert load_config(write("a.yaml", f"name: {word}"), Config).name == word


names = st.one_of(
    st.text(st.characters(exclude_categories=("Cs",)), max_size=12),
    st.sampled_from(
        ["on", "off", "1e-3", "1_0", "null", "~", "", "true", "0x1f", "010", "1:30", "<<", "=", "2020-01-01", ".5"]
    ),
)


@given(names, st.floats(allow_nan=False, allow_infinity=False), st.lists(st.integers()), st.booleans())
def test_resolved_yaml_reads_back_to_an_equal_config(tmp_path_factory, name, rate, order, tied) -> None:
    config = Config(name=name, tied=tied, optim=Optim(matrix_lr=rate, order=order))
    path = tmp_path_factory.getbasetemp() / "resolved.yaml"
    path.write_bytes(resolved_yaml(config).encode())
    again = load_config(path, Config)
    assert (
        again == config and config_hash(again) == config_hash(config) and resolved_yaml(again) == resolved_yaml(config)
    )


def test_hash_depends_on_settings_and_not_on_their_spelling(write) -> None:
    written = load_config(write("a.yaml", "optim: {matrix_lr: 4e-2}\nname: run"), Config)
    assert config_hash(written) == config_hash(Config())
    assert config_hash(Config(name="other")) != config_hash(Config())
    assert len(config_hash(Config())) == 64


def test_unknown_key_names_file_path_and_nearest_key(write) -> None:
    write("base.yaml", "optim: {matrix_lrr: 1}")
    message = refusal(write("leaf.yaml", "extends: base.yaml"))
    assert "base.yaml: there is no setting optim.matrix_lrr; did you mean optim.matrix_lr?" in message
    assert "did you mean schedule.wallclock_s?" in refusal(write("b.yaml", "wallclock_s: 3"))
    assert "schedule.warmdown.steps" in refusal(write("c.yaml", "schedule: {warmdown: {step: 3}}"))
    assert "known here: name, tied, schedule, optim" in refusal(write("d.yaml", "zzz: 3"))


def test_unknown_override_names_nearest_key(write) -> None:
    path = write("a.yaml", "name: a")
    assert "--set optim.ordr=[1]: there is no setting optim.ordr; did you mean optim.order?" in refusal(
        path, "optim.ordr=[1]"
    )
    assert "optim.matrix_lr" in refusal(path, "optim.matrix_lr.x=1")


@pytest.mark.parametrize(
    "override", ["optim.matrix_lr", "=3", "optim.=3", "optim..matrix_lr=1", "name=", "name=[", "name={a: 1, a: 2}"]
)
def test_malformed_overrides_are_refused(write, override: str) -> None:
    assert f"--set {override}" in refusal(write("a.yaml", "name: a"), override)


def test_refused_values_name_key_value_and_where_they_were_set(write) -> None:
    write("base.yaml", "schedule: {wallclock_s: -5}")
    path = write("leaf.yaml", "extends: base.yaml\ntied: maybe")
    message = refusal(path, "optim.order=[1, x]")
    assert "base.yaml: schedule.wallclock_s must be greater than 0, and it is -5" in message
    assert "leaf.yaml: tied must be" in message and "'maybe'" in message
    assert "--set optim.order=[1, x]: optim.order.1 must be a valid integer" in message


def test_validator_messages_arrive_with_their_section(write) -> None:
    path = write("a.yaml", "name: a\nschedule: {warmdown: {steps: 1}}")
    message = refusal(path, "schedule.warmdown.fraction=0.5", "name=b")
    expected = "and --set schedule.warmdown.fraction=0.5: schedule.warmdown: warmdown takes either steps or fraction"
    assert message.startswith(str(path)) and message.endswith(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name: a\nname: b", "line 2, column 1: the key 'name' stands twice"),
        ("optim: {order: [1], order: [2]}", "'order' stands twice"),
        ("- 1\n- 2", "holds a list"),
        ("", "is empty"),
        ("# only a comment\n", "is empty"),
        ("just words", "holds a str"),
        ("1: 2", "the key 1 is not a word"),
        ("name: [unclosed", "line 1"),
        ("optim: &a {matrix_lr: 1}\nschedule: *a", "references (*name) are not supported"),
        ("optim: {matrix_lr: .inf}", "optim.matrix_lr"),
        ("optim: {matrix_lr: inf}", "must be a finite number"),
        ("optim: {matrix_lr: nan}", "must be a finite number"),
        ("optim: 3", "optim must be"),
        ("name: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
        ("optim: {order: " + "[" * 3000, "nested too deeply"),
        ("extends: [a.yaml]", "`extends` must name one file"),
        ("extends: nowhere.yaml", "nowhere.yaml, which"),
        ("extends: leaf.yaml", "goes round in a circle: leaf.yaml -> leaf.yaml"),
        ("name: \x07", "leaf.yaml"),
    ],
)
def test_files_that_cannot_be_a_config_are_refused_by_name(write, text: str, expected: str) -> None:
    message = refusal(write("leaf.yaml", text))
    assert expected in message and "leaf.yaml" in message


@pytest.mark.parametrize("values", [[0.9, "1e400"], ["nan"], [0.1, 0.2, "-1e999"]])
def test_numbers_in_lists_must_be_finite_too(write, values: list) -> None:
    class Listed(BaseModel):
        betas: list[float] = []

    path = write("listed.yaml", f"betas: [{', '.join(map(str, values))}]")
    with pytest.raises(ValueError, match=r"listed.yaml: betas is \[.*, and a setting must be a finite number"):
        load_config(path, Listed)
    with pytest.raises(ValueError, match="somewhere: betas is .* must be a finite number"):
        check_settings({"betas": [float(value) for value in values]}, Listed, "somewhere")


def test_longer_cycles_missing_files_and_other_encodings(write, tmp_path: Path) -> None:
    write("a.yaml", "extends: b.yaml")
    write("b.yaml", "extends: c.yaml")
    assert "a.yaml -> b.yaml -> c.yaml -> a.yaml" in refusal(write("c.yaml", "extends: a.yaml").with_name("a.yaml"))
    write("baseline.yaml", "name: x")
    assert "did you mean" in refusal(tmp_path / "basline.yaml")
    assert "there is no config file" in refusal(tmp_path / "no" / "folder.yaml")
    assert "there is no config file" in refusal(tmp_path)
    (tmp_path / "latin.yaml").write_bytes("name: é".encode("latin-1"))
    assert "is not UTF-8" in refusal(tmp_path / "latin.yaml")


@given(st.text(max_size=60))
def test_any_text_loads_or_is_refused_in_one_sentence(tmp_path_factory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        load_config(path, Config)
    except ValueError as error:
        assert "any.yaml" in str(error)


def test_config_diff_lists_exactly_what_differs() -> None:
    a = {"x": 1, "s": {"p": [1, 2], "q": None}, "only_a": {}}
    b = {"x": 1.5, "s": {"p": [1, 3], "q": None}, "only_b": {"deep": "é"}}
    assert config_diff(a, b) == [
        "only_a: {} -> (not set)",
        'only_b.deep: (not set) -> "é"',
        "s.p: [1, 2] -> [1, 3]",
        "x: 1 -> 1.5",
    ]
    assert config_diff(a, json.loads(json.dumps(a))) == []
    assert config_diff({"x": True}, {"x": 1}) == ["x: true -> 1"]


def test_read_yaml_takes_one_file_as_it_stands(write, tmp_path: Path) -> None:
    assert read_yaml(write("a.yaml", "extends: b.yaml\nrate: 1e-3")) == {"extends": "b.yaml", "rate": 0.001}
    with pytest.raises(ValueError, match="there is no config file"):
        read_yaml(tmp_path / "none.yaml")


def test_settings_at_hand_are_checked_as_a_files_are() -> None:
    assert check_settings({"train": {"seed": 3}}, GolfConfig, "here").train.seed == 3
    with pytest.raises(ValueError, match="here: there is no setting train.sed; did you mean train.seed"):
        check_settings({"train": {"sed": 3}}, GolfConfig, "here")
    with pytest.raises(ValueError, match="here: train.seed must be .*-1"):
        check_settings({"train": {"seed": -1}}, GolfConfig, "here")
