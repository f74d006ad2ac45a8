"""The training clock, on a fake time; and agreement over two real processes."""

import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitsperbyte.golf.clock import Clock, agree_max


class FakeTime:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_counts_running_intervals_only() -> None:
    now = FakeTime()
    clock = Clock(time_fn=now)
    now.now += 5
    assert clock.elapsed_s == 0 and not clock.running
    clock.start()
    now.now += 2
    assert clock.elapsed_s == 2 and clock.running
    clock.pause()
    now.now += 100
    assert clock.elapsed_s == 2
    clock.start()
    now.now += 3
    assert clock.elapsed_s == 5


def test_queued_device_work_is_on_the_clock_at_pause_and_off_it_at_start() -> None:
    """A device that is 7 s behind when waited for: those seconds count when the clock stops, not when it starts."""
    now, behind = FakeTime(), [7.0]

    def synchronize() -> None:
        now.now += behind[0]
        behind[0] = 0.0

    clock = Clock(synchronize, now)
    clock.start()
    assert clock.elapsed_s == 0
    behind[0] = 4.0
    clock.pause()
    assert clock.elapsed_s == 4


def test_reading_does_not_wait_for_the_device() -> None:
    waits: list[int] = []
    clock = Clock(lambda: waits.append(1), FakeTime())
    clock.start()
    assert clock.elapsed_s == 0 and len(waits) == 1


def test_paused_block_is_free_and_keeps_a_stopped_clock_stopped() -> None:
    now = FakeTime()
    clock = Clock(time_fn=now)
    with clock.paused():
        now.now += 1
    assert not clock.running
    clock.start()
    now.now += 1
    with clock.paused():
        assert not clock.running
        now.now += 50
        with clock.paused():
            now.now += 50
        assert not clock.running
    now.now += 1
    assert clock.running and clock.elapsed_s == 2


def test_paused_goes_on_after_an_exception() -> None:
    now = FakeTime()
    clock = Clock(time_fn=now)
    clock.start()
    with pytest.raises(RuntimeError), clock.paused():
        raise RuntimeError("evaluation failed")
    now.now += 2
    assert clock.running and clock.elapsed_s == 2


@given(finished=st.floats(0, 1e6), running=st.floats(0, 1e6), charged=st.floats(0, 1e6), later=st.floats(0, 1e6))
def test_restored_clock_goes_on_where_the_saved_one_stood(
    finished: float, running: float, charged: float, later: float
) -> None:
    now = FakeTime()
    first = Clock(time_fn=now)
    first.start()
    now.now += finished
    first.pause()
    first.charge(charged)
    first.start()
    now.now += running
    state = first.state()
    second = Clock(time_fn=now)
    second.restore(state)
    now.now += 12_345  # the time between the two processes is nobody's
    assert second.elapsed_s == pytest.approx(finished + running + charged, abs=1e-6)
    assert second.charged_s == charged
    second.charge(later)
    assert second.charged_s == pytest.approx(charged + later)
    assert second.elapsed_s == pytest.approx(finished + running + charged + later, abs=1e-6)


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf, "3", True])
def test_refuses_impossible_seconds(seconds: object) -> None:
    with pytest.raises(ValueError, match="finite number of seconds"):
        Clock().charge(seconds)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="elapsed_s"):
        Clock().restore({"elapsed_s": seconds, "charged_s": 0.0})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    "state, word", [({"elapsed_s": 1.0}, "charged_s"), ({"elapsed_s": 1.0, "charged_s": 2.0}, "only")]
)
def test_refuses_a_state_that_no_clock_has(state: dict[str, float], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        Clock().restore(state)


def test_misuse_is_an_invariant() -> None:
    clock = Clock()
    with pytest.raises(AssertionError):
        clock.pause()
    clock.start()
    with pytest.raises(AssertionError):
        clock.start()
    with pytest.raises(AssertionError):
        clock.restore({"elapsed_s": 0.0, "charged_s": 0.0})


def test_agreement_without_a_group_is_the_identity() -> None:
    assert agree_max([1.5, 0.0, -2.0]) == [1.5, 0.0, -2.0]
    assert agree_max([]) == []


RANK = """
import sys
from datetime import timedelta
import torch.distributed as dist
from bitsperbyte.golf.clock import agree_max
rank = int(sys.argv[1])
where, limit = "file://" + sys.argv[2], timedelta(seconds=60)
dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2, timeout=limit)
print(agree_max([[0.1, 1.0, 599.9], [0.2, 0.0, 600.1]][rank]))
dist.destroy_process_group()
"""


def test_two_ranks_agree_on_the_larger(tmp_path) -> None:
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    outputs = [rank.communicate(timeout=120)[0].strip() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert outputs == ["[0.2, 1.0, 600.1]"] * 2
