"""What a submission.json claims, under the names that are found in public ones: the file has no schema.

Numbers keep the digits they are written with, so that a claim is compared to what it says and no further.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

BPB = ("val_bpb", "mean_val_bpb", "val_bpb_mean", "final_val_bpb", "bpb")
LOSS = ("val_loss", "mean_val_loss", "val_loss_mean", "final_val_loss")
TOTAL = ("bytes_total", "total_bytes", "total_submission_bytes", "submission_bytes", "total_size_bytes")
CODE = ("bytes_code", "code_bytes", "code_size_bytes")
WEIGHTS = ("bytes_model", "model_bytes", "bytes_weights", "weight_bytes", "compressed_model_bytes", "bytes_model_compressed", "bytes_model_*")
WEIGHTS_OR_TOTAL = ("bytes_artifact", "artifact_bytes", "artifact_size_bytes", "artifact_bytes_max")  # used for either
STEPS = ("step_stop", "steps", "num_steps", "steps_completed", "training_steps")
BY_SEED = ("seed_results", "per_seed", "results_by_seed", "per_seed_results", "seeds", "results")


@dataclass(frozen=True)
class Claim:
    """A number under its name; `seed` where it is that of one seed."""

    key: str
    value: Decimal
    seed: int | None = None

    @property
    def decimals(self) -> int:
        """Digits after the point, as written."""
        exponent = self.value.as_tuple().exponent
        return max(0, -exponent) if isinstance(exponent, int) else 0

    def __str__(self) -> str:
        name = self.key if self.seed is None else f"{self.key} of seed {self.seed}"
        return f"{name} {self.value:,}" if self.decimals == 0 else f"{name} {self.value}"


@dataclass(frozen=True)
class Claims:
    """The whole file; None and empty for what it does not say. `by_seed` holds the object of each seed."""

    facts: Mapping[str, Any]
    by_seed: Mapping[int, Mapping[str, Any]]
    seeds: tuple[int, ...]

    def get(self, keys: tuple[str, ...], seed: int | None = None) -> Claim | None:
        """The first of `keys` that holds a number, of the whole or of one seed."""
        return next(self.all(keys, seed), None)

    def all(self, keys: tuple[str, ...], seed: int | None = None) -> Iterator[Claim]:
        """Every one of `keys` that holds a number; one that ends in * stands for all that begin so (bytes_model_int6_zstd)."""
        where = self.facts if seed is None else self.by_seed.get(seed, {})
        named = [name for key in keys for name in ([k for k in where if k.startswith(key[:-1])] if key.endswith("*") else [key])]
        for key in dict.fromkeys(named):
            value = number(where.get(key))
            if value is not None:
                yield Claim(key, value, seed)

    def text(self, *path: str) -> str | None:
        """The text under nested keys, None where there is none."""
        value: Any = self.facts
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        return value if isinstance(value, str) and value else None


def read_claims(facts: Mapping[str, Any]) -> Claims:
    """The claims of a parsed submission.json (numbers as int and Decimal)."""
    by_seed: dict[int, Mapping[str, Any]] = {}
    listed: list[int] = []
    for key in BY_SEED:
        for seed, result in _per_seed(facts.get(key), may_be_plain=key == "seeds"):
            listed.append(seed)
            if result:
                by_seed.setdefault(seed, result)
    if isinstance(facts.get("seed"), int) and not isinstance(facts["seed"], bool):
        listed.append(facts["seed"])
    return Claims(facts, by_seed, tuple(dict.fromkeys(listed)))


def number(value: Any) -> Decimal | None:
    """A number of a parsed JSON, of a size that a score or a count of bytes has; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | Decimal):
        return None
    found = Decimal(value)
    exponent = found.as_tuple().exponent
    return found if found.is_finite() and isinstance(exponent, int) and exponent > -40 and found.adjusted() < 20 else None


def _per_seed(value: Any, *, may_be_plain: bool) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """(seed, its results) of a mapping from seeds, of a list of objects that name their seed, or, where it may be one, a plain list."""
    if isinstance(value, dict):
        for key, result in value.items():
            seed = _seed(key)
            if seed is not None:
                yield seed, result if isinstance(result, dict) else {"val_bpb": result}
    elif isinstance(value, list):
        for item in value:
            seed = _seed(item.get("seed")) if isinstance(item, dict) else _seed(item) if may_be_plain else None
            if seed is not None:
                yield seed, item if isinstance(item, dict) else {}


def _seed(value: Any) -> int | None:
    """A seed written as a number or as `42`, `seed_42`, `seed42`."""
    if isinstance(value, str):
        digits = value.lower().removeprefix("seed").strip("_- ")
        return int(digits) if digits.isdecimal() and len(digits) < 20 else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None
