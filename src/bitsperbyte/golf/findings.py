"""What a check found, one sentence each: the form in which every checker of this track answers."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Finding:
    """`ok` is None where the check could not be made; `detail` is one sentence: what was seen, what is wrong, or why it could not be
    seen."""

    check: str
    ok: bool | None
    detail: str

    @property
    def verdict(self) -> str:
        return {True: "passed", False: "FAILED", None: "not checked"}[self.ok]

    @property
    def line(self) -> str:
        """Verdict and detail for a terminal: what a stranger's file put into the detail must not steer it."""
        return f"{self.verdict}: " + "".join(c if c.isprintable() else "\ufffd" for c in self.detail)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class LegalityFinding(Finding):
    """position: the first target, in its stream, at which the check failed. change: the largest change seen, in nats (of a sum of
    probabilities: how far from 1; of bytes: bytes)."""

    position: int | None = None
    change: float | None = None


def failed(findings: Iterable[Finding]) -> list[Finding]:
    """Those that failed; one that could not be made has not."""
    return [finding for finding in findings if finding.ok is False]
