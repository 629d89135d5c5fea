"""The laws every collective must obey, and the cases that have broken published ones.

Every rank draws the same example and builds its own vector from it; a dense Allreduce says what must come out.
Values are small multiples of a power of two: their sums are exact, and bits can be compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from mpi4py import MPI

from horovod_sparse.collectives import COLLECTIVES, Exchange
from horovod_sparse.kernels import to_host
from horovod_sparse.mpi.messenger import Messenger
from horovod_sparse.rules import Place
from horovod_sparse.vector import SparseVector

SHARED = ("same indices", "all empty", "cancelling", "everything", "one region")
PATTERNS = ("random", "same indices", "disjoint", "one region", "some empty", "all empty", "cancelling", "everything")
# Of which sums over 16 ranks still fit the mantissa, while 16 bits, or 24 of 53, do not hold them.
BITS = {"float32": 18, "float64": 36}
# Formats of the wire that round, and the values they are for.
NARROWER = [("float16", "float32"), ("bfloat16", "float32"), ("float32", "float64")]


def make(comm: Any, name: str, dtype: Any = "float32", put: Callable[[Any], Any] = np.asarray, **given: Any) -> Any:
    """A collective by its name, on a messenger of its own; what is given are options as ``Sparse.of`` takes them."""
    rule = COLLECTIVES[name]
    options = rule.Options.read(given)
    assert given.keys() <= options.known(), f"{name} has no such options: {given}"
    like = put(np.empty(0, dtype))
    return rule(Place(1, like, rank=comm.Get_rank(), ranks=comm.Get_size()), Messenger(comm), options)


@dataclass(frozen=True)
class Case:
    """One example: how long the vectors are, where their entries lie, and the seed of their values.

    The total has ``share`` of the positions as its k, where a collective limits it. Values are ``unit`` times integers
    of so many bits as sums allow.
    """

    size: int
    pattern: str
    seed: int = 1
    dtype: str = "float32"
    share: float = 0.1
    unit: float = 1 / 8

    @property
    def k(self) -> int:
        return max(1, round(self.share * self.size))


def cases(dtype: str | None = None, most: int = 50_000) -> st.SearchStrategy[Case]:
    """Cases of one dtype, or of either; some values are subnormal in float16 or below it, some far beyond it."""
    return st.builds(
        Case,
        size=st.one_of(st.integers(1, 40), st.integers(1, most // 10), st.integers(most // 10, most)),
        pattern=st.sampled_from(PATTERNS),
        seed=st.integers(0, 2**31),
        dtype=st.just(dtype) if dtype else st.sampled_from(sorted(BITS)),
        share=st.sampled_from([1e-9, 0.01, 0.3, 1.0]),
        unit=st.sampled_from([1 / 8, 2.0**-30, 1.0, 2.0**100]),
    )


def thorough() -> bool:
    """Whether every combination is tried, with all examples: once, at the least number with all that differs.

    Three ranks are odd, leave remainders, fold before they make a tree, and fill one node and a half.
    """
    return MPI.COMM_WORLD.Get_size() == 3


def examples(most: int) -> settings:
    """So many examples of a law where it is tried thoroughly, a third of them elsewhere."""
    return settings(max_examples=most if thorough() else -(-most // 3))


def own_vector(case: Case, comm: Any) -> SparseVector:
    """The vector of this rank, without the work of building the others."""
    return vector_of(case, comm.Get_rank(), comm.Get_size())


def vector_of(case: Case, rank: int, ranks: int) -> SparseVector:
    """The vector of any rank."""
    generator = np.random.default_rng([case.seed, rank])
    indices = _indices(case, rank, ranks, generator)
    limit = 2 ** BITS[case.dtype]
    integers = generator.integers(-limit, limit, indices.size)
    if case.pattern == "cancelling":
        few = np.random.default_rng(case.seed + 2).integers(1, limit, 8)
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


def placed(vector: SparseVector, put: Callable[[Any], Any]) -> SparseVector:
    """A vector whose arrays were put elsewhere: on a device, or back on the host."""
    indices = None if vector.indices is None else put(vector.indices)
    return SparseVector(indices, put(vector.values), vector.size, vector.shared)


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


def digest(*arrays: Any) -> str:
    """Equal for arrays of the same bits, on whatever device; IEEE 754 leaves the sign and payload of NaN open."""
    return hashlib.sha256(b"|".join(map(_content, arrays))).hexdigest()


def _content(array: Any) -> bytes:
    if array is None:
        return b""
    host = to_host(array)
    host = np.where(np.isnan(host), host.dtype.type(np.nan), host) if host.dtype.kind == "f" else host
    return repr((host.dtype.str, host.shape)).encode() + host.tobytes()


def content(state: Any) -> Any:
    """All that a state holds, but clocks; equal for states of the same bits."""
    if isinstance(state, dict):
        return {key: content(value) for key, value in state.items() if key != "seconds"}
    return digest(state) if isinstance(state, np.ndarray) else state


def digest_of(*vectors: SparseVector) -> str:
    """Equal for vectors of the same bits."""
    return digest(*(array for one in vectors for array in (one.indices, one.values)))


def same_bits(comm: Any, *arrays: Any) -> bool:
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


def check_exchange(comm: Any, collective: Any, case: Case, put: Callable[[Any], Any] = np.asarray) -> Exchange:
    """Conservation, same bits, order of indices and an untouched argument, for one case.

    The arrays are put where the collective shall find them; the exchange that is returned is on the host.
    """
    mine = own_vector(case, comm)
    handed_in = placed(mine, put)
    collective.decide(case.size, case.k)
    exchange = collective.allreduce(handed_in, case.k)
    total, returned = placed(exchange.total, to_host), placed(exchange.returned, to_host)
    expected, came_back = np.empty((2, case.size), case.dtype)
    comm.Allreduce(dense(mine), expected)
    comm.Allreduce(dense(returned), came_back)
    kinds = {type(one.values) for one in (handed_in, exchange.total, exchange.returned)}
    checks = {
        "nothing is lost": np.array_equal(expected, dense(total) + came_back),
        "the argument is not changed": digest_of(handed_in) == digest_of(own_vector(case, comm)),
        "the total is well formed": well_formed(total, case),
        "what returned is well formed": well_formed(returned, case),
        "the result is where the argument was": len(kinds) == 1,
    }
    failures = [name for name, holds in checks.items() if not holds]
    answers = comm.allgather((failures, digest_of(total)))
    assert not any(failures for failures, _ in answers), (case, [failures for failures, _ in answers])
    assert len({bits for _, bits in answers}) == 1, (case, "the total has the same bits on every rank")
    return Exchange(total, returned)
