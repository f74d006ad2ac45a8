"""The search: reward of the base and of every member of the population on the train set, and the best K of them."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from bitsperbyte.randopt.config import RandOptConfig
from bitsperbyte.randopt.engines.base import Engine, Sampling
from bitsperbyte.randopt.journal import Journal, Row
from bitsperbyte.randopt.population import BASE, Member, draw_population
from bitsperbyte.randopt.rollout import run_members
from bitsperbyte.randopt.tasks.base import Item, Task
from bitsperbyte.randopt.tasks.grading import Grader
from bitsperbyte.randopt.workers import Fleet
from bitsperbyte.stats.intervals import mean, standard_deviation, standard_error

LINE_EVERY_S = 15.0  # between progress lines where there is no terminal to draw a bar in


@dataclass(frozen=True)
class SearchResult:
    """A searched population. `rows` are in the population's order; `selected` the best K by train reward, equal ones by index."""

    seed: int
    population: list[Member]
    base_row: Row
    rows: list[Row]
    selected: list[Member]

    def describe(self) -> dict[str, Any]:
        """The record's figures by sigma: of the rewards n, mean, sample standard deviation, standard error, share above the base's; the
        differences of two sigmas' means with their standard error; None where there are too few values for one."""
        by_sigma: dict[float, list[float]] = {}
        for row in sorted(self.rows, key=lambda row: row.sigma):
            by_sigma.setdefault(row.sigma, []).append(row.reward)
        per_sigma = [{"sigma": sigma, "num": len(rewards), "mean": mean(rewards),
                      "sd": standard_deviation(rewards) if len(rewards) > 1 else None,
                      "standard_error": standard_error(rewards) if len(rewards) > 1 else None,
                      "share_above_base": sum(r > self.base_row.reward for r in rewards) / len(rewards)}
                     for sigma, rewards in by_sigma.items()]
        differences = [{"a": b["sigma"], "b": a["sigma"], "difference": b["mean"] - a["mean"],
                        "standard_error": None if None in (a["standard_error"], b["standard_error"])
                        else (a["standard_error"] ** 2 + b["standard_error"] ** 2) ** 0.5}
                       for i, a in enumerate(per_sigma) for b in per_sigma[i + 1:]]
        best = max(per_sigma, key=lambda row: row["mean"])
        return {"size": len(self.population), "seed": self.seed, "sigmas": sorted(by_sigma), "per_sigma": per_sigma,
                "sigma_differences": differences, "best_sigma": best["sigma"]}


def search(
    config: RandOptConfig, engine: Engine | Fleet, task: Task, grader: Grader, journal: Journal, train_items: Sequence[Item], console: Console,
    say: Callable[[str], None],
) -> SearchResult:
    """Evaluate what the journal does not hold yet of the base and the population, and select the best `search.top_k`."""
    population = draw_population(config.search.population, config.noise.sigmas, config.search.seed)
    sampling = Sampling(config.task.max_new_tokens or task.default_max_new_tokens, stop=task.stop)
    context = config.task.context if task.kind == "likelihood" else None

    def run(phase: str, members: Sequence[Member], on_row: Callable[[Row], None]) -> list[Row]:
        return run_members(engine, task, grader, journal, phase, train_items, members, lambda member: sampling, context=context,
                           on_row=on_row)

    base_row = run("base_train", [BASE], lambda row: None)[0]
    say(f"base on {len(train_items)} train {'documents' if context else 'questions'}: reward {base_row.reward:.4f}")
    num_done = len(journal.rows("search"))
    if num_done:
        say(f"{num_done} of {len(population)} seeds are in the journal")
    with SearchProgress(console, len(population), journal.rows("search"), base_row.reward) as progress:
        rows = run("search", population, progress.advance)
    ranking = sorted(population, key=lambda member: (-rows[member.index].reward, member.index))
    return SearchResult(config.search.seed, population, base_row, rows, ranking[: config.search.top_k])


class SearchProgress:
    """A bar on a terminal, a line now and then elsewhere: seeds/s, tokens/s, best reward so far, time left."""

    def __init__(self, console: Console, num_seeds: int, done: Sequence[Row], base_reward: float) -> None:
        self._console, self._num_seeds, self._num_done, self._base = console, num_seeds, len(done), base_reward
        self._best = max((row.reward for row in done), default=None)
        self._num_new = self._num_tokens = 0
        self._begin = self._last_line_s = time.perf_counter()
        self._bar: Progress | None = None

    def __enter__(self) -> "SearchProgress":
        if self._console.is_terminal:
            self._bar = Progress(BarColumn(20), TextColumn("{task.fields[text]}"), console=self._console)
            self._task = self._bar.add_task("search", total=self._num_seeds, completed=self._num_done, text="")
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar:
            self._bar.stop()

    def advance(self, row: Row) -> None:
        """One more seed is in the journal."""
        now = time.perf_counter()
        self._num_done, self._num_new, self._num_tokens = self._num_done + 1, self._num_new + 1, self._num_tokens + row.num_tokens
        self._best = row.reward if self._best is None else max(self._best, row.reward)
        text = self._text(now - self._begin)
        if self._bar:
            self._bar.update(self._task, completed=self._num_done, text=text)
        elif now - self._last_line_s > LINE_EVERY_S or self._num_done == self._num_seeds:
            self._last_line_s = now
            self._console.print(f"search {text}", highlight=False, soft_wrap=True)

    def _text(self, elapsed_s: float) -> str:
        left_s = (self._num_seeds - self._num_done) * elapsed_s / self._num_new
        speed = f"{self._num_new / elapsed_s:.2f} seeds/s  {self._num_tokens / elapsed_s:,.0f} tok/s"
        return (f"{self._num_done}/{self._num_seeds} seeds  {speed}  best {self._best:.4f} (base {self._base:.4f})  "
                f"{left_s:.0f} s left")
