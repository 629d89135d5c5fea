"""Bucket of a fully sharded model: takes complete gradients, and returns this rank's shard of their mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from horovod_sparse.engine.bucket import Bucket, Prepared, Settings, StepGradients
from horovod_sparse.engine.layout import Layout, Segment
from horovod_sparse.rules import Conditions
from horovod_sparse.transport.base import Transport


class Columns(NamedTuple):
    """Columns that hold the shards of one parameter, in the rows of a reduce-scatter's input and in a bucket.

    Attributes:
        source: First column in the rows of the input, which has one row for each rank.
        place: First position in each rank's region of the bucket.
        width: Number of columns.
    """

    source: int
    place: int
    width: int


class Shard(NamedTuple):
    """Shard of one parameter in a rank's region of a bucket.

    Attributes:
        key: Name of the parameter.
        place: First position in the region.
        width: Number of positions, the same in each rank's region.
        size: Number of elements that this rank holds; the other positions are padding.
    """

    key: str
    place: int
    width: int
    size: int


class ScatteredBucket(Bucket):
    """Bucket with one region for each rank, whose owner alone gets the result.

    Args:
        layout: One segment, whose size is a multiple of the world size.
        shards: What the regions hold, ascending by place.
        settings: Settings of all buckets of the model.
        transport: The ranks that take part.
        shared: State that the rules of all buckets of the model share.

    Attributes:
        key: Key of the segment.
        width: Number of elements of a region.
    """

    def __init__(
        self,
        layout: Layout,
        shards: Sequence[Shard],
        settings: Settings,
        transport: Transport,
        shared: dict[type[Any], Any] | None = None,
    ) -> None:
        super().__init__(layout, replace(settings, scatters=True), transport, shared)
        self.key, self.width = layout.segments[0].key, layout.size // transport.size
        self._rank, self._ranks = transport.rank, transport.size
        self._shards = {shard.key: shard for shard in shards}
        self.parts = [Segment(shard.key, self._rank * self.width + shard.place, shard.size) for shard in shards]
        self._columns: Sequence[Columns] = ()  # of the step in progress
        self._result: torch.Tensor

    def begin_step(self, columns: Sequence[Columns]) -> torch.Tensor:
        """Set what the gradients of this step hold, before they are put; return the tensor that receives the result.

        Args:
            columns: Columns of the parameters that have a gradient, ascending; all others are held.
        """
        self._columns = columns
        self._result = torch.empty(self.width, dtype=self.layout.dtype, device=self.layout.torch_device)
        return self._result

    def places(self, part: Segment) -> Sequence[tuple[int, int]]:
        """Return begin and end of a parameter's shard in each region."""
        shard = self._shards[part.key]
        starts = range(shard.place, self.layout.size, self.width)
        return [(start, start + shard.width) for start in starts]

    def _prepare(self, collected: StepGradients, conditions: Callable[[], Conditions]) -> Prepared:
        rows = collected.gradients[self.key]
        flat, length, ranks = self.device.array_of(rows), rows.shape[-1], self._ranks
        if [(0, 0, self.width)] == _merged(self._columns) and length == self.width:
            gradients = [(0, flat)]
        else:
            gradients = [
                (rank * self.width + place, flat[rank * length + source : rank * length + source + width])
                for rank in range(ranks)
                for source, place, width in _merged(self._columns)
            ]
        outputs = [(self._rank * self.width, self.device.array_of(self._result))]
        return Prepared([], [], outputs, gradients, conditions())

    def exchange(self, collected: StepGradients, conditions: Callable[[], Conditions]) -> None:
        """Exchange the gradients of a step, and free them: the complete gradients of a model need not fit in memory.

        The result is then the caller's alone. On a device, the kernels that have read the gradients are done: messages
        have left since.
        """
        try:
            super().exchange(collected, conditions)
        finally:
            collected.gradients[self.key] = collected.gradients[self.key].new_empty(0)
            self._result = self._result.new_empty(0)


def _merged(columns: Sequence[Columns]) -> list[Columns]:
    """Return columns with those joined that follow each other in both places."""
    merged: list[Columns] = []
    for one in columns:
        last = merged[-1] if merged else None
        if last is not None and (last.source + last.width, last.place + last.width) == one[:2]:
            merged[-1] = last._replace(width=last.width + one.width)
        else:
            merged.append(one)
    return merged
