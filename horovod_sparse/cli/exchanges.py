"""Times and verifies the exchange of one bucket: the measurement behind `horovod-sparse bench collectives`."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI

from horovod_sparse.collectives import Exchange
from horovod_sparse.compression import Sparse
from horovod_sparse.consensus import consensus_of
from horovod_sparse.kernels.types import Array
from horovod_sparse.place import Place
from horovod_sparse.vector import SparseVector

_WINDOWS = 8  # different gradients
_SHIFT = 1 << 10  # elements from one to the next
_CHUNK = 1 << 20  # elements that are verified at a time


@dataclass(frozen=True)
class Row:
    """One algorithm at one size and density; per operation.

    A time is the median over the iterations of what the ranks needed for selection and exchange.

    Attributes:
        algorithm: Name of the preset.
        size: Elements of the dense vector.
        nbytes: Bytes of the dense vector.
        density: That of the configuration.
        min_ms: Milliseconds of the fastest rank.
        avg_ms: Mean of the ranks.
        max_ms: Milliseconds of the slowest rank.
        best_ms: Milliseconds of the slowest rank in the fastest iteration.
        exchange_ms: Exchange alone, of the fastest rank: it came last and waited for nobody.
        algbw: Bytes of the dense vector per time of the slowest rank, in GB/s.
        busbw: algbw * 2 (P-1)/P, which for a dense ring is the rate of each link.
        wire_bytes: Bytes that a rank sends, mean of the ranks.
        messages: Messages that a rank sends, mean of the ranks.
        entries: Entries that a rank hands in, in the last iteration, mean of the ranks.
        total_entries: Entries of the last iteration's total.
        wrong: Elements of the last total that break the law of conservation, plus ranks that hold other bits; None
            where this was not checked.
    """

    algorithm: str
    size: int
    nbytes: int
    density: float
    min_ms: float
    avg_ms: float
    max_ms: float
    best_ms: float
    exchange_ms: float
    algbw: float
    busbw: float
    wire_bytes: float
    messages: float
    entries: float
    total_entries: int
    wrong: int | None


class Gradients:
    """A few float32 gradients of normally distributed elements: windows of one buffer, which hardly costs memory.

    Args:
        size: Elements of a gradient.
        seed: Seed and rank; every rank has others.
    """

    def __init__(self, size: int, seed: tuple[int, int]) -> None:
        self._size = size
        self._buffer = np.random.default_rng(seed).standard_normal(size + _WINDOWS * _SHIFT, np.float32)

    def __getitem__(self, iteration: int) -> Array:
        """The gradient of an iteration."""
        start = _SHIFT * (iteration % _WINDOWS)
        return self._buffer[start : start + self._size]


class Bucket:
    """A bucket at a constant density and its parts, which do what ``Pipeline`` does, with a clock between the stages.

    Args:
        sparse: The configuration.
        size: Elements n.
        comm: The communicator of all ranks.
    """

    def __init__(self, sparse: Sparse, size: int, comm: MPI.Intracomm) -> None:
        self._consensus = consensus_of(comm)
        self._size = size
        self._k = sparse.k(size)
        place = Place(size, np.empty(0, np.float32), rank=comm.Get_rank(), ranks=comm.Get_size())
        self._memory, self._sparsifier, self.collective, _ = sparse.build(place, comm)

    def run(self, gradient: Array) -> tuple[float, float, SparseVector, Exchange]:
        """Exchanges a gradient; gives the seconds of everything and of the exchange, and what went in and came out."""
        begin = time.perf_counter()
        accumulator = self._memory.open([(0, gradient)], 1.0)
        if self.collective.entries(self._size, self._k) < self._size:
            vector = self._sparsifier.take(accumulator, self._k, self._consensus)
        else:
            vector = accumulator.take_all()
        selected = time.perf_counter()
        exchange = self.collective.allreduce(vector, self._k)
        exchanged = time.perf_counter()
        self._memory.close(accumulator, vector, exchange.returned)
        return time.perf_counter() - begin, exchanged - selected, vector, exchange


def measure(
    name: str,
    sparse: Sparse,
    gradients: Gradients,
    size: int,
    comm: MPI.Intracomm,
    iterations: int,
    warmup: int,
    check: bool = True,
) -> Row:
    """Times one configuration; all ranks call this and get the same row.

    Args:
        name: What to call it.
        sparse: The configuration.
        gradients: This rank's gradients.
        size: Elements of a gradient.
        comm: The communicator of all ranks.
        iterations: Timed iterations, at least 1; each begins with a barrier.
        warmup: Iterations before them, in which reused thresholds settle.
        check: Verify the last result, which takes a dense allreduce in float64.
    """
    bucket = Bucket(sparse, size, comm)
    for iteration in range(warmup):
        bucket.run(gradients[iteration])
    traffic = bucket.collective.traffic
    sent = -np.array([traffic.bytes_sent, traffic.messages_sent], float)
    seconds = np.empty((iterations, 2))
    for iteration in range(iterations):
        comm.Barrier()
        whole, alone, vector, exchange = bucket.run(gradients[warmup + iteration])
        seconds[iteration] = whole, alone
    traffic = bucket.collective.traffic
    sent += traffic.bytes_sent, traffic.messages_sent
    everyones = 1e3 * np.array(comm.allgather(seconds))  # ranks, iterations, 2
    means = np.array(comm.allgather([*sent / iterations, len(vector)])).mean(axis=0)
    mistakes = wrong(comm, vector, exchange) if check else None
    return _row(name, sparse, size, everyones, means, len(exchange.total), mistakes)


def _row(
    name: str, sparse: Sparse, size: int, everyones: Array, means: Array, total_entries: int, wrong: int | None
) -> Row:
    whole, exchange = everyones[..., 0], everyones[..., 1]
    ranks, nbytes = len(everyones), 4 * size
    slowest = float(np.median(whole.max(axis=0)))
    algbw = nbytes / slowest / 1e6
    return Row(
        algorithm=name,
        size=size,
        nbytes=nbytes,
        density=sparse.density,
        min_ms=float(np.median(whole.min(axis=0))),
        avg_ms=float(np.median(whole.mean(axis=0))),
        max_ms=slowest,
        best_ms=float(whole.max(axis=0).min()),
        exchange_ms=float(np.median(exchange.min(axis=0))),
        algbw=algbw,
        busbw=algbw * 2 * (ranks - 1) / ranks,
        wire_bytes=float(means[0]),
        messages=float(means[1]),
        entries=float(means[2]),
        total_entries=total_entries,
        wrong=wrong,
    )


def wrong(comm: MPI.Intracomm, vector: SparseVector, exchange: Exchange) -> int:
    """How much of an exchange is wrong; all ranks call this and get the same number.

    Args:
        comm: The communicator of all ranks.
        vector: What this rank handed in.
        exchange: What it got.

    Returns:
        The number of elements where the sum over the ranks of what they handed in and did not get back, in float64,
        is not the total, beyond what rounding in float32 explains; plus the number of ranks whose total has other
        bits than that of rank 0.
    """
    largest = float(np.abs(vector.values).max(initial=0))
    # Each of P - 1 additions rounds a partial sum, which is no larger than the sum of the ranks' largest magnitudes.
    tolerance = comm.Get_size() * np.finfo(np.float32).eps * comm.allreduce(largest)
    different = 0
    for begin in range(0, vector.size, _CHUNK):
        end = min(begin + _CHUNK, vector.size)
        delivered = _part(vector, begin, end) - _part(exchange.returned, begin, end)
        comm.Allreduce(MPI.IN_PLACE, delivered)
        agrees = np.abs(delivered - _part(exchange.total, begin, end)) <= tolerance  # false for NaN
        different += int(np.count_nonzero(~agrees))
    digests: list[bytes] = comm.allgather(_digest(exchange.total))
    most: int = comm.allreduce(different, MPI.MAX)
    return most + sum(digest != digests[0] for digest in digests)


def _part(vector: SparseVector, begin: int, end: int) -> Array:
    """The elements begin .. end of a vector, written out in float64."""
    if vector.indices is None:
        return vector.values[begin:end].astype(np.float64)
    part = np.zeros(end - begin)
    inside = slice(*np.searchsorted(vector.indices, [begin, end]))
    part[vector.indices[inside] - begin] = vector.values[inside]
    return part


def _digest(vector: SparseVector) -> bytes:
    digest = hashlib.sha256(np.ascontiguousarray(vector.values).tobytes())
    if vector.indices is not None:
        digest.update(np.ascontiguousarray(vector.indices).tobytes())
    return digest.digest()
