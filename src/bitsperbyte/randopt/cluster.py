"""Ray as it is: connect to a cluster or start one on this machine, and count what has room in it."""

import logging
import math
import os
import signal
import socket
import threading
from dataclasses import dataclass
from typing import Any

import torch

from bitsperbyte.randopt.config import RandOptConfig, WorkersSection
from bitsperbyte.randopt.engines.registry import engine_name

CONNECT_S = 10.0
OBJECT_STORE_BYTES = 2**28  # of a cluster on this machine: answers and nats of a few members are under way at once
# For the processes of a cluster that is started here; whoever starts one by `ray start` sets these for it. Ray's memory monitor looks at
# the whole machine and not at a job's share of it, and kills workers that have memory to spare.
SETTINGS = {"RAY_memory_monitor_refresh_ms": "0", "RAY_usage_stats_enabled": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "RAY_process_group_cleanup_enabled": "true", "RAY_DEDUP_LOGS": "0"}


def require_ray(section: WorkersSection) -> None:
    """ValueError, before anything is begun, where a config asks for workers and Ray is not there."""
    if section.count == 0:
        return
    try:
        import ray  # noqa: F401
    except ImportError as error:
        wanted = "one worker for each GPU" if section.count is None else f"{section.count} workers"
        raise ValueError(f"workers.count asks for {wanted}, and Ray cannot be imported ({error}): pip install 'bitsperbyte[ray]', or set "
                         "workers.count to 0 for one engine in this process") from error


@dataclass(frozen=True)
class Needs:
    """What one worker takes: `cpus` and, where the engines run on GPUs, `gpus` of one node."""

    cpus: int
    gpus: int

    def __str__(self) -> str:
        cpus = f"{self.cpus} CPU{'s' * (self.cpus > 1)}"
        return f"{self.gpus} GPU{'s' * (self.gpus > 1)} and {cpus}" if self.gpus else cpus


class Cluster:
    """A connection to Ray, closed with the process that Ray runs in if it was begun here. `needs` is what a worker takes."""

    def __init__(self, config: RandOptConfig) -> None:
        section = config.workers
        group = config.hardware.tensor_parallel if engine_name(config.model) == "vllm" else 1
        with_gpus = Needs(section.cpus_each, group)
        without = Needs(section.cpus_each, 0)
        self._is_own = _connect(section, with_gpus if config.model.device != "cpu" else without)
        device = config.model.device
        if device == "auto":
            device = "cuda" if any(node.get("GPU") for node in self._nodes()) else "cpu"
        self.device, self.needs = device, with_gpus if device == "cuda" else without

    def room(self) -> int:
        """How many workers the nodes of the cluster hold, were it ours alone. A worker's GPUs are those of one node."""
        return sum(_room(node.get("CPU", 0.0), node.get("GPU", 0.0), self.needs) for node in self._nodes())

    def num_nodes(self) -> int:
        return len(self._nodes())

    def close(self) -> None:
        import ray

        if self._is_own:
            ray.shutdown()

    def _nodes(self) -> list[dict[str, Any]]:
        import ray

        return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _room(cpus: float, gpus: float, needs: Needs) -> int:
    return int(min(cpus // needs.cpus, gpus // needs.gpus if needs.gpus else math.inf))


def _require_listener(address: str) -> None:
    """OSError at once where nobody listens at host:port; Ray would try for minutes."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()


def _connect(section: WorkersSection, needs: Needs) -> bool:
    """Whether Ray was begun here; False where this process was connected to it already."""
    import ray

    if ray.is_initialized():
        return False
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": True}
    before = signal.getsignal(signal.SIGTERM)
    try:
        if section.address is None:
            for name, value in SETTINGS.items():
                os.environ.setdefault(name, value)
            cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            gpus = torch.cuda.device_count() if needs.gpus else 0
            on_gpus = gpus // needs.gpus if gpus else 0
            # as many processors as its workers take, since Ray begins an idle process for each
            workers = min(math.inf if section.count is None else section.count, on_gpus or cpus // needs.cpus)
            cpus = max(needs.cpus * workers, 1) if on_gpus else max(min(needs.cpus * workers, cpus), 1)
            ray.init(address="local", num_cpus=cpus, num_gpus=gpus, include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES,
                     _node_ip_address="127.0.0.1", **quiet)
        else:
            _require_listener(section.address)
            ray.init(address=section.address, **quiet)
    except (OSError, ValueError, RuntimeError) as error:
        if section.address is None:
            raise
        raise ValueError(f"no Ray cluster can be joined at workers.address {section.address} ({' '.join(str(error).split())[:200]}): begin "
                         "one with `ray start --head`, or set workers.address to null for one on this machine") from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # Ray puts its own there, which would end us without a word
    return True
