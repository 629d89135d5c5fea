"""Share of the node's cores per rank, for the CPU kernels."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping

from horovod_sparse.transport import waiting
from horovod_sparse.transport.base import Transport


def own_cores(transport: Transport) -> int:
    """Return the number of threads that this rank can run without taking cores from other ranks.

    A core that n ranks of the node may run on counts as 1/n. The result is at least 1 and at most OMP_NUM_THREADS, or
    ``torch.get_num_threads()`` if torch is loaded. The first call on a connection is a collective operation.

    Args:
        transport: Transport that keeps the result.
    """
    cores: int = transport.keep("cores", lambda: _own_cores(transport))
    return cores


def _own_cores(transport: Transport) -> int:
    mine = _affinity()
    cores = share(mine, transport.by_node(None).own.allgather_object(mine))
    threads = _limit(os.environ)
    if transport.job is not None:
        waiting.choose(cores, min(threads, max(1, len(mine))))
    return max(1, min(int(cores + 1e-9), threads))


def share(mine: Iterable[int], everyones: Iterable[Iterable[int]]) -> float:
    """Return a rank's share of the cores that it may run on.

    Args:
        mine: Numbers of the cores that the rank may run on.
        everyones: Numbers of the cores that each rank of the node may run on, including this rank.
    """
    ranks = Counter(core for cores in everyones for core in cores)
    return sum(1 / ranks[core] for core in mine)


def _affinity() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _limit(environment: Mapping[str, str]) -> int:
    torch = sys.modules.get("torch")  # knows the user's setting; not imported for this
    if torch is not None:
        return int(torch.get_num_threads())
    first = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isdigit() and int(first) else sys.maxsize
