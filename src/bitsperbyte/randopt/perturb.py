"""Switch a model's weights to a seed's, in place, and back to the base, exactly.

Weights are always rebuilt from a copy of the base, never added to and subtracted from: bfloat16 sums do not come back (base "none" does
that, where there is no memory for a copy, and says that it is inexact). Nothing is reallocated, so that captured graphs stay valid.
"""

import difflib
import fnmatch
import hashlib
import importlib.util
import math
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch

from bitsperbyte.randopt import noise
from bitsperbyte.randopt.layout import Layout, Piece


def _triton_writer(targets: Sequence[noise.Target], scheme: str) -> Any:
    from bitsperbyte.randopt.noise_triton import TritonWriter

    return TritonWriter(targets, scheme)


# how weights are written; each is built from targets and a scheme, and has prepare(levels) and write(seed, what prepare gave)
WRITERS: dict[str, Callable[[Sequence[noise.Target], str], Any]] = {"torch": noise.TorchWriter, "triton": _triton_writer}


class Perturber:
    """Perturbs the tensors of a layout whose checkpoint names match a pattern of `include` and none of `exclude` (shell patterns).

    `scheme`: of noise.SCHEMES. `sigma`: "absolute", or "relative", which multiplies by each checkpoint tensor's root mean square,
    computed in float64 and rounded to float32 (so that other orders of summation give the same number); `rms` gives these where the
    layout holds only parts of the tensors. `base`: where the copy lies; "device" beside the live weights, "pinned" in page-locked CPU
    memory, from where each switch copies it, "none" nowhere (inexact). `verify_every`: switches between two checks of the base.
    `writer`: of WRITERS; "auto" is triton on CUDA where triton is installed, otherwise torch; `describe` says which.

    ValueError for patterns that match nothing, types that noise is not defined for, and partial tensors without their RMS; RuntimeError
    where this machine does not give the scheme's known answer.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        scheme: str = "rademacher",
        sigma: Literal["absolute", "relative"] = "absolute",
        base: Literal["device", "pinned", "none"] = "device",
        include: Sequence[str] = ("*",),
        exclude: Sequence[str] = (),
        verify_every: int = 64,
        rms: Mapping[str, float] | None = None,
        writer: str = "auto",
    ) -> None:
        assert base in ("device", "pinned", "none") and sigma in ("absolute", "relative") and verify_every >= 1
        self._scheme, self._sigma_kind, self._base_kind, self._verify_every = scheme, sigma, base, verify_every
        self._include, self._exclude, self._skipped = tuple(include), tuple(exclude), dict(layout.skipped)
        chosen = set(select(layout.names, include, exclude))
        self._tensors = [t for t in layout.tensors if any(p.name in chosen for p in t.pieces)]
        for live in self._tensors:
            if live.tensor.dtype not in noise.LIVE_DTYPES:
                raise ValueError(f"noise is defined for float32, bfloat16 and float16, and {live.name} is {live.tensor.dtype}: "
                                 "load the model in one of these types, or exclude the tensor")
        self._live = [t.tensor.detach() for t in self._tensors]
        self._pointers = [t.tensor.data_ptr() for t in self._tensors]
        self._base = [_copy_of(t, base) for t in self._live] if base != "none" else self._live
        self._where = [(i, piece) for i, t in enumerate(self._tensors) for piece in t.pieces if piece.name in chosen]
        self._on_cuda = any(t.is_cuda for t in self._live)
        if writer == "auto":
            writer = "triton" if self._on_cuda and importlib.util.find_spec("triton") else "torch"
        self._writer_name = writer
        _self_test(scheme, writer, self._live[0].device)
        sources = self._base if base == "device" else self._live
        self._writer = WRITERS[writer]([noise.Target(p, self._live[i], sources[i]) for i, p in self._where], scheme)
        self._expected = checksums(self._live)
        self.rms: dict[str, float] = self._tensor_rms(rms) if sigma == "relative" else {}
        self._prepared: dict[float, Any] = {}
        self._state: tuple[int, float] | None = None  # seed and sigma of the live weights; None: they are the base
        self._num_switches = 0
        self._timer = _SwitchTimer(self._live[0].device)

    @property
    def pieces(self) -> list[Piece]:
        """What noise is added to."""
        return [piece for _, piece in self._where]

    @property
    def num_perturbed(self) -> int:
        """Elements that noise is added to."""
        return sum(piece.num_elements for piece in self.pieces)

    def perturb(self, seed: int, sigma: float) -> None:
        """Make the live weights round(base + sigma * z(seed)), whatever they were. Every `verify_every` switches the base is checked
        first. RuntimeError where that fails or a live tensor has moved."""
        if not (math.isfinite(sigma) and sigma >= 0):
            raise ValueError(f"sigma is {sigma}, and must be a finite number of at least 0")
        seed, prepared = noise.checked_seed(seed), self._prepared_of(sigma)
        self._refuse_moved()
        if self._num_switches and self._num_switches % self._verify_every == 0 and self._base_kind != "none":
            self.reset()
            self.verify_base()
        if self._base_kind == "none":
            self.reset()
        with self._timer, torch.no_grad():
            if self._base_kind == "pinned":
                self._copy_base()
            self._writer.write(seed, prepared)
        self._state = (seed, sigma)
        self._num_switches += 1

    def reset(self) -> None:
        """Make the live weights the base again: every byte, unless there is no copy (base "none", which subtracts)."""
        self._refuse_moved()
        if self._base_kind != "none":
            self._copy_base()
        elif self._state is not None:
            seed, sigma = self._state
            self._writer.write(seed, self._prepared_of(-sigma))
        self._state = None

    def verify_base(self) -> None:
        """RuntimeError unless the copy of the base, and the live weights while they are the base, have the checksums of the start.
        With base "none" there is nothing to check once weights were switched."""
        looked_at = [] if self._base_kind == "none" else [("the copy of the base weights", self._base)]
        if self._state is None and (self._base_kind != "none" or not self._num_switches):
            looked_at.append(("the live weights after a reset", self._live))
        for what, tensors in looked_at:
            found = checksums(tensors)
            wrong = [t.name for t, a, b in zip(self._tensors, found, self._expected, strict=True) if a != b]
            if wrong:
                raise RuntimeError(
                    f"{what} changed since loading, in {len(wrong)} of {len(found)} tensors ({', '.join(wrong[:3])}): something else "
                    "wrote to them, or the memory is faulty. Members switched to since the last good check, up to "
                    f"{min(self._num_switches, self._verify_every)}, may have been evaluated with wrong weights; load the model again"
                )

    def effective_rms(self, sigma: float, seed: int, only: Collection[Piece] | None = None) -> list[dict[str, Any]]:
        """What `perturb` writes, by group of tensors (names with their numbers as *): name, num_elements, base_rms, requested_rms (of
        sigma * z), effective_rms (of what rounding left of it), share_unchanged. `only` counts these pieces and no others. Leaves the live
        weights alone, but for base "none", which must reset them to know the base."""
        if self._base_kind == "none":
            self.reset()
        sums: dict[str, list[torch.Tensor]] = {}
        sizes: dict[str, int] = {}
        for (i, piece), row in zip(self._where, self._levels_of(sigma), strict=True):
            if only is not None and piece not in only:
                continue
            group = re.sub(r"(?<![^.])\d+(?![^.])", "*", piece.name)
            sizes[group] = sizes.get(group, 0) + piece.num_elements
            levels = torch.from_numpy(row).to(self._live[i].device)
            for part, products in noise.parts(piece, seed, self._scheme, levels):
                old = part.view(self._base[i]).to(levels.device)
                new = (old + products).to(old.dtype)
                squares = [_sum_of_squares(t) for t in (old, products, new.double() - old.double())]
                sums.setdefault(group, []).append(torch.stack([*squares, (new == old).sum().double()]).cpu())
        rows = []
        for group, parts in sums.items():
            total, num = torch.stack(parts).sum(0).tolist(), sizes[group]
            rms = [math.sqrt(square / num) for square in total[:3]]
            rows.append({"name": group, "num_elements": num, "base_rms": rms[0], "requested_rms": rms[1], "effective_rms": rms[2],
                         "share_unchanged": total[3] / num})
        return rows

    def switch_s(self) -> float:
        """Mean seconds of a switch so far, checks left out; 0.0 before the first."""
        return self._timer.mean_s()

    def describe(self) -> dict[str, Any]:
        """Facts for the record."""
        return {**noise.describe(self._scheme), "sigma": self._sigma_kind, "base": self._base_kind, "exact": self._base_kind != "none",
                "writer": self._writer_name, "verify_every": self._verify_every, "include": list(self._include),
                "exclude": list(self._exclude), "num_perturbed": self.num_perturbed,
                "num_tensors": len({piece.name for _, piece in self._where}), "skipped": self._skipped, "rms": self.rms}

    def _levels_of(self, sigma: float) -> np.ndarray:
        """Products sigma * z for every target, float32 (targets, values of the scheme)."""
        factors = [self.rms[piece.name] if self.rms else 1.0 for _, piece in self._where]
        rows = {factor: noise.scaled_levels(self._scheme, sigma * factor) for factor in set(factors)}
        return np.stack([rows[factor] for factor in factors])

    def _prepared_of(self, sigma: float) -> Any:
        if sigma not in self._prepared:
            if len(self._prepared) == 64:  # a search has few sigmas, so that each is kept
                self._prepared.clear()
            self._prepared[sigma] = self._writer.prepare(self._levels_of(sigma))
        return self._prepared[sigma]

    def _copy_base(self) -> None:
        for live, base in zip(self._live, self._base, strict=True):
            live.copy_(base, non_blocking=True)

    def _refuse_moved(self) -> None:
        for live, pointer in zip(self._tensors, self._pointers, strict=True):
            if live.tensor.data_ptr() != pointer:
                raise RuntimeError(f"the weights of {live.name} were moved in memory after the perturber was made: make a new one, and "
                                   "capture graphs again")

    def _tensor_rms(self, given: Mapping[str, float] | None) -> dict[str, float]:
        if given is not None:
            missing = [piece.name for _, piece in self._where if piece.name not in given]
            if missing:
                raise ValueError(f"the given RMS values leave out {missing[0]}")
            return {piece.name: float(np.float32(given[piece.name])) for _, piece in self._where}
        totals: dict[str, float] = {}
        counts: dict[str, int] = {}
        for i, piece in self._where:
            squares = [_sum_of_squares(part.view(self._base[i])) for part in piece.cut(2**22)]
            totals[piece.name] = totals.get(piece.name, 0.0) + float(torch.stack(squares).sum())
            counts[piece.name] = counts.get(piece.name, 0) + piece.num_elements
        for _, piece in self._where:
            if counts[piece.name] != math.prod(piece.shape):
                raise ValueError(f"sigma: relative needs the RMS of the whole tensor {piece.name}, of which this layout holds "
                                 f"{counts[piece.name]} of {math.prod(piece.shape)} elements: pass rms")
        return {name: float(np.float32(math.sqrt(total / counts[name]))) for name, total in totals.items()}


def select(names: Sequence[str], include: Sequence[str], exclude: Sequence[str]) -> list[str]:
    """Names that match a pattern of `include` and none of `exclude`. ValueError for a pattern without a match, and for nothing left."""
    for pattern in (*include, *exclude):
        if not fnmatch.filter(names, pattern):
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.0)
            raise ValueError(f"no tensor of the model matches the pattern {pattern!r}; the nearest names are {', '.join(near)}")
    chosen = [n for n in names if _matches(n, include) and not _matches(n, exclude)]
    if not chosen:
        raise ValueError(f"the patterns {list(exclude)} exclude every tensor that {list(include)} includes: nothing is left to perturb")
    return chosen


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


# -- checksums --------------------------------------------------------------------------------------------------------

_ROW = 2**14


def checksums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """A 64-bit sum over the bytes of each tensor, on its device: 32-bit words times odd 64-bit numbers, row by row, then over the rows'
    sums. Any change of one word changes it; it guards against accidents, not against malice."""
    weights = {device: _weights().to(device) for device in {t.device for t in tensors}}
    return [int(_checksum(_words_of(t), weights[t.device]).cpu()) for t in tensors]


def _checksum(words: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    while True:
        sums = torch.cat([(rows * weights).sum(1) for rows in _rows(words)])
        if len(sums) == 1:
            return sums
        words = sums.view(torch.int32)


def _rows(words: torch.Tensor) -> Iterator[torch.Tensor]:
    """int32 words as matrices of rows of _ROW, the last row filled with zeros; few rows at once, for the memory of their products."""
    step = _ROW * (16 if words.device.type == "cpu" else 1024)
    whole = len(words) // _ROW * _ROW
    for begin in range(0, whole, step):
        yield words[begin : min(whole, begin + step)].view(-1, _ROW)
    if whole < len(words) or not whole:
        yield torch.nn.functional.pad(words[whole:], (0, _ROW - len(words) + whole)).view(1, _ROW)


def _words_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor as int32 words in the order of its memory; what does not fill a word is filled with zeros."""
    dense = tensor.numel() == 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    flat = tensor.as_strided((tensor.numel(),), (1,)) if dense else tensor.reshape(-1).contiguous()
    num_bytes = flat.numel() * flat.element_size()
    if num_bytes % 4 or flat.storage_offset() * flat.element_size() % 4:
        flat = torch.nn.functional.pad(flat.contiguous().view(torch.uint8), (0, -num_bytes % 4))
    return flat.view(torch.int32)


def _weights() -> torch.Tensor:
    words = noise.philox(np.stack([np.arange(_ROW // 2, dtype=np.uint32), *np.zeros((3, _ROW // 2), np.uint32)], axis=1), key=0)
    return torch.from_numpy(words.reshape(-1).view(np.int64) | 1)


# -- pieces of the above ----------------------------------------------------------------------------------------------


def _copy_of(tensor: torch.Tensor, base: str) -> torch.Tensor:
    """A copy with the same strides, since pieces are found by them."""
    if base == "pinned" and tensor.is_cuda:
        copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, pin_memory=True)
    else:
        copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)


def _sum_of_squares(tensor: torch.Tensor) -> torch.Tensor:
    squares = tensor.double().square()
    if squares.is_cuda:
        return squares.sum()
    return torch.tensor(squares.numpy().sum(), dtype=torch.float64)  # by one thread: torch's last bits depend on how many there are


def _self_test(scheme: str, writer: str, device: torch.device) -> None:
    """The writer, on this device, must give the known answer before it touches a weight."""
    digest = hashlib.sha256()
    levels = noise.scaled_levels(scheme, 1.0)
    for name, seed, begin in noise.KNOWN_PLACES:
        end = begin + noise.KNOWN_LENGTH
        live = torch.zeros(noise.KNOWN_LENGTH, device=device)
        piece = Piece(name, (end,), begin, end, 0, 1, offset=0, row_stride=1)
        tested = WRITERS[writer]([noise.Target(piece, live, live)], scheme)
        tested.write(seed, tested.prepare(levels[None]))
        digest.update(live.cpu().numpy().astype("<f4").tobytes())
    if digest.hexdigest()[:16] != noise.SCHEMES[scheme].known_answer:
        raise RuntimeError(f"the {scheme} noise that {writer} makes on {device} is not the defined one (its known answer differs), so "
                           "that seeds would mean other models than elsewhere: use another writer, driver or device")


class _SwitchTimer:
    """Seconds of the blocks it is entered for; on CUDA by events, read later, since a switch is only queued."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._total_s, self._num = device, 0.0, 0
        self._pending: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __enter__(self) -> None:
        self._begin: Any = time.perf_counter()
        if self._device.type == "cuda":
            self._begin = torch.cuda.Event(enable_timing=True)
            self._begin.record(torch.cuda.current_stream(self._device))

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is not None:
            return
        if self._device.type != "cuda":
            self._total_s, self._num = self._total_s + time.perf_counter() - self._begin, self._num + 1
            return
        end = torch.cuda.Event(enable_timing=True)
        end.record(torch.cuda.current_stream(self._device))
        self._pending.append((self._begin, end))
        if len(self._pending) >= 256:
            self.mean_s()

    def mean_s(self) -> float:
        for begin, end in self._pending:
            end.synchronize()
            self._total_s, self._num = self._total_s + begin.elapsed_time(end) / 1e3, self._num + 1
        self._pending.clear()
        return self._total_s / self._num if self._num else 0.0
