"""Hierarchical: the ranks of a node first, then one rank of each node across the network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from horovod_sparse.collectives.base import Base
from horovod_sparse.collectives.dense import Dense
from horovod_sparse.collectives.gtopk import GTopk
from horovod_sparse.collectives.oktopk import OkTopk
from horovod_sparse.collectives.topka import TopkA
from horovod_sparse.collectives.topkdsa import TopkDSA
from horovod_sparse.rules import BucketContext, Exchange, SparseVector
from horovod_sparse.rules.options import RuleOptions, integer
from horovod_sparse.transport.traffic import Traffic
from horovod_sparse.wire import Wire

if TYPE_CHECKING:
    from horovod_sparse.transport.base import Transport

_PARTS: dict[str, type[Any]] = {"topka": TopkA, "topkdsa": TopkDSA, "gtopk": GTopk, "oktopk": OkTopk, "dense": Dense}
_RULES: dict[type[RuleOptions], type[Any]] = {rule.Options: rule for rule in _PARTS.values()}


class Hierarchical(Base):
    """An inner collective on each node, an outer one among the nodes' first ranks, and a broadcast in the node.

    What crosses the network counts nodes instead of ranks. What the outer collective returns stays with the first
    rank of the node. On one node only the inner collective runs.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(Base.Options):
        """Options of Hierarchical. As text, ``inner`` and ``outer`` are names, and the options of both stand beside.

        Attributes:
            inner: Options of the collective on a node: of TopkA, TopkDSA, GTopk, OkTopk or Dense.
            outer: Options of the collective across nodes.
            node_ranks: So many consecutive ranks count as one node; None: those that share memory.
        """

        inner: RuleOptions = field(default_factory=TopkA.Options)
        outer: RuleOptions = field(default_factory=OkTopk.Options)
        node_ranks: int | None = integer(None, least=1)

        def __post_init__(self) -> None:
            """Checks that both can be combined."""
            super().__post_init__()
            for part, options in (("inner", self.inner), ("outer", self.outer)):
                if type(options) not in _RULES:
                    raise ValueError(f"{part} must be one of {', '.join(_PARTS)}, not {options!r}")

        @classmethod
        def read(cls, settings: Mapping[str, Any]) -> Hierarchical.Options:
            """Options out of settings, for both parts, too."""
            names = {"inner": "topka", "outer": "oktopk"}
            given = {key: value for key, value in settings.items() if key in ("wire", "indices", "node_ranks", *names)}
            for part, default in names.items():
                name = given.get(part, default)
                if isinstance(name, str) and name in _PARTS:
                    given[part] = _PARTS[name].Options.read(settings)
            return cls(**given)

        def known(self) -> set[str]:
            """Names of the settings that this and both parts take."""
            return super().known() | self.inner.known() | self.outer.known()

    def __init__(self, context: BucketContext, transport: Transport, options: Options) -> None:
        super().__init__(context, transport, options)
        self._nodes, self._node, leaders = transport.by_node(options.node_ranks)
        self._inner = _RULES[type(options.inner)](context, self._node, options.inner)
        self._outer = None if leaders is None else _RULES[type(options.outer)](context, leaders, options.outer)

    @property
    def traffic(self) -> Traffic:
        """Payload this rank has sent and received, inside its node and across nodes."""
        total = Traffic()
        for part in (self._transport, self._node, self._outer):
            if part is not None:
                total.add(part.traffic)
        return total

    def allreduce(self, vector: SparseVector, k: int) -> Exchange:
        """Sums the vectors of each node, then the nodes' sums; vectors without indices on all ranks at once."""
        if vector.indices is None:
            return super().allreduce(vector, k)
        self._choose_coding(vector, k)
        of_node = self._inner.allreduce(vector, k)
        if self._nodes == 1:
            exchange: Exchange = of_node
            return exchange
        if self._outer is None:
            return Exchange(self._broadcast(self._wire, None, vector), of_node.returned)
        across = self._outer.allreduce(self._for_outer(of_node.total), k)
        total, error, wire = across.total, None, self._wire
        if total.indices is not None:
            total, rounding, wire = self._round(total)
            if self._transport.rank == 0:  # the first ranks round alike, and one of them answers for it
                error = rounding
        return Exchange(self._broadcast(wire, total, vector), of_node.returned.plus(across.returned, error))

    def _for_outer(self, total: SparseVector) -> SparseVector:
        """A node's total with indices, unless all nodes' totals have none: a collective takes one kind at a time."""
        if total.indices is not None or isinstance(self._inner, Dense):
            return total
        everything = np.arange(total.size, dtype=np.int32, like=total.values)
        return SparseVector(everything, total.values, total.size, shared=True)

    def _broadcast(self, wire: Wire, total: SparseVector | None, like: SparseVector) -> SparseVector:
        """Tells the node the total that its first rank has; a total without indices travels as its values."""
        message = np.empty(0, np.uint8, like=like.values)
        if total is not None:
            message = total.values.view(np.uint8) if total.indices is None else wire.pack(total.entries)
        headers = self._node.allgather_integers(message.nbytes, total is not None and total.indices is None)
        length, full = headers[0].tolist()
        message = self._node.broadcast(message, length)
        if full:
            return SparseVector.full(message.view(like.values.dtype))
        return SparseVector(*wire.unpack(message, like.size), like.size, shared=True)

    def state_dict(self) -> dict[str, Any]:
        """The states of both collectives; the outer one's is empty on ranks that do not take part in it."""
        return {"inner": self._inner.state_dict(), "outer": {} if self._outer is None else self._outer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over a state given by ``state_dict`` on the same rank of the same nodes."""
        self._inner.load_state_dict(state["inner"])
        if self._outer is not None:
            self._outer.load_state_dict(state["outer"])
