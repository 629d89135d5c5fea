"""Hierarchical: sums within each node first, then across nodes with one rank per node."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from horovod_sparse.collectives.base import Base
from horovod_sparse.collectives.dense import Dense
from horovod_sparse.collectives.gtopk import GTopk
from horovod_sparse.collectives.oktopk import OkTopk
from horovod_sparse.collectives.topka import TopkA
from horovod_sparse.collectives.topkdsa import TopkDSA
from horovod_sparse.kernels import joined
from horovod_sparse.rules import Accumulator, BucketContext, Reduced, SparseVector
from horovod_sparse.rules.options import RuleOptions, integer
from horovod_sparse.wire import Wire

if TYPE_CHECKING:
    from horovod_sparse.transport.base import Transport

_PARTS: dict[str, type[Any]] = {"topka": TopkA, "topkdsa": TopkDSA, "gtopk": GTopk, "oktopk": OkTopk, "dense": Dense}
_ALIGNMENT = 8  # bytes before a broadcast total, which say whether it has indices
_RULES: dict[type[RuleOptions], type[Any]] = {rule.Options: rule for rule in _PARTS.values()}


class Hierarchical(Base):
    """Runs an inner collective on each node, an outer one among the nodes' first ranks, and a broadcast in the node.

    The traffic across the network depends on the number of nodes instead of ranks. Entries that the outer collective
    returns go to the first rank of the node. On a single node only the inner collective runs.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(Base.Options):
        """Options of Hierarchical. In a spec, ``inner`` and ``outer`` are names, and the options of both follow.

        Attributes:
            inner: Options of the collective within a node: TopkA, TopkDSA, GTopk, OkTopk or Dense.
            outer: Options of the collective across nodes, from the same choice.
            node_ranks: Number of consecutive ranks that count as one node; None: ranks that share memory.
        """

        inner: RuleOptions = field(default_factory=TopkA.Options)
        outer: RuleOptions = field(default_factory=OkTopk.Options)
        node_ranks: int | None = integer(None, least=1)

        def __post_init__(self) -> None:
            """Check the fields, and that both collectives are allowed."""
            super().__post_init__()
            for part, options in (("inner", self.inner), ("outer", self.outer)):
                if type(options) not in _RULES:
                    raise ValueError(f"{part} must be one of {', '.join(_PARTS)}, not {options!r}")

        @classmethod
        def read(cls, settings: Mapping[str, Any]) -> Hierarchical.Options:
            """Create the options from settings, including those of both collectives."""
            names = {"inner": "topka", "outer": "oktopk"}
            given = {key: value for key, value in settings.items() if key in ("wire", "indices", "node_ranks", *names)}
            for part, default in names.items():
                name = given.get(part, default)
                if isinstance(name, str) and name in _PARTS:
                    given[part] = _PARTS[name].Options.read(settings)
            return cls(**given)

        def known(self) -> set[str]:
            """Return the names of the settings of this rule and of both collectives."""
            return super().known() | self.inner.known() | self.outer.known()

    def __init__(self, context: BucketContext, transport: Transport, options: Options) -> None:
        super().__init__(context, transport, options)
        nodes = transport.by_node(options.node_ranks).counting(transport.traffic)
        self._firsts, self._nodes, self._node, leaders = nodes.firsts, nodes.number, nodes.own, nodes.leaders
        self._inner = _RULES[type(options.inner)](context, self._node, options.inner)
        self._outer = None if leaders is None else _RULES[type(options.outer)](context, leaders, options.outer)

    def allreduce(self, vector: SparseVector, k: int) -> Reduced:
        """Sum the vectors of each node, then the nodes' sums; sum vectors without indices over all ranks at once."""
        if vector.indices is None:
            return super().allreduce(vector, k)
        if self._nodes == 1:
            reduced: Reduced = self._inner.allreduce(vector, k)
            return reduced
        return self._across(vector, k, lambda outer, total: outer.allreduce(total, k))

    def region(self, size: int) -> tuple[int, int] | None:
        """Return the region of the collective across nodes, on their first ranks; on one node, of that within.

        After a dense sum within nodes, the sum across them is dense, too, and nobody owns a region.
        """
        owner = self._inner if self._nodes == 1 or isinstance(self._inner, Dense) else self._outer
        region: tuple[int, int] | None = None if owner is None else owner.region(size)
        return region

    def allreduce_owned(self, vector: SparseVector, k: int, own: Accumulator) -> Reduced:
        """Sum the vectors, and what the first ranks of the nodes hold of their regions."""
        if self._nodes == 1:
            reduced: Reduced = self._inner.allreduce_owned(vector, k, own)
            return reduced
        return self._across(vector, k, lambda outer, total: outer.allreduce_owned(total, k, own))

    def _across(self, vector: SparseVector, k: int, sum_up: Callable[[Any, SparseVector], Reduced]) -> Reduced:
        """Sum the vectors of each node, then the nodes' sums."""
        self._choose_coding(vector, k)
        of_node: Reduced = self._inner.allreduce(vector, k)
        if self._outer is None:
            return Reduced(self._broadcast(self._wire, None, vector), of_node.returned)
        across = sum_up(self._outer, self._for_outer(of_node.total))
        total, error, wire = across.total, None, self._wire
        if total.indices is not None:
            total, rounding, wire = self._round(total)
            if self._transport.rank == 0:  # all first ranks round identically; only one returns the error
                error = rounding
        return Reduced(self._broadcast(wire, total, vector), of_node.returned.plus(across.returned, error))

    def _for_outer(self, total: SparseVector) -> SparseVector:
        """Return a node's total with indices, unless no node's total has any: a collective cannot mix both kinds."""
        if total.indices is not None or isinstance(self._inner, Dense):
            return total
        everything = np.arange(total.size, dtype=np.int32, like=total.values)
        return SparseVector(everything, total.values, total.size, shared=True)

    def _broadcast(self, wire: Wire, total: SparseVector | None, like: SparseVector) -> SparseVector:
        """Broadcast the total of the node's first rank; a total without indices is sent as its values."""
        node, start = self._node, np.empty_like(like.values, dtype=np.uint8, shape=(_ALIGNMENT,))
        node.traffic.rounds += 1
        if total is None:
            message = node.receive(0, like.values).wait()
        else:
            start[:] = total.indices is None
            content = total.values.view(np.uint8) if total.indices is None else wire.pack(total.entries)
            message, others = joined([start, content]), range(1, node.size)
            for sending in node.send_all([message] * len(others), others, message):
                sending.wait()
        content = message[_ALIGNMENT:]
        if message[0]:
            return SparseVector.full(content.view(like.values.dtype))
        return SparseVector(*wire.unpack(content, like.size), like.size, shared=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the nodes and the states of both collectives; the outer one is empty on ranks that take no part."""
        outer = {} if self._outer is None else self._outer.state_dict()
        return {"nodes": self._firsts, "inner": self._inner.state_dict(), "outer": outer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state from ``state_dict``, saved on the same rank of the same nodes."""
        self._inner.load_state_dict(state["inner"])
        if self._outer is not None:
            self._outer.load_state_dict(state["outer"])
