"""Rollout: each member once, in order, graded while the next one generates."""

import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bitsperbyte.randopt import rollout
from bitsperbyte.randopt.config import TaskSection
from bitsperbyte.randopt.engines.base import Sampling
from bitsperbyte.randopt.engines.fake import FakeEngine
from bitsperbyte.randopt.journal import Journal
from bitsperbyte.randopt.population import BASE, Member, draw_population
from bitsperbyte.randopt.rollout import nats_path, read_nats, run_members
from bitsperbyte.randopt.tasks.arithmetic import Arithmetic
from bitsperbyte.randopt.tasks.base import Grade, Item
from bitsperbyte.randopt.tasks.grading import Grader
from bitsperbyte.run.outcome import RunFailed

MEMBERS = draw_population(5, [0.1, 0.2], 1)
TASK = Arithmetic(TaskSection(name="arithmetic", num_train=6, num_test=2))
ITEMS = TASK.items()[0]
SAMPLING = Sampling(4, stop=TASK.stop)


def rolled(path: Path, engine: FakeEngine, members: list[Member], task: Arithmetic = TASK, **more: object) -> list:
    with Journal.open(path, {}) as journal, Grader(task) as grader:
        return run_members(engine, task, grader, journal, more.pop("phase", "search"), more.pop("items", ITEMS), members,
                           lambda member: SAMPLING, **more)


def switches(engine: FakeEngine) -> list[tuple]:
    return [call for call in engine.calls if call[0] == "perturb"]


def test_rows_hold_what_each_member_answered(tmp_path: Path) -> None:
    engine, seen = FakeEngine(), []
    rows = rolled(tmp_path / "j", engine, [BASE, *MEMBERS], on_row=seen.append)
    assert rows == seen and [row.index for row in rows] == [-1, 0, 1, 2, 3, 4]
    fresh = FakeEngine()
    for member, row in zip([BASE, *MEMBERS], rows, strict=True):
        fresh.reset() if member.seed is None else fresh.perturb(member.seed, member.sigma)
        answers = fresh.generate(fresh.encode([TASK.prompt(item) for item in ITEMS]), SAMPLING)
        grades = [TASK.grade(item, answer.text) for item, answer in zip(ITEMS, answers, strict=True)]
        assert row.votes == [g.vote for g in grades] and row.reward == sum(g.reward for g in grades) / len(ITEMS)
        assert row.num_tokens == sum(a.num_tokens for a in answers) and row.num_truncated == sum(a.truncated for a in answers)
        assert (row.seed, row.sigma, row.num_prompts) == (member.seed, member.sigma, len(ITEMS))
    assert engine.live is None and engine.calls[-1] == ("verify_base",)


def test_what_the_journal_has_is_not_run_again(tmp_path: Path) -> None:
    first = rolled(tmp_path / "j", FakeEngine(), MEMBERS[1:3])
    engine = FakeEngine()
    rows = rolled(tmp_path / "j", engine, MEMBERS)
    assert rows[1:3] == first and len(switches(engine)) == 3
    engine = FakeEngine()
    assert rolled(tmp_path / "j", engine, MEMBERS) == rows and engine.calls == []


@pytest.mark.parametrize("change", [{"seed": 7}, {"sigma": 0.5}])
def test_rows_of_another_population_are_refused(tmp_path: Path, change: dict) -> None:
    rolled(tmp_path / "j", FakeEngine(), MEMBERS)
    with pytest.raises(ValueError, match="search 2 was run with seed .* the journal is of another run"):
        rolled(tmp_path / "j", FakeEngine(), [replace(m, **change) if m.index == 2 else m for m in MEMBERS])
    with pytest.raises(ValueError, match="holds 6 items, and this run has 5"):
        rolled(tmp_path / "j", FakeEngine(), MEMBERS, items=ITEMS[:5])


def test_a_member_is_graded_while_the_next_one_generates(tmp_path: Path) -> None:
    generating = threading.Event()
    overlapped = []

    class Slow(Arithmetic):
        def grade(self, item: Item, text: str) -> Grade:
            overlapped.append(generating.wait(5))  # the first member's grading ends only when the second one generates
            return super().grade(item, text)

    def on_call(call: tuple) -> None:
        if call[0] == "generate" and call[1][0] == MEMBERS[1].seed:
            generating.set()

    rolled(tmp_path / "j", FakeEngine(on_call=on_call), MEMBERS[:2], task=Slow(TASK.section))
    assert len(overlapped) == 12 and all(overlapped)


def test_an_interrupt_keeps_the_member_that_is_being_graded(tmp_path: Path) -> None:
    def on_call(call: tuple) -> None:
        if call[0] == "generate" and call[1][0] == MEMBERS[2].seed:
            raise KeyboardInterrupt

    engine = FakeEngine(on_call=on_call)
    with pytest.raises(KeyboardInterrupt):
        rolled(tmp_path / "j", engine, MEMBERS)
    with Journal.open(tmp_path / "j", {}) as journal:
        assert [row.index for row in journal.rows("search")] == [0, 1]
    assert engine.live is None


@pytest.mark.parametrize(("error", "kind", "sentence"), [
    (RuntimeError("kernel failed"), RunFailed, "member 2 .* failed in search: kernel failed.*--resume"),
    (ValueError("a prompt is too long"), ValueError, "a prompt is too long"),
])
def test_an_engines_error_names_the_member(tmp_path: Path, error: Exception, kind: type, sentence: str) -> None:
    with pytest.raises(kind, match=sentence):
        rolled(tmp_path / "j", FakeEngine(fail_at=MEMBERS[2].seed, error=error), MEMBERS)
    with Journal.open(tmp_path / "j", {}) as journal:
        assert [row.index for row in journal.rows("search")] == [0, 1]


def test_a_device_that_fails_again_at_reset_does_not_hide_its_first_error(tmp_path: Path) -> None:
    def on_call(call: tuple) -> None:
        if call == ("reset",):
            raise RuntimeError("the device is lost")

    engine = FakeEngine(fail_at=MEMBERS[2].seed, error=RuntimeError("kernel failed"), on_call=on_call)
    with pytest.raises(RunFailed, match="member 2 .* kernel failed"):
        rolled(tmp_path / "j", engine, MEMBERS)


def test_an_interrupt_waits_for_grading_but_not_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout, "GRADING_GRACE_S", 0.05)
    stuck = threading.Event()

    class Stuck(Arithmetic):
        def grade(self, item: Item, text: str) -> Grade:
            assert stuck.wait(60)
            return super().grade(item, text)

    def on_call(call: tuple) -> None:
        if call[0] == "generate" and call[1][0] == MEMBERS[1].seed:
            raise KeyboardInterrupt

    task = Stuck(TASK.section)
    with Journal.open(tmp_path / "j", {}) as journal, Grader(task) as grader:
        with pytest.raises(KeyboardInterrupt):
            run_members(FakeEngine(on_call=on_call), task, grader, journal, "search", ITEMS, MEMBERS, lambda member: SAMPLING)
        assert journal.rows("search") == [] and not stuck.is_set()
        stuck.set()


def test_an_interrupt_while_grading_is_awaited_loses_nothing(tmp_path: Path) -> None:
    begun = threading.Event()

    class Slow(Arithmetic):
        def grade(self, item: Item, text: str) -> Grade:
            if not begun.is_set():
                begun.set()
                time.sleep(0.2)  # until the main thread waits for it
                signal.raise_signal(signal.SIGINT)  # is handled in the main thread
            return super().grade(item, text)

    with pytest.raises(KeyboardInterrupt):
        rolled(tmp_path / "j", FakeEngine(), MEMBERS[:1], task=Slow(TASK.section))
    with Journal.open(tmp_path / "j", {}) as journal:
        assert [row.index for row in journal.rows("search")] == [0]


def test_a_graders_error_names_the_item_and_what_came_before_is_kept(tmp_path: Path) -> None:
    class Broken(Arithmetic):
        num_graded = 0

        def grade(self, item: Item, text: str) -> Grade:
            self.num_graded += 1
            if self.num_graded > 2 * len(ITEMS):
                raise RuntimeError("grading broke")
            return super().grade(item, text)

    with pytest.raises(RuntimeError, match="failed to grade .*grading broke"):
        rolled(tmp_path / "j", FakeEngine(), MEMBERS, task=Broken(TASK.section))
    with Journal.open(tmp_path / "j", {}) as journal:
        assert [row.index for row in journal.rows("search")] == [0, 1]


def test_seconds_of_the_rows_are_the_phases_wall_time(tmp_path: Path) -> None:
    begin = time.perf_counter()
    rows = rolled(tmp_path / "j", FakeEngine(delay_s=0.03), MEMBERS)
    wall_s = time.perf_counter() - begin
    assert 5 * 0.03 <= sum(row.seconds for row in rows) <= wall_s
    assert all(0.03 <= row.generate_s < wall_s and 0 <= row.switch_s < wall_s for row in rows)


def test_documents_are_scored_and_their_nats_kept(tmp_path: Path) -> None:
    items = [Item(str(i), text, "") for i, text in enumerate(["a document", "another one", "x"])]
    rows = rolled(tmp_path / "j", FakeEngine(), [BASE, *MEMBERS], phase="heldout", items=items, context=4, nats_dir=tmp_path / "n")
    for row in rows:
        documents = read_nats(tmp_path / "n", "heldout", row.index)
        assert [float(d.nats.sum()) for d in documents] == row.nats and [len(d.nats) for d in documents] == [9, 10, 0]
        assert [int(d.num_bytes.sum()) for d in documents] == row.num_bytes == [9, 10, 0]
        assert row.reward < 0 and row.num_tokens == 19


def test_lost_or_damaged_nats_are_scored_again(tmp_path: Path) -> None:
    items = [Item(str(i), text, "") for i, text in enumerate(["a document", "another one"])]
    more = {"phase": "heldout", "items": items, "context": 4, "nats_dir": tmp_path / "n"}
    rows = rolled(tmp_path / "j", FakeEngine(), MEMBERS, **more)
    kept = [nats_path(tmp_path / "n", "heldout", i).read_bytes() for i in range(5)]
    nats_path(tmp_path / "n", "heldout", 1).unlink()
    nats_path(tmp_path / "n", "heldout", 3).write_bytes(kept[3][:-7])
    nats_path(tmp_path / "n", "heldout", 4).write_bytes(kept[0])  # whole, but another member's
    engine = FakeEngine()
    assert rolled(tmp_path / "j", engine, MEMBERS, **more) == rows and len(switches(engine)) == 3
    for i in range(5):
        assert all(np.array_equal(a.nats, b.nats) for a, b in zip(
            read_nats(tmp_path / "n", "heldout", i), scores_of(MEMBERS[i], items), strict=True))
    with Journal.open(tmp_path / "j", {}) as journal:
        assert len(journal.rows("heldout")) == 5


def scores_of(member: Member, items: list[Item]) -> list:
    engine = FakeEngine()
    engine.perturb(member.seed, member.sigma)
    return engine.score([item.question for item in items], 4)


def test_a_loss_that_is_no_number_is_refused(tmp_path: Path) -> None:
    class Broken(FakeEngine):
        def score(self, documents: list[str], context: int) -> list:
            made = super().score(documents, context)
            made[0].nats[0] = np.inf
            return made

    with pytest.raises(ValueError, match="member 0 .* loss that is not a number: sigma is too large"):
        rolled(tmp_path / "j", Broken(), MEMBERS, phase="heldout", context=4)

