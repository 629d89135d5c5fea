"""The laws of collectives, and the cases that have broken published ones.

Every rank builds its own vector from the same case; a dense sum says what must come out. Values are small multiples of
a power of two: their sums are exact, and bits can be compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.kernels import to_host
from horovod_sparse.rules import Exchange, SparseVector
from horovod_sparse.rules.testing.values import dense, digest_of, eighths, fail_together, place_of, placed

SHARED = ("same indices", "all empty", "cancelling", "everything", "one region")
PATTERNS = ("random", "same indices", "disjoint", "one region", "some empty", "all empty", "cancelling", "everything")
# Of which sums over 16 ranks still fit the mantissa, while 16 bits, or 24 of 53, do not hold them.
BITS = {"float32": 18, "float64": 36}


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
        """Entries that a total has, where a collective limits them."""
        return max(1, round(self.share * self.size))


def own_vector(case: Case, transport: Any) -> SparseVector:
    """The vector of this rank, without the work of building the others."""
    return vector_of(case, transport.rank, transport.size)


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
    """Size, dtypes and order of a vector that came out of an exchange."""
    indices, values = vector.indices, vector.values
    plain = vector.size == case.size and values.dtype == np.dtype(case.dtype)
    if indices is None:
        return plain and values.size == case.size
    ascending = bool(np.all(np.diff(indices) > 0)) and indices.size == values.size
    inside = indices.size == 0 or (indices[0] >= 0 and indices[-1] < case.size)
    return bool(plain and ascending and inside and indices.dtype == np.int32)


def check_exchange(transport: Any, collective: Any, case: Case, put: Callable[[Any], Any] = np.asarray) -> Exchange:
    """Conservation, same bits, order of indices and an untouched argument, for one case.

    The arrays are put where the collective shall find them; the exchange that is returned is on the host.
    """
    mine = own_vector(case, transport)
    handed_in = placed(mine, put)
    collective.decide(case.size, case.k)
    exchange = collective.allreduce(handed_in, case.k)
    total, returned = placed(exchange.total, to_host), placed(exchange.returned, to_host)
    expected, came_back = transport.allreduce(dense(mine)), transport.allreduce(dense(returned))
    kinds = {type(one.values) for one in (handed_in, exchange.total, exchange.returned)}
    checks = {
        "nothing is lost": np.array_equal(expected, dense(total) + came_back),
        "the argument is not changed": digest_of(handed_in) == digest_of(own_vector(case, transport)),
        "the total is well formed": well_formed(total, case),
        "what returned is well formed": well_formed(returned, case),
        "the result is where the argument was": len(kinds) == 1,
    }
    fail_together(transport, [f"{law}, in {case}" for law, holds in checks.items() if not holds])
    return Exchange(total, returned)


def check_collective(transport: Any, rule: Any, **options: Any) -> None:
    """Lets a collective exchange vectors of every pattern, in both precisions; a collective call.

    Laws: the vectors summed over the ranks are the total and what returned, summed over the ranks; the total has the
    same bits on every rank, with whatever the ranks select; a vector without indices is summed dense; and a collective
    that takes over another one's state goes on with the same bits.

    Args:
        transport: Connects the ranks, of which there may be any number.
        rule: The class; it gets vectors with the same indices on every rank, too.
        **options: Of the rule.

    Raises:
        AssertionError: A law does not hold; on all ranks.
    """
    for dtype, sizes in (("float32", (1, 2000)), ("float64", (5,))):
        collective = build_on(transport, rule, dtype, **options)
        for seed, (size, pattern) in enumerate(itertools.product(sizes, PATTERNS)):
            check_exchange(transport, collective, Case(size, pattern, seed, dtype))
        values = eighths(np.random.default_rng(transport.rank), 500, dtype=dtype)
        exchange = collective.allreduce(SparseVector.full(values), 50)
        everything = sum(transport.allgather_object(values)) - sum(transport.allgather_object(dense(exchange.returned)))
        whole = exchange.total.indices is None and np.array_equal(exchange.total.values, everything)
        fail_together(transport, [] if whole else ["a vector without indices is summed dense"])
    check_restored(transport, lambda: build_on(transport, rule, **options))


def build_on(transport: Any, rule: Any, dtype: Any = np.float32, **options: Any) -> Any:
    """A collective on a transport of its own."""
    return rule(place_of(transport, 1, dtype), transport.channel(), rule.Options(**options))


def check_restored(transport: Any, build: Callable[[], Any]) -> None:
    """A collective that takes over another one's state, of two steps, goes on with the same bits; a collective call."""
    first, second = build(), build()
    steps = [own_vector(Case(3000, "same indices", seed), transport) for seed in range(4)]
    for vector in steps[:2]:
        first.decide(3000, 150)
        first.allreduce(vector, 150)
    second.load_state_dict(first.state_dict())
    for vector in steps[2:]:
        decided = {collective.decide(3000, 150) for collective in (first, second)}
        exchanges = [collective.allreduce(vector, 150) for collective in (first, second)]
        same = len(decided) == len({digest_of(one.total, one.returned) for one in exchanges}) == 1
        fail_together(transport, [] if same else ["a restored collective goes on with the same bits"])
