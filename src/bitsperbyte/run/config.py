"""Run configurations: a YAML file, the files it extends, `--set` overrides, read into a pydantic model.

Scalars follow YAML 1.2, where `on`, `off`, `yes` and `no` are words and `1e-3` is a number; PyYAML's own 1.1 rules get
both wrong for a config of hyperparameters. Underscores in numbers are read (16_000_000).
"""

import difflib
import hashlib
import json
import math
import re
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

Model = TypeVar("Model", bound=BaseModel)
LOGGER, WORKERS = "logger", "workers"  # sections of a config that change nothing about a run: not part of its hash, free to change on --resume

_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_INT = re.compile(r"^[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)$")
_FLOAT = re.compile(
    r"^[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?(?:[eE][-+]?[0-9]+)|[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?)$"
)
_RESOLVERS = [
    ("null", _NULL, ["~", "n", "N", ""]),
    ("bool", _BOOL, list("tTfF")),
    ("int", _INT, list("-+0123456789")),
    ("float", _FLOAT, list("-+0123456789.")),
    ("merge", re.compile(r"^<<$"), ["<"]),
]


class LoggerSection(BaseModel):
    """Where a run's scalars are copied to while it runs (run/trackers.py), in the config of every track."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    backend: Literal["none", "tensorboard", "wandb", "trackio"] = Field("none", description="the package of that name must be installed")
    project: str | None = Field(None, description="wandb, trackio: null takes bitsperbyte")


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(
            yaml.AliasEvent
        ):  # a reference can be endless or explode; `extends` covers what it is good for
            raise yaml.composer.ComposerError(
                None, None, "references (*name) are not supported", self.peek_event().start_mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is not a word", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes whatever either the 1.1 or our rules would read as something other than a string."""

    yaml_implicit_resolvers = {first: list(rules) for first, rules in yaml.SafeDumper.yaml_implicit_resolvers.items()}

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _tag, _pattern, _first in _RESOLVERS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _pattern, _first)


def load_config(path: Path | str, model_cls: type[Model], overrides: Sequence[str] = ()) -> Model:
    """Read `path`, the files it `extends`, then `overrides` ("a.b=value", the value in YAML), into `model_cls`.

    A mapping merges key by key; a list or scalar replaces. Raises ValueError, naming file and dotted key, for a missing
    file, text that is not a YAML mapping, a duplicate or unknown key (with the nearest known one), a cycle of
    `extends`, and values that the model refuses.
    """
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for source, layer in _layers(Path(path)):
        _check_keys(layer, model_cls, source)
        _merge(merged, layer, origins, source)
    for override in overrides:
        layer = _parse_override(override)
        _check_keys(layer, model_cls, f"--set {override}")
        _merge(merged, layer, origins, f"--set {override}")
    try:
        loaded = model_cls.model_validate(merged)
    except ValidationError as error:
        raise ValueError("; ".join(_describe(item, origins, str(path)) for item in error.errors())) from error
    if found := _not_finite(loaded):
        raise ValueError(f"{_origin(found.partition(' ')[0], origins, str(path))}: {found}, and a setting must be a finite number")
    return loaded


def check_settings(values: dict[str, Any], model_cls: type[Model], source: str) -> Model:
    """Settings that are at hand, not in a file (`source` names where from), read as `load_config` reads a file's; ValueError likewise."""
    _check_keys(values, model_cls, source)
    try:
        made = model_cls.model_validate(values)
    except ValidationError as error:
        raise ValueError("; ".join(f"{source}: {sentence}" for sentence in error_sentences(error))) from error
    if found := _not_finite(made):
        raise ValueError(f"{source}: {found}, and a setting must be a finite number")
    return made


def _not_finite(model: BaseModel) -> str | None:
    """The first number that is not finite, alone or in a list, as `key is value`; None where each is."""
    for key, value in _flatten(model.model_dump(mode="python")).items():
        for number in value if isinstance(value, list | tuple) else [value]:
            if isinstance(number, float) and not math.isfinite(number):
                return f"{key} is {value}"
    return None


def resolved_yaml(model: BaseModel) -> str:
    """Every setting, defaults included, as YAML that `load_config` reads back to an equal model."""
    # ASCII with escapes: YAML folds unescaped line separators such as U+0085 into spaces
    return yaml.dump(model.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, allow_unicode=False, width=100)


def config_hash(model: BaseModel) -> str:
    """sha256 (hex) of the canonical JSON of every setting but the logger's and the workers'; equal for equal settings however they were written."""
    text = json.dumps(
        model.model_dump(mode="json", exclude={LOGGER, WORKERS}), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return hashlib.sha256(text.encode()).hexdigest()


def config_diff(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """One line for each dotted key whose value differs, `key: value in a -> value in b`, sorted by key."""
    flat_a, flat_b = _flatten(a), _flatten(b)
    keys = sorted(flat_a.keys() | flat_b.keys())

    def show(flat: dict[str, Any], key: str) -> str:
        return json.dumps(flat[key], ensure_ascii=False, default=str) if key in flat else "(not set)"

    return [
        f"{key}: {show(flat_a, key)} -> {show(flat_b, key)}" for key in keys if show(flat_a, key) != show(flat_b, key)
    ]


def read_yaml(path: Path | str) -> dict[str, Any]:
    """The mapping in one YAML file as it stands: no parents, no model. Raises ValueError as `load_config` does."""
    return _read_mapping(Path(path), None)


def error_sentences(error: ValidationError) -> list[str]:
    """One readable sentence for each thing that the model refused: dotted key, what is wrong, the value."""
    return [_sentence(item) for item in error.errors()]


def _layers(path: Path, chain: tuple[Path, ...] = ()) -> list[tuple[str, dict[str, Any]]]:
    """The file and its ancestors, oldest first."""
    resolved = path.resolve()
    if resolved in chain:
        names = " -> ".join(p.name for p in (*chain[chain.index(resolved) :], resolved))
        raise ValueError(f"{path}: `extends` goes round in a circle: {names}")
    data = _read_mapping(path, chain[-1] if chain else None)
    parent = data.pop("extends", None)
    if parent is None:
        return [(str(path), data)]
    if not isinstance(parent, str):
        raise ValueError(f"{path}: `extends` must name one file, and it is {parent!r}")
    return [*_layers(path.parent / parent, (*chain, resolved)), (str(path), data)]


def _read_mapping(path: Path, child: Path | None) -> dict[str, Any]:
    needed_by = f", which {child} extends" if child else ""
    if not path.is_file():
        near = (
            difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.y*ml")], n=1)
            if path.parent.is_dir()
            else []
        )
        hint = f"; did you mean {path.parent / near[0]}?" if near else ": give the path of a YAML file"
        raise ValueError(f"there is no config file {path}{needed_by}{hint}")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start})") from error
    data = _parse(text, str(path))
    if not isinstance(data, dict):
        kind = "is empty" if data is None else f"holds a {type(data).__name__}"
        raise ValueError(f"{path} {kind}, and a config must be a mapping of settings such as `name: my_run`")
    return data


def _parse(text: str, source: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)  # a SafeLoader: it builds plain values only
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ValueError(f"{source}{where}: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{source}: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise ValueError(f"{source}: nested too deeply for a config") from error
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error


def _parse_override(override: str) -> dict[str, Any]:
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ValueError(f"--set {override}: write it as section.key=value, e.g. --set schedule.wallclock_s=120")
    if not text.strip():
        raise ValueError(f"--set {override}: the value is missing; write {key.strip()}=null to unset it")
    layer: Any = _parse(text, f"--set {override}")
    for part in reversed(parts):
        layer = {part: layer}
    return layer


def _merge(into: dict[str, Any], layer: dict[str, Any], origins: dict[str, str], source: str, prefix: str = "") -> None:
    for key, value in layer.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, dict):
            if not isinstance(into.get(key), dict):
                into[key] = {}
                origins[dotted] = source
            _merge(into[key], value, origins, source, f"{dotted}.")
        else:
            into[key] = value
            origins[dotted] = source


def _section(annotation: Any) -> type[BaseModel] | None:
    """The model that a field holds, for `Section` and `Section | None`."""
    for candidate in (annotation, *typing.get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _known_keys(model_cls: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model_cls.model_fields.items():
        yield f"{prefix}{name}"
        if section := _section(field.annotation):
            yield from _known_keys(section, f"{prefix}{name}.")


def _check_keys(layer: dict[str, Any], model_cls: type[BaseModel], source: str) -> None:
    """ValueError at the first key that the model does not have."""

    def walk(values: dict[str, Any], model: type[BaseModel], prefix: str) -> None:
        for key, value in values.items():
            field = model.model_fields.get(key)
            if field is None:
                raise ValueError(
                    f"{source}: there is no setting {prefix}{key}; {_nearest(prefix, key, model, model_cls)}"
                )
            section = _section(field.annotation)
            if isinstance(value, dict) and section:
                walk(value, section, f"{prefix}{key}.")

    walk(layer, model_cls, "")


def _nearest(prefix: str, key: str, model: type[BaseModel], root: type[BaseModel]) -> str:
    if near := difflib.get_close_matches(key, model.model_fields, n=1, cutoff=0.7):
        return f"did you mean {prefix}{near[0]}?"
    known = list(_known_keys(root))
    if elsewhere := [name for name in known if name.rpartition(".")[2] == key]:
        return f"did you mean {elsewhere[0]}?"
    if near := difflib.get_close_matches(f"{prefix}{key}", known, n=1, cutoff=0.75):
        return f"did you mean {near[0]}?"
    return f"known here: {', '.join(prefix + name for name in model.model_fields)}"


def _origin(dotted: str, origins: dict[str, str], fallback: str) -> str:
    """Which files and options set the key or anything in it, else the nearest part of it that one did set."""
    inside = [
        source for key, source in origins.items() if key == dotted or key.startswith(f"{dotted}." if dotted else "")
    ]
    if inside:
        return " and ".join(dict.fromkeys(inside))
    while dotted:
        if dotted in origins:
            return origins[dotted]
        dotted = dotted.rpartition(".")[0]
    return fallback


def _describe(item: Any, origins: dict[str, str], fallback: str) -> str:
    return f"{_origin('.'.join(map(str, item['loc'])), origins, fallback)}: {_sentence(item)}"


def _sentence(item: Any) -> str:
    dotted = ".".join(map(str, item["loc"]))
    message = item["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    if item["type"] in ("value_error", "assertion_error"):
        return f"{dotted}: {message}" if dotted and not message.startswith(f"{dotted}.") else message
    message = message.replace("Input should be", "must be").replace("Field required", "is missing")
    value = repr(item["input"])
    shown = value if len(value) <= 60 else f"{value[:57]}..."
    return f"{dotted} {message}" if item["type"] == "missing" else f"{dotted} {message}, and it is {shown}"


def _flatten(values: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> scalar or list; an empty mapping stays as it is."""
    if not isinstance(values, dict) or not values:
        return {prefix.removesuffix("."): values} if prefix else {}
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flatten(value, f"{prefix}{key}.")
    return flat
