"""Ok-Topk: balanced split and reduce, a global threshold, and an allgather of what passes it.

Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning" (PPoPP 2022); at most 6 k (P-1)/P words
per rank, whatever P.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from horovod_sparse.collectives.balance import balance
from horovod_sparse.collectives.base import Base
from horovod_sparse.collectives.exchange import Exchange
from horovod_sparse.collectives.magnitude import kth_magnitude
from horovod_sparse.collectives.split import check_throttle, split_reduce
from horovod_sparse.collectives.wire import Entries, concatenate
from horovod_sparse.kernels import to_device, to_host
from horovod_sparse.kernels.types import Array, Indices
from horovod_sparse.threshold import ReusedThreshold
from horovod_sparse.vector import SparseVector

# The largest owner holds more than so many times the mean: the entries are spread evenly first.
_IMBALANCE = 4


class OkTopk(Base):
    """Sums regions that hold about equally many entries, and keeps about the k largest sums.

    An entry whose index is not in the total returns to the ranks that selected it. The boundaries of the regions and
    the global threshold are found anew every ``tau_partition`` and ``tau_threshold`` steps and reused in between. A
    reused threshold that so many or so few entries reach that the total would leave its band is nudged; if that does
    not help, it is found anew in the same step, so that every total stays inside the band.

    Args:
        comm: The communicator of the ranks that take part.
        tau_threshold: Steps from one exact global threshold to the next.
        tau_partition: Steps from one partition into regions to the next.
        global_low: Lower end of the band for the number of entries of a total, as a fraction of k.
        global_high: Its upper end.
        global_up: Factor on a reused threshold that too many entries reach.
        global_down: Divisor of one that too few reach.
        dense_steps: Steps at the start that are exchanged dense.
        throttle: Exchanges under way at a time while the entries are split.
        wire: Format in which values travel; None: as they are. Sums are compared with the threshold before their
            owner rounds them.

    Raises:
        ValueError: A number is out of range, the band's ends are not ordered, or the format is unknown.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        *,
        tau_threshold: int = 32,
        tau_partition: int = 64,
        global_low: float = 2 / 3,
        global_high: float = 4 / 3,
        global_up: float = 1.008,
        global_down: float = 1.008,
        dense_steps: int = 0,
        throttle: int = 4,
        wire: str | None = None,
    ) -> None:
        super().__init__(comm, wire=wire)
        if tau_partition < 1 or dense_steps < 0:
            raise ValueError(
                f"tau_partition must be at least 1 and dense_steps at least 0, not {tau_partition} and {dense_steps}"
            )
        self._threshold = ReusedThreshold(tau_threshold, global_low, global_high, global_up, global_down)
        self._tau_partition = tau_partition
        self._throttle = check_throttle(throttle)
        self._dense_left = dense_steps
        self._partition_left = 0  # steps for which the boundaries may still be reused
        self._boundaries = np.zeros(self._messenger.ranks + 1, np.int64)

    def entries(self, size: int, k: int) -> int:
        """Everything during the dense steps at the start, k afterwards."""
        if self._dense_left == 0:
            return k
        self._dense_left -= 1
        return size

    def _allreduce(self, vector: SparseVector, k: int) -> Exchange:
        """Sums the ranks' vectors to a total of about k entries."""
        assert vector.indices is not None
        if self._partition_left == 0 or self._boundaries[-1] != vector.size:
            self._boundaries = self._partition(vector.indices, vector.size)
            self._partition_left = self._tau_partition
        self._partition_left -= 1
        sums = split_reduce(self._messenger, vector, self._boundaries, self._throttle)
        kept, counts = self._select(sums, k)
        mine, error = self._messenger.wire.round(SparseVector(*kept, vector.size))
        kept = mine.entries
        if max(counts) * len(counts) > _IMBALANCE * sum(counts):
            kept, counts = balance(self._messenger, kept, counts)
        indices, values = self._gather(kept, counts)
        total = SparseVector(indices, values, vector.size, shared=True)
        return Exchange(total, vector.without(total).plus(error))

    def _partition(self, indices: Indices, size: int) -> Array:
        """Boundaries that give every rank about as many entries: the mean of what the ranks propose."""
        ranks = self._messenger.ranks
        inner = np.arange(1, ranks, dtype=np.int64)
        if indices.size:
            # In 64 bits: the sum of P positions exceeds 32 bits for models of ordinary size.
            proposal = to_host(indices[to_device(inner * indices.size // ranks, indices)]).astype(np.int64)
        else:
            proposal = inner * size // ranks
        return np.array([0, *self._messenger.sum(proposal) // ranks, size], np.int64)

    def _select(self, sums: Entries, k: int) -> tuple[Entries, list[int]]:
        """This owner's sums that reach the global threshold, and how many every owner has."""
        threshold = self._threshold
        if not threshold.due(k):
            threshold.reuse()
            for _ in range(2):
                kept, counts = self._reach(sums)
                if not threshold.below(sum(counts)) and not threshold.above(sum(counts)):
                    threshold.held()
                    return kept, counts
                threshold.nudge(sum(counts))
            threshold.failed()
        threshold.renew(kth_magnitude(self._messenger, sums[1], max(k, 1)), k)
        return self._reach(sums)

    def _reach(self, sums: Entries) -> tuple[Entries, list[int]]:
        indices, values = sums
        enough = np.flatnonzero(np.abs(values) >= self._threshold.value)
        kept = indices[enough], values[enough]
        return kept, self._messenger.share(kept[0].size)[:, 0].tolist()

    def _gather(self, kept: Entries, counts: list[int]) -> Entries:
        """All owners' entries; regions ascend with the ranks, so that they only have to be joined."""
        wire, dtype = self._messenger.wire, kept[1].dtype
        messages = self._messenger.allgather(wire.pack(kept), [count * wire.entry(dtype) for count in counts])
        return concatenate([wire.unpack(message, dtype) for message in messages])

    def state_dict(self) -> dict[str, Any]:
        """The global threshold, the boundaries, and how long they are good for."""
        return {
            "threshold": self._threshold.state_dict(),
            "boundaries": self._boundaries,
            "partition_left": self._partition_left,
            "dense_left": self._dense_left,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over a state given by ``state_dict`` on as many ranks.

        Raises:
            ValueError: The state belongs to another number of ranks.
        """
        boundaries = np.asarray(state["boundaries"], np.int64)
        if boundaries.size != self._boundaries.size:
            raise ValueError(
                f"rank {self._messenger.rank}: the state holds the regions of {boundaries.size - 1} ranks, but there "
                f"are {self._messenger.ranks}"
            )
        self._threshold.load_state_dict(state["threshold"])
        self._boundaries = boundaries.copy()
        self._partition_left, self._dense_left = int(state["partition_left"]), int(state["dense_left"])
