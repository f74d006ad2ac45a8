"""Room for workers on nodes, and how Ray is joined: quietly, without its signal handlers, in one sentence where it cannot be."""

import signal
import socket
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitsperbyte.randopt import cluster
from bitsperbyte.randopt.cluster import Cluster, Needs, require_ray


class FakeRay:
    """What of Ray a cluster touches: nodes with resources, init, shutdown."""

    __version__ = "0"

    def __init__(self, nodes: list[dict[str, float]], initialized: bool = False, error: Exception | None = None) -> None:
        self._nodes, self.initialized, self.error = nodes, initialized, error
        self.init_options: dict[str, Any] | None = None
        self.shut_down = False

    def is_initialized(self) -> bool:
        return self.initialized

    def init(self, **options: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Ray puts its own handler there
        if self.error:
            raise self.error
        self.init_options = options

    def shutdown(self) -> None:
        self.shut_down = True

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": node} for node in self._nodes] + [{"Alive": False, "Resources": {"CPU": 64.0, "GPU": 8.0}}]


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch, config: Callable) -> Callable[..., tuple[Cluster, FakeRay]]:
    """joined(nodes, num_cpus=, num_gpus= of this machine, **sections) -> (the cluster, what it used)."""

    def join(nodes: list[dict[str, float]], *, num_cpus: int = 4, num_gpus: int = 0, initialized: bool = False, error: Exception | None = None,
             **sections: Any) -> tuple[Cluster, FakeRay]:
        ray = FakeRay(nodes, initialized, error)
        monkeypatch.setitem(sys.modules, "ray", ray)
        monkeypatch.setattr(cluster, "os", SimpleNamespace(environ={}, sched_getaffinity=lambda pid: range(num_cpus)))
        monkeypatch.setattr(cluster.torch.cuda, "device_count", lambda: num_gpus)
        return Cluster(config(**sections)), ray

    return join


VLLM = {"model": {"path": "m", "engine": "vllm"}}


def test_a_worker_has_its_gpus_on_one_node(joined: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "engine_name", lambda model: model.engine)
    nodes = [{"CPU": 16.0, "GPU": 3.0}, {"CPU": 16.0, "GPU": 5.0}, {"CPU": 64.0}]
    pairs, _ = joined(nodes, workers={"count": None}, hardware={"num_gpus": 8, "tensor_parallel": 2}, **VLLM)
    assert pairs.device == "cuda" and pairs.needs == Needs(1, 2) and str(pairs.needs) == "2 GPUs and 1 CPU"
    assert pairs.room() == 1 + 2 and pairs.num_nodes() == 3, "eight GPUs, and three pairs of one node each"
    starved, _ = joined(nodes, workers={"count": None, "cpus_each": 10}, hardware={"num_gpus": 8, "tensor_parallel": 2}, **VLLM)
    assert starved.room() == 2
    native, _ = joined(nodes, workers={"count": None}, model={"path": "m", "engine": "native"},
                       hardware={"num_gpus": 8, "tensor_parallel": 2})
    assert native.needs == Needs(1, 1) and native.room() == 8, "only vllm spreads a model"
    cpu, _ = joined(nodes, workers={"count": None, "cpus_each": 3}, model={"path": "m", "device": "cpu"})
    assert cpu.device == "cpu" and cpu.needs == Needs(3, 0) and cpu.room() == 5 + 5 + 21


@given(nodes=st.lists(st.tuples(st.integers(0, 256), st.integers(0, 16)), max_size=6), cpus=st.integers(1, 9), gpus=st.integers(0, 8))
def test_all_workers_fit_and_no_node_has_room_for_another(nodes: list[tuple[int, int]], cpus: int, gpus: int) -> None:
    for node_cpus, node_gpus in nodes:
        num = cluster._room(float(node_cpus), float(node_gpus), Needs(cpus, gpus))
        assert num * cpus <= node_cpus and num * gpus <= node_gpus
        assert (num + 1) * cpus > node_cpus or (num + 1) * gpus > node_gpus


@pytest.mark.parametrize(("sections", "num_cpus", "num_gpus", "expected"), [
    ({"workers": {"count": 3}}, 16, 0, (3, 0)),  # not an idle process for each of 16 processors
    ({"workers": {"count": 3, "cpus_each": 2}}, 16, 0, (6, 0)),
    ({"workers": {"count": 30}}, 16, 0, (16, 0)),
    ({"workers": {"count": None}}, 16, 8, (8, 8)),
    ({"workers": {"count": 2, "cpus_each": 4}}, 16, 8, (8, 8)),
    ({"workers": {"count": 2}, "model": {"path": "m", "device": "cpu"}}, 16, 8, (2, 0)),
])
def test_a_ray_of_this_machine_begins_no_more_than_its_workers_take(joined: Callable, sections: dict, num_cpus: int, num_gpus: int,
                                                                   expected: tuple[int, int]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    made, ray = joined([{"CPU": 1.0}], num_cpus=num_cpus, num_gpus=num_gpus, **sections)
    options = ray.init_options
    assert (options["num_cpus"], options["num_gpus"]) == expected
    assert options["address"] == "local" and options["include_dashboard"] is False and options["log_to_driver"] is False
    assert cluster.os.environ["RAY_memory_monitor_refresh_ms"] == "0" and cluster.os.environ["RAY_usage_stats_enabled"] == "0"
    assert signal.getsignal(signal.SIGTERM) == before
    made.close()
    assert ray.shut_down


def test_a_ray_that_was_there_before_is_left_as_it_is(joined: Callable) -> None:
    made, ray = joined([{"CPU": 2.0}], initialized=True, workers={"count": 2})
    made.close()
    assert ray.init_options is None and not ray.shut_down


def test_a_cluster_that_is_not_there_is_one_sentence(joined: Callable) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ValueError, match="no Ray cluster can be joined at workers.address auto .no answer.: begin one with `ray start --head`, or"):
        joined([], error=ConnectionError("no\nanswer"), workers={"count": 2, "address": "auto"})
    assert signal.getsignal(signal.SIGTERM) == before
    with socket.socket() as bound, pytest.raises(ValueError, match="joined at workers.address 127.0.0.1:[0-9]+ .*refused"):
        bound.bind(("127.0.0.1", 0))  # and does not listen
        joined([], workers={"count": 2, "address": f"127.0.0.1:{bound.getsockname()[1]}"})


def test_a_cluster_at_an_address_is_joined_as_it_is(joined: Callable) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        _, ray = joined([{"CPU": 4.0}], workers={"count": None, "address": address})
    assert ray.init_options["address"] == address and not {"num_cpus", "num_gpus"} & set(ray.init_options)
    assert cluster.os.environ == {}, "settings of its processes are whoever's began them"


def test_ray_is_asked_for_only_by_workers(config: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    require_ray(config().workers)
    with pytest.raises(ValueError, match="workers.count asks for one worker for each GPU, and Ray cannot be imported"):
        require_ray(config(workers={"count": None}).workers)
