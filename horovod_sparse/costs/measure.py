"""Measures what the cost model needs: the link between the ranks of a communicator, and what a rank computes.

All ranks are measured at the same time, as they will exchange: those that share a network card, a core or memory are
measured sharing it. Every rank gets the slowest rank's figures, and thereby the same bits. They are measured once for
each communicator, which keeps them, and for each device: messages of a GPU may have to go through the host's memory.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from horovod_sparse.costs.coding import coding_pays
from horovod_sparse.costs.formulas import Compute
from horovod_sparse.costs.network import Link, Network
from horovod_sparse.kernels import kernels_for, to_device, to_host
from horovod_sparse.kernels.types import MAX_SIZE, Array

if TYPE_CHECKING:
    from horovod_sparse.transport.base import Transport

_ROUNDS = 3  # the fastest counts
_PINGS = 20  # short messages in one round
_BYTES = (1 << 16, 1 << 18, 1 << 20, 1 << 22)  # long messages, up to the one that takes too long
_LONG_SECONDS = 0.4  # for all long messages of one kind
_ELEMENTS = 1 << 20
_DENSITY = 0.01
_VECTORS = 8  # in one sum
_KERNEL_SECONDS = 0.005  # of one round: more than a time slice, where ranks share cores
# A message with fewer entries is not worth the calls that code it.
_FEW = 512
_HOST = np.empty(0, np.uint8)


def measure_link(transport: Transport, like: Array = _HOST) -> Link:
    """Seconds per message and per byte between ranks that all send and receive at once; both 0 on one rank.

    Each rank sends to the one almost half the communicator on and receives from the one as far back: first
    short messages, then longer ones, in well under a second. Ranks of one node then share its link to the others, and
    ``beta`` is that of a share.

    Args:
        transport: Of the ranks; all of them call this at the same point.
        like: Array on whose device the messages are.
    """
    link: Link = transport.keep(f"link {_device(like)}", lambda: _measure_link(transport.channel(), like))
    return link


def measure_compute(transport: Transport, like: Array) -> Compute:
    """Seconds per element and per entry of the kernels, at a density of 1 %.

    Args:
        transport: Of the ranks; all of them call this at the same point.
        like: Array whose dtype (float32 or float64) and device those measured take.
    """
    compute: Compute = transport.keep(
        f"{like.dtype} {_device(like)}", lambda: _measure_compute(transport.channel(), like)
    )
    return compute


def measure_coding(transport: Transport, like: Array) -> float:
    """Seconds per entry for coding indices and decoding them, at a density of 1 %.

    Args:
        transport: Of the ranks; all of them call this at the same point.
        like: Array whose device is measured.
    """
    seconds: float = transport.keep(f"coding {_device(like)}", lambda: _measure_coding(transport.channel(), like))
    return seconds


def coded_from(transport: Transport, like: Array, density: float) -> int:
    """From how many entries on a message's indices should be coded, as measured; the same on every rank.

    Args:
        transport: Of the ranks; all of them call this at the same point. The link and the coder are measured once for
            each communicator.
        like: Array on whose device the messages are.
        density: Fraction of the positions.
    """
    if transport.size == 1 or density == 0:
        return MAX_SIZE + 1
    beta, code = measure_link(transport, like).beta, measure_coding(transport, like)
    return _FEW if coding_pays(beta, code, density) else MAX_SIZE + 1


def _device(like: Array) -> str:
    return type(like).__module__


def _measure_link(transport: Transport, like: Array) -> Link:
    if transport.size == 1:
        return Link(0.0, 0.0)
    alpha = _message_seconds(transport, 8, like, repeat=_PINGS)
    nbytes, seconds = _longest(lambda nbytes: _message_seconds(transport, nbytes, like))
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


def _message_seconds(transport: Transport, nbytes: int, like: Array, repeat: int = 1) -> float:
    """Seconds per message, with what it takes to get it from device to device."""
    rank, ranks = transport.rank, transport.size
    # Not the same partner in both directions, where there are others: Open MPI sends long messages over TCP between
    # two ranks in one direction at a time.
    distance = max(1, (ranks - 1) // 2)
    to, origin = (rank + distance) % ranks, (rank - distance) % ranks
    message = np.zeros(nbytes, np.uint8, like=like)

    def exchange() -> None:
        sending = transport.send(message, to)
        transport.receive(origin, message).wait()
        sending.wait()

    return _seconds(transport, exchange, repeat, message)


def _reduce_seconds(transport: Transport, like: Array) -> float:
    """Seconds per element that a dense allreduce takes beyond the time of its bytes and messages.

    That is for the sums, and for what the library's algorithm leaves of the link's bandwidth.
    """
    network = Network(transport.size, measure_link(transport, like))
    nbytes, seconds = _longest(lambda nbytes: _allreduce_seconds(transport, nbytes, like))
    known = sum(step.bandwidth + step.latency for step in network.allreduce(nbytes))
    return max(seconds - known, 0.0) / (nbytes / like.itemsize * network.others)


def _allreduce_seconds(transport: Transport, nbytes: int, like: Array) -> float:
    values = np.zeros(nbytes // like.itemsize, like.dtype, like=like)
    return _seconds(transport, lambda: transport.allreduce(values), 1, values)


def _measure_compute(transport: Transport, like: Array) -> Compute:
    kernels = kernels_for(like)
    generator = np.random.default_rng(0)
    gradient = to_device(generator.standard_normal(_ELEMENTS, np.float32).astype(like.dtype), like)
    buffer = np.zeros_like(gradient)
    k = round(_DENSITY * _ELEMENTS)
    vectors = [_entries(generator, k, like) for _ in range(_VECTORS)]
    entries = sum(values.size for _, values in vectors)
    half = vectors[0][1].size // 2

    def seconds(run: Callable[[], object]) -> float:
        return _repeated(transport, run, buffer)

    return Compute(
        select=seconds(lambda: kernels.select([(0, gradient)], buffer, k)) / _ELEMENTS,
        accumulate=seconds(lambda: kernels.accumulate([(0, gradient)], buffer)) / _ELEMENTS,
        reduce=_reduce_seconds(transport, like) if transport.size > 1 else 0.0,
        merge=seconds(lambda: kernels.merge_sum(vectors, _ELEMENTS)) / entries,
        cut=seconds(lambda: kernels.cut(*vectors[0], half)) / vectors[0][1].size,
        code=measure_coding(transport, like),
    )


def _measure_coding(transport: Transport, like: Array) -> float:
    kernels = kernels_for(like)
    indices, _ = _entries(np.random.default_rng(0), round(_DENSITY * _ELEMENTS), like)
    first = int(indices[0])

    def run() -> None:
        bits, coded = kernels.encode_indices(indices)
        kernels.decode_indices(coded, indices.size, first, bits, _ELEMENTS)

    return _repeated(transport, run, indices) / indices.size


def _repeated(transport: Transport, run: Callable[[], object], at: Array) -> float:
    """Seconds per call, of as many calls as can be measured."""
    return _seconds(transport, run, math.ceil(_KERNEL_SECONDS / _seconds(transport, run, 1, at)), at)


def _entries(generator: np.random.Generator, k: int, like: Array) -> tuple[Array, Array]:
    """About k entries at random positions."""
    indices = np.cumsum(generator.integers(1, 2 * _ELEMENTS // k, k, np.int32), dtype=np.int32)
    indices = indices[indices < _ELEMENTS]
    values = generator.standard_normal(indices.size).astype(like.dtype)
    return to_device(indices, like), to_device(values, like)


def _seconds(transport: Transport, run: Callable[[], object], repeat: int = 1, at: Array = _HOST) -> float:
    """Seconds per call in the fastest round, of the slowest rank; every rank gets the same number.

    A round ends when the device of the array ``at`` has done all of it.
    """
    rounds = []
    to_host(at[:1])
    for _ in range(_ROUNDS):
        transport.barrier()
        begin = time.perf_counter()
        for _ in range(repeat):
            run()
        to_host(at[:1])
        rounds.append((time.perf_counter() - begin) / repeat)
    return float(max(transport.allgather_object(min(rounds))))
