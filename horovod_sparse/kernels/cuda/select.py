"""Accumulation and selection on the device; kernels.protocol documents them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import cupy
import numpy as np

from horovod_sparse.kernels import copied
from horovod_sparse.kernels.cuda.launch import (
    Module,
    Table,
    blocks_for,
    check_dtype,
    check_real,
    check_scale,
    check_vector,
    instances,
    multiprocessors,
    real_of,
)
from horovod_sparse.kernels.types import Accumulation, Array, Indices, Segments, Velocity

if TYPE_CHECKING:
    from typing_extensions import Unpack

_MODULE = Module(
    "select",
    templates=["draw", "estimate", "set_threshold", "digit", "compact", "take"],
    plain=instances(("accumulate", "sweep"), (0, 1)),  # without and with a velocity
)

_TILE = 4096  # elements per tile of the buffer
_ROW = 1024  # entries per tile of a list
_PLAN_BYTES = 80 << 10
_WIDTH = {4: 31, 8: 63}  # bits of a magnitude, by itemsize
_DIGIT = 11
_ALL_ARE_CANDIDATES = 1 << 14  # up to this number of elements there is no sample
_STRATA = 1 << 16  # maximum size of a sample
_PER_STRATUM = 256  # minimum number of elements per sampled one
_BLOCKS_PER_PROCESSOR = 4


def accumulate(
    gradients: Segments, buffer: Array, scale: float = 1.0, threads: int = 1, **options: Unpack[Accumulation]
) -> None:
    """Implement ``cpu.accumulate``; ``threads`` is ignored. Does not synchronize."""
    del threads
    table, what = _prepare(gradients, buffer, scale, **options)
    _MODULE.launch(
        f"accumulate<{real_of(buffer)}, {int(what.values is not None)}>",
        min(blocks_for(buffer.size, _TILE), 16 * multiprocessors()),
        *(table.device, table.count, buffer, np.int64(buffer.size), *what),
    )


def select(
    gradients: Segments, buffer: Array, k: int, scale: float = 1.0, threads: int = 1, **options: Unpack[Accumulation]
) -> tuple[Indices, Array]:
    """Implement ``cpu.select``; does not synchronize, as the number of entries is known."""
    del threads
    table, what = _prepare(gradients, buffer, scale, **options)
    k = _check_count(k, table.active)
    if k == 0:
        accumulate(gradients, buffer, scale, **options)
        return cupy.empty(0, np.int32), cupy.empty(0, buffer.dtype)
    sample = _Sample.of(table.active, k)
    selection = _Selection(table, buffer, sample.capacity)
    if sample.strata:
        selection.estimate(what, sample)
    selection.sweep(what)
    selection.search(k)
    return selection.compact(k)


def select_above(
    gradients: Segments,
    buffer: Array,
    threshold: float,
    scale: float = 1.0,
    threads: int = 1,
    **options: Unpack[Accumulation],
) -> tuple[Indices, Array]:
    """Implement ``cpu.select_above``; synchronizes once, for the number of entries."""
    del threads
    table, what = _prepare(gradients, buffer, scale, **options)
    if not threshold >= 0:
        raise ValueError(f"threshold must be 0 or more, not {threshold}")
    key = _key(threshold, buffer)
    capacity = min(table.active, max(table.active // 32, _ALL_ARE_CANDIDATES))
    selection = _Selection(table, buffer, capacity, low=key)
    selection.sweep(what)
    return selection.compact(selection.found(), key)


def cut(indices: Indices, values: Array, k: int) -> tuple[tuple[Indices, Array], tuple[Indices, Array]]:
    """Implement ``cpu.cut``; does not synchronize."""
    indices, values = check_vector(indices, values, "vector")
    k = _check_count(k, values.size)
    if k == 0:
        return (indices[:0], values[:0]), (copied(indices), copied(values))
    selection = _Selection(Table([], 0), values[:0], 0, listed=(indices, values))
    selection.search(k)
    rest = cupy.empty(values.size - k, np.int32), cupy.empty(values.size - k, values.dtype)
    return selection.compact(k, rest=rest), rest


def take(gradients: Segments, buffer: Array, positions: Indices | None) -> Array:
    """Implement ``cpu.take``; does not synchronize, so positions are not checked: out of bounds returns 0."""
    table = Table(gradients, check_real(buffer, "buffer").size)
    count = buffer.size if positions is None else check_dtype(positions, "positions").size
    values: Array = cupy.empty(count, buffer.dtype)
    _MODULE.launch(
        f"take<{real_of(buffer)}>",
        min(blocks_for(count), 64 * multiprocessors()),
        *(table.device, table.count, positions, np.int64(count), buffer, np.int64(buffer.size), values),
    )
    return values


class _AccumulateArgs(NamedTuple):
    """Arguments of the kernels that accumulate; ``values`` to ``weight`` describe the velocity."""

    scale: Any
    source: Array | None
    clear: Any
    values: Array | None
    momentum: Any
    share: Any
    fresh: Any
    weight: Any


def _prepare(
    gradients: Segments,
    buffer: Array,
    scale: float,
    source: Array | None = None,
    clear: bool = False,
    velocity: Velocity | None = None,
) -> tuple[Table, _AccumulateArgs]:
    """Convert the arguments of ``accumulate`` after checking them."""
    table = Table(gradients, check_real(buffer, "buffer").size, writable=clear)
    values, momentum, share, fresh, weight = velocity or (None, 0.0, 0.0, 0.0, 1.0)
    return table, _AccumulateArgs(
        check_scale(scale, buffer),
        _check_matching(source, buffer, "source"),
        np.int32(clear),
        _check_matching(values, buffer, "velocity"),
        check_scale(momentum, buffer, "momentum"),
        check_scale(share, buffer, "share"),
        check_scale(fresh, buffer, "fresh"),
        check_scale(weight, buffer, "weight"),
    )


def _check_matching(array: Array | None, buffer: Array, name: str) -> Array | None:
    if array is None:
        return None
    if check_dtype(array, name, buffer.dtype).size != buffer.size:
        raise ValueError(f"{name}: {array.size} elements, but the buffer has {buffer.size}")
    return array


def _check_count(k: int, available: int) -> int:
    if k < 0:
        raise ValueError(f"k must not be negative, but is {k}")
    return min(k, available)


def _key(threshold: float, like: Array) -> Any:
    """Return the bits of a threshold in the dtype of an array as a NumPy integer, as the kernels compare them."""
    with np.errstate(over="ignore"):
        return np.array([threshold], like.dtype).view(f"i{like.itemsize}")[0] & np.iinfo(f"i{like.itemsize}").max


@dataclass(frozen=True)
class _Sample:
    """Plan for estimating the threshold of the candidates from a sample.

    Attributes:
        strata: Number of sampled elements; 0: all elements are candidates.
        low: Rank in the sample of a magnitude that almost certainly more than k elements reach.
        high: Rank in the sample of a magnitude that almost certainly fewer than k elements reach; 0: there is none.
        capacity: Maximum number of candidates to store.
    """

    strata: int
    low: int
    high: int
    capacity: int

    @classmethod
    def of(cls, active: int, k: int) -> _Sample:
        """Plan the selection of k out of the active elements."""
        strata = min(_STRATA, active // _PER_STRATUM)
        if active <= _ALL_ARE_CANDIDATES:
            return cls(0, 0, 0, active)
        rank = k * strata / active
        low = math.ceil(rank + _deviation(rank))
        if low >= strata:
            return cls(0, 0, 0, active)
        # The threshold is the lower end of a bin, slightly below the magnitude of this rank.
        most = 1.01 * (low + _deviation(low)) * active / strata + _ROW
        return cls(strata, low, max(0, math.floor(rank - _deviation(rank))), min(active, math.ceil(most)))


def _deviation(count: float) -> float:
    """Return four standard deviations of a roughly Poisson-distributed count, plus a margin for small counts."""
    return 4 * math.sqrt(count) + 8


class _Selection:
    """Device memory of one selection, and its kernels, which are launched in the order of the methods.

    Args:
        table: The gradients.
        buffer: Buffer to which the gradients are added.
        capacity: Maximum number of candidates to store.
        low: Key that candidates must reach.
        listed: Entries to select from instead of the buffer.
    """

    def __init__(
        self, table: Table, buffer: Array, capacity: int, low: int = 0, listed: tuple[Indices, Array] | None = None
    ) -> None:
        self._table, self._buffer, self._capacity = table, buffer, capacity
        self._real, width = real_of(buffer), buffer.itemsize
        self._size = buffer.size
        self._sweep_tiles = blocks_for(self._size, _TILE)
        # compact reads a list, or in tiles of the sweep the whole buffer.
        compact_tiles = max(self._sweep_tiles, blocks_for(listed[0].size if listed else capacity, _ROW))
        statuses = 8 * (self._sweep_tiles + compact_tiles)
        zeroed = _PLAN_BYTES + statuses
        samples = 0 if listed else _STRATA
        scratch = cupy.empty(zeroed + max(capacity * (4 + width) + 8, samples * width), np.uint8)
        scratch.data.memset_async(0, zeroed)
        self._plan = scratch[:_PLAN_BYTES]
        self._sweep_statuses = scratch[_PLAN_BYTES : _PLAN_BYTES + 8 * self._sweep_tiles]
        self._compact_statuses = scratch[_PLAN_BYTES + 8 * self._sweep_tiles : zeroed]
        self._sample = scratch[zeroed:]  # the candidates use the same memory afterwards
        self._listed = np.int64(-1 if listed is None else listed[0].size)
        self._values: Array = scratch[zeroed : zeroed + capacity * width]
        self._indices: Array = scratch[zeroed + capacity * width :]
        if listed is not None:
            self._indices, self._values = listed
        if low:
            _MODULE.launch(f"set_threshold<{self._real}>", 1, self._plan, low, threads=32)
        # The search also reads the buffer if there are too few candidates.
        rows = blocks_for(listed[0].size if listed else self._size, _ROW)
        self._blocks = max(1, min(_BLOCKS_PER_PROCESSOR * multiprocessors(), rows))

    @property
    def _step(self) -> tuple[Any, ...]:
        return self._table.device, self._table.count, self._buffer, np.int64(self._size)

    def estimate(self, what: _AccumulateArgs, sample: _Sample) -> None:
        """Compute the threshold of the candidates from the sample."""
        table = self._table
        _MODULE.launch(
            f"draw<{self._real}>",
            blocks_for(sample.strata),
            *(table.device, table.count, self._buffer if what.source is None else what.source, what.scale),
            *(what.values, what.momentum, what.share, what.fresh, what.weight),
            *(np.int64(table.active), np.int32(sample.strata), self._plan, self._sample),
        )
        strata, low, high = np.array([sample.strata, sample.low, sample.high], np.int32)
        _MODULE.launch(f"estimate<{self._real}>", 1, self._plan, self._sample, strata, low, high)

    def sweep(self, what: _AccumulateArgs) -> None:
        """Accumulate, and list the candidates."""
        statuses, capacity = self._sweep_statuses, np.int64(self._capacity)
        _MODULE.launch(
            f"sweep<{self._real}, {int(what.values is not None)}>",
            self._sweep_tiles,
            *(*self._step, *what, self._plan, statuses, self._indices, self._values, capacity),
        )

    def search(self, k: int) -> None:
        """Find the k-th largest magnitude."""
        for level in range(-(-_WIDTH[self._buffer.itemsize] // _DIGIT)):
            _MODULE.launch(
                f"digit<{self._real}>",
                self._blocks,
                *(np.int32(level), self._plan, self._values, self._listed, np.int64(self._capacity), np.int64(k)),
                *self._step,
            )

    def found(self) -> int:
        """Return the number of candidates; synchronizes."""
        return int(self._plan[8:16].view(np.int64)[0])

    def compact(
        self, count: int, threshold: Any = None, rest: tuple[Indices, Array] | None = None
    ) -> tuple[Indices, Array]:
        """Move out the ``count`` entries that ``search`` found or, if a threshold is given, that reach it."""
        indices, values = cupy.empty(count, np.int32), cupy.empty(count, self._buffer.dtype)
        none = np.array([-1], f"i{self._buffer.itemsize}")[0]
        buffer = None if self._listed >= 0 else self._buffer
        _MODULE.launch(
            f"compact<{self._real}>",
            self._blocks,
            *(self._plan, self._compact_statuses, self._indices, self._values, self._listed, np.int64(self._capacity)),
            *(none if threshold is None else threshold, self._table.device, self._table.count, buffer),
            *(np.int64(self._size), indices, values, *(rest or (None, None))),
        )
        return indices, values
