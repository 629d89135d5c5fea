"""Cores that a rank has to itself, for the kernels of the host."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping

from horovod_sparse.transport.base import Transport


def own_cores(transport: Transport) -> int:
    """Number of threads that this rank may keep busy without taking cores from others.

    The cores that it may run on, each divided by the ranks of the node that may run there; no more than OMP_NUM_THREADS
    says, or where torch is loaded ``torch.get_num_threads()``.

    Args:
        transport: Keeps the answer; a collective call the first time.
    """
    cores: int = transport.keep("cores", lambda: _own_cores(transport))
    return cores


def _own_cores(transport: Transport) -> int:
    mine = _affinity()
    everyones = transport.by_node(None).own.allgather_object(mine)
    return max(1, min(share(mine, everyones), _limit(os.environ)))


def share(mine: Iterable[int], everyones: Iterable[Iterable[int]]) -> int:
    """Part of the cores that a rank may run on, rounded down.

    Args:
        mine: Their numbers.
        everyones: Those of all ranks of the node.
    """
    ranks = Counter(core for cores in everyones for core in cores)
    return int(sum(1 / ranks[core] for core in mine) + 1e-9)


def _affinity() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _limit(environment: Mapping[str, str]) -> int:
    torch = sys.modules.get("torch")  # which knows what its user has set; nothing here needs it
    if torch is not None:
        return int(torch.get_num_threads())
    first = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isdigit() and int(first) else sys.maxsize
