"""From a finished search to the record's figures: test set, vote, controls, tests, probes, held-out bpb.

Nothing here chooses: K and every control are fixed by the configuration before the test set is seen. Each model is run on the test set
once, whatever it is needed for, and every row goes through the journal, so that a killed evaluation goes on where it was.

Times stand under `seconds` and under keys that end in `_s`; everything else is the same whenever the same run is made again.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bitsperbyte.metric.bpb import Score
from bitsperbyte.randopt.config import RandOptConfig
from bitsperbyte.randopt.controls import RandomEnsembles, random_ensembles, sample_seed, too_few_subsets
from bitsperbyte.randopt.engines.base import DocumentNats, Engine, Sampling
from bitsperbyte.randopt.heldout import Likelihood, compare
from bitsperbyte.randopt.journal import Journal, Row
from bitsperbyte.randopt.noise import describe as describe_noise
from bitsperbyte.randopt.population import BASE, Member, draw_pool, draw_subsets
from bitsperbyte.randopt.rollout import read_nats, run_members
from bitsperbyte.randopt.search import SearchResult
from bitsperbyte.randopt.tasks.base import Item, Task
from bitsperbyte.randopt.tasks.grading import Grader
from bitsperbyte.randopt.vote import Ballots, Outcome, ensemble
from bitsperbyte.randopt.workers import Fleet
from bitsperbyte.stats.paired import mcnemar_exact, paired_bootstrap_accuracy, spearman, wilson
from bitsperbyte.text.slices import Slice

NATS = "nats"  # folder of a run: nats by token of every model that is mixed


def evaluate(
    config: RandOptConfig, engine: Engine | Fleet, task: Task, grader: Grader, journal: Journal, found: SearchResult,
    test_items: Sequence[Item], held_out: Slice | None, run_dir: Path, console: Console, say: Callable[[str], None],
) -> dict[str, Any]:
    """Run everything the record needs that the journal does not hold yet, and return the record's `randopt` part."""
    made = _Evaluation(config, engine, task, grader, journal, found, test_items, run_dir, console, say)
    noise = {**config.noise.model_dump(mode="json"), **describe_noise(config.noise.scheme)}
    part = {"noise": noise, "task": task.describe(), "engine": engine.describe(), "population": found.describe()}
    part |= made.on_documents() if task.kind == "likelihood" else made.on_answers()
    part["heldout"] = made.on_held_out(held_out)
    part["probes"] = made.probes()
    part |= {"truncation": made.truncation(), "throughput": made.throughput(), "switch": made.switch()}
    return part


class _Evaluation:
    """What is run, and the figures that come of it. Members are ranked by train reward; equal ones by index."""

    def __init__(
        self, config: RandOptConfig, engine: Engine | Fleet, task: Task, grader: Grader, journal: Journal, found: SearchResult,
        test_items: Sequence[Item], run_dir: Path, console: Console, say: Callable[[str], None],
    ) -> None:
        self.config, self.engine, self.task, self.grader, self.journal, self.found = config, engine, task, grader, journal, found
        self.items, self.nats_dir, self.console, self.say = test_items, run_dir / NATS, console, say
        self.k = config.search.top_k
        self.rows = {"base_train": [found.base_row], "search": found.rows}  # by phase, all that the record is made of
        self.reward = {row.index: row.reward for row in found.rows}
        ranking = sorted(found.population, key=lambda member: (-self.reward[member.index], member.index))
        self.ensembles = {k: ranking[:k] for k in (self.k, *sorted(config.search.secondary_k))}
        self.top = self.ensembles[self.k]
        assert self.top == found.selected
        self.probed = ranking[: config.probes.top]
        self.pool: list[Member] = []
        self.subsets: list[list[Member]] = []
        if config.controls.random_k:
            self.pool = draw_pool(found.population, config.controls.control_pool, config.search.seed)
            self.subsets = self._random_subsets(config.controls.num_subsets)
        self.members = _distinct([*ranking[: max(self.ensembles)], *self.pool, *self.probed])
        self.test_of: dict[int, dict[str, Any]] = {}  # of each of these members, alone
        self.bpb_of: dict[int, float] = {}  # of each of those scored on the held-out slice

    # -- a task with answers ------------------------------------------------------------------------------------------

    def on_answers(self) -> dict[str, Any]:
        """The test set by votes: everything about it in the record."""
        controls = self.config.controls
        base = self._run("base_test", [BASE])[0]
        tested = {row.index: row for row in self._run("test", self.members)}
        sampled = self._base_samples() if controls.base_majority else []
        self.test_of = {index: accuracy(np.array(row.correct)) for index, row in tested.items()}
        order = [tested[index] for index in self._clustering_order()]
        ballots = self._ballots([*order, *sampled])
        place = {row.index: i for i, row in enumerate(order)}  # a member's row in the ballots

        def vote(voters: Sequence[Member]) -> Outcome:
            return ensemble(ballots, [place[member.index] for member in voters])

        headline = vote(self.top)
        against: dict[str, np.ndarray] = {"base": np.array(base.correct)}
        part: dict[str, Any] = {"selection": self._selection(), "base": {**self._base_train(), "test": accuracy(against["base"])},
                                "ensemble": self._outcome(self.k, headline),
                                "secondary": [self._outcome(k, vote(self.ensembles[k])) for k in self.ensembles if k != self.k]}
        part["controls"] = rows = {}
        if sampled:
            samples = ensemble(ballots, range(len(order), len(order) + len(sampled)))
            against["base_majority"] = samples.correct
            rows["base_majority"] = {
                "enabled": True, **self._outcome(self.k, samples), "temperature": controls.temperature, "top_p": controls.top_p,
                "generated_tokens": sum(row.num_tokens for row in sampled),
                "ensemble_generated_tokens": sum(tested[member.index].num_tokens for member in self.top)}
        else:
            rows["base_majority"] = _off("base_majority")
        if controls.best_single:
            against["best_single"] = np.array(tested[self.top[0].index].correct)
            rows["best_single"] = {"enabled": True, "index": self.top[0].index, "test": self.test_of[self.top[0].index]}
        else:
            rows["best_single"] = _off("best_single")
        drawn = random_ensembles(ballots, [[place[m.index] for m in s] for s in self.subsets]) if self.subsets else None
        rows["random_k"] = self._random_k(drawn, headline) if drawn else _off("random_k")
        part["tests"] = [_test(headline.correct, name, correct, correct) for name, correct in against.items()]
        if drawn:
            part["tests"].append(_test(headline.correct, "random_k", drawn.mean_correct, drawn.median.correct))
        sides = {"ensemble": headline.correct, **against}
        part["items"] = {"ids": [item.id for item in self.items],
                         "correct": {name: "".join("01"[bool(right)] for right in side) for name, side in sides.items()}}
        part["spearman"] = self._spearman({member.index: self.test_of[member.index]["accuracy"] for member in self.pool})
        if hasattr(self.task, "verifier"):
            part["verifier"] = self._verified([tested[member.index] for member in self.top], sampled)
        return part

    def _clustering_order(self) -> list[int]:
        """Indices of the members in the order in which their votes are clustered: the best first, so that no control has a say in which
        of the ensemble's answers are equal."""
        ranked = max(self.ensembles.values(), key=len)
        return [member.index for member in (*ranked, *(m for m in self.members if m not in ranked))]

    def _base_samples(self) -> list[Row]:
        """K samples of the base model at temperature."""
        c = self.config.controls

        def sampling(sample: Member) -> Sampling:
            seed = sample_seed(self.config.search.seed, sample.index)
            return Sampling(self._max_new_tokens(), c.temperature, c.top_p, seed, self.task.stop)

        return self._run("base_sample", [Member(i, None, None) for i in range(self.k)], sampling)

    def _ballots(self, rows: Sequence[Row]) -> Ballots:
        """The classes of all votes; those of an item are clustered at once, in the order of `rows`."""
        votes = [list(dict.fromkeys(row.votes[i] for row in rows if row.votes[i] is not None)) for i in range(len(self.items))]
        numbers = [dict(zip(texts, classes, strict=True))
                   for texts, classes in zip(votes, self.grader.submit_classes(votes).result(), strict=True)]
        classes = [[-1 if vote is None else numbers[i][vote] for i, vote in enumerate(row.votes)] for row in rows]
        return Ballots(np.array(classes, np.int64), np.array([row.correct for row in rows], bool))

    def _outcome(self, k: int, outcome: Outcome) -> dict[str, Any]:
        return {"k": k, "test": accuracy(outcome.correct), "num_unanswered": outcome.num_unanswered,
                "num_inconsistent": outcome.num_inconsistent}

    def _random_k(self, drawn: RandomEnsembles, headline: Outcome) -> dict[str, Any]:
        return {"enabled": True, "pool": [self._facts(member) for member in self.pool], "k": self.k, "num_subsets": len(drawn.outcomes),
                **drawn.describe(), "share_at_least_ensemble": drawn.share_at_least(headline.accuracy),
                "warning": self._pool_warning(self.config.controls.num_subsets)}

    def _verified(self, members: Sequence[Row], sampled: Sequence[Row]) -> dict[str, Any]:
        """Best of K by the task's verifier, which needs no reference answer: right where any of K answers passes. Apart from the vote,
        since it uses what a vote does not have; K samples of the base are held against it."""

        def best_of(rows: Sequence[Row]) -> np.ndarray:
            return np.array([any(row.votes[i] is not None and self.task.verifier(item, row.votes[i]) for row in rows)
                             for i, item in enumerate(self.items)])

        mine = best_of(members)
        made: dict[str, Any] = {"k": self.k, "ensemble": accuracy(mine)}
        if sampled:
            samples = best_of(sampled)
            made |= {"base_samples": accuracy(samples), "tests": [_test(mine, "base_samples", samples, samples)]}
        return made

    # -- a task of documents ------------------------------------------------------------------------------------------

    def on_documents(self) -> dict[str, Any]:
        """The test set by bits per byte, where an ensemble is the mixture of its members: everything about it in the record."""
        controls = self.config.controls
        context = self.config.task.context
        self._run("base_test", [BASE], context=context)
        self.test_of = {row.index: _score(row).to_dict() for row in self._run("test", self.members, context=context)}

        def load(index: int) -> list[DocumentNats]:
            return read_nats(self.nats_dir, "base_test" if index == BASE.index else "test", index)

        made, sides = self._compare(load, self.subsets, "the test documents")
        part: dict[str, Any] = {
            "selection": self._selection(), "base": {**self._base_train(), "test": made["base"]},
            "ensemble": {"k": self.k, "test": made["mixture"], "mean_member": made["mean_member"]},
            "secondary": [{"k": row["k"], "test": row["mixture"]} for row in made["secondary"]]}
        part["controls"] = {
            "base_majority": {"enabled": False, "why": "a likelihood task has no answers to vote on"},
            "best_single": {"enabled": True, "index": self.top[0].index, "test": made["best_single"]}
            if controls.best_single else _off("best_single"),
            "random_k": {"enabled": True, "pool": [self._facts(member) for member in self.pool], **made["random_mixture"],
                         "share_at_most_ensemble": _share_at_most(made["random_mixture"]["scores"], made["mixture"]["bpb"]),
                         "warning": self._pool_warning(controls.num_subsets)} if self.subsets else _off("random_k")}
        part["tests"] = made["differences"]
        part["items"] = {"ids": [item.id for item in self.items], "nats": {name: side.nats.tolist() for name, side in sides.items()},
                         "num_bytes": sides["base"].num_bytes.tolist()}
        part["spearman"] = self._spearman({member.index: -self.test_of[member.index]["bpb"] for member in self.pool})
        return part

    # -- held-out bits per byte ---------------------------------------------------------------------------------------

    def on_held_out(self, held_out: Slice | None) -> dict[str, Any]:
        """Base, ensemble and random mixtures on text that has nothing to do with the task; so are the probes, alone."""
        if held_out is None:
            return {"enabled": False, "why": "heldout.enabled is off"}
        context, limit = self.config.heldout.context, self.engine.describe()["context"]
        if limit is not None and limit < context:
            self.say(f"held-out slice: in windows of {limit} tokens, since the model takes no more (heldout.context is {context})")
            context = limit
        subsets = self._random_subsets(self.config.heldout.random_mixtures) if self.pool else []
        mixed = [member for group in (*self.ensembles.values(), *subsets) for member in group]
        items = [Item(f"heldout/{i}", text, "") for i, text in enumerate(held_out.documents)]
        rows = self._run("heldout", [BASE, *_distinct([*mixed, *self.probed])], items=items, context=context)
        self.bpb_of = {row.index: _score(row).bpb for row in rows}

        def load(index: int) -> list[DocumentNats]:
            return read_nats(self.nats_dir, "heldout", index)

        made, sides = self._compare(load, subsets, f"the held-out slice {held_out.path.name}")
        if not subsets:
            made["random_mixture"] = _off("random_k")
        return {"enabled": True, "slice": held_out.path.name, "slice_sha256": held_out.sha256, "source": held_out.manifest["source"],
                "context": context, "documents": "isolated", "num_docs": len(held_out.documents), "k": self.k, **made,
                "items": {"nats": {name: side.nats.tolist() for name, side in sides.items()}, "num_bytes": sides["base"].num_bytes.tolist()},
                "warning": self._pool_warning(self.config.heldout.random_mixtures)}

    def _compare(
        self, load: Callable[[int], Sequence[DocumentNats]], subsets: Sequence[Sequence[Member]], what: str,
    ) -> tuple[dict[str, Any], dict[str, Likelihood]]:
        return compare(load, BASE.index, {k: [m.index for m in members] for k, members in self.ensembles.items()}, self.k,
                       [[m.index for m in subset] for subset in subsets], what)

    # -- small parts --------------------------------------------------------------------------------------------------

    def probes(self) -> list[dict[str, Any]]:
        """The best members alone: test set and held-out bpb (None where nothing was held out)."""
        return [{"rank": rank, **self._facts(member), "test": self.test_of[member.index], "bpb": self.bpb_of.get(member.index)}
                for rank, member in enumerate(self.probed, 1)]

    def truncation(self) -> dict[str, float]:
        """The share of answers that ran into the limit of new tokens, by phase."""
        return {phase: sum(row.num_truncated for row in rows) / sum(row.num_prompts for row in rows)
                for phase, rows in self.rows.items() if not rows[0].nats}

    def throughput(self) -> dict[str, dict[str, Any]]:
        """Counts, seconds and rates by phase, of the rows that count: what a kill lost is in none of them."""
        made = {}
        for phase, rows in self.rows.items():
            seconds = sum(row.seconds for row in rows)
            kind = "scored_tokens" if rows[0].nats else "generated_tokens"
            counts = {"seeds": len(rows), "prompts": sum(row.num_prompts for row in rows),
                      "prompt_tokens": sum(row.num_prompt_tokens for row in rows), kind: sum(row.num_tokens for row in rows)}
            rates = {f"{name}_per_s": counts[name] / seconds if seconds > 0 else None for name in ("seeds", "prompts", kind)}
            made[phase] = {"seconds": seconds, **counts, **rates}
        return made

    def switch(self) -> dict[str, Any]:
        """Mean seconds of a weight switch, and what rounding left of the noise, once for each sigma."""
        switches = [row.switch_s for rows in self.rows.values() for row in rows if row.seed is not None]
        first = {member.sigma: member for member in reversed(self.found.population)}
        rms = [{"sigma": sigma, "seed": member.seed, "groups": self.engine.effective_rms(sigma, member.seed)}
               for sigma, member in sorted(first.items())]
        self.engine.reset()
        return {"mean_s": sum(switches) / len(switches), "effective_rms": rms}

    def _run(
        self, phase: str, members: Sequence[Member], sampling_of: Callable[[Member], Sampling] | None = None, *,
        items: Sequence[Item] | None = None, context: int | None = None,
    ) -> list[Row]:
        """The rows of `members` in that phase, in their order; the journal's where it has them."""
        greedy = Sampling(self._max_new_tokens(), stop=self.task.stop)
        items = self.items if items is None else items
        num_done = sum(self.journal.get(phase, member.index) is not None for member in members)
        if num_done < len(members):
            self.say(f"{phase}: {len(members)} models on {len(items)} items" + (f", {num_done} are in the journal" if num_done else ""))
        columns = TextColumn(phase), BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn()
        with Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal) as progress:
            bar = progress.add_task(phase, total=len(members), completed=num_done)
            self.rows[phase] = run_members(
                self.engine, self.task, self.grader, self.journal, phase, items, members, sampling_of or (lambda member: greedy),
                context=context, nats_dir=self.nats_dir if context else None, on_row=lambda row: progress.advance(bar))
        return self.rows[phase]

    def _max_new_tokens(self) -> int:
        return self.config.task.max_new_tokens or self.task.default_max_new_tokens

    def _random_subsets(self, num: int) -> list[list[Member]]:
        drawn = draw_subsets(len(self.pool), self.k, num, self.config.search.seed)
        return [[self.pool[position] for position in subset] for subset in drawn]

    def _pool_warning(self, num_wanted: int) -> str | None:
        return too_few_subsets(len(self.pool), self.k, num_wanted) if self.pool else None

    def _selection(self) -> dict[str, Any]:
        return {"top_k": self.k, "members": [{"rank": rank, **self._facts(member)} for rank, member in enumerate(self.top, 1)]}

    def _facts(self, member: Member) -> dict[str, Any]:
        """One member on both sides: the reward it was ranked by, and the test set."""
        test = self.test_of[member.index]
        figures = ({"test_bpb": test["bpb"]} if self.task.kind == "likelihood" else
                   {"test_accuracy": test["accuracy"], "test_correct": test["num_correct"], "num_test": test["num"]})
        return {"index": member.index, "seed": member.seed, "sigma": member.sigma, "train_reward": self.reward[member.index], **figures}

    def _base_train(self) -> dict[str, Any]:
        row = self.found.base_row
        return {"train_reward": row.reward, "train_accuracy": sum(row.correct) / len(row.correct) if row.correct else None}

    def _spearman(self, test: dict[int, float]) -> dict[str, Any]:
        """Does the train reward foretell the test set, over members that nobody selected?"""
        if not test:
            return _off("random_k")
        made = spearman([self.reward[index] for index in test], list(test.values()))
        return {"enabled": True, "rho": made.rho, "low": made.low, "high": made.high, "num": made.num, "why": made.why,
                "of": "train reward and " + ("minus test bpb" if self.task.kind == "likelihood" else "test accuracy")}


def accuracy(correct: np.ndarray) -> dict[str, Any]:
    """The record's figures of bool (N,) right answers, with Wilson's 95% interval."""
    made = wilson(int(correct.sum()), len(correct))
    return {"num_correct": int(correct.sum()), "num": len(correct), "accuracy": made.estimate, "low": made.low, "high": made.high}


def _test(ensemble: np.ndarray, name: str, share: np.ndarray, other: np.ndarray) -> dict[str, Any]:
    """The ensemble (bool (N,)) against `name`: paired bootstrap against `share` (N,), McNemar's test against `other` (bool (N,))."""
    made = paired_bootstrap_accuracy(ensemble, share)
    only_a, only_b = int((ensemble & ~other).sum()), int((other & ~ensemble).sum())
    return {"a": "ensemble", "b": name, "difference": made.estimate, "low": made.low, "high": made.high, "only_a": only_a,
            "only_b": only_b, "p_mcnemar": mcnemar_exact(only_a, only_b)}


def _off(control: str) -> dict[str, Any]:
    return {"enabled": False, "why": f"turned off: controls.{control}"}


def _score(row: Row) -> Score:
    return Likelihood(np.array(row.nats), np.array(row.num_bytes), row.num_tokens).score


def _share_at_most(scores: Sequence[dict[str, Any]], bpb: float) -> float:
    return sum(score["bpb"] <= bpb for score in scores) / len(scores)


def _distinct(members: Iterable[Member]) -> list[Member]:
    return sorted(set(members), key=lambda member: member.index)
