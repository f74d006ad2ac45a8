"""Long lines made short enough to draw, without hiding a spike, and the range of an axis that one spike does not squash."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

START_SHARE = 0.05  # of a run: its first losses fall so steeply that an axis made for them shows nothing else
MARGIN = 0.06  # of the range, above and below


def thin(x: Sequence[float], y: Sequence[float], num_bins: int) -> tuple[np.ndarray, np.ndarray]:
    """(x, y) of at most 4 points in each of `num_bins` equal parts of the x range: first, last, lowest and highest, in their order.

    A line through them covers the same pixels as one through all points, where a part is a pixel wide. x must not fall; points whose y
    is not finite are left out.
    """
    xs, ys = np.asarray(x, float), np.asarray(y, float)
    assert xs.shape == ys.shape and num_bins > 0, (xs.shape, ys.shape, num_bins)
    finite = np.isfinite(ys)
    xs, ys = xs[finite], ys[finite]
    if len(xs) <= 4 * num_bins:
        return xs, ys
    span = xs[-1] - xs[0]
    part = np.minimum(((xs - xs[0]) / span * num_bins).astype(int), num_bins - 1) if span > 0 else np.zeros(len(xs), int)
    begins = np.flatnonzero(np.diff(part, prepend=-1))
    kept: set[int] = set()
    for begin, end in zip(begins, [*begins[1:], len(xs)], strict=True):
        piece = ys[begin:end]
        kept |= {int(begin), int(end) - 1, int(begin + piece.argmin()), int(begin + piece.argmax())}
    places = sorted(kept)
    return xs[places], ys[places]


@dataclass(frozen=True)
class Limits:
    """The range of an axis. Points above `high` are drawn as marks at the upper edge."""

    low: float
    high: float

    def above(self, values: Sequence[float]) -> np.ndarray:
        """Which values lie above the range, bool (N,)."""
        return np.asarray(values, float) > self.high


def limits(series: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Limits | None:
    """The y range for several (x, y): down to the lowest value, up to the highest that comes after the first twentieth, unless a few of
    these lie far above the others.

    None without a finite value.
    """
    later: list[float] = []
    lowest = math.inf
    for x, y in series:
        xs, ys = np.asarray(x, float), np.asarray(y, float)
        xs, ys = xs[np.isfinite(ys)], ys[np.isfinite(ys)]
        if len(xs):
            lowest = min(lowest, float(ys.min()))
            some = ys[xs > xs[0] + START_SHARE * (xs[-1] - xs[0])] if xs[-1] > xs[0] else ys
            later += (some if len(some) > 1 else ys).tolist()
    if not later:
        return None
    low, (usual_low, usual_high), high = lowest, np.percentile(later, [2, 98]), max(later)
    high = min(high, usual_high + 1.5 * (usual_high - usual_low)) if usual_high > usual_low else high
    pad = MARGIN * (high - low) or MARGIN * (abs(high) or 1.0)
    return Limits(float(low - pad), float(high + pad))
