"""Tests of the laws of collectives, with the cases that have broken published ones.

Every rank builds its vector from the same case, and a dense sum gives the expected result. Values are small multiples
of a power of two, so their sums are exact and results can be compared bitwise.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.kernels import to_host
from horovod_sparse.rules import Accumulator, Reduced, SparseVector
from horovod_sparse.rules.testing.values import context_of, dense, digest_of, eighths, fail_together, placed

SHARED = ("same indices", "all empty", "cancelling", "everything", "one region")
PATTERNS = ("random", "same indices", "disjoint", "one region", "some empty", "all empty", "cancelling", "everything")
# Bits of the random integers: sums over 16 ranks fit the mantissa, but 16 bits (for float64: 24 bits) cannot hold them.
BITS = {"float32": 18, "float64": 36}


@dataclass(frozen=True)
class Case:
    """One test case: the input vectors of all ranks.

    Attributes:
        size: Number of elements of the vectors.
        pattern: Distribution of the entries over positions and ranks, one of ``PATTERNS``.
        seed: Random seed.
        dtype: "float32" or "float64".
        share: k as a fraction of ``size``, for collectives that limit the entries of the total.
        unit: Factor on the values, which are random integers; a power of two keeps sums exact.
    """

    size: int
    pattern: str
    seed: int = 1
    dtype: str = "float32"
    share: float = 0.1
    unit: float = 1 / 8

    @property
    def k(self) -> int:
        """Number of entries of the total, for collectives that limit it."""
        return max(1, round(self.share * self.size))


def own_vector(case: Case, transport: Any) -> SparseVector:
    """Return the vector of this rank."""
    return vector_of(case, transport.rank, transport.size)


def vector_of(case: Case, rank: int, ranks: int) -> SparseVector:
    """Return the vector of a given rank."""
    generator = np.random.default_rng([case.seed, rank])
    indices = _indices(case, rank, ranks, generator)
    limit = 2 ** BITS[case.dtype]
    integers = generator.integers(-limit, limit, indices.size)
    if case.pattern == "cancelling":
        few = np.random.default_rng(case.seed + 2).integers(1, limit, 8)
        integers = np.resize(-few if rank % 2 else few, indices.size)
    values = integers.astype(case.dtype) * np.dtype(case.dtype).type(case.unit)
    return SparseVector(indices, values, case.size, shared=case.pattern in SHARED)


def _indices(case: Case, rank: int, ranks: int, generator: np.random.Generator) -> NDArray[np.int32]:
    n = case.size
    everything = np.arange(n, dtype=np.int32)
    chosen = np.flatnonzero(generator.random(n) < generator.random()).astype(np.int32)
    shared = np.random.default_rng(case.seed + 1).random(n) < 0.3
    by_pattern: dict[str, NDArray[np.int32]] = {
        "random": chosen,
        "same indices": everything[shared],
        "disjoint": everything[rank::ranks].copy(),
        "one region": everything[: max(1, n // (2 * ranks))],
        "some empty": chosen if rank % 2 else everything[:0],
        "all empty": everything[:0],
        "cancelling": everything[shared],
        "everything": everything,
    }
    return by_pattern[case.pattern]


def well_formed(vector: SparseVector, case: Case) -> bool:
    """Return whether the size, dtypes and index order of a vector from an exchange are valid."""
    indices, values = vector.indices, vector.values
    plain = vector.size == case.size and values.dtype == np.dtype(case.dtype)
    if indices is None:
        return plain and values.size == case.size
    ascending = bool(np.all(np.diff(indices) > 0)) and indices.size == values.size
    inside = indices.size == 0 or (indices[0] >= 0 and indices[-1] < case.size)
    return bool(plain and ascending and inside and indices.dtype == np.int32)


def check_exchange(transport: Any, collective: Any, case: Case, put: Callable[[Any], Any] = np.asarray) -> Reduced:
    """Check conservation, device, index order and an unchanged input, for one case; a collective call.

    Args:
        transport: Transport between the ranks; any world size.
        collective: The collective under test, on the same ranks.
        case: The test case.
        put: Function that moves a host array to the collective's device.

    Returns:
        The result, on the host.

    Raises:
        AssertionError: A law is violated; raised on all ranks.
    """
    vector = placed(own_vector(case, transport), put)
    accumulator, before = _rest(case, transport.rank, vector, put)
    collective.decide(case.size, case.k)
    extended = collective.extend(accumulator, vector, case.k)
    sent, after = dense(placed(extended, to_host)), to_host(accumulator.buffer)
    reduced = collective.allreduce(extended, case.k)
    total, returned = placed(reduced.total, to_host), placed(reduced.returned, to_host)
    expected, rest = transport.allreduce(sent), transport.allreduce(dense(returned))
    kinds = {type(array) for array in (vector.values, reduced.total.values, reduced.returned.values)}
    checks = {
        "the extended vector plus the rest equal the accumulator": np.array_equal(before, sent + after),
        "total plus returned entries equal the input": np.array_equal(expected, dense(total) + rest),
        "the input vector is unchanged": digest_of(vector) == digest_of(own_vector(case, transport)),
        "the total is well formed": well_formed(total, case),
        "the returned vector is well formed": well_formed(returned, case),
        "the result is on the device of the input": len(kinds) == 1,
    }
    fail_together(transport, [f"{law}, in {case}" for law, holds in checks.items() if not holds])
    return Reduced(total, returned)


def _rest(case: Case, rank: int, vector: SparseVector, put: Callable[[Any], Any]) -> tuple[Accumulator, NDArray[Any]]:
    """Return an accumulator after the selection of a vector, and what it held before, on the host."""
    generator = np.random.default_rng([case.seed, rank, 1])
    integers = generator.integers(-(2 ** BITS[case.dtype]), 2 ** BITS[case.dtype], case.size)
    before = integers.astype(case.dtype) * np.dtype(case.dtype).type(case.unit)
    indices, values = (to_host(array) for array in vector.entries)
    before[indices] = values
    rest = before.copy()
    rest[indices] = 0
    accumulator = Accumulator(put(rest), [(0, put(np.zeros_like(rest)))])
    accumulator.settle()
    return accumulator, before


def check_collective(transport: Any, rule: Any, **options: Any) -> None:
    """Test the laws of a collective on vectors of every pattern, in both precisions; a collective call.

    Laws: ``extend`` moves entries out of the accumulator and loses none. The sum of the extended vectors over the ranks
    equals the total plus the sum of the returned vectors, on every rank and for any selection. A vector without indices
    is summed densely. A collective that loads the state of another returns the same bits.

    Args:
        transport: Transport between the ranks; any world size.
        rule: The collective class. Some of its input vectors have the same indices on every rank.
        **options: Options of the collective.

    Raises:
        AssertionError: A law is violated; raised on all ranks.
    """
    for dtype, sizes in (("float32", (1, 2000)), ("float64", (5,))):
        collective = build_on(transport, rule, dtype, **options)
        for seed, (size, pattern) in enumerate(itertools.product(sizes, PATTERNS)):
            check_exchange(transport, collective, Case(size, pattern, seed, dtype))
        values = eighths(np.random.default_rng(transport.rank), 500, dtype=dtype)
        reduced = collective.allreduce(SparseVector.full(values), 50)
        everything = sum(transport.allgather_object(values)) - sum(transport.allgather_object(dense(reduced.returned)))
        correct = reduced.total.indices is None and np.array_equal(reduced.total.values, everything)
        fail_together(transport, [] if correct else ["a vector without indices is summed densely"])
    check_restored(transport, lambda: build_on(transport, rule, **options))


def build_on(transport: Any, rule: Any, dtype: Any = np.float32, **options: Any) -> Any:
    """Return a collective on a private transport; a collective call."""
    return rule(context_of(transport, 1, dtype), transport.channel(), rule.Options(**options))


def check_restored(transport: Any, build: Callable[[], Any]) -> None:
    """Check that a collective that loads another's state returns the same bits; a collective call."""
    original, restored = build(), build()
    steps = [own_vector(Case(3000, "same indices", seed), transport) for seed in range(4)]
    for vector in steps[:2]:
        original.decide(3000, 150)
        original.allreduce(vector, 150)
    restored.load_state_dict(original.state_dict())
    for vector in steps[2:]:
        decided = {collective.decide(3000, 150) for collective in (original, restored)}
        exchanges = [collective.allreduce(vector, 150) for collective in (original, restored)]
        same = len(decided) == len({digest_of(reduced.total, reduced.returned) for reduced in exchanges}) == 1
        fail_together(transport, [] if same else ["a restored collective returns the same bits"])
