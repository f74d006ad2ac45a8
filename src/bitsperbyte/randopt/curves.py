"""What a run sends to its logger: each evaluated seed by its number, the rows of the other phases by theirs, and the result."""

from collections import deque
from math import inf

from bitsperbyte.randopt.journal import Journal, Row
from bitsperbyte.records.schema import AccuracyPart, LossPart, RandOptPart
from bitsperbyte.run.trackers import Tracker

RATE_ROWS = 20  # of which seeds/s and tokens/s are means: single seeds differ


class Curves:
    """Follows the journal's new rows. A resumed run goes on where the journal stands, so that a seed keeps its number."""

    def __init__(self, tracker: Tracker, journal: Journal, every_seeds: int) -> None:
        self._tracker, self._every = tracker, every_seeds
        self._num = {phase: len(journal.rows(phase)) for phase in ("search", "test", "base_sample", "heldout")}
        self._best = max((row.reward for row in journal.rows("search")), default=-inf)
        self._recent: deque[Row] = deque(maxlen=RATE_ROWS)
        journal.on_append = self.add

    def add(self, row: Row) -> None:
        """Log one row. Of the search: step n is the nth evaluated seed."""
        if row.phase not in self._num:  # of the base, alone in its phase
            self._tracker.log(0, {f"{row.phase}/reward": row.reward})
            return
        self._num[row.phase] += 1
        step = self._num[row.phase]
        if row.phase != "search":
            self._tracker.log(step, {f"{row.phase}/reward": row.reward})
            return
        self._best = max(self._best, row.reward)
        self._recent.append(row)
        if step == 1 or step % self._every == 0:
            seconds = sum(recent.seconds for recent in self._recent)
            self._tracker.log(step, {
                "search/reward": row.reward, "search/best": self._best, "search/sigma": row.sigma,
                "search/seeds_per_s": len(self._recent) / seconds if seconds > 0 else None,
                "search/tokens_per_s": sum(recent.num_tokens for recent in self._recent) / seconds if seconds > 0 else None,
                "search/truncated_share": row.num_truncated / row.num_prompts})

    def result(self, part: RandOptPart) -> None:
        """Log what the run found: base, ensemble, random ensembles and the best member on the test set; bits per byte of held-out text."""
        values: dict[str, float | None] = {f"result/{name}_{_figure(result)[0]}": _figure(result)[1] for name, result in part.results().items()}
        random_k = part.controls.random_k
        values |= {"result/random_k_accuracy": random_k.mean, "result/random_k_bpb": random_k.mean_bpb}
        if part.heldout and part.heldout.base and part.heldout.mixture:
            values |= {"result/base_heldout_bpb": part.heldout.base.bpb, "result/ensemble_heldout_bpb": part.heldout.mixture.bpb}
        self._tracker.log(self._num["search"], values)


def _figure(result: AccuracyPart | LossPart) -> tuple[str, float]:
    return ("accuracy", result.accuracy) if isinstance(result, AccuracyPart) else ("bpb", result.bpb)
