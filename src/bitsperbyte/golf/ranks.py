"""This process among the processes of a run, and the device that it computes on."""

import os
import resource
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

DEVICE_NAMES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class Ranks:
    """This process among the run's processes (one without torchrun), and the device it computes on."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()

    def mean(self, value: Tensor) -> Tensor:
        if self.world_size > 1:
            value = value.clone()
            dist.all_reduce(value)
            value /= self.world_size
        return value

    def share(self, tensors: list[Tensor]) -> None:
        """Give every rank the main rank's values."""
        if self.world_size > 1:
            for tensor in tensors:
                dist.broadcast(tensor.detach(), 0)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def all_gather(got: Tensor, sent: Tensor, async_op: bool = False) -> dist.Work | None:
    """Every rank's `sent` (n,), equally long on all, into `got` (ranks * n,), under the name that this torch has for it."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the older name warns on every rank from 2.13 on
    return gather(got, sent, async_op=async_op)


def is_lost_rank(error: BaseException) -> bool:
    """Whether a collective failed because another rank is gone, rather than something here. gloo raises a bare RuntimeError."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def join_ranks(device_name: str) -> Ranks:
    """The ranks that torchrun started, or a single one. `device_name` is auto, cpu or cuda; ValueError for another name, and when a GPU
    is asked for and there is none."""
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = pick_device(device_name, local_rank)
    if world_size > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(minutes=30))
    return Ranks(rank, world_size, device)


def pick_device(device_name: str, local_rank: int = 0) -> torch.device:
    """cuda:local_rank or cpu; `auto` takes the GPU where there is one. ValueError for any other name."""
    if device_name not in DEVICE_NAMES:
        raise ValueError(f"there is no device {device_name!r}: ask for one of {', '.join(DEVICE_NAMES)}")
    if device_name == "cuda" and not torch.cuda.is_available():
        raise ValueError("the device asked for is cuda, and torch sees no GPU here: ask for cpu or auto (train.device in a config)")
    if device_name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise ValueError(f"rank {local_rank} of this host has no GPU: torch sees {torch.cuda.device_count()}; "
                         "start that many processes (torchrun --nproc-per-node)")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def peak_memory_bytes(device: torch.device) -> int:
    """Most device memory allocated so far on CUDA; this process's peak resident size on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reserved_memory_bytes(device: torch.device) -> int:
    """Most device memory that torch held so far on CUDA; `peak_memory_bytes` on a CPU."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else peak_memory_bytes(device)
