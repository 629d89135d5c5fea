"""ARC-Top-K: the blocks with the largest mean over the ranks, estimated from a sketch (Chen et al. 2025)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.kernels import to_device, to_host
from horovod_sparse.kernels.types import Array
from horovod_sparse.rules import Step
from horovod_sparse.rules.options import integer
from horovod_sparse.sparsifiers.base import Random
from horovod_sparse.sparsifiers.stable import StableTopK


class ARCTopK(StableTopK, Random):
    """Selects blocks of consecutive elements like StableTopK, by the norm of their sum over the ranks.

    The sum of the ranks' squared norms, by which StableTopK selects, also counts noise that cancels in the sum. Here
    each rank multiplies its blocks by a Gaussian matrix with ``columns`` columns, which is the same on every rank and
    changes with each step. The products, summed over the ranks, are those of the blocks' sums. Their squared norms
    estimate those of the sums, up to a common factor, with a relative standard deviation of sqrt(2 / columns). In the
    paper, the blocks are rows of weight matrices.

    Held positions, which take no part in the step, stay in the memory and are sent as zeros.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(StableTopK.Options, Random.Options):
        """Options of ARCTopK.

        Attributes:
            block: Number of elements of a block; the last block of a bucket may be smaller. A choice sends
                columns / block numbers per element of the bucket, in addition to the values.
            refresh: Steps between two choices; a change of the number of blocks also triggers one.
            columns: Number of columns of the sketch.
        """

        block: int = integer(1024, least=1)
        refresh: int = integer(1, least=1)
        columns: int = integer(4, least=1)

    def _scores(self, accumulator: Accumulator, step: Step) -> NDArray[np.float64]:
        """Return the squared norm of each block's sketch, summed over the ranks first."""
        values = _active_values(accumulator)
        complete = values.size // self._block * self._block
        generator = self._draw(step, shared=True)
        matrix = generator.standard_normal((self._block, self._options.columns)).astype(values.dtype)
        matrix = to_device(matrix, values)
        rest = values[complete:]
        with np.errstate(all="ignore"):  # as in all kernels, values that are not finite are no error
            parts = [values[:complete].reshape(-1, self._block) @ matrix, rest[None] @ matrix[: rest.size]]
            sketch = np.concatenate(parts if rest.size else parts[:1])
            total = self._context.consensus(to_host(sketch).ravel()).reshape(sketch.shape).astype(np.float64)
            scores = np.zeros(len(total))
            for column in total.T:  # in this order on any processor, so that all ranks choose the same blocks
                scores += column**2
        return scores


def _active_values(accumulator: Accumulator) -> Array:
    """Return the accumulated values, with zeros at held positions; the buffer itself if there are none."""
    buffer = accumulator.settle()
    if accumulator.active_size == accumulator.size:
        return buffer
    values = np.zeros_like(buffer)
    for start, part in accumulator.active():
        values[start : start + part.size] = part
    return values
