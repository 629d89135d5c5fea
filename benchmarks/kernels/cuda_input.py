"""GPU contenders of benchmarks.kernels.selection, including the merge of eight vectors, and memory use."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar

import cupy
import numpy as np
import torch

from benchmarks.kernels.selection import Entries, Input
from benchmarks.runner import Record
from horovod_sparse.engine.device import device_of
from horovod_sparse.kernels import cuda
from horovod_sparse.kernels.types import Array

GPU = torch.device("cuda")
# Consecutive calls of a fast contender; they hide the host's work for the next call, as in training.
REPEAT = 20

# The targets, and the sizes and densities to which they apply.
SIZES, DENSITIES = (25_600_000, 110_000_000, 336_000_000), (0.001, 0.01)
STREAM_TARGET, CHAIN_TARGET, MERGE_TARGET_MS, MEMORY_TARGET = 1.3, 8.0, 1.0, 0.05
VECTORS, ENTRIES = 8, 1_000_000  # vectors of the merge, and entries per vector


class CudaInput(Input):
    """Input of one size on the GPU, with the contenders as methods.

    Everything runs on the stream and with the memory allocator used in training.
    """

    CONTENDERS: ClassVar = dict.fromkeys(("stream", "ours", "topk", "chain", "merge"), 1)

    def __init__(self, size: int, density: float, threads: int) -> None:
        del threads  # of the CPU
        self._device = device_of(GPU)
        self._context = ExitStack()
        self._context.enter_context(self._device.work())
        generator = torch.Generator(GPU).manual_seed(size)
        gradient, initial = (torch.randn(size, generator=generator, device=GPU) for _ in range(2))
        super().__init__(round(density * size), gradient, initial)
        self._segments = [(0, self._device.array_of(self._gradient))]
        self._array = self._device.array_of(self._buffer)
        self._vectors = self._draw_vectors(size)

    def _draw_vectors(self, size: int) -> Sequence[Entries]:
        rng = np.random.default_rng(size)
        count = min(ENTRIES, size // 2)
        vectors = []
        for _ in range(VECTORS):
            indices = np.unique(rng.integers(0, size, count, dtype=np.int32))
            vectors.append((cupy.asarray(indices), cupy.asarray(rng.standard_normal(indices.size, dtype=np.float32))))
        return vectors

    def close(self) -> None:
        """Leave the context of the device."""
        self._context.close()

    def stream(self) -> None:
        """Run the lower bound of a selection that leaves the gradient unchanged, with torch: 12 bytes per element."""
        self._buffer.add_(self._gradient)

    def ours(self) -> Entries:
        """Run the fused kernels, which leave the gradient unchanged, and return the selected entries."""
        return cuda.select(self._segments, self._array, self.k)

    def array_of(self, tensor: torch.Tensor) -> Array:
        """Return a tensor as an array that shares its memory."""
        array: Array = self._device.array_of(tensor)
        return array

    def merge(self) -> None:
        """Sum eight vectors."""
        cuda.merge_sum(self._vectors, self._array.size)

    def milliseconds(self, run: Callable[[], object]) -> float:
        """Return the time of one call, averaged over consecutive calls."""
        self.reset()
        repeat = REPEAT if run in (self.stream, self.ours) else 3
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(repeat):
            run()
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - begin) / repeat

    def memory(self) -> float:
        """Return the peak memory of a selection, result included, residual excluded, relative to the residual."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        taken = self.ours()
        torch.cuda.synchronize()
        del taken
        return (torch.cuda.max_memory_allocated() - before) / self._array.nbytes

    @staticmethod
    def targets(cell: Record, best: Mapping[str, float]) -> dict[str, bool]:
        """Return the targets that apply and whether each is met; ``best`` contains the smallest times in ms."""
        if cell["size"] not in SIZES or cell["density"] not in DENSITIES:
            return {}
        return {
            f"ours/stream <= {STREAM_TARGET}": best["ours"] <= STREAM_TARGET * best["stream"],
            "ours < topk": best["ours"] < best["topk"],
            f"chain/ours > {CHAIN_TARGET:g}": best["chain"] > CHAIN_TARGET * best["ours"],
            f"merge < {MERGE_TARGET_MS:g} ms": best["merge"] < MERGE_TARGET_MS,
            f"memory < {MEMORY_TARGET:.0%}": cell["memory"] < MEMORY_TARGET,
        }

    @staticmethod
    def facts() -> dict[str, Any]:
        """Return the facts that the results depend on."""
        return {
            "gpu": torch.cuda.get_device_name(GPU),
            "driver": cupy.cuda.runtime.driverGetVersion(),
            "cuda": torch.version.cuda,
            "cupy": cupy.__version__,
        }
