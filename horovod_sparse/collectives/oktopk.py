"""Ok-Topk: balanced split and reduce, a global threshold, and an allgather of the sums that reach it.

Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning" (PPoPP 2022). The volume per rank does not
grow with P; docs/collectives/oktopk.md derives its bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.collectives.balance import balance, saving
from horovod_sparse.collectives.base import Base
from horovod_sparse.collectives.magnitude import KthMagnitude, kth_magnitude
from horovod_sparse.collectives.region import Region
from horovod_sparse.collectives.split import split_reduce
from horovod_sparse.costs.accuracy import sums as keep_of
from horovod_sparse.kernels import joined, kernels_for, to_host
from horovod_sparse.kernels.types import Array, Indices
from horovod_sparse.rules import Accumulator, BucketContext, Reduced, SparseVector
from horovod_sparse.rules.options import integer, number
from horovod_sparse.rules.states import checked_integer
from horovod_sparse.rules.threshold import ReusedThreshold
from horovod_sparse.wire import Wire, concatenate

if TYPE_CHECKING:
    from horovod_sparse.transport.base import Transport

# Entries are balanced only if that shortens the critical path of the allgather by at least this many bytes: balancing
# costs a message or a few (20 us at 10 Gbit/s are 25 kB).
_WORTH = 2**16
# Share of the last threshold from which owners compare sums, so that they need not count all of them.
_NEAR = 0.5


class _Part(NamedTuple):
    """An owner's part of the total.

    Attributes:
        sent: Sums before rounding.
        error: Rounding errors of the sums; None if nothing is rounded.
        message: Rounded sums as a message.
        counts: Number of entries of every owner.
        lengths: Bytes of every owner's message.
    """

    sent: SparseVector
    error: SparseVector | None
    message: Array
    counts: list[int]
    lengths: list[int]


class OkTopk(Base):
    """Sums regions with about equal numbers of entries, and sends about the k largest sums to all ranks.

    Without ``keep``, entries whose index is not in the total are returned to the ranks that selected them. With it, the
    total has about keep * k sums, and owners of regions keep what they do not send. The boundaries of the regions
    are computed every ``tau_partition`` steps and the global threshold every ``tau_threshold`` steps; both are reused
    in between. If the total would leave its band with a reused threshold, the threshold is nudged once; if that is not
    enough, the exact one is computed in the same step, so that every total stays inside the band, unless there are too
    few sums. Sums are compared with the threshold before their owner rounds them.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(Base.Options):
        """Options of Ok-Topk.

        Attributes:
            keep: The total has keep * k sums, to which the owner of a region adds what it holds there; owners retain
                the others. None: as published, the total has k sums, and entries of the others return to the ranks
                that selected them. "auto": 4, with Adam and other adaptive optimizers at least P / 2. Ignored if all
                ranks select the same positions.
            tau_threshold: Steps between exact global thresholds.
            tau_partition: Steps between partitions into regions.
            global_low: Lower end of the band for the number of entries of the total, as a fraction of k or keep * k.
            global_high: Upper end of the band.
            global_up: Factor on a reused threshold that too many sums reach.
            global_down: Divisor of a reused threshold that too few sums reach.
            throttle: Number of concurrent exchanges during split and reduce.
        """

        keep: float | str | None = number(None, above=0, word="auto", hint="None returns what is cut")
        tau_threshold: int = integer(32, least=1)
        tau_partition: int = integer(64, least=1)
        global_low: float = number(2 / 3, above=0, most=1)
        global_high: float = number(4 / 3, least=1)
        global_up: float = number(1.008, least=1)
        global_down: float = number(1.008, least=1)
        throttle: int = integer(4, least=1)

    def __init__(self, context: BucketContext, transport: Transport, options: Options) -> None:
        super().__init__(context, transport, options)
        o = options
        band = (o.global_low, o.global_high, o.global_up, o.global_down)
        self._threshold = ReusedThreshold(o.tau_threshold, *band, context.events)
        self._keep = keep_of(o.keep, context.ranks, context.adaptive)
        self._partition_left = 0  # steps for which the boundaries may still be reused
        self._boundaries = np.zeros(transport.size + 1, np.int64)

    def region(self, size: int) -> tuple[int, int] | None:
        """Return the region of this rank if owners keep sums; regions are then known before the selection."""
        if self._keep is None:
            return None
        if self._boundaries[-1] != size:
            self._boundaries = np.arange(self._transport.size + 1, dtype=np.int64) * size // self._transport.size
        begin, end = self._boundaries[self._transport.rank :][:2].tolist()
        return begin, end

    def allreduce_owned(self, vector: SparseVector, k: int, own: Accumulator) -> Reduced:
        """Sum the ranks' vectors, and what the owners hold, to a total of about keep * k entries."""
        return self._allreduce_rounded(vector, k, lambda rounded, wire, k: self._sum_owned(rounded, wire, k, own))

    def _sum_owned(self, vector: SparseVector, wire: Wire, k: int, own: Accumulator) -> Reduced:
        arrived = SparseVector(
            *split_reduce(self._transport, wire, vector, self._boundaries, self._options.throttle), vector.size
        )
        region = Region(int(self._boundaries[self._transport.rank]), own, arrived)
        candidates = region.take_above(self._threshold.value * min(_NEAR, 1 / self._options.global_down))
        assert self._keep is not None
        part = self._select(candidates, min(vector.size, max(1, round(self._keep * k))), region)
        returned = region.returned(part.sent)
        total, error = self._gather(part, wire, vector.size)
        self._repartition(total)
        return Reduced(total, returned.plus(error))

    def _repartition(self, total: SparseVector) -> None:
        """Set the boundaries of the next steps: those that divide the entries of the total equally.

        What a rank holds of a region that another owns from now on is selected there like any other entry.
        """
        self._partition_left = (self._partition_left or self._options.tau_partition) - 1
        ranks = self._transport.size
        if self._partition_left == 0 and len(total) >= ranks:
            self._boundaries = np.array([0, *_quantiles(total.entries[0], ranks), total.size], np.int64)

    def _allreduce(self, vector: SparseVector, wire: Wire, k: int) -> Reduced:
        """Sum the ranks' vectors to a total of about k entries."""
        assert vector.indices is not None
        if self._partition_left == 0 or self._boundaries[-1] != vector.size:
            self._boundaries = self._partition(vector.indices, vector.size)
            self._partition_left = self._options.tau_partition
        self._partition_left -= 1
        sums = split_reduce(self._transport, wire, vector, self._boundaries, self._options.throttle)
        part = self._select(SparseVector(*sums, vector.size), max(k, 1))
        total, error = self._gather(part, wire, vector.size)
        return Reduced(total, vector.without(total).plus(error))

    def _gather(self, part: _Part, wire: Wire, size: int) -> tuple[SparseVector, SparseVector | None]:
        """Return the total, and the rounding errors of the sums that this rank has sent."""
        if saving(part.counts) * sum(part.lengths) > _WORTH * sum(part.counts):
            part = self._offer(balance(self._transport, self._wire.exact, part.sent, part.counts))
        messages = self._transport.allgather(part.message, part.lengths)
        total = SparseVector(*concatenate(wire.unpack_all(messages, size)), size, shared=True)
        return total, part.error

    def _partition(self, indices: Indices, size: int) -> Array:
        """Return boundaries that give every rank about the same number of entries: the mean of the ranks' proposals."""
        ranks = self._transport.size
        # In 64 bits, as the sum of P positions exceeds 32 bits for models of ordinary size.
        proposal = _quantiles(indices, ranks) if indices.size else np.arange(1, ranks, dtype=np.int64) * size // ranks
        return np.array([0, *self._transport.allreduce(proposal) // ranks, size], np.int64)

    def _select(self, sums: SparseVector, k: int, region: Region | None = None) -> _Part:
        """Return the sums that reach the global threshold, nudged or computed if needed; a region has smaller sums."""
        if not self._threshold.due(k) and (part := self._reuse(sums)) is not None:
            return part
        kth = kth_magnitude(self._transport, sums.values, k, sums.size)
        if region is not None and not kth.value:  # fewer sums are that large
            sums = sums.plus(region.take_above(0.0))
            kth = kth_magnitude(self._transport, sums.values, k, sums.size)
        self._threshold.renew(kth.value, k)
        return self._reach(sums, kth)

    def _reuse(self, sums: SparseVector) -> _Part | None:
        """Return this owner's sums that reach the last threshold, nudged once if needed; None if it does not hold."""
        self._threshold.reuse()
        for _ in range(2):
            part = self._reach(sums)
            if self._threshold.holds(sum(part.counts)):
                return part
        self._threshold.failed()
        return None

    def _reach(self, sums: SparseVector, kth: KthMagnitude | None = None) -> _Part:
        """Return this owner's sums that reach the current threshold.

        Of sums equal to ``kth``, an exact threshold, those with the lowest positions are kept, k in all. In 16 bits,
        many are equal: with error feedback, the magnitudes that are sent lie close together, just above the threshold.
        """
        indices, values = sums.entries
        reached = SparseVector(*kernels_for(values).reaching(indices, values, self._threshold.value), sums.size)
        if kth is not None and kth.wanted < kth.equal:
            kind = values.dtype.type
            above = kernels_for(values).reaching(indices, values, float(np.nextafter(kind(kth.value), kind(np.inf))))
            larger = SparseVector(*above, sums.size)
            equal = reached.without(larger)
            before = int(self._transport.allgather_integers(len(equal))[: self._transport.rank].sum())
            reached = larger.plus(equal.head(max(0, kth.wanted - before)))
        return self._offer(reached)

    def _offer(self, sent: SparseVector) -> _Part:
        """Return this owner's part of the total; gathers every owner's count and length in one collective operation."""
        rounded, error, wire = self._round(sent)
        message = wire.pack(rounded.entries)
        headers = self._transport.allgather_integers(len(sent), message.nbytes)
        return _Part(sent, error, message, headers[:, 0].tolist(), headers[:, 1].tolist())

    def state_dict(self) -> dict[str, Any]:
        """Return the global threshold, the boundaries, and for how many steps they remain valid."""
        return {
            "threshold": self._threshold.state_dict(),
            "boundaries": self._boundaries,
            "partition_left": self._partition_left,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state from ``state_dict``, saved with the same world size.

        Raises:
            ValueError: The state was saved with another world size, or a value is invalid.
        """
        boundaries = np.asarray(state["boundaries"], np.int64)
        if boundaries.size != self._boundaries.size:
            raise ValueError(
                f"rank {self._transport.rank}: the state holds the regions of {boundaries.size - 1} ranks, but there "
                f"are {self._transport.size}"
            )
        if boundaries[0] != 0 or (boundaries[1:] < boundaries[:-1]).any():
            raise ValueError(f"boundaries of regions must ascend from 0, not be {boundaries.tolist()!r:.100}")
        self._threshold.load_state_dict(state["threshold"])
        self._boundaries = boundaries.copy()
        self._partition_left = checked_integer(state["partition_left"], "partition_left of oktopk")


def _quantiles(indices: Indices, ranks: int) -> NDArray[np.int64]:
    """Return the indices, on the host, that divide ascending ones into equal parts for the ranks."""
    if ranks == 1:
        return np.empty(0, np.int64)
    places = [number * indices.size // ranks for number in range(1, ranks)]
    return to_host(joined([indices[place : place + 1] for place in places])).astype(np.int64)
