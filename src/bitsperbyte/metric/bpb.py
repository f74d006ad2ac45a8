"""Bits per byte: the one place where nats become bits and are divided by bytes.

    bpb = (sum of nats over the scored tokens) / (ln 2 * number of UTF-8 bytes those same tokens stand for)

Sums are Python floats (float64) and integers. No other module divides by ln 2.
"""

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass

MIN_BYTES_PER_TOKEN = 0.8  # a byte tokenizer with a BOS before each document lies just below 1
MAX_BYTES_PER_TOKEN = 12.0  # large vocabularies lie near 5


def bits(nats: float) -> float:
    """Information in bits of `nats`: nats / ln 2, in float64."""
    return float(nats) / math.log(2.0)


@dataclass(frozen=True)
class Score:
    """The loss of some tokens and the bytes of those same tokens. Scores of disjoint spans add.

    nats: summed negative log-likelihood (natural logarithm), finite and not negative; num_bytes: UTF-8 bytes the scored
    tokens stand for; num_tokens: how many were scored. ValueError for a figure that no scoring can give.
    """

    nats: float
    num_bytes: int
    num_tokens: int

    def __post_init__(self) -> None:
        nats = float(self.nats)
        if not math.isfinite(nats) or nats < 0.0:
            raise ValueError(f"a summed loss of {nats} nats is not a score: it must be finite and not negative; look "
                             "for a model that diverged, or a loss of the wrong sign")
        object.__setattr__(self, "nats", nats)
        for name in ("num_bytes", "num_tokens"):
            count = operator.index(getattr(self, name))
            if count < 0:
                raise ValueError(f"{name} is {count}: a score cannot count fewer than 0; look for an overflow in the "
                                 "sums")
            object.__setattr__(self, name, count)

    @classmethod
    def zero(cls) -> "Score":
        """The neutral element of addition."""
        return cls(0.0, 0, 0)

    @classmethod
    def total(cls, scores: Iterable["Score"]) -> "Score":
        """Sum of scores of disjoint spans; the nats are summed exactly, so the order does not matter."""
        scores = list(scores)
        nats = math.fsum(s.nats for s in scores)
        return cls(nats, sum(s.num_bytes for s in scores), sum(s.num_tokens for s in scores))

    def __add__(self, other: "Score") -> "Score":
        if not isinstance(other, Score):
            return NotImplemented
        return Score(self.nats + other.nats, self.num_bytes + other.num_bytes, self.num_tokens + other.num_tokens)

    @property
    def bpb(self) -> float:
        """Bits per byte. ValueError where no byte was counted."""
        if self.num_bytes == 0:
            raise ValueError(f"no bits per byte: {self.num_tokens} scored tokens ({self.nats:.6g} nats) stand for 0 "
                             "bytes; score some text, not only control tokens such as BOS")
        return bits(self.nats) / self.num_bytes

    @property
    def nats_per_token(self) -> float:
        """Mean loss of a token in nats. ValueError where nothing was scored."""
        return self.nats / self._scored_tokens()

    @property
    def bytes_per_token(self) -> float:
        """Mean UTF-8 bytes of a scored token. ValueError where nothing was scored."""
        return self.num_bytes / self._scored_tokens()

    def _scored_tokens(self) -> int:
        if self.num_tokens == 0:
            raise ValueError("no token was scored, so there is no mean over tokens; give a text with at least one "
                             "target token")
        return self.num_tokens

    def check(self, what: str = "score") -> "Score":
        """This score, if its bytes per token lie in 0.8..12 as those of running text do; otherwise ValueError with the
        likely cause.

        Short answers to task prompts are exempt: do not check those.
        """
        ratio = self.bytes_per_token
        if MIN_BYTES_PER_TOKEN <= ratio <= MAX_BYTES_PER_TOKEN:
            return self
        if ratio < MIN_BYTES_PER_TOKEN:
            cause = ("the tokens were made by another tokenizer than the one that counted the bytes, most of them are "
                     "control tokens, or the bytes belong to less text than the losses")
        else:
            cause = ("the tokens were made by another tokenizer than the one that counted the bytes, or the bytes "
                     "belong to more text than the losses (bytes of unscored tokens in the denominator)")
        raise ValueError(f"{what}: {self.num_bytes} bytes over {self.num_tokens} scored tokens are {ratio:.3f} bytes a "
                         f"token, outside {MIN_BYTES_PER_TOKEN:g}..{MAX_BYTES_PER_TOKEN:g}; likely {cause}")

    def to_dict(self) -> dict[str, float | int]:
        """Raw sums and the figures derived from them, for records."""
        return {"nats": self.nats, "num_bytes": self.num_bytes, "num_tokens": self.num_tokens, "bpb": self.bpb,
                "nats_per_token": self.nats_per_token, "bytes_per_token": self.bytes_per_token}
