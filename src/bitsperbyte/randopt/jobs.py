"""What one model does in a phase: switch the weights, then answer prompts or score texts. One engine does it in turn; workers.py spreads it
over many."""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from bitsperbyte.randopt.engines.base import DocumentNats, Engine, Generation, Sampling
from bitsperbyte.randopt.population import Member
from bitsperbyte.run.outcome import RunFailed


@dataclass(frozen=True)
class Job:
    """The same for every member of a phase: `prompts` (token ids) that are answered, or where `context` is set `texts` that are scored
    in windows of so many tokens."""

    phase: str
    prompts: Sequence[Sequence[int]] = ()
    texts: Sequence[str] = ()
    context: int | None = None


@dataclass(frozen=True)
class Done:
    """A member's answers or scored documents, in the items' order. Seconds: `switch_s` of the weights, `generate_s` of the rest."""

    member: Member
    answers: list[Generation]
    documents: list[DocumentNats]
    switch_s: float
    generate_s: float


def do(engine: Engine, job: Job, member: Member, sampling: Sampling) -> Done:
    """Run one member. An error of the engine names it: RunFailed, unless the error says itself what to do."""
    with _naming(member, job.phase):
        begin = time.perf_counter()
        if member.seed is None:
            engine.reset()
        else:
            engine.perturb(member.seed, member.sigma)
        switched = time.perf_counter()
        answers, documents = [], []
        if job.context is None:
            answers = engine.generate(job.prompts, sampling)
        else:
            documents = engine.score(job.texts, job.context)
        return Done(member, answers, documents, switched - begin, time.perf_counter() - switched)


def in_turn(engine: Engine, job: Job, members: Sequence[Member], sampling_of: Callable[[Member], Sampling]) -> Generator[Done, None, None]:
    """Each of `members` on one engine, in their order."""
    for member in members:
        yield do(engine, job, member, sampling_of(member))


@contextmanager
def _naming(member: Member, phase: str) -> Iterator[None]:
    try:
        yield
    except (RunFailed, ValueError, OSError, torch.OutOfMemoryError):
        raise  # these say what to do
    except Exception as error:
        raise RunFailed(f"{member} failed in {phase}: {str(error) or type(error).__name__}; everything before it is kept, and --resume "
                        "goes on with it") from error
