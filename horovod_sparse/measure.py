"""Measures what the cost model needs: the link between the ranks of a communicator, and what a rank computes.

All ranks are measured at the same time, as they will exchange: those that share a network card, a core or memory are
measured sharing it. Every rank gets the slowest rank's figures, and thereby the same bits. They are measured once for
each communicator, which keeps them, and for each device: messages of a GPU may have to go through the host's memory.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from horovod_sparse.costmodel import Compute
from horovod_sparse.kernels import kernels_for, to_device, to_host
from horovod_sparse.kernels.types import Array
from horovod_sparse.network import Link, Network
from horovod_sparse.staging import Staging
from horovod_sparse.vector import SparseVector

_TAG = 2
_ROUNDS = 3  # the fastest counts
_PINGS = 20  # short messages in one round
_BYTES = (1 << 16, 1 << 18, 1 << 20, 1 << 22)  # long messages, up to the one that takes too long
_LONG_SECONDS = 0.4  # for all long messages of one kind
_ELEMENTS = 1 << 20
_DENSITY = 0.01
_VECTORS = 8  # in one sum
_KERNEL_SECONDS = 0.005  # of one round: more than a time slice, where ranks share cores
_HOST = np.empty(0, np.uint8)


def measure_link(comm: MPI.Intracomm, like: Array = _HOST) -> Link:
    """Seconds per message and per byte between ranks that all send and receive at once; both 0 on one rank.

    Each rank sends to the one almost half the communicator on and receives from the one as far back: first
    short messages, then longer ones, in well under a second. Ranks of one node then share its link to the others, and
    ``beta`` is that of a share.

    Args:
        comm: The communicator; all its ranks call this at the same point.
        like: Array on whose device the messages are.
    """
    link: Link = _kept(comm, f"link {_device(like)}", lambda: _measure_link(comm, like))
    return link


def measure_compute(like: Array, comm: MPI.Intracomm) -> Compute:
    """Seconds per element and per entry of the kernels, at a density of 1 %.

    Args:
        like: Array whose dtype (float32 or float64) and device those measured take.
        comm: The communicator; all its ranks call this at the same point.
    """
    compute: Compute = _kept(comm, f"{like.dtype} {_device(like)}", lambda: _measure_compute(like, comm))
    return compute


@functools.cache
def _keyval() -> int:
    return MPI.Comm.Create_keyval()


def _device(like: Array) -> str:
    return type(like).__module__


def _kept(comm: MPI.Intracomm, name: str, measure: Callable[[], Any]) -> Any:
    """What the communicator keeps under a name, measured if there is nothing yet."""
    known: Any = comm.Get_attr(_keyval()) or {}
    if name not in known:
        known[name] = measure()
        comm.Set_attr(_keyval(), known)
    return known[name]


def _measure_link(comm: MPI.Intracomm, like: Array) -> Link:
    if comm.Get_size() == 1:
        return Link(0.0, 0.0)
    alpha = _message_seconds(comm, 8, like, repeat=_PINGS)
    nbytes, seconds = _longest(lambda nbytes: _message_seconds(comm, nbytes, like))
    return Link(alpha, max(seconds - alpha, 0.0) / nbytes)


def _longest(seconds_of: Callable[[int], float]) -> tuple[int, float]:
    """The longest message that the time allows, and its seconds, which are the same on every rank."""
    spent = 0.0
    for nbytes in _BYTES:
        seconds = seconds_of(nbytes)
        spent += _ROUNDS * seconds
        if spent + 4 * _ROUNDS * seconds > _LONG_SECONDS:  # the next one takes four times as long
            break
    return nbytes, seconds


def _message_seconds(comm: MPI.Intracomm, nbytes: int, like: Array, repeat: int = 1) -> float:
    """Seconds per message, with what it takes to get it from device to device."""
    rank, ranks = comm.Get_rank(), comm.Get_size()
    # Not the same partner in both directions, where there are others: Open MPI sends long messages over TCP between
    # two ranks in one direction at a time.
    distance = max(1, (ranks - 1) // 2)
    to, origin = (rank + distance) % ranks, (rank - distance) % ranks
    way, message = Staging(comm).own(like), np.zeros(nbytes, np.uint8, like=like)
    incoming = way.incoming(nbytes, like)

    def exchange() -> None:
        (outgoing,) = way.outgoing([message])
        comm.Sendrecv(outgoing.buffer, to, _TAG, incoming.buffer, origin, _TAG)
        incoming.unload()
        outgoing.release()

    seconds = _seconds(comm, exchange, repeat, message)
    incoming.release()
    return seconds


def _reduce_seconds(comm: MPI.Intracomm, like: Array) -> float:
    """Seconds per element that a dense allreduce takes beyond the time of its bytes and messages.

    That is for the sums, and for what the library's algorithm leaves of the link's bandwidth.
    """
    network = Network(comm.Get_size(), measure_link(comm, like))
    nbytes, seconds = _longest(lambda nbytes: _allreduce_seconds(comm, nbytes, like))
    known = sum(step.bandwidth + step.latency for step in network.allreduce(nbytes))
    return max(seconds - known, 0.0) / (nbytes / like.itemsize * network.others)


def _allreduce_seconds(comm: MPI.Intracomm, nbytes: int, like: Array) -> float:
    values = np.zeros(nbytes // like.itemsize, like.dtype, like=like)
    total, way = np.zeros_like(values), Staging(comm).common(like)
    return _seconds(comm, lambda: way.sum(comm, values, total), 1, total)


def _measure_compute(like: Array, comm: MPI.Intracomm) -> Compute:
    kernels = kernels_for(like)
    generator = np.random.default_rng(0)
    gradient = to_device(generator.standard_normal(_ELEMENTS, np.float32).astype(like.dtype), like)
    buffer = np.zeros_like(gradient)
    k = round(_DENSITY * _ELEMENTS)
    vectors = [_entries(generator, k, like) for _ in range(_VECTORS)]
    entries = sum(values.size for _, values in vectors)
    vector = SparseVector(*vectors[0], _ELEMENTS)

    def seconds(run: Callable[[], object]) -> float:
        return _seconds(comm, run, math.ceil(_KERNEL_SECONDS / _seconds(comm, run, 1, buffer)), buffer)

    return Compute(
        select=seconds(lambda: kernels.select([(0, gradient)], buffer, k)) / _ELEMENTS,
        accumulate=seconds(lambda: kernels.accumulate([(0, gradient)], buffer)) / _ELEMENTS,
        reduce=_reduce_seconds(comm, like) if comm.Get_size() > 1 else 0.0,
        merge=seconds(lambda: kernels.merge_sum(vectors, _ELEMENTS)) / entries,
        cut=seconds(lambda: vector.cut(len(vector) // 2)) / len(vector),
    )


def _entries(generator: np.random.Generator, k: int, like: Array) -> tuple[Array, Array]:
    """About k entries at random positions."""
    indices = np.cumsum(generator.integers(1, 2 * _ELEMENTS // k, k, np.int32), dtype=np.int32)
    indices = indices[indices < _ELEMENTS]
    values = generator.standard_normal(indices.size).astype(like.dtype)
    return to_device(indices, like), to_device(values, like)


def _seconds(comm: MPI.Intracomm, run: Callable[[], object], repeat: int = 1, at: Array = _HOST) -> float:
    """Seconds per call in the fastest round, of the slowest rank; every rank gets the same number.

    A round ends when the device of the array ``at`` has done all of it.
    """
    rounds = []
    to_host(at[:1])
    for _ in range(_ROUNDS):
        comm.Barrier()
        begin = time.perf_counter()
        for _ in range(repeat):
            run()
        to_host(at[:1])
        rounds.append((time.perf_counter() - begin) / repeat)
    slowest = np.array([min(rounds)])
    comm.Allreduce(MPI.IN_PLACE, slowest, MPI.MAX)
    return float(slowest[0])
