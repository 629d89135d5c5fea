"""Laws that every collective must obey, with strategies for examples; the package contains the laws themselves."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import rank_threads
import torch_ranks
from hypothesis import settings
from hypothesis import strategies as st
from mpi4py import MPI

from horovod_sparse.collectives import COLLECTIVES
from horovod_sparse.rules import Accumulator, BucketContext, Reduced, SparseVector
from horovod_sparse.rules.testing import Case, check_exchange, values
from horovod_sparse.rules.testing.collectives import BITS, PATTERNS, SHARED, own_vector, vector_of
from horovod_sparse.rules.testing.values import content, dense, digest, digest_of, placed
from horovod_sparse.transport import base
from horovod_sparse.transport.base import Transport
from horovod_sparse.transport.mpi import MPITransport
from horovod_sparse.transport.traffic import Traffic

__all__ = [
    "SHARED",
    "Case",
    "check_exchange",
    "content",
    "dense",
    "digest",
    "digest_of",
    "own_vector",
    "placed",
    "vector_of",
]

Ranks: TypeAlias = Transport | MPI.Intracomm | torch_ranks.Comm

# Wire formats that round, and the dtypes of the values that they encode.
NARROWER = [("float16", "float32"), ("bfloat16", "float32"), ("float32", "float64")]
LOGARITHMIC = [("log8", "float32"), ("log4", "float64")]


def make(
    transport: Transport,
    name: str,
    dtype: Any = "float32",
    put: Callable[[Any], Any] = np.asarray,
    adaptive: bool = False,
    **given: Any,
) -> Any:
    """Return a collective by its name, on a private channel; ``given`` are options as in ``Sparse.of``."""
    rule = COLLECTIVES[name]
    options = rule.Options.read(given)
    assert given.keys() <= options.known(), f"{name} has no such options: {given}"
    like = put(np.empty(0, dtype))
    context = BucketContext(1, like, rank=transport.rank, ranks=transport.size, adaptive=adaptive)
    return rule(context, transport.channel(), options)


def allreduce(collective: Any, vector: SparseVector, k: int) -> Reduced:
    """Return the exchange of a vector that is all there is in the accumulator."""
    zeros = np.zeros((2, vector.size), vector.values.dtype)
    accumulator = Accumulator(zeros[0], [(0, zeros[1])])
    reduced: Reduced = collective.allreduce(collective.extend(accumulator, vector, k), k)
    return reduced


def on_nodes(transport: Transport, node_ranks: int) -> Transport:
    """Return a transport of the same ranks for which consecutive ranks share a node; the last one may be smaller."""
    fresh = transport.duplicate()
    split = fresh.split
    fresh.split = lambda _: split(node_ranks)  # type: ignore[method-assign]
    fresh.by_node(None)  # channels share the nodes
    return fresh


def summed(transport: Transport, value: Any) -> Any:
    """Return the sum of numbers or arrays over the ranks."""
    return sum(transport.allgather_object(value))


def sum_bytes(transport: Transport, nbytes: int) -> float:
    """Return the bytes that a rank sends in the sum of a floating-point array; exact for regions of equal size."""
    ranks = transport.size
    gathered = nbytes <= base.GATHERED_SUM_BYTES or nbytes * ranks <= base.GATHERED_SUM_TOTAL
    return (ranks - 1) * nbytes if gathered else 2 * nbytes * (ranks - 1) / ranks


def check_counts(transport: Transport, traffic: Traffic) -> None:
    """Assert that all ranks together receive what they send; shares of a library's collective are rounded."""
    assert abs(summed(transport, traffic.bytes_sent) - summed(transport, traffic.bytes_received)) <= 3 * transport.size


def everywhere(ranks: Ranks, holds: bool) -> bool:
    """Return whether a condition holds on all ranks; a collective call."""
    return values.everywhere(_transport(ranks), holds)


def same_bits(ranks: Ranks, *arrays: Any) -> bool:
    """Return whether arrays have the same bits on all ranks; a collective call."""
    return values.same_bits(_transport(ranks), *arrays)


def _transport(ranks: Ranks) -> Transport:
    if isinstance(ranks, MPI.Intracomm):
        return MPITransport(ranks)
    return ranks.transport if isinstance(ranks, torch_ranks.Comm) else ranks


def cases(dtype: str | None = None, most: int = 50_000) -> st.SearchStrategy[Case]:
    """Return a strategy for cases of one dtype or both; some values are too small for float16, some too large."""
    return st.builds(
        Case,
        size=st.one_of(st.integers(1, 40), st.integers(1, most // 10), st.integers(most // 10, most)),
        pattern=st.sampled_from(PATTERNS),
        seed=st.integers(0, 2**31),
        dtype=st.just(dtype) if dtype else st.sampled_from(sorted(BITS)),
        share=st.sampled_from([1e-9, 0.01, 0.3, 1.0]),
        unit=st.sampled_from([1 / 8, 2.0**-30, 2.0**-120, 1.0, 2.0**100]),
    )


def thorough() -> bool:
    """Return whether to test every combination with all examples, which is done at a single world size: three.

    That is the smallest one that covers all cases: it is odd, leaves remainders, needs a fold before a binary tree, and
    fills one and a half nodes.
    """
    launched = int(os.environ["WORLD_SIZE"]) if torch_ranks.launched() else MPI.COMM_WORLD.Get_size()
    return (rank_threads.sizes or (launched,)) == (3,)


def examples(most: int) -> settings:
    """Return settings for ``most`` examples of a law in a thorough test, and for a third of them otherwise."""
    return settings(max_examples=most if thorough() else -(-most // 3))
