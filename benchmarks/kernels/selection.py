"""Times of the fused accumulate + exact top-k + residual kernel, compared with its bound and with torch and NumPy.

    python -m benchmarks.kernels.selection --sizes 1M,25M,100M --densities 0.001,0.01 --threads 1,2 --turns 9
    python -m benchmarks.kernels.selection --device cuda --sizes 25.6M,110M,336M

All contenders have the same input; the fast ones run several times in a turn, as other load affects them most:

- stream: the lower bound: read gradient, read and write buffer, 12 bytes per element, at the same SIMD level
- ours: the `select` kernel of this package, which moves at least these 12 bytes: it leaves the gradient as it is. In
  training it clears the gradient in the same pass, 16 bytes: benchmarks.kernels.steps measures that
- topk: torch.topk alone, from precomputed magnitudes
- chain: torch's add, abs, topk, sort, gather and zero, which together do the same work as ours
- argpartition: numpy.argpartition alone, from precomputed magnitudes (on the CPU)
- merge: merge_sum of 8 vectors of a million entries (with --device cuda)

Results are verified: ours selects the same entries as the chain up to ties, and the entries taken and the remaining
buffer add up to gradient + buffer exactly. The exit status is 1 if a result was wrong.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from timeit import timeit
from typing import Any, ClassVar

import numpy as np
import torch

from benchmarks import command_line
from benchmarks.runner import Found, Measure, Record, add_arguments, choose, column, run, table, times, values
from horovod_sparse.cli.units import at_least, count, listed
from horovod_sparse.kernels import to_host
from horovod_sparse.kernels.types import Array

Entries = tuple[Array, Array]

# Targets for 25M elements and one thread: at most these multiples of the stream bound, by density.
STREAM_TARGETS = {0.001: 1.25, 0.01: 1.5}
CHAIN_TARGET = 40.0
TARGET_SIZE = 25_000_000


class Input:
    """Input of one size on a device, with the contenders as methods.

    Args:
        k: Number of entries to select.
        gradient: Gradient, float32 [size].
        initial: Initial content of the buffer, float32 [size].
    """

    def __init__(self, k: int, gradient: torch.Tensor, initial: torch.Tensor) -> None:
        self.k, self._gradient, self._initial = k, gradient, initial
        self._buffer, self._magnitudes = initial.clone(), initial.abs()

    def reset(self) -> None:
        """Restore the initial content of the buffer."""
        self._buffer.copy_(self._initial)

    def topk(self) -> None:
        """Run the selection alone with torch."""
        torch.topk(self._magnitudes, self.k, sorted=False)

    def chain(self) -> Entries:
        """Run the complete step with torch operators and return the selected entries."""
        self._buffer.add_(self._gradient)
        chosen = torch.topk(self._buffer.abs(), self.k, sorted=False).indices
        indices = torch.sort(chosen).values
        values = self._buffer[indices]
        self._buffer[indices] = 0
        return self.array_of(indices.to(torch.int32)), self.array_of(values)

    def array_of(self, tensor: torch.Tensor) -> Array:
        """Return a tensor as an array of the same device."""
        return tensor.numpy()

    def on_host(self, taken: Entries) -> tuple[Array, Array, Array, Array, Array]:
        """Return the initial content, the gradient, the remaining buffer, and the indices and values taken."""
        initial, gradient, left = (one.cpu().numpy() for one in (self._initial, self._gradient, self._buffer))
        return initial, gradient, left, to_host(taken[0]), to_host(taken[1])

    def memory(self) -> float | None:
        """Return the peak memory of a selection; None: not known."""
        return None

    def close(self) -> None:
        """Release the device."""


class CpuInput(Input):
    """Input on the CPU.

    Attributes:
        CONTENDERS: Methods that are contenders, and how often each runs in a turn.
    """

    CONTENDERS: ClassVar = {"stream": 5, "ours": 5, "topk": 1, "chain": 1, "argpartition": 1}

    def __init__(self, size: int, density: float, threads: int) -> None:
        from horovod_sparse.kernels import cpu  # may be missing where the benchmark runs on a GPU

        self.kernels = cpu
        rng = np.random.default_rng(size)
        self.threads = threads
        self.gradient: Array = rng.standard_normal(size, dtype=np.float32)
        self.initial: Array = rng.standard_normal(size, dtype=np.float32)
        super().__init__(round(density * size), torch.from_numpy(self.gradient), torch.from_numpy(self.initial))
        self.buffer: Array = self._buffer.numpy()

    def stream(self) -> None:
        """Run the lower bound."""
        self.kernels.accumulate([(0, self.gradient)], self.buffer, 1.0, self.threads)

    def ours(self) -> Entries:
        """Run the fused kernel and return the selected entries."""
        return self.kernels.select([(0, self.gradient)], self.buffer, self.k, 1.0, self.threads)

    def argpartition(self) -> None:
        """Run the selection alone with NumPy."""
        np.argpartition(self._magnitudes.numpy(), len(self._magnitudes) - self.k)

    def milliseconds(self, run: Callable[[], object]) -> float:
        """Return the time of one call."""
        self.reset()
        return 1e3 * timeit(run, number=1)

    @staticmethod
    def targets(cell: Record, best: Mapping[str, float]) -> dict[str, bool]:
        """Return the targets that apply and whether each is met; ``best`` contains the smallest times in ms."""
        size, density, threads = (cell[name] for name in ("size", "density", "threads"))
        if size != TARGET_SIZE or threads != 1 or density not in STREAM_TARGETS:
            return {}
        limit = STREAM_TARGETS[density]
        return {
            f"ours/stream <= {limit}": best["ours"] <= limit * best["stream"],
            f"chain/ours > {CHAIN_TARGET:g}": best["chain"] > CHAIN_TARGET * best["ours"],
        }

    @staticmethod
    def facts() -> dict[str, Any]:
        """Return the facts that the results depend on."""
        from horovod_sparse.kernels import cpu

        return {"simd": cpu.simd_level()}


def wrong(case: Any, taken: Entries) -> tuple[int, Array, Array]:
    """Count wrong elements after ``taken`` left the buffer; return the count, gradient + buffer, and the indices."""
    initial, gradient, left, indices, values = case.on_host(taken)
    acc = initial + gradient
    # Exact up to ties: the magnitudes taken are the k largest, from any positions.
    largest = np.partition(np.abs(acc), len(acc) - case.k)[len(acc) - case.k :]
    not_largest = np.count_nonzero(np.sort(np.abs(values)) != np.sort(largest))
    count = moved_wrongly(acc, left, indices, values) + int(not_largest) + abs(len(indices) - case.k)
    return count, acc, indices


def moved_wrongly(acc: Array, left: Array, indices: Array, values: Array) -> int:
    """Return the number of wrong entries after entries of ``acc`` were taken and ``left`` remained."""
    rest = acc.copy()
    rest[indices] = 0
    misplaced = np.count_nonzero(rest.view(np.int32) != left.view(np.int32))
    changed = np.count_nonzero(values.view(np.int32) != acc[indices].view(np.int32))
    return int(misplaced + changed + np.count_nonzero(np.diff(indices) <= 0))


def inputs(device: str) -> Any:
    """Return the class of a device's inputs."""
    if device == "cuda":
        from benchmarks.kernels.cuda_input import CudaInput

        return CudaInput
    return CpuInput


def verify(case: Any) -> dict[str, int]:
    """Return the wrong elements of ours (also compared with the chain) and of the chain (to test the check itself)."""
    case.reset()
    of_ours, acc, ours = wrong(case, case.ours())
    case.reset()
    of_chain, _, chain = wrong(case, case.chain())
    threshold = np.abs(acc[ours]).min(initial=np.inf)
    of_ours += int(np.count_nonzero(np.abs(acc[np.setxor1d(ours, chain)]) != threshold))
    return {"ours": of_ours, "chain": of_chain}


@contextmanager
def open_cell(size: int, density: float, threads: int, device: str) -> Iterator[Measure]:
    """Prepare and verify a cell."""
    torch.set_num_threads(threads)
    case = inputs(device)(size, density, threads)
    wrong, facts = verify(case), machine(device)

    def measure(name: str) -> Record:
        ms = [case.milliseconds(getattr(case, name)) for _ in range(case.CONTENDERS[name])]
        memory = case.memory() if name == "ours" else None
        return {"ms": ms, "wrong": wrong.get(name, 0), "memory": memory, "machine": facts}

    try:
        yield measure
    finally:
        case.close()


def machine(name: str = "cpu") -> dict[str, Any]:
    """Return the facts that the results of a device depend on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        **inputs(name).facts(),
        "load average": os.getloadavg(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def show(found: Found) -> str:
    """Return the table of a cell, and which targets are met."""
    lines = [table("", found, {**times(found, "stream"), "#wrong": column("wrong", "d", max)})]
    if {"stream", "ours", "chain"} <= found.keys():
        first = found["ours"][0]
        for name, of in (("min", min), ("median", median)):
            stream, ours, chain = (of(values(found[one], "ms")) for one in ("stream", "ours", "chain"))
            lines.append(f"{name}: ours/stream {ours / stream:.2f}   chain/ours {chain / ours:.2f}")
        best = {one: min(values(turns, "ms")) for one, turns in found.items()}
        targets = inputs(first["device"]).targets(first, best)
        lines += [f"target {target}: {'met' if met else 'NOT met'}" for target, met in targets.items()]
    return "\n".join(lines)


def cells(options: argparse.Namespace) -> list[Record]:
    """Return the cells of all sizes, densities and numbers of threads."""
    names = ("size", "density", "threads")
    combinations = itertools.product(options.sizes, options.densities, options.threads)
    return [{**dict(zip(names, one, strict=True)), "device": options.device} for one in combinations]


def main() -> int:
    """Measure and print; return 1 if a result was wrong."""
    parser = command_line("kernels.selection", __doc__)
    add_arguments(parser, (), turns=7)
    add = parser.add_argument
    add("--sizes", type=listed(count), default="1M,25M")
    add("--densities", type=listed(float), default="0.001,0.01")
    add("--threads", type=listed(at_least(1)), default="1")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    choose(parser, options, inputs(options.device).CONTENDERS)
    print("   ".join(f"{name}: {value}" for name, value in machine(options.device).items()))
    wrong = run(options, cells(options), open_cell, show)
    print(f"\nload average at the end: {os.getloadavg()}")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
