"""Stable top-k: the best blocks over all ranks, reused for many steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.kernels import kernels_for, to_device, to_host
from horovod_sparse.kernels.types import Indices
from horovod_sparse.rules import BucketContext, Step
from horovod_sparse.rules.options import RuleOptions, integer
from horovod_sparse.rules.states import checked_integer, require_positions
from horovod_sparse.sparsifiers.base import Base
from horovod_sparse.vector import SparseVector


class StableTopK(Base):
    """Selects the same blocks of consecutive elements on every rank, and chooses them only every ``refresh`` steps.

    A block's score is the squared L2 norm of the accumulated gradient in it, summed over the ranks. The k // block best
    blocks, at least one, are used until the next choice; the steps in between need no search. Only values need to be
    sent. Choosing too rarely costs accuracy, and so does an unsuitable block size.

    Held positions, which take no part in the step, stay in the memory and are sent as zeros.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(RuleOptions):
        """Options of StableTopK.

        Attributes:
            block: Number of elements of a block; the last block of a bucket may be smaller.
            refresh: Steps between two choices; a change of the number of blocks also triggers one.
        """

        block: int = integer(64, least=1)
        refresh: int = integer(100, least=1)

    shares_indices = True
    narrows = False  # ranks would have to agree on the best blocks in every step

    def __init__(self, context: BucketContext, options: Options) -> None:
        super().__init__(context, options)
        self._block = options.block
        if self._block > context.size:
            raise ValueError(
                f"rank {context.rank}: block must not exceed the bucket's size, but is {self._block} for bucket "
                f"{context.bucket} of {context.size} elements: choose a smaller block, or a larger dense_below, so "
                "that small parameters are sent dense"
            )
        self._until = 0  # the step of the next choice
        self._blocks = np.empty_like(context.like, shape=(0,), dtype=np.int32)
        self._positions: Indices = self._blocks

    def take(self, accumulator: Accumulator, k: int, step: Step) -> SparseVector:
        """Move the chosen blocks out of the accumulator."""
        count = self._count(k)
        if step.number >= self._until or count != len(self._blocks):
            scores = to_device(self._scores(accumulator, step), accumulator.buffer)
            everyone = np.arange(scores.size, dtype=np.int32, like=scores)
            (best, _), _ = kernels_for(scores).cut(everyone, scores, count)
            self._choose(best)
            self._until = step.number + self._options.refresh
        return accumulator.take_at(self._positions, shared=True)

    def _scores(self, accumulator: Accumulator, step: Step) -> NDArray[np.float64]:
        """Return the score of each block, the same on every rank."""
        del step
        scores: NDArray[np.float64] = self._context.consensus(to_host(accumulator.block_scores(self._block)))
        return scores

    def _count(self, k: int) -> int:
        """Return the number of blocks for k elements, the same on every rank."""
        size, block = self._context.size, self._block
        return max(1, k // block) if k < size else -(-size // block)

    def _choose(self, blocks: Indices) -> None:
        self._blocks = blocks
        inside = np.arange(self._block, dtype=np.int64, like=blocks)  # int32 could overflow in the last block
        positions = (blocks[:, None].astype(np.int64) * self._block + inside).ravel()
        self._positions = positions[positions < self._context.size].astype(np.int32)

    def state_dict(self) -> dict[str, Any]:
        """Return the chosen blocks and the step of the next choice."""
        return {"until": self._until, "blocks": self._blocks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state from ``state_dict``; ValueError if a value is invalid."""
        require_positions(state["blocks"], -(-self._context.size // self._block), "blocks of stable")
        self._until = checked_integer(state["until"], "until of stable")
        self._choose(to_device(state["blocks"], self._context.like).copy())
