"""ExDyna: MiCRO with parts of the bucket that have about equal numbers of entries (Yoon and Oh, CCGrid 2024)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from horovod_sparse.kernels import kernels_for
from horovod_sparse.rules import BucketContext
from horovod_sparse.rules.options import integer
from horovod_sparse.sparsifiers.micro import MiCRO
from horovod_sparse.vector import SparseVector

# A part with more than this multiple of the mean number of entries gives a block to a neighbour with fewer than the
# inverse.
_BAND = 1.05
# A part keeps at least this fraction of its equal share of the blocks.
_LEAST = 0.25


class ExDyna(MiCRO):
    """Selects like MiCRO, in parts that consist of blocks, which move between neighbouring parts.

    After each step, the entries of the total are counted in each part. Of two neighbours, one of which has more than
    1.05 of the mean and the other fewer than 1 / 1.05, the first gives the block at their boundary to the second. The
    ranks then select about equal numbers of entries, so that none waits for a longer message.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(MiCRO.Options):
        """Options of ExDyna.

        Attributes:
            blocks: Number of blocks of a bucket, of equal size.
        """

        blocks: int = integer(1024, least=1)

    replicated = False  # there is a part for each rank

    def __init__(self, context: BucketContext, options: Options) -> None:
        super().__init__(context, options)
        self._blocks = options.blocks
        self._parts = np.arange(context.ranks + 1) * options.blocks // context.ranks  # first block of each, and the end

    def _boundaries(self) -> list[int]:
        size, blocks = self._context.size, self._blocks
        return [block * size // blocks for block in self._parts.tolist()]

    def observe(self, total: SparseVector) -> None:
        """Adjust the threshold, and move blocks between neighbouring parts."""
        super().observe(total)
        if total.indices is None or not len(total):
            return
        inner = np.array(self._boundaries()[1:-1], np.int32)
        places = kernels_for(total.values).places(total.indices, inner).tolist()
        counts = np.diff([0, *places, len(total)]).astype(np.float64)
        self._balance(counts, block=len(total) / self._blocks)

    def _balance(self, counts: Any, block: float) -> None:
        """Move at most one block between each two neighbouring parts.

        Args:
            counts: Number of entries in each part, float64 [P]; updated by what a move is likely to change.
            block: Mean number of entries in a block.
        """
        mean, least = counts.mean(), _LEAST * self._blocks / self._context.ranks
        for left, right in itertools.pairwise(range(counts.size)):
            for giver, taker, shift in ((left, right, -1), (right, left, 1)):
                blocks = self._parts[giver + 1] - self._parts[giver]
                if counts[giver] > _BAND * mean and counts[taker] < mean / _BAND and blocks - 1 >= least:
                    self._parts[right] += shift
                    counts[giver] -= block
                    counts[taker] += block
                    break

    def state_dict(self) -> dict[str, Any]:
        """Return the threshold, the k that it is for, and the first block of each part."""
        return {**super().state_dict(), "parts": self._parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state from ``state_dict``, saved with the same world size and number of blocks.

        Raises:
            ValueError: The state was saved with others.
        """
        parts = np.asarray(state["parts"], self._parts.dtype)
        if parts.size != self._parts.size or (np.diff(parts) < 0).any() or [*parts[[0, -1]]] != [0, self._blocks]:
            raise ValueError(
                f"rank {self._context.rank}: parts of exdyna must be {self._parts.size} ascending numbers from 0 to "
                f"{self._blocks}, not {parts.tolist()!r:.100}: resume with the same number of ranks and of blocks"
            )
        super().load_state_dict(state)
        self._parts = parts.copy()
