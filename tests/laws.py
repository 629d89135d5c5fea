"""The laws every collective must obey, and the cases that have broken published ones.

Every rank draws the same example and builds the vectors of all ranks from it, so that each knows what must come out.
Values are eighths of small integers: their sums are exact, and bits can be compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from horovod_sparse.vector import SparseVector

SHARED = ("same indices", "all empty", "cancelling", "everything", "one region")
PATTERNS = ("random", "same indices", "disjoint", "one region", "some empty", "all empty", "cancelling", "everything")


@dataclass(frozen=True)
class Case:
    """One example: how long the vectors are, where their entries lie, and the seed of their values.

    The total has ``share`` of the positions as its k, where a collective limits it.
    """

    size: int
    pattern: str
    seed: int
    dtype: str = "float32"
    share: float = 0.1

    @property
    def k(self) -> int:
        return max(1, round(self.share * self.size))


cases = st.builds(
    Case,
    size=st.one_of(st.integers(1, 40), st.integers(1, 5000), st.integers(1, 1_000_000)),
    pattern=st.sampled_from(PATTERNS),
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from(["float32", "float64"]),
    share=st.sampled_from([1e-9, 0.01, 0.3, 1.0]),
)


def vectors(case: Case, ranks: int) -> list[SparseVector]:
    """The vector of every rank."""
    generator = np.random.default_rng(case.seed)
    return [_vector(case, rank, ranks, generator) for rank in range(ranks)]


def _vector(case: Case, rank: int, ranks: int, generator: np.random.Generator) -> SparseVector:
    indices = _indices(case, rank, ranks, generator)
    values = generator.integers(-64, 64, indices.size).astype(case.dtype) / 8
    if case.pattern == "cancelling":
        values = np.resize(np.arange(1, 9) * (-1.0 if rank % 2 else 1.0), indices.size).astype(case.dtype)
    return SparseVector(indices, values, case.size, shared=case.pattern in SHARED)


def _indices(case: Case, rank: int, ranks: int, generator: np.random.Generator) -> np.ndarray:
    n = case.size
    everything = np.arange(n, dtype=np.int32)
    chosen = np.sort(generator.permutation(n)[: generator.integers(1, n + 1)]).astype(np.int32)
    shared = np.random.default_rng(case.seed + 1).random(n) < 0.3
    return {
        "random": chosen,
        "same indices": everything[shared],
        "disjoint": everything[rank::ranks].copy(),
        "one region": everything[: max(1, n // (2 * ranks))],
        "some empty": chosen if rank % 2 else everything[:0],
        "all empty": everything[:0],
        "cancelling": everything[shared],
        "everything": everything,
    }[case.pattern]


def dense(vector: SparseVector) -> np.ndarray:
    """The vector written out."""
    if vector.indices is None:
        return np.asarray(vector.values)
    result = np.zeros(vector.size, vector.values.dtype)
    result[vector.indices] = vector.values
    return result


def everywhere(comm: Any, holds: bool) -> bool:
    """Whether something holds on all ranks; all of them learn the same answer and so fail together."""
    from mpi4py import MPI

    return bool(comm.allreduce(holds, op=MPI.LAND))


def same_bits(comm: Any, array: np.ndarray | None) -> bool:
    """Whether an array has the same bits on all ranks."""
    mine = None if array is None else (array.dtype.str, array.shape, array.tobytes())
    return everywhere(comm, comm.bcast(mine) == mine)


def check_exchange(comm: Any, collective: Any, case: Case) -> Any:
    """Conservation, same bits, order of indices and an untouched argument, for one case; gives the exchange."""
    sent = vectors(case, comm.Get_size())
    mine = sent[comm.Get_rank()]
    before = (mine.indices.copy(), mine.values.copy())
    exchange = collective.allreduce(mine, case.k)
    total, returned = exchange.total, exchange.returned
    assert everywhere(comm, np.array_equal(before[0], mine.indices) and np.array_equal(before[1], mine.values))
    came_back = np.empty(case.size, case.dtype)
    comm.Allreduce(dense(returned), came_back)
    assert everywhere(comm, np.array_equal(sum(map(dense, sent)), dense(total) + came_back))
    assert everywhere(comm, total.size == returned.size == case.size)
    assert everywhere(comm, total.values.dtype == returned.values.dtype == np.dtype(case.dtype))
    for vector in (total, returned):
        ascending = vector.indices is None or (
            vector.indices.dtype == np.int32
            and vector.indices.size == vector.values.size
            and bool(np.all(np.diff(vector.indices) > 0))
        )
        assert everywhere(comm, ascending)
    assert same_bits(comm, total.indices)
    assert same_bits(comm, total.values)
    return exchange


def check_repeatable(comm: Any, build: Any, seed: int, size: int = 1000) -> None:
    """Random floats, whose sums depend on the order, give the same bits on every rank and in every run.

    ``build`` makes a new collective, on all ranks.
    """
    generator = np.random.default_rng([seed, comm.Get_rank()])
    indices = np.sort(generator.permutation(size)[: size // 3]).astype(np.int32)
    values = generator.standard_normal(indices.size).astype(np.float32)
    totals = [build().allreduce(SparseVector(indices, values, size), size // 10).total for _ in range(3)]
    assert all(same_bits(comm, total.values) and same_bits(comm, total.indices) for total in totals)
    assert everywhere(comm, all(np.array_equal(totals[0].values, total.values) for total in totals[1:]))
