"""What a submission weighs: bytes of code and of weights against the cap, tensor by tensor."""

import dataclasses
from dataclasses import dataclass
from typing import Any

CAP_BYTES = 16_000_000  # decimal, code included (Parameter Golf's rules)

# What the script of a submission is flattened from (bundle.py), relative to the package. A module that these import belongs in
# the list too.
BUNDLED_MODULES: tuple[str, ...] = (
    "golf/submission.py",
    "golf/step.py",
    "golf/ranks.py",
    "golf/reduce.py",
    "golf/lines.py",
    "golf/model.py",
    "golf/muon.py",
    "golf/schedule.py",
    "golf/clock.py",
    "golf/quantize.py",
    "golf/codecs.py",
    "golf/body.py",
    "golf/ledger.py",
    "golf/artifact.py",
    "golf/evaluate.py",
    "metric/bpb.py",
    "metric/windows.py",
    "text/tokenizers.py",
    "text/shards.py",
    "text/loader.py",
)


@dataclass(frozen=True)
class TensorRow:
    """One tensor: its storage (`int6`, `float32`), the bytes before the codec, and those after it if compressed alone
    (the sum over tensors therefore differs a little from the file's size)."""

    name: str
    storage: str
    shape: tuple[int, ...]
    num_weights: int
    payload_bytes: int
    compressed_bytes: int

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.compressed_bytes / self.num_weights

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "shape": list(self.shape), "bits_per_weight": self.bits_per_weight}


@dataclass(frozen=True)
class Ledger:
    """`weight_bytes` is the size of the artifact file; `rows` has one entry a tensor, in the file's order."""

    code_bytes: int
    weight_bytes: int
    rows: tuple[TensorRow, ...]
    cap_bytes: int = CAP_BYTES

    @property
    def total_bytes(self) -> int:
        return self.code_bytes + self.weight_bytes

    @property
    def margin_bytes(self) -> int:
        """Bytes left under the cap; negative when over it."""
        return self.cap_bytes - self.total_bytes

    @property
    def bits_per_weight(self) -> float:
        """Bits of the file for each weight of the model."""
        return 8 * self.weight_bytes / sum(row.num_weights for row in self.rows)

    def check(self) -> "Ledger":
        """This ledger; ValueError when code and weights exceed the cap."""
        if self.margin_bytes < 0:
            raise ValueError(
                f"the submission is {-self.margin_bytes:,} bytes over the cap: {self.weight_bytes:,} of weights and "
                f"{self.code_bytes:,} of code are {self.total_bytes:,} of {self.cap_bytes:,}; use fewer bits (int6), a "
                f"stronger codec (brotli), or a smaller model"
            )
        return self

    def to_dict(self) -> dict[str, Any]:
        return {
            "code_bytes": self.code_bytes,
            "weight_bytes": self.weight_bytes,
            "total_bytes": self.total_bytes,
            "cap_bytes": self.cap_bytes,
            "margin_bytes": self.margin_bytes,
            "bits_per_weight": self.bits_per_weight,
            "tensors": [row.to_dict() for row in self.rows],
        }
