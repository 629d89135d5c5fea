"""The laws every collective must obey, with what draws examples of them; the package has the laws themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import rank_threads
from hypothesis import settings
from hypothesis import strategies as st
from mpi4py import MPI

from horovod_sparse.collectives import COLLECTIVES
from horovod_sparse.rules import BucketContext
from horovod_sparse.rules.testing import Case, check_exchange, values
from horovod_sparse.rules.testing.collectives import BITS, PATTERNS, SHARED, own_vector, vector_of
from horovod_sparse.rules.testing.values import content, dense, digest, digest_of, placed
from horovod_sparse.transport import base
from horovod_sparse.transport.base import Transport
from horovod_sparse.transport.mpi import MPITransport

__all__ = [
    "LOGARITHMIC",
    "NARROWER",
    "SHARED",
    "Case",
    "cases",
    "check_exchange",
    "content",
    "dense",
    "digest",
    "digest_of",
    "everywhere",
    "examples",
    "make",
    "own_vector",
    "placed",
    "same_bits",
    "sum_bytes",
    "summed",
    "thorough",
    "vector_of",
]

# Formats of the wire that round, and the values they are for.
NARROWER = [("float16", "float32"), ("bfloat16", "float32"), ("float32", "float64")]
LOGARITHMIC = [("log8", "float32"), ("log4", "float64")]


def make(
    transport: Transport, name: str, dtype: Any = "float32", put: Callable[[Any], Any] = np.asarray, **given: Any
) -> Any:
    """A collective by its name, on a channel of its own; what is given are options as ``Sparse.of`` takes them."""
    rule = COLLECTIVES[name]
    options = rule.Options.read(given)
    assert given.keys() <= options.known(), f"{name} has no such options: {given}"
    like = put(np.empty(0, dtype))
    return rule(BucketContext(1, like, rank=transport.rank, ranks=transport.size), transport.channel(), options)


def summed(transport: Transport, value: Any) -> Any:
    """Sum of numbers or arrays over the ranks."""
    return sum(transport.allgather_object(value))


def sum_bytes(transport: Transport, nbytes: int) -> float:
    """Bytes that a rank sends in the sum of an array of floating-point numbers, but for unequal regions."""
    ranks = transport.size
    gathered = nbytes <= base._GATHERED_SUM_BYTES or nbytes * ranks <= base._GATHERED_SUM_TOTAL
    return (ranks - 1) * nbytes if gathered else 2 * nbytes * (ranks - 1) / ranks


def everywhere(ranks: Transport | MPI.Intracomm, holds: bool) -> bool:
    """Tell whether a condition holds on all ranks; a collective call."""
    return values.everywhere(_transport(ranks), holds)


def same_bits(ranks: Transport | MPI.Intracomm, *arrays: Any) -> bool:
    """Tell whether arrays are the same on all ranks; a collective call."""
    return values.same_bits(_transport(ranks), *arrays)


def _transport(ranks: Transport | MPI.Intracomm) -> Transport:
    return MPITransport(ranks) if isinstance(ranks, MPI.Intracomm) else ranks


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
    return (rank_threads.sizes or (MPI.COMM_WORLD.Get_size(),)) == (3,)


def examples(most: int) -> settings:
    """So many examples of a law where it is tried thoroughly, a third of them elsewhere."""
    return settings(max_examples=most if thorough() else -(-most // 3))
