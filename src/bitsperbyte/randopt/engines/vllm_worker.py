"""What runs inside vLLM's workers: a worker extension that lays its shard out, checks it against the checkpoint, and perturbs it in place.

vLLM adds the class to each worker under the name EXTENSION and calls its methods through `collective_rpc`; the package is installed, so
that workers find it wherever they run. Arguments and results are plain data. A method answers {"value": ...}, or {"error": kind, "text":
...} for what a person should read as one sentence, since an exception on its way through a worker process loses its type.
"""

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from bitsperbyte.randopt.engines.checkpoint import tensor_shapes
from bitsperbyte.randopt.engines.vllm_layout import ShardLayout, different, shard_layout, squares
from bitsperbyte.randopt.layout import matrix_shape
from bitsperbyte.randopt.perturb import Perturber

EXTENSION = "bitsperbyte.randopt.engines.vllm_worker.PerturbExtension"


def keep_plain_weights() -> None:
    """On CPUs vLLM repacks linear weights for oneDNN and AMX, and drops the originals; noise needs the originals. Told so, it computes
    with them through torch. No effect elsewhere."""
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        _custom_ops._supports_onednn = False
        utils.check_cpu_sgl_kernel = lambda n, k, dtype: False


# vLLM imports this module in each worker before it loads a weight, and calls nothing of it until afterwards
if "vllm" in sys.modules:
    keep_plain_weights()


def _answering(method: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    @functools.wraps(method)
    def answer(*args: Any, **named: Any) -> dict[str, Any]:
        try:
            return {"value": method(*args, **named)}
        except torch.OutOfMemoryError as error:
            return {"error": "memory", "text": str(error)}
        except (ValueError, RuntimeError) as error:
            return {"error": type(error).__name__, "text": str(error)}

    return answer


class PerturbExtension:
    """Methods that vLLM's worker gains; `bpb_open` comes first, then `bpb_prepare`, then the others. Names begin with bpb, since vLLM
    refuses an extension that hides a method of its own."""

    @_answering
    def bpb_open(self, files: Sequence[str]) -> dict[str, Any]:
        """Lay out this rank's shard of the checkpoint in `files` and compare it, byte for byte. Returns by checkpoint tensor the sum of
        squares and the number of elements that this rank owns."""
        config = self.vllm_config
        if config.quant_config is not None:
            raise ValueError(f"vLLM quantises the weights ({config.quant_config.get_name()}), and noise on packed weights and their scales means "
                             "nothing: take the unquantised model")
        if config.cache_config.enable_prefix_caching:
            raise ValueError("vLLM's prefix cache is on, and it would answer with keys and values of other weights: it must be off")
        if config.parallel_config.pipeline_parallel_size > 1:
            raise ValueError("vLLM is set to pipeline parallelism, which this version does not lay out: use tensor parallelism")
        from vllm.distributed import get_tensor_model_parallel_rank

        paths = [Path(file) for file in files]
        where = {name: path for path in paths for name in tensor_shapes(path)}
        shapes = {name: shape for path in paths for name, shape in tensor_shapes(path).items()}
        shard = shard_layout(self.get_model(), shapes, get_tensor_model_parallel_rank())
        with _Reader(where, shapes) as read:
            if wrong := different(shard.layout, read):
                raise ValueError(f"vLLM does not hold the checkpoint's weights as they are stored: {len(wrong)} tensors differ "
                                 f"({', '.join(wrong[:3])}). It permutes, scales or repacks them in loading, so noise on them would be "
                                 "another member's: this model needs the native engine")
        self.bpb_shard: ShardLayout = shard
        return {"squares": {name: list(found) for name, found in squares(shard).items()}}

    @_answering
    def bpb_prepare(self, settings: Mapping[str, Any], rms: Mapping[str, float] | None) -> None:
        """Make the Perturber, by its arguments; `rms` are the checkpoint tensors' for relative sigmas."""
        with torch.inference_mode(False):
            self.bpb_perturber = Perturber(self.bpb_shard.layout, rms=rms, **settings)

    @_answering
    def bpb_perturb(self, seed: int, sigma: float) -> None:
        self.bpb_perturber.perturb(seed, sigma)
        self._bpb_wait()

    @_answering
    def bpb_reset(self) -> None:
        self.bpb_perturber.reset()
        self._bpb_wait()

    @_answering
    def bpb_verify_base(self) -> None:
        self.bpb_perturber.verify_base()

    @_answering
    def bpb_effective_rms(self, sigma: float, seed: int) -> list[dict[str, Any]]:
        return self.bpb_perturber.effective_rms(sigma, seed, self.bpb_shard.owned)

    @_answering
    def bpb_describe(self) -> dict[str, Any]:
        """The Perturber's facts, with the elements that this rank owns as num_perturbed, and its seconds a switch."""
        facts = self.bpb_perturber.describe()
        facts["num_perturbed"] = sum(p.num_elements for p in self.bpb_perturber.pieces if p in self.bpb_shard.owned)
        return {**facts, "names": sorted({p.name for p in self.bpb_perturber.pieces}), "switch_s": self.bpb_perturber.switch_s()}

    def _bpb_wait(self) -> None:
        """Until the device is done: what vLLM launches next may run on another stream."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()


class _Reader:
    """Rectangles of the tensors in safetensors files, each file opened once."""

    def __init__(self, where: Mapping[str, Path], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._where, self._shapes, self._stack, self._open = where, shapes, ExitStack(), {}

    def __enter__(self) -> "_Reader":
        return self

    def __exit__(self, *failure: Any) -> None:
        self._stack.close()

    def __call__(self, name: str, row_begin: int, row_end: int, col_begin: int, col_end: int) -> torch.Tensor:
        from safetensors import safe_open

        path = self._where[name]
        if path not in self._open:
            self._open[path] = self._stack.enter_context(safe_open(path, framework="pt"))
        stored, shape = self._open[path].get_slice(name), self._shapes[name]
        if not shape:
            return self._open[path].get_tensor(name).reshape(1, 1)
        rows = stored[row_begin:row_end]
        return rows.reshape(row_end - row_begin, matrix_shape(shape)[1])[:, col_begin:col_end]
