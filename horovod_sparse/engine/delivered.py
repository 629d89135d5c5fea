"""Results of the last exchange for one gradient, for the hooks of an optimizer."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from horovod_sparse.engine.bucket import Bucket
from horovod_sparse.engine.layout import Segment
from horovod_sparse.engine.pipeline.sparse import SparsePipeline
from horovod_sparse.kernels import copy_to_host, to_host
from horovod_sparse.kernels.types import Array
from horovod_sparse.rules import SparseVector


class Delivered:
    """Part of a bucket with a selection that belongs to one gradient. Tensors are copies on the host, one-dimensional.

    Args:
        bucket: The bucket.
        pipeline: Pipeline of the bucket.
        part: Positions of the gradient, as in ``Bucket.parts``.

    Attributes:
        key: Key of the gradient.
        size: Number of its elements.
        number: Number of the bucket.
        handover: What an optimizer's momentum holds of what was delivered for the bucket.
    """

    def __init__(self, bucket: Bucket, pipeline: SparsePipeline, part: Segment) -> None:
        self._bucket, self._pipeline, self.handover = bucket, pipeline, pipeline.handover
        self.key, self._start, self.size = part
        self._places = bucket.places(part)
        self.number = bucket.layout.number

    @property
    def unit(self) -> float:
        """Factor that converts velocities and sums that were delivered to a mean gradient without the loss scale."""
        return self._pipeline.gradient_unit

    @property
    def replaced(self) -> bool:
        """True if any rank's momentum was replaced before the last exchange."""
        return self._pipeline.replaced

    @property
    def sample(self) -> SparseVector | None:
        """Some entries of what the last exchange has delivered for the bucket; None if that was no selection."""
        return self._pipeline.sample

    @property
    def is_zero(self) -> bool:
        """True if there is a ``sample`` that holds nothing but zeros."""
        if self.sample is None:
            return False
        with self._bucket.work():
            return not self.sample.values.any()

    def ratio(self, gradient_of: Callable[[str], torch.Tensor | None]) -> float | None:
        """Return what the largest of ``sample`` was multiplied by since it was delivered; None if that is not known.

        Args:
            gradient_of: Returns the gradient for a key; None: it is not to be read.
        """
        if self.sample is None or not len(self.sample):
            return None
        with self._bucket.work():
            indices, values = map(copy_to_host, self.sample.entries)
            place = int(abs(values).argmax())
            index, value = int(indices[place]), float(values[place])
            part = next((one for one in self._bucket.parts if 0 <= index - one.start < one.size), None)
            if part is None or not value:  # a sketch has noise in a padding, too
                return None
            gradient = gradient_of(part.key)
            return None if gradient is None else float(gradient.flatten()[index - part.start]) / value

    def change(self) -> torch.Tensor | None:
        """Return how the optimizer's next step changes the delivered velocity; None if there is none."""
        before, after = self.handover.held, self.handover.next
        return self.part(after) - self.part(before) if len(before) or len(after) else None

    def owed(self, ranks: int) -> torch.Tensor:
        """Return this rank's velocity, as if all ranks had it, less what was delivered last."""
        return self.part(SparseVector.full(self._pipeline.velocity)) * ranks - self.part(self.handover.held)

    def part(self, vector: SparseVector) -> torch.Tensor:
        """Return the gradient's part of a vector of the bucket, with zeros."""
        end = self._start + self.size
        with self._bucket.work(self._bucket.collected):
            if vector.indices is None:
                return torch.from_numpy(copy_to_host(vector.values[self._start : end]))
            indices, values = map(to_host, vector.entries)
        first, last = np.searchsorted(indices, (self._start, end))
        part: Array = np.zeros(self.size, values.dtype)
        part[indices[first:last] - self._start] = values[first:last]
        return torch.from_numpy(part)

    def commit(self) -> None:
        """Note that the optimizer has applied the last exchange of the bucket."""
        self._pipeline.commit()

    def replace_momentum(self) -> None:
        """Note that the optimizer's momentum has been replaced."""
        self._bucket.replace_momentum()

    def drop_momentum(self) -> None:
        """Forget the gradient's momentum, which every rank's optimizer has lost."""
        with self._bucket.device.work():
            for start, end in self._places:
                self._pipeline.drop_momentum(start, end)
