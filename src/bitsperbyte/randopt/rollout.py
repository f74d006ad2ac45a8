"""Run models over items: switch the weights, generate, grade while the next model generates, write a row.

The same loop serves the search, the test set, the controls and the held-out slice; a member that the journal already holds is not run
again.
"""

import io
import math
import time
import zipfile
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bitsperbyte.metric.bpb import Score
from bitsperbyte.randopt.engines.base import DocumentNats, Engine, Sampling
from bitsperbyte.randopt.jobs import Done, Job, in_turn
from bitsperbyte.randopt.journal import Journal, Row
from bitsperbyte.randopt.population import Member
from bitsperbyte.randopt.tasks.base import Grade, Item, Task
from bitsperbyte.randopt.tasks.grading import Grader
from bitsperbyte.randopt.workers import Fleet
from bitsperbyte.run.folder import write_atomic

GRADED_AT_ONCE = 64  # members of a fleet whose answers are being graded; more than that, and the workers wait
RTOL = 1e-3  # of a document's nats, scored twice: another batch or device rounds otherwise
GRADING_GRACE_S = 10.0  # after an interrupt or a failure, for the answers that are being graded


@dataclass
class _Generated:
    """A member's answers on their way through the grader."""

    done: Done
    grades: Future[list[Grade]]
    submitted: float  # perf_counter
    graded: float = 0.0

    def watch(self) -> "_Generated":
        self.grades.add_done_callback(lambda _: setattr(self, "graded", time.perf_counter()))
        return self


def run_members(
    engine: Engine | Fleet, task: Task, grader: Grader, journal: Journal, phase: str, items: Sequence[Item], members: Sequence[Member],
    sampling_of: Callable[[Member], Sampling], *, context: int | None = None, nats_dir: Path | None = None,
    on_row: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """The rows of `members` over `items` in `phase`, in the members' order; `on_row` sees each new one when the disk has it.

    With `context` the items' texts are scored in windows of so many tokens; otherwise their questions are answered and graded.
    `nats_dir` keeps the nats of each scored token, one file a member, for mixtures. An error of the engine names the member. On an
    interrupt the members whose answers are being graded are still written, if that takes no more than GRADING_GRACE_S.
    """
    missing = [member for member in members if not _is_done(journal, phase, member, len(items), nats_dir)]
    if missing:
        try:
            if context is None:
                job = Job(phase, prompts=engine.encode([task.prompt(item) for item in items]))
                most = GRADED_AT_ONCE if isinstance(engine, Fleet) else 1
                with closing(_run(engine, job, missing, sampling_of)) as produced:
                    _answer(produced, grader, journal, phase, items, most, on_row)
            else:
                job = Job(phase, texts=[item.question for item in items], context=context)
                with closing(_run(engine, job, missing, sampling_of)) as produced:
                    _score(produced, journal, phase, nats_dir, on_row)
        except BaseException:
            with suppress(Exception):  # a device that failed fails here again, and the error that counts is the first
                engine.reset()
            raise
        engine.reset()
        engine.verify_base()
    return [journal.get(phase, member.index) for member in members]


def _run(engine: Engine | Fleet, job: Job, members: Sequence[Member], sampling_of: Callable[[Member], Sampling]) -> Generator[Done, None, None]:
    """What each of `members` did: of one engine in their order, of a fleet as they finish."""
    return engine.run(job, members, sampling_of) if isinstance(engine, Fleet) else in_turn(engine, job, members, sampling_of)


def read_nats(nats_dir: Path, phase: str, index: int) -> list[DocumentNats]:
    """The scored tokens of each document, as `run_members` kept them."""
    path = nats_path(nats_dir, phase, index)
    try:
        with np.load(path, allow_pickle=False) as arrays:
            nats, num_bytes, lengths = arrays["nats"], arrays["num_bytes"], arrays["lengths"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is missing or damaged ({type(error).__name__}): go on with --resume, which scores it "
                         "again") from error
    cuts = np.cumsum(lengths)[:-1]
    return [DocumentNats(n, b) for n, b in zip(np.split(nats, cuts), np.split(num_bytes, cuts), strict=True)]


def nats_path(nats_dir: Path, phase: str, index: int) -> Path:
    return nats_dir / f"{phase}_{index if index >= 0 else 'base'}.npz"


def _is_done(journal: Journal, phase: str, member: Member, num_items: int, nats_dir: Path | None) -> bool:
    """Whether the journal holds the member's row; ValueError where that row is of another seed, sigma or number of items."""
    row = journal.get(phase, member.index)
    if row is None:
        return False
    if (row.seed, row.sigma) != (member.seed, member.sigma):
        raise ValueError(f"{journal.path}: {phase} {member.index} was run with seed {row.seed} and sigma {row.sigma}, and this run "
                         f"draws {member.seed} and {member.sigma}: the journal is of another run")
    if num_items not in (len(row.rewards), len(row.nats)):
        raise ValueError(f"{journal.path}: {phase} {member.index} holds {max(len(row.rewards), len(row.nats))} items, and this run has "
                         f"{num_items}: the journal is of another run")
    return nats_dir is None or _kept(nats_dir, row)


def _kept(nats_dir: Path, row: Row) -> bool:
    """Whether the member's nats are there, whole and its own. Those that are not are scored again; the row says what they must sum to."""
    try:
        documents = read_nats(nats_dir, row.phase, row.index)
    except ValueError:
        return False
    return [int(d.num_bytes.sum()) for d in documents] == row.num_bytes and np.allclose([d.nats.sum() for d in documents], row.nats, rtol=RTOL)


def _answer(
    produced: Iterator[Done], grader: Grader, journal: Journal, phase: str, items: Sequence[Item], most: int, on_row: Callable[[Row], None],
) -> None:
    """Grade and write what is produced; at most `most` members wait for their grades while others generate."""
    since = time.perf_counter()
    pending: deque[_Generated] = deque()

    def collect() -> None:
        nonlocal since
        first = pending[0]
        grades = first.grades.result()
        pending.popleft()  # only now: an interrupt of the wait leaves it to the last collect
        now = time.perf_counter()
        row = _answered_row(phase, first, grades, seconds=now - since)
        since = now
        journal.append(row)
        on_row(row)

    try:
        for done in produced:
            while pending and (len(pending) >= most or pending[0].grades.done()):
                collect()  # it was graded meanwhile
            grades = grader.submit(items, [answer.text for answer in done.answers])
            pending.append(_Generated(done, grades, time.perf_counter()).watch())
        while pending:
            collect()
    except BaseException:
        until = time.perf_counter() + GRADING_GRACE_S
        while pending and wait([pending[0].grades], max(0.0, until - time.perf_counter())).done and pending[0].grades.exception() is None:
            collect()
        raise


def _score(produced: Iterator[Done], journal: Journal, phase: str, nats_dir: Path | None, on_row: Callable[[Row], None]) -> None:
    since = time.perf_counter()
    for done in produced:
        member = done.member
        if nats_dir is not None:
            _keep_nats(nats_path(nats_dir, phase, member.index), done.documents)  # before the row: a row says that they are there
        now = time.perf_counter()
        row = _scored_row(phase, done, now - since)
        since = now
        earlier = journal.get(phase, member.index)
        if earlier is None:
            journal.append(row)
            on_row(row)
        elif not np.allclose(earlier.nats, row.nats, rtol=RTOL):
            raise ValueError(f"{member} was scored again in {phase}, since the nats it had were lost, and {journal.path} says "
                             f"{math.fsum(earlier.nats):.3f} nats where there are now {math.fsum(row.nats):.3f}: the model or the text "
                             "changed; start a new run in another --run-dir")


def _answered_row(phase: str, graded: _Generated, grades: Sequence[Grade], seconds: float) -> Row:
    rewards = [float(grade.reward) for grade in grades]
    done = graded.done
    answers, member = done.answers, done.member
    return Row(phase, member.index, member.seed, member.sigma, reward=_mean(rewards, member, phase), rewards=rewards,
               correct=[bool(grade.correct) for grade in grades], votes=[grade.vote for grade in grades], nats=[], num_bytes=[],
               num_prompts=len(answers), num_prompt_tokens=sum(a.num_prompt_tokens for a in answers),
               num_tokens=sum(a.num_tokens for a in answers), num_truncated=sum(a.truncated for a in answers),
               switch_s=done.switch_s, generate_s=done.generate_s, grade_s=max(0.0, graded.graded - graded.submitted), seconds=seconds)


def _scored_row(phase: str, done: Done, seconds: float) -> Row:
    """The reward is minus the bpb of all documents together; each document's own stands in `rewards` only as nats and bytes."""
    member, documents = done.member, done.documents
    nats = [float(document.nats.sum()) for document in documents]
    num_bytes = [int(document.num_bytes.sum()) for document in documents]
    num_tokens = sum(len(document.nats) for document in documents)
    if not all(map(math.isfinite, nats)):
        raise ValueError(f"{member} scored documents with a loss that is not a number: sigma is too large for this model, or its "
                         "weights are damaged")
    reward = -Score(math.fsum(nats), sum(num_bytes), num_tokens).bpb
    return Row(phase, member.index, member.seed, member.sigma, reward=reward, rewards=[], correct=[], votes=[], nats=nats,
               num_bytes=num_bytes, num_prompts=len(documents), num_prompt_tokens=0, num_tokens=num_tokens, num_truncated=0,
               switch_s=done.switch_s, generate_s=done.generate_s, grade_s=0.0, seconds=seconds)


def _mean(rewards: Sequence[float], member: Member, phase: str) -> float:
    if not all(map(math.isfinite, rewards)):
        raise ValueError(f"{member} got a reward that is not a finite number in {phase}: the task's grading is at fault")
    return math.fsum(rewards) / len(rewards)


def _keep_nats(path: Path, documents: Sequence[DocumentNats]) -> None:
    path.parent.mkdir(exist_ok=True)
    content = io.BytesIO()
    np.savez(content, nats=np.concatenate([d.nats for d in documents]), num_bytes=np.concatenate([d.num_bytes for d in documents]),
             lengths=np.array([len(d.nats) for d in documents], dtype=np.int64))
    write_atomic(path, content.getvalue())
