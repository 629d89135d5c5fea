"""The laws every collective must obey, and the cases that have broken published ones.

Every rank draws the same example and builds its own vector from it; a dense Allreduce says what must come out.
Values are eighths of small integers: their sums are exact, and bits can be compared. So are those of larger integers,
which 16 bits do not hold.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from mpi4py import MPI

from horovod_sparse.vector import SparseVector

SHARED = ("same indices", "all empty", "cancelling", "everything", "one region")
PATTERNS = ("random", "same indices", "disjoint", "one region", "some empty", "all empty", "cancelling", "everything")


@dataclass(frozen=True)
class Case:
    """One example: how long the vectors are, where their entries lie, and the seed of their values.

    The total has ``share`` of the positions as its k, where a collective limits it. Values are ``unit`` times integers
    of so many ``bits``.
    """

    size: int
    pattern: str
    seed: int
    dtype: str = "float32"
    share: float = 0.1
    unit: float = 1 / 8
    bits: int = 6

    @property
    def k(self) -> int:
        return max(1, round(self.share * self.size))


cases = st.builds(
    Case,
    size=st.one_of(st.integers(1, 40), st.integers(1, 5000), st.integers(5000, 50_000)),
    pattern=st.sampled_from(PATTERNS),
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from(["float32", "float64"]),
    share=st.sampled_from([1e-9, 0.01, 0.3, 1.0]),
)


def rounded_cases(dtype: str) -> st.SearchStrategy[Case]:
    """Values that have to be rounded.

    Some are subnormal in float16 or below all of its numbers, some beyond all of them, or so far beyond that they stay
    behind whole. Sums over 16 ranks still fit the mantissa.
    """
    return st.builds(
        Case,
        size=st.one_of(st.integers(1, 40), st.integers(1, 5000)),
        pattern=st.sampled_from(PATTERNS),
        seed=st.integers(0, 2**31),
        dtype=st.just(dtype),
        share=st.sampled_from([0.01, 0.3, 1.0]),
        unit=st.sampled_from([2.0**-30, 1 / 8, 1.0, 2.0**100]),
        bits=st.just({"float32": 18, "float64": 36}[dtype]),
    )


def few_ranks() -> bool:
    """Whether there is time for every configuration: ranks that share the cores wait for each other."""
    return MPI.COMM_WORLD.Get_size() <= 4


def thorough() -> bool:
    """Whether every combination is tried, with all examples: once, at the least number with all that differs.

    Three ranks are odd, leave remainders, fold before they make a tree, and fill one node and a half.
    """
    return MPI.COMM_WORLD.Get_size() == 3


def examples(most: int) -> settings:
    """So many examples of a law where it is tried thoroughly; half of them on other few ranks, a quarter on many."""
    return settings(max_examples=most if thorough() else -(-most // (2 if few_ranks() else 4)))


def vectors(case: Case, ranks: int) -> list[SparseVector]:
    """The vector of every rank."""
    return [_vector(case, rank, ranks) for rank in range(ranks)]


def own_vector(case: Case, comm: Any) -> SparseVector:
    """The vector of this rank, without the work of building the others."""
    return _vector(case, comm.Get_rank(), comm.Get_size())


def _vector(case: Case, rank: int, ranks: int) -> SparseVector:
    generator = np.random.default_rng([case.seed, rank])
    indices = _indices(case, rank, ranks, generator)
    integers = generator.integers(-(2**case.bits), 2**case.bits, indices.size)
    if case.pattern == "cancelling":
        few = np.random.default_rng(case.seed + 2).integers(1, 2**case.bits, 8)
        integers = np.resize(-few if rank % 2 else few, indices.size)
    values = integers.astype(case.dtype) * np.dtype(case.dtype).type(case.unit)
    return SparseVector(indices, values, case.size, shared=case.pattern in SHARED)


def _indices(case: Case, rank: int, ranks: int, generator: np.random.Generator) -> np.ndarray:
    n = case.size
    everything = np.arange(n, dtype=np.int32)
    chosen = np.flatnonzero(generator.random(n) < generator.random()).astype(np.int32)
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
    return bool(comm.allreduce(holds, op=MPI.LAND))


def digest(*arrays: np.ndarray | None) -> str:
    """Equal for arrays of the same bits."""
    parts = [b"" if one is None else repr((one.dtype.str, one.shape)).encode() + one.tobytes() for one in arrays]
    return hashlib.sha256(b"|".join(parts)).hexdigest()


def same_bits(comm: Any, *arrays: np.ndarray | None) -> bool:
    """Whether arrays have the same bits on all ranks."""
    return len(set(comm.allgather(digest(*arrays)))) == 1


def well_formed(vector: SparseVector, case: Case) -> bool:
    """Size, dtypes and order of a vector that came out of an exchange."""
    indices, values = vector.indices, vector.values
    plain = vector.size == case.size and values.dtype == np.dtype(case.dtype)
    if indices is None:
        return plain and values.size == case.size
    ascending = bool(np.all(np.diff(indices) > 0)) and indices.size == values.size
    inside = indices.size == 0 or (indices[0] >= 0 and indices[-1] < case.size)
    return bool(plain and ascending and inside and indices.dtype == np.int32)


def check_exchange(comm: Any, collective: Any, case: Case) -> Any:
    """Conservation, same bits, order of indices and an untouched argument, for one case; gives the exchange."""
    mine = own_vector(case, comm)
    before = digest(mine.indices, mine.values)
    exchange = collective.allreduce(mine, case.k)
    total, returned = exchange.total, exchange.returned
    expected, came_back = np.empty((2, case.size), case.dtype)
    comm.Allreduce(dense(mine), expected)
    comm.Allreduce(dense(returned), came_back)
    checks = {
        "nothing is lost": np.array_equal(expected, dense(total) + came_back),
        "the argument is not changed": digest(mine.indices, mine.values) == before,
        "the total is well formed": well_formed(total, case),
        "what returned is well formed": well_formed(returned, case),
    }
    failures = [name for name, holds in checks.items() if not holds]
    answers = comm.allgather((failures, digest(total.indices, total.values)))
    assert not any(failures for failures, _ in answers), [failures for failures, _ in answers]
    assert len({bits for _, bits in answers}) == 1, "the total has the same bits on every rank"
    return exchange


def check_repeatable(comm: Any, build: Any, seed: int, size: int = 1000) -> None:
    """Random floats, whose sums depend on the order, give the same bits on every rank and in every run.

    ``build`` makes a new collective, on all ranks.
    """
    generator = np.random.default_rng([seed, comm.Get_rank()])
    indices = np.sort(generator.permutation(size)[: size // 3]).astype(np.int32)
    values = generator.standard_normal(indices.size).astype(np.float32)
    totals = [build().allreduce(SparseVector(indices, values, size), size // 10).total for _ in range(3)]
    bits = {digest(total.indices, total.values) for total in totals}
    assert len(set().union(*comm.allgather(bits))) == 1
