"""Error feedback: what is not sent is added to the next gradient (Stich et al. 2018, EF-SGD)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.kernels import copy_to_host, kernels_for, to_device
from horovod_sparse.kernels.types import Segments
from horovod_sparse.memories.sums import total
from horovod_sparse.place import Place
from horovod_sparse.vector import SparseVector


class Residual:
    """Keeps the whole rest: e' = acc - sent, one buffer of the bucket's size.

    Args:
        place: The bucket and the rank.
    """

    def __init__(self, place: Place) -> None:
        self._residual = np.zeros(place.size, place.like.dtype, like=place.like)

    def open(self, gradients: Segments, scale: float) -> Accumulator:
        """The accumulator works in place on the residual: nothing is copied."""
        return Accumulator(self._residual, gradients, scale)

    def close(self, accumulator: Accumulator, vector: SparseVector, returned: SparseVector) -> None:
        """What was not taken is in place already; adds what came back from the exchange."""
        del vector
        kernels_for(self._residual).add(returned.indices, returned.values, accumulator.settle())

    def state_dict(self) -> dict[str, Any]:
        """A copy of the residual."""
        return {"residual": copy_to_host(self._residual)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copies the residual in; ValueError when it is of another size or dtype."""
        residual = state["residual"]
        mine = self._residual
        if residual.shape != mine.shape or residual.dtype != mine.dtype:
            raise ValueError(
                f"residual of shape {residual.shape} and dtype {residual.dtype} does not fit a bucket of shape "
                f"{mine.shape} and dtype {mine.dtype}: load the state with the model and bucket size it was saved with"
            )
        mine[...] = to_device(residual, mine)

    def merge(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Residuals add up."""
        return {"residual": total([state["residual"] for state in states], self._residual)}
