"""A fleet: engines in Ray workers, one for each GPU group or so many on CPUs, that take members from one queue as they finish.

Ray places the workers, carries what goes in and out, and notices when one is gone; what is here is whose turn it is. A worker that dies,
or takes longer than it may, is replaced and its members go back to the front of the queue; workers join whenever the cluster has room.
Only this process writes the journal, so a member that ran twice stands there once.
"""

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from bitsperbyte.randopt.cluster import Cluster
from bitsperbyte.randopt.config import RandOptConfig
from bitsperbyte.randopt.engines.base import Engine, Sampling
from bitsperbyte.randopt.engines.registry import prepare_model
from bitsperbyte.randopt.jobs import Done, Job
from bitsperbyte.randopt.population import Member
from bitsperbyte.randopt.worker import Worker, versions
from bitsperbyte.run.outcome import RunFailed

POLL_S = 1.0  # between two looks at the cluster's nodes, and at the clocks
CLOSE_S = 10.0  # for the engines to close themselves
AHEAD = 2  # members that a worker has at once, so that it need not wait for this process

Opener = Callable[[RandOptConfig, Path, Callable[[str], None]], Engine]


@dataclass
class _Slot:
    """One worker. It waits for a place in the cluster, then opens its engine, then works; `since` is when it began that, or the task at
    the head of its line."""

    number: int
    actor: Any
    placing: Any = None  # the references of what it was asked for
    opening: Any = None
    tasks: deque[tuple[Any, Member]] = field(default_factory=deque)
    is_ready: bool = False
    where: str = "not placed yet"
    since: float = 0.0

    @property
    def head(self) -> Any:
        """What it is to answer next; None where it is idle."""
        return self.placing or self.opening or (self.tasks[0][0] if self.tasks else None)

    def __str__(self) -> str:
        return f"worker {self.number} ({self.where})"


class Fleet:
    """Many engines behind what a search asks of one. Use `Fleet.open(...)`.

    Workers differ in nothing that a result depends on: same files, versions and kind of device, or they are turned away.
    """

    def __init__(self, config: RandOptConfig, cluster: Cluster, run_dir: Path, opener: Opener, say: Callable[[str], None]) -> None:
        self._config, self._section, self._cluster = config, config.workers, cluster
        self._settings = config.model_copy(update={"model": config.model.model_copy(update={"device": cluster.device})}).model_dump_json()
        self._run_dir, self._opener, self._say = str(run_dir.absolute()), opener, say
        self._slots: list[_Slot] = []
        self._queue: deque[Member] = deque()
        self._numbers = count(1)
        self._facts: dict[str, Any] | None = None  # of the first worker that was ready, which the others must equal
        self._same: dict[str, Any] = {}
        self._versions = versions()
        self._losses: Counter[Member] = Counter()  # of workers, by the member that they were at
        self._num_failed_starts = 0  # in a row
        self._num_given_up = 0  # workers that are not replaced
        self._num_lost = self._most = self._most_nodes = 0
        self._looked = self._last_ready = time.monotonic()

    @classmethod
    def open(cls, config: RandOptConfig, run_dir: Path, say: Callable[[str], None], opener: Opener) -> "Fleet":
        """Connect, begin the workers, and return when the first of them is ready. `opener` is the registry's open_engine.

        ValueError for what no worker can load, for a cluster that is not there, and for too little room where workers.when_fewer is
        refuse.
        """
        prepare_model(config, run_dir, say)
        cluster = Cluster(config)
        fleet = cls(config, cluster, run_dir, opener, say)
        try:
            fleet._check_room()
            while not fleet._ready():
                fleet._turn()
        except BaseException:
            fleet.close()
            raise
        return fleet

    # -- what a search asks for ---------------------------------------------------------------------------------------

    def run(self, job: Job, members: Sequence[Member], sampling_of: Callable[[Member], Sampling]) -> Generator[Done, None, None]:
        """What each of `members` did, as they finish. An error of an engine ends the run, as it does with one; a worker that is lost does
        not. RunFailed where `workers.max_failures` were lost at one member, or none is left."""
        import ray

        shared = ray.put(job)  # once a node, and not with each member
        self._queue = deque(members)
        num_left = len(members)
        try:
            while num_left:
                self._feed(shared, sampling_of)
                done = self._turn()
                if done is not None:
                    num_left -= 1
                    self._feed(shared, sampling_of)  # before the caller takes its time
                    yield done
        finally:
            self._queue.clear()
            for slot in [slot for slot in self._slots if slot.tasks]:  # after an error: nobody waits for what they do
                self._end(slot)

    def describe(self) -> dict[str, Any]:
        assert self._facts is not None
        return self._facts

    def encode(self, prompts: Sequence[Sequence[dict[str, str]]]) -> list[list[int]]:
        return self._ask_one("encode", prompts)

    def effective_rms(self, sigma: float, seed: int) -> list[dict[str, Any]]:
        return self._ask_one("effective_rms", sigma, seed)

    def reset(self) -> None:
        self._ask_all("reset")

    def verify_base(self) -> None:
        self._ask_all("verify_base")

    def wait_for(self, num: int) -> None:
        """Return when so many workers are ready. A run need not: it begins with the first."""
        while len(self._ready()) < num:
            self._turn()

    def summary(self) -> dict[str, Any]:
        """For the record's provenance: the most workers and nodes at one time, the workers that were lost, what each took."""
        import ray

        return {"ray": ray.__version__, "most_workers": self._most, "lost": self._num_lost, "most_nodes": self._most_nodes,
                "each": {"cpus": self._cluster.needs.cpus, "gpus": self._cluster.needs.gpus}}

    def num_devices(self) -> int:
        """GPUs (or, without any, workers) that the run had at most."""
        return max(1, self._most) * max(1, self._cluster.needs.gpus)

    def close(self) -> None:
        """End the workers, and Ray if it was begun here."""
        import ray

        if ray.is_initialized():
            closing = [slot.actor.call.remote("close") for slot in self._ready() if not slot.tasks]
            if closing:
                ray.wait(closing, num_returns=len(closing), timeout=CLOSE_S)
            for slot in list(self._slots):
                self._end(slot)
            self._cluster.close()

    # -- one turn -----------------------------------------------------------------------------------------------------

    def _turn(self) -> Done | None:
        """Wait a moment for whatever happens next and see to it; what a member did, if it was that."""
        import ray

        self._tend()
        heads = {slot.head: slot for slot in self._slots if slot.head is not None}
        if not heads:
            time.sleep(POLL_S)
            return None
        ready, _ = ray.wait(list(heads), timeout=POLL_S)
        if not ready:
            return None
        slot = heads[ready[0]]
        try:
            return self._answered(slot, ray.get(ready[0]))
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, ray.exceptions.RayError) or not isinstance(cause, Exception):
                self._lose(slot, f"could not go on ({why_lost(cause)})", by_node=True)  # what it was given, or made, is gone with a node
            elif slot.is_ready:
                raise cause from error
            else:
                self._failed_to_open(slot, cause)
        except ray.exceptions.RayError as error:
            self._lose(slot, f"is gone ({why_lost(error)})", left_with_node(error, slot.is_ready))
        return None

    def _answered(self, slot: _Slot, answer: Any) -> Done | None:
        slot.since = time.monotonic()
        if slot.placing is not None:
            slot.placing = None
            slot.where, found = answer
            if found != self._versions:
                self._failed_to_open(slot, ValueError(f"its code is not this process's ({differences(found, self._versions)}): install the same "
                                                      "version of everything on all nodes"))
        elif slot.opening is not None:
            slot.opening = None
            self._opened(slot, *answer)
        else:
            slot.tasks.popleft()
            return answer
        return None

    def _opened(self, slot: _Slot, facts: dict[str, Any], same: dict[str, Any], lines: list[str]) -> None:
        if self._facts is None:
            for line in lines:
                self._say(line)
            self._facts, self._same = facts, same
        if same != self._same:
            self._say(f"{slot} is turned away, since its results would not be the others' ({differences(same, self._same)})")
            self._give_up(slot)
            return
        slot.is_ready = True
        self._num_failed_starts = 0
        self._most = max(self._most, len(self._ready()))

    def _feed(self, shared: Any, sampling_of: Callable[[Member], Sampling]) -> None:
        """Give members to workers, the idle first. Nobody gets a second one that would leave an idle worker without any."""
        slots = self._ready()
        for most in range(1, AHEAD + 1):
            for slot in slots:
                if len(slot.tasks) < most and len(self._queue) > (len(slots) if most > 1 else 0):
                    member = self._queue.popleft()
                    if not slot.tasks:
                        slot.since = time.monotonic()
                    slot.tasks.append((slot.actor.work.remote(shared, member, sampling_of(member)), member))

    # -- workers that come and go -------------------------------------------------------------------------------------

    def _tend(self) -> None:
        """Begin the workers that the cluster has room for and the run wants. RunFailed where there has been none for too long."""
        now = time.monotonic()
        if self._ready():
            self._last_ready = now
        elif now - self._last_ready > self._section.start_timeout_s and not any(slot.opening and not slot.placing for slot in self._slots):
            raise RunFailed(f"no worker found room for {self._section.start_timeout_s:g} s (workers.start_timeout_s): each takes "
                            f"{self._cluster.needs}; everything so far is kept, and --resume goes on when the cluster has room")
        if self._slots and now - self._looked < POLL_S:
            return
        self._looked = now
        self._check_clocks()
        target = self._target()
        for slot in [slot for slot in self._slots if slot.placing][: max(0, len(self._slots) - target)]:
            self._end(slot)  # its node left before it got there
        for _ in range(target - len(self._slots)):
            self._begin()

    def _target(self) -> int:
        room, wanted = self._cluster.room(), self._section.count
        self._most_nodes = max(self._most_nodes, self._cluster.num_nodes())
        return (room if wanted is None else min(room, wanted)) - self._num_given_up

    def _begin(self) -> None:
        import ray

        needs = self._cluster.needs
        actor = ray.remote(Worker).options(num_cpus=needs.cpus, num_gpus=needs.gpus, max_restarts=0, max_task_retries=0).remote()
        slot = _Slot(next(self._numbers), actor, since=time.monotonic())
        slot.placing = actor.place.remote()
        slot.opening = actor.open.remote(self._settings, self._run_dir, os.getcwd(), self._opener, needs.cpus)
        self._slots.append(slot)

    def _lose(self, slot: _Slot, why: str, by_node: bool = False) -> None:
        """Its members go back to the front of the queue; its place is taken by another at the next look at the cluster. Neither a member
        nor the engine is to blame where its node left (`by_node`), so that this counts for no limit."""
        self._num_lost += 1
        self._end(slot)
        members = [member for _, member in slot.tasks]
        self._queue.extendleft(reversed(members))
        if not slot.is_ready:
            self._say(f"{slot} {why} before it was ready")
            if not by_node:
                self._count_failed_start(slot, why)
            return
        again = f"; {' and '.join(map(str, members))} will be run again" if members else ""
        self._say(f"{slot} {why}{again}")
        if members and not by_node:  # a member that takes every worker down must meet its limit
            self._losses[members[0]] += 1
            if self._losses[members[0]] >= self._section.max_failures:
                raise RunFailed(f"{self._losses[members[0]]} workers were lost at {members[0]} (workers.max_failures): it may need more memory "
                                f"than there is, or longer than workers.timeout_s, {self._section.timeout_s:g} s; everything so far is kept, "
                                "and --resume goes on with it")

    def _failed_to_open(self, slot: _Slot, error: Exception) -> None:
        """What the first cannot load, none can, as far as one knows. One that joins others does so or does not."""
        if not self._ready():
            raise error
        self._say(f"{slot} could not open its engine ({' '.join(str(error).split())}): going on without it")
        self._give_up(slot)

    def _count_failed_start(self, slot: _Slot, why: str) -> None:
        self._num_failed_starts += 1
        if self._num_failed_starts < self._section.max_failures:
            return
        if not self._ready():
            raise RunFailed(f"{self._num_failed_starts} workers in a row were lost before they were ready (workers.max_failures); the last "
                            f"{why}; is there memory for a model in each?")
        self._say(f"{self._num_failed_starts} workers in a row were lost before they were ready: going on with {len(self._ready())}")
        self._num_given_up += 1
        self._num_failed_starts = 0

    def _give_up(self, slot: _Slot) -> None:
        self._num_given_up += 1
        self._end(slot)

    def _end(self, slot: _Slot) -> None:
        import ray

        self._slots = [other for other in self._slots if other is not slot]
        ray.kill(slot.actor, no_restart=True)

    def _check_clocks(self) -> None:
        """Lose the workers that are over their time, and whose answer has not come either while this process was busy."""
        import ray

        heads = [slot.head for slot in self._slots if slot.head is not None]
        answered = set(ray.wait(heads, num_returns=len(heads), timeout=0)[0]) if heads else set()
        now = time.monotonic()
        for slot in list(self._slots):
            if slot.head is None or slot.head in answered:
                continue
            limit, name = ((self._section.timeout_s, "timeout_s") if slot.is_ready else
                           (self._section.start_timeout_s, "start_timeout_s") if not slot.placing else (float("inf"), ""))
            if now - slot.since > limit:
                self._lose(slot, f"has not answered for {now - slot.since:.0f} s (workers.{name})")

    def _check_room(self) -> None:
        """Say how many workers there will be; where they are fewer than asked for, go on or refuse. Nodes of a cluster that was begun
        elsewhere may come late."""
        section, needs = self._section, self._cluster.needs
        asked = section.count if section.count is not None else self._config.hardware.num_gpus // needs.gpus if needs.gpus else 1
        until = time.monotonic() + section.start_timeout_s
        while (room := self._cluster.room()) < (asked if section.when_fewer == "refuse" else 1):
            if section.address is None or time.monotonic() > until:
                place = "this machine" if section.address is None else "the cluster"
                hint = " or set workers.when_fewer to use" if room else ""
                raise ValueError(f"{asked} worker{'s' * (asked > 1)} of {needs} each were asked for, and {place} has room for {room}: ask for "
                                 f"fewer or smaller ones (workers.count, workers.cpus_each, hardware.tensor_parallel){hint}")
            time.sleep(POLL_S)
        num = room if section.count is None else min(room, section.count)
        fewer = f" of the {asked} that were asked for; others join if there is room later" if room < asked else ""
        self._say(f"{num} worker{'s' * (num > 1)} of {needs} each{fewer}")

    # -- asking outside a queue ---------------------------------------------------------------------------------------

    def _ready(self) -> list[_Slot]:
        return [slot for slot in self._slots if slot.is_ready]

    def _ask_one(self, method: str, *arguments: Any) -> Any:
        """The answer of some worker."""
        num_lost = self._num_lost
        while self._num_lost - num_lost < self._section.max_failures:
            for answer in self._asked(self._ready()[:1], method, *arguments):
                return answer
            self._turn()
        raise RunFailed(f"{self._section.max_failures} workers were lost at {method} (workers.max_failures); everything so far is kept, and "
                        "--resume goes on with it")

    def _ask_all(self, method: str) -> None:
        """Of every worker that is ready; one that is lost meanwhile has nothing left to answer for."""
        for _ in self._asked(self._ready(), method):
            pass

    def _asked(self, slots: Sequence[_Slot], method: str, *arguments: Any) -> Iterator[Any]:
        import ray

        asked = [(slot, slot.actor.call.remote(method, *arguments)) for slot in slots]
        for slot, reference in asked:
            try:
                yield ray.get(reference, timeout=self._section.timeout_s)
            except ray.exceptions.RayTaskError as error:
                raise error.cause from error
            except ray.exceptions.RayError as error:
                self._lose(slot, f"is gone ({why_lost(error)})", left_with_node(error, slot.is_ready))


def why_lost(error: Any) -> str:
    """The line of an error of Ray that says what happened, without the advice around it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    told = next((line for line in lines if line.startswith("The actor is dead because")), None)
    if told is None:
        told = lines[-1] if "creation task" in lines[0] else lines[0]
    return told.partition(" Some common causes")[0].removeprefix("The actor is dead because ").strip(" .:")[:300]


def left_with_node(error: Any, was_ready: bool) -> bool:
    """Whether Ray says that a worker's node left: what it ran then has no part in it. That it cannot be spoken to, Ray says of a node that
    left and, on a busy machine, of a worker that a member has just taken down; so of one that was at work it counts."""
    import ray

    unreachable = isinstance(error, ray.exceptions.ActorUnavailableError) and not was_ready
    return unreachable or isinstance(error, ray.exceptions.NodeDiedError) or "node has died" in str(error)


def differences(its: dict[str, Any], others: dict[str, Any]) -> str:
    return "; ".join(f"{name}: {_short(its[name])} and not {_short(others[name])}" for name in its if its[name] != others[name])


def _short(value: Any) -> str:
    return f"{value[:12]}..." if isinstance(value, str) and len(value) > 40 else str(value)
