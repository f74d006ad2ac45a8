"""The ranks' gradients averaged while the backward pass still runs.

Gradients arrive roughly from the last block to the first. They are packed into buckets in that order, and each bucket is reduced, without
waiting for it, as soon as the last of its gradients is there. A parameter that is used several times (a recurrent block) arrives once,
when all its uses have been added up. A compiled network's backward is one graph that hands over all gradients at its end: then the
buckets overlap each other only.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET_BYTES = 8 * 2**20  # the baseline's 68 MB of gradients in nine pieces; small enough to begin early, large enough for the link


class GradientReducer:
    """Averages the `.grad` of `parameters` over `world_size` ranks. Call `begin` before the backward pass that completes the gradients
    (the last micro-batch) and `finish` after it; passes outside just accumulate. All ranks must use the same parameters."""

    def __init__(self, parameters: Iterable[Tensor], world_size: int, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.world_size, self.active = world_size, False
        self.buckets: list[list[Tensor]] = []
        size = bucket_bytes  # the first parameter opens a bucket
        for p in reversed(list(parameters)):
            if size >= bucket_bytes or self.buckets[-1][0].dtype != p.dtype:
                self.buckets.append([])
                size = 0
            self.buckets[-1].append(p)
            size += p.numel() * p.element_size()
            p.register_post_accumulate_grad_hook(self._arrived)
        self._bucket_of = {p: i for i, bucket in enumerate(self.buckets) for p in bucket}
        self._flat = [torch.zeros(sum(p.numel() for p in bucket), dtype=bucket[0].dtype, device=bucket[0].device) for bucket in self.buckets]

    def begin(self) -> None:
        self.active, self._next = True, 0
        self._waiting = [len(bucket) for bucket in self.buckets]
        self._works: list[dist.Work] = []

    def _arrived(self, parameter: Tensor) -> None:
        if self.active:
            self._waiting[self._bucket_of[parameter]] -= 1
            while self._next < len(self.buckets) and not self._waiting[self._next]:
                self._launch()

    def _launch(self) -> None:
        """Reduce the next bucket. Always in order, so that every rank calls the same collectives one after the other."""
        bucket, flat = self.buckets[self._next], self._flat[self._next]
        for p, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            part.copy_(p.grad.flatten()) if p.grad is not None else part.zero_()
        self._works.append(dist.all_reduce(flat, async_op=True))
        self._next += 1

    def finish(self) -> None:
        """Wait until every gradient is the mean over ranks. One that no rank has stays None."""
        while self._next < len(self.buckets):
            self._launch()
        for bucket, flat, work in zip(self.buckets, self._flat, self._works, strict=True):
            work.wait()
            flat /= self.world_size
            for p, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                if p.grad is not None:
                    p.grad.copy_(part.view_as(p.grad))
        self.active = False
