"""Stable top-k: the best blocks of all ranks together, kept for many steps."""

from __future__ import annotations

from typing import Any

import numpy as np

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.consensus import Consensus
from horovod_sparse.kernels import kernels_for, to_device, to_host
from horovod_sparse.kernels.types import Indices
from horovod_sparse.place import Place
from horovod_sparse.sparsifiers.base import Base, whole_number
from horovod_sparse.vector import SparseVector


class StableTopK(Base):
    """Takes the same blocks of consecutive elements on every rank, and chooses them anew only now and then.

    A block's score is the squared L2 norm of the accumulated gradient in it, summed over the ranks. The k // block
    best ones, at least one, are taken until the next choice. On the steps between nothing is searched for, and in all
    steps only values need to travel. Too rare a choice costs accuracy; so does a block of the wrong size.

    Positions that are held for now stay in the memory and travel as zeros.

    Args:
        place: The bucket and the rank.
        block: Elements of a block; the bucket's last one may have fewer.
        refresh: Steps from one choice to the next; a change of the density asks for a choice, too.

    Raises:
        ValueError: A number is out of range, or a block is larger than the bucket.
    """

    shares_indices = True

    def __init__(self, place: Place, *, block: int = 64, refresh: int = 100) -> None:
        super().__init__(place)
        self._block = whole_number("block", block, least=1)
        self._refresh = whole_number("refresh", refresh, least=1)
        if block > place.size:
            raise ValueError(
                f"rank {place.rank}: block must not exceed the bucket's size, but is {block} for bucket {place.bucket} "
                f"of {place.size} elements: choose a smaller block, or a larger dense_below, so that small parameters "
                "do not make a bucket of their own"
            )
        self._step = 0
        self._blocks = np.empty_like(place.like, shape=(0,), dtype=np.int32)
        self._positions: Indices = self._blocks

    def take(self, accumulator: Accumulator, k: int, consensus: Consensus) -> SparseVector:
        """Moves the chosen blocks out of the accumulator."""
        count = self._count(k)
        if self._step % self._refresh == 0 or count != len(self._blocks):
            total = consensus(to_host(accumulator.block_scores(self._block)))
            scores = to_device(total, accumulator.buffer)
            everyone = np.arange(scores.size, dtype=np.int32, like=scores)
            (best, _), _ = kernels_for(scores).cut(everyone, scores, count)
            self._choose(best)
        self._step += 1
        return accumulator.take_at(self._positions, shared=True)

    def _count(self, k: int) -> int:
        """How many blocks stand for k elements; from what is the same on every rank."""
        size, block = self._place.size, self._block
        return max(1, k // block) if k < size else -(-size // block)

    def _choose(self, blocks: Indices) -> None:
        self._blocks = blocks
        inside = np.arange(self._block, dtype=np.int64, like=blocks)  # int32 could overflow in the last block
        positions = (blocks[:, None].astype(np.int64) * self._block + inside).ravel()
        self._positions = positions[positions < self._place.size].astype(np.int32)

    def state_dict(self) -> dict[str, Any]:
        """The blocks chosen, and the number of the step."""
        return {"step": self._step, "blocks": self._blocks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over a state given by ``state_dict``."""
        self._step = int(state["step"])
        self._choose(to_device(state["blocks"], self._place.like).copy())
