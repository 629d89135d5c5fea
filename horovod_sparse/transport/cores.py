"""Share of the node's cores per rank, for the CPU kernels."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping

from horovod_sparse.transport.base import Transport


def own_cores(transport: Transport) -> int:
    """Return the number of threads that this rank can run without taking cores from other ranks.

    The result is at least 1 and at most OMP_NUM_THREADS, or ``torch.get_num_threads()`` if torch is loaded. The first
    call on a connection is a collective operation.
    """
    return max(1, min(int(_share(transport) + 1e-9), _limit(os.environ)))


def choose_waiting(transport: Transport, on_device: bool) -> None:
    """Choose how this rank waits for others. The first call on a connection is a collective operation.

    Args:
        transport: Transport of the ranks.
        on_device: Whether gradients are computed on a GPU, which leaves the cores idle.
    """
    cores, limit = _share(transport), _limit(os.environ)
    if on_device:
        limit = 1
    elif limit == sys.maxsize:  # without torch, the thread that waits is the one that computes
        limit = 0
    if transport.waiting is not None:
        transport.waiting.share_cores(cores, min(limit, len(_affinity())) + 1)


def _share(transport: Transport) -> float:
    def collect() -> float:
        mine = _affinity()
        return share(mine, transport.by_node(None).own.allgather_object(mine))

    return transport.keep("cores", collect)


def share(mine: Iterable[int], everyones: Iterable[Iterable[int]]) -> float:
    """Return a rank's share of the cores that it may run on.

    Args:
        mine: Numbers of the cores that the rank may run on.
        everyones: Numbers of the cores that each rank of the node may run on, including this rank.
    """
    ranks = Counter(core for cores in everyones for core in cores)
    return sum(1 / ranks[core] for core in mine)


def _affinity() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def _limit(environment: Mapping[str, str]) -> int:
    torch = sys.modules.get("torch")  # knows the user's setting; not imported for this
    if torch is not None:
        return int(torch.get_num_threads())
    first = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isdigit() and int(first) else sys.maxsize
