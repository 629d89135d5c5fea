"""Auto: measures the network, predicts every algorithm's time, and takes the fastest, dense included."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from horovod_sparse.collectives.exchange import Exchange, Traffic
from horovod_sparse.collectives.wire import Wire
from horovod_sparse.costmodel import Cost, table
from horovod_sparse.kernels.types import Array
from horovod_sparse.measure import measure_compute, measure_link
from horovod_sparse.vector import SparseVector

_LOG = logging.getLogger("horovod_sparse")
_FLOAT32 = np.empty(0, np.float32)


class Auto:
    """Chooses a collective for the size of the bucket and the k in force, and anew when either changes.

    The link and the kernels are measured once for each communicator, in under a second, and agreed over the ranks, so
    that all of them choose alike. The table behind a choice is logged on rank 0, at level INFO of the logger
    ``horovod_sparse``. On one rank the choice is Dense, and nothing is measured or logged.

    Args:
        comm: The communicator of the ranks that take part.
        like: Array whose dtype and device those of the bucket are: for them the kernels are measured.
        wire: Format in which values travel; None: as they are. What Dense sends is not rounded.
        **options: Options of the collectives that may be chosen.

    Raises:
        ValueError: The format is unknown.
    """

    def __init__(self, comm: MPI.Intracomm, like: Array = _FLOAT32, *, wire: str | None = None, **options: Any) -> None:
        self._comm = comm
        self._like = like[:0]
        self._width = Wire(wire).dtype(like.dtype).itemsize
        self._options = {"wire": wire, **options}
        self._past = Traffic()  # of collectives that are no longer in use
        self._decided = (-1, -1)  # size and k of the choice in force
        self._choose("dense")

    def _choose(self, name: str) -> None:
        from horovod_sparse.collectives import make  # whose table holds this class, too

        self.choice = name
        self._chosen = make(name, self._comm, self._options)

    @property
    def traffic(self) -> Traffic:
        """What this rank has sent and received so far, by whatever collective."""
        total = Traffic()
        total.add(self._past)
        total.add(self._chosen.traffic)
        return total

    def entries(self, size: int, k: int) -> int:
        """What the chosen collective asks for: everything, if it is Dense."""
        self._decide(size, k)
        return self._chosen.entries(size, k)

    def allreduce(self, vector: SparseVector, k: int) -> Exchange:
        """Sums the ranks' vectors by the chosen collective."""
        self._decide(vector.size, k)
        return self._chosen.allreduce(vector, k)

    def _decide(self, size: int, k: int) -> None:
        if (size, k) == self._decided or self._comm.Get_size() == 1:
            return
        first, self._decided = self._decided == (-1, -1), (size, k)
        link, compute = measure_link(self._comm, self._like), measure_compute(self._like, self._comm)
        ranks, itemsize = self._comm.Get_size(), self._like.itemsize
        costs = table(size, max(k, 1), ranks, link, compute, itemsize, wire=self._width)
        best = costs[0].algorithm
        if first or best != self.choice:
            if self._comm.Get_rank() == 0:
                _LOG.info("%s", _explain(costs, size, k, ranks))
            self._past.add(self._chosen.traffic)
            self._choose(best)

    def state_dict(self) -> dict[str, Any]:
        """The choice in force and the state of the collective chosen."""
        return {"choice": self.choice, "decided": list(self._decided), "chosen": self._chosen.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over a state given by ``state_dict``; the choice stays in force until size or k change."""
        if state["choice"] != self.choice:
            self._past.add(self._chosen.traffic)
            self._choose(state["choice"])
        self._decided = (int(state["decided"][0]), int(state["decided"][1]))
        self._chosen.load_state_dict(state["chosen"])


def _explain(costs: Sequence[Cost], size: int, k: int, ranks: int) -> str:
    """The predictions as a table, the choice first."""
    lines = [f"{costs[0].algorithm} is predicted to be fastest for {k} of {size} elements on {ranks} ranks (ms):"]
    lines.append(f"{'':10} {'total':>10} {'selection':>10} {'bandwidth':>10} {'latency':>10} {'merging':>10}")
    for cost in costs:
        parts = (cost.total, cost.selection, cost.bandwidth, cost.latency, cost.merging)
        lines.append(f"{cost.algorithm:10} " + " ".join(f"{1000 * seconds:10.3f}" for seconds in parts))
    return "\n".join(lines)
