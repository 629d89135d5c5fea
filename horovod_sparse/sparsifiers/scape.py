"""SCAPE: each rank selects its part of the next step's positions by the first moment (Zheng et al. 2026)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.kernels import kernels_for, to_device, to_host
from horovod_sparse.kernels.types import Indices
from horovod_sparse.rules import BucketContext, Step
from horovod_sparse.rules.options import flag, number
from horovod_sparse.rules.states import checked_integer, checked_number, require_positions
from horovod_sparse.sparsifiers.base import Fused
from horovod_sparse.vector import SparseVector

# Below this factor on the stored moment, it is multiplied out, so that neither overflows.
_LEAST_WEIGHT = 1e-6


class SCAPE(Fused):
    """Selects the same positions on every rank, of which each rank has chosen a part in the step before.

    There is a part of the bucket for each rank. In step t, rank r chooses in part (t + 1 + r) mod P, for step t + 1:
    the k/P largest of |m| + |residual|, where the residual is its own, after the selection of step t, and m is the
    first moment of what has been delivered, m = beta m + (1 - beta) total / P. The positions are gathered while the
    values of step t are summed. Only values need to be sent; made for the collective ``shared``.

    The first positions, and those after a change of k, are chosen and gathered at once, before the selection.

    Only the paper's abstract was available to us. It names first-moment statistics, one part for each rank, and use one
    step later. That the residual counts, and that parts move from rank to rank, is ours: a position that was never sent
    has no first moment, and a position whose gradient is zero on one rank can matter on another.

    Held positions, which take no part in the step, stay in the memory and are sent as zeros.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(Fused.Options):
        """Options of SCAPE.

        Attributes:
            beta: Decay of the first moment per step, in [0, 1).
            residual: Whether the residual counts. Without it, the positions found in dense steps (``dense_steps``) are
                sent for good, as no other position ever has a first moment.
        """

        beta: float = number(0.9, lambda x: 0 <= x < 1, "in [0, 1)", hint="0.9 is Adam's")
        residual: bool = flag(True)

    shares_indices = True
    narrows = False  # each rank has another part of the residuals to rank the positions by

    def __init__(self, context: BucketContext, options: Options) -> None:
        super().__init__(context, options)
        self._beta, self._residual = options.beta, options.residual
        # The first moment is weight * moment, so that a step only touches what was delivered. Empty: nothing was yet.
        self._moment = np.empty_like(context.like, shape=(0,))
        self._weight = 1.0
        self._positions: Indices = np.empty_like(context.like, shape=(0,), dtype=np.int32)
        self._k = 0  # that the positions are for
        self._gathering: Callable[[], Indices] | None = None  # waits for the positions of the next step

    def take(self, accumulator: Accumulator, k: int, step: Step) -> SparseVector:
        """Move the entries at the positions chosen in the step before out of the accumulator, and choose the next."""
        self._drop()
        self._weight *= step.carry
        if k != self._k:
            self._positions, self._k = self._choose(accumulator, k, step.number)(), k
            self._context.events["positions_renewed"] += 1
        vector = accumulator.take_at(self._positions, shared=True)
        self._gathering = self._choose(accumulator, k, step.number + 1)
        return vector

    def _choose(self, accumulator: Accumulator, k: int, turn: int) -> Callable[[], Indices]:
        """Choose positions in this rank's part, and start to gather all ranks'; return what waits for them."""
        size, ranks = self._context.size, self._context.ranks
        part = (turn + self._context.rank) % ranks
        count = (part + 1) * k // ranks - part * k // ranks
        chosen = to_host(self._largest(accumulator, part * size // ranks, (part + 1) * size // ranks, count))
        row = np.full(max(-(-k // ranks), 1), -1, np.int32)  # of the same length on every rank
        row[: chosen.size] = chosen
        rows = self._context.gather(row)

        def finish() -> Indices:
            positions = np.roll(rows(), turn, axis=0).ravel()  # by part, and so ascending
            return to_device(positions[positions >= 0], self._positions)

        return finish

    def _largest(self, accumulator: Accumulator, begin: int, end: int, count: int) -> Indices:
        """Return the positions with the ``count`` highest scores from ``begin`` to ``end``, ascending."""
        active = accumulator.part(begin, end).active()
        if self._moment.size:
            scores = np.abs(self._moment[begin:end])
            scores *= self._weight
        else:
            scores = np.zeros_like(accumulator.buffer, shape=(end - begin,))
        counts = self._residual or not self._moment.size
        others = [(start - begin, np.abs(part) if counts else np.zeros_like(part)) for start, part in active]
        chosen: Indices = Accumulator(scores, others).take_largest(count, self._threads).entries[0] + np.int32(begin)
        return chosen

    def observe(self, total: SparseVector) -> None:
        """Take over the positions of the next step, and update the first moment."""
        if self._gathering is not None:
            self._positions, self._gathering = self._gathering(), None
        if not self._moment.size:
            self._moment = self._context.zeros()
        self._weight *= self._beta
        if self._weight < _LEAST_WEIGHT:
            self._moment *= self._weight
            self._weight = 1.0
        delivered = total.times((1 - self._beta) / (self._weight * self._context.ranks))
        kernels_for(self._moment).add(delivered.indices, delivered.values, self._moment)

    def _drop(self) -> None:
        """Wait for positions whose step was undone or sent in vain, and drop them."""
        if self._gathering is not None:
            self._gathering()
            self._gathering = None

    def state_dict(self) -> dict[str, Any]:
        """Return the first moment and its factor, the positions of the next step, and the k that they are for."""
        return {"moment": self._moment, "weight": self._weight, "positions": self._positions, "k": self._k}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state from ``state_dict``; ValueError if a value is invalid."""
        size, moment = self._context.size, state["moment"]
        if moment.shape not in ((0,), (size,)):
            raise ValueError(
                f"rank {self._context.rank}: moment of scape must have {size} values or none, not shape "
                f"{moment.shape}: load the state with the model and bucket size it was saved with"
            )
        require_positions(state["positions"], size, "positions of scape")
        weight, k = checked_number(state["weight"], "weight of scape"), checked_integer(state["k"], "k of scape")
        self._drop()
        self._moment = to_device(moment, self._moment).copy()
        self._positions = to_device(state["positions"], self._positions).copy()
        self._weight, self._k = weight, k
