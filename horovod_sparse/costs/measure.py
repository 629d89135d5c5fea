"""Measurements for the cost model: the link between the ranks of a communicator, and the compute costs of a rank.

All functions are collective operations. All ranks measure at the same time, as they later exchange: ranks that share a
network card, a core or memory are measured while sharing it. Every rank gets the slowest rank's results, bit-identical
on all ranks. Results are cached in the connection, separately for each device: messages of a GPU may have to pass
through host memory.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from horovod_sparse.costs.coding import coding_pays
from horovod_sparse.costs.formulas import Compute
from horovod_sparse.costs.network import Link, Network, Node
from horovod_sparse.kernels import kernels_for, to_device, to_host
from horovod_sparse.kernels.types import MAX_SIZE, Array

if TYPE_CHECKING:
    from horovod_sparse.transport.base import Transport
    from horovod_sparse.transport.nodes import Nodes

_ROUNDS = 3  # the fastest one is the result
_PINGS = 20  # short messages per round
_BYTES = (1 << 16, 1 << 18, 1 << 20, 1 << 22)  # long messages, up to the longest that fits in _LONG_SECONDS
_LONG_SECONDS = 0.1  # for all long messages of one measurement
_ELEMENTS = 1 << 22  # gradient and residual exceed a core's share of the cache, as after a backward pass
_DENSITY = 0.01
_LOW_DENSITY = 0.001  # of the selection: what more entries take is priced per entry
_LEVELS = (4, 0x41000000, 23)  # bits and levels of log4, up to 8: as good as any for the time of a conversion
_VECTORS = 8  # vectors per sum
_KERNEL_SECONDS = 0.005  # minimum per round, and for each rank on the core: more than a time slice
# Minimum number of entries; below it, the calls that code the indices cost more than they save.
_FEW = 512
_HOST = np.empty(0, np.uint8)


def measure_link(transport: Transport, like: Array = _HOST) -> Link:
    """Measure seconds per message and per byte while all ranks send and receive; both are 0 on one rank.

    Each rank sends to the rank almost half the world size ahead and receives from the rank at the same distance behind:
    first short messages, then longer ones, in well under a second. The device of ``like`` holds them. Ranks of one node
    share its link to the other nodes, and ``beta`` is that of one rank's share.
    """
    return transport.measured(f"link {_device(like)}", lambda: _measure_link(transport.channel(), like))


def measure_network(transport: Transport, nodes: Nodes, like: Array = _HOST) -> tuple[Link, Node | None]:
    """Measure the link between two nodes, and that within a node; if nodes are not nested, ``measure_link`` and None.

    Ranks with the same number in their nodes exchange across the nodes, all numbers at once: they share the link.
    """
    if not nodes.nested:
        return measure_link(transport, like), None

    def measure() -> tuple[Link, Node]:
        links = []
        for group in (nodes.own, nodes.peers):
            transport.barrier()
            link = _measure_link(group.channel(), like)
            links.append(np.max(transport.allgather_object([link.alpha, link.beta]), axis=0).tolist())
        (within_alpha, within_beta), (alpha, beta) = links
        return Link(alpha, beta / nodes.own.size), Node(nodes.own.size, Link(within_alpha, within_beta))

    return transport.measured(f"nodes of {nodes.own.size} {_device(like)}", measure)


def measure_compute(transport: Transport, like: Array, sharing: int = 1) -> Compute:
    """Measure seconds per element, per entry and per value of the kernels, as the steps of a bucket call them.

    Args:
        transport: Transport between the ranks.
        like: Array of the dtype, float32 or float64, and on the device.
        sharing: Number of ranks per core; a measurement lasts this many times as long, so that each gets its share.
    """
    return transport.measured(
        f"{like.dtype} {_device(like)}", lambda: _measure_compute(transport.channel(), like, sharing)
    )


def measure_coding(transport: Transport, like: Array, sharing: int = 1) -> float:
    """Measure seconds per entry for encoding and decoding indices at a density of 1 %; as ``measure_compute``."""
    return transport.measured(f"coding {_device(like)}", lambda: _measure_coding(transport.channel(), like, sharing))


def coded_from(transport: Transport, like: Array, density: float) -> int:
    """Return the minimum number of entries for which coding a message's indices pays off; the same on every rank.

    Args:
        transport: Transport between the ranks.
        like: Array on the device that holds the messages.
        density: Fraction of positions that have an entry.
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
    """Return the longest message that the time allows, and its seconds; the same on every rank."""
    spent = 0.0
    for nbytes in _BYTES:
        seconds = seconds_of(nbytes)
        spent += _ROUNDS * seconds
        if spent + 4 * _ROUNDS * seconds > _LONG_SECONDS:  # the next message takes four times as long
            break
    return nbytes, seconds


def _message_seconds(transport: Transport, nbytes: int, like: Array, repeat: int = 1) -> float:
    """Measure seconds per message from device to device."""
    rank, ranks = transport.rank, transport.size
    # Send to and receive from different ranks, if there are enough: over TCP, Open MPI sends long messages between two
    # ranks in one direction at a time.
    distance = max(1, (ranks - 1) // 2)
    to, origin = (rank + distance) % ranks, (rank - distance) % ranks
    message = np.zeros(nbytes, np.uint8, like=like)

    def exchange() -> None:
        sending = transport.send(message, to)
        transport.receive(origin, message).wait()
        sending.wait()

    return _seconds(transport, exchange, repeat, message)


def _reduce_seconds(transport: Transport, like: Array) -> float:
    """Measure seconds per element of a dense allreduce beyond the time of its bytes and messages.

    This covers the sums and writing the average, and the part of the link's bandwidth that the exchange does not use.
    """
    network = Network(transport.size, *measure_network(transport, transport.by_node(None), like))
    nbytes, seconds = _longest(lambda nbytes: _allreduce_seconds(transport, nbytes, like))
    known = sum(step.bandwidth + step.latency for step in network.sum(nbytes))
    return max(seconds - known, 0.0) / (nbytes / like.itemsize * network.others)


def _allreduce_seconds(transport: Transport, nbytes: int, like: Array) -> float:
    values = np.zeros(nbytes // like.itemsize, like.dtype, like=like)
    scatter = kernels_for(like).scatter
    return _seconds(transport, lambda: scatter(None, transport.allreduce(values), [(0, values)]), 1, values)


def _measure_compute(transport: Transport, like: Array, sharing: int) -> Compute:
    kernels = kernels_for(like)
    generator = np.random.default_rng(0)
    gradient = to_device(generator.standard_normal(_ELEMENTS, np.float32).astype(like.dtype), like)
    buffer = np.zeros_like(gradient)
    k = round(_DENSITY * _ELEMENTS)
    vectors = [_entries(generator, k, like) for _ in range(_VECTORS)]
    entries = sum(values.size for _, values in vectors)
    values = gradient[: _ELEMENTS // 4]

    def seconds(run: Callable[[], object]) -> float:
        return _repeated(transport, run, buffer, sharing)

    def select() -> None:
        kernels.largest([(0, gradient)])
        kernels.select([(0, gradient)], buffer, round(_LOW_DENSITY * _ELEMENTS), clear=True)

    def merge() -> None:
        kernels.scatter(*kernels.merge_sum(vectors, _ELEMENTS), [(0, gradient)], cleared=True)

    def convert() -> None:  # as wire/values.py
        kernels.key_range(values)
        rounded, _ = kernels.round_levels(values, *_LEVELS)
        kernels.decode_levels(kernels.encode_levels(rounded, *_LEVELS), values.size, *_LEVELS, like.dtype)

    return Compute(
        convert=seconds(convert) / values.size,
        accumulate=seconds(lambda: kernels.accumulate([(0, gradient)], buffer)) / _ELEMENTS,
        select=seconds(select) / _ELEMENTS,
        reduce=_reduce_seconds(transport, like) if transport.size > 1 else 0.0,
        merge=seconds(merge) / entries,
        cut=seconds(lambda: kernels.cut(*vectors[0], k // 2)) / vectors[0][1].size,
        code=measure_coding(transport, like, sharing),
    )


def _measure_coding(transport: Transport, like: Array, sharing: int) -> float:
    kernels = kernels_for(like)
    indices, _ = _entries(np.random.default_rng(0), round(_DENSITY * _ELEMENTS), like)
    first = int(indices[0])

    def run() -> None:
        bits, coded = kernels.encode_indices(indices)
        kernels.decode_indices(coded, indices.size, first, bits, _ELEMENTS)

    return _repeated(transport, run, indices, sharing) / indices.size


def _repeated(transport: Transport, run: Callable[[], object], at: Array, sharing: int) -> float:
    """Measure seconds per call, with enough calls for a round of about _KERNEL_SECONDS for each rank on the core."""
    calls = math.ceil(sharing * _KERNEL_SECONDS / _seconds(transport, run, 1, at))
    return _seconds(transport, run, calls, at)


def _entries(generator: np.random.Generator, k: int, like: Array) -> tuple[Array, Array]:
    """Return about k entries at random positions."""
    indices = np.cumsum(generator.integers(1, 2 * _ELEMENTS // k, k, np.int32), dtype=np.int32)
    indices = indices[indices < _ELEMENTS]
    values = generator.standard_normal(indices.size).astype(like.dtype)
    return to_device(indices, like), to_device(values, like)


def _seconds(transport: Transport, run: Callable[[], object], repeat: int = 1, at: Array = _HOST) -> float:
    """Measure seconds per call on the slowest rank, in the fastest round; the same on every rank.

    A rank that starts a round late finds the others' messages there, so its own fastest round would be too fast. A
    round ends when the device of the array ``at`` has completed all work.
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
    return float(min(map(max, zip(*transport.allgather_object(rounds), strict=True))))
