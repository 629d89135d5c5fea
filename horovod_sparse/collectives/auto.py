"""Auto: measures the network and chooses a collective, sparse or dense, by predicted times."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from horovod_sparse.collectives.base import Base
from horovod_sparse.collectives.gtopk import GTopk
from horovod_sparse.collectives.hierarchical import Hierarchical
from horovod_sparse.collectives.oktopk import OkTopk
from horovod_sparse.collectives.topka import TopkA
from horovod_sparse.collectives.topkdsa import TopkDSA
from horovod_sparse.costs.formulas import Cost
from horovod_sparse.costs.measure import measure_compute, measure_network
from horovod_sparse.costs.model import choice, table
from horovod_sparse.rules import Accumulator, BucketContext, Exchange, SparseVector
from horovod_sparse.rules.options import RuleOptions
from horovod_sparse.rules.states import checked_integer

if TYPE_CHECKING:
    from horovod_sparse.costs.formulas import Compute
    from horovod_sparse.costs.network import Link, Node
    from horovod_sparse.transport.base import Transport

_LOG = logging.getLogger("horovod_sparse")
_CANDIDATES: dict[str, type[Base]] = {
    "topka": TopkA,
    "topkdsa": TopkDSA,
    "gtopk": GTopk,
    "oktopk": OkTopk,
    "hierarchical": Hierarchical,  # on nested nodes
}
_CHOICES = ("dense", *_CANDIDATES)


class Auto(Base):
    """Chooses a collective for the bucket's size and the current k, and again when either changes.

    Hierarchical is a candidate where several nodes have the same number of ranks, more than one. Links and kernels are
    measured once per communicator, in under a second, and the ranks agree on the results, so that all make the same
    choice. Rank 0 logs the predictions behind a new choice at level INFO of the logger ``horovod_sparse``. With one
    rank the choice is dense, and nothing is measured or logged. Each algorithm keeps its thresholds while another one
    runs.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(Base.Options):
        """Options of Auto and of each algorithm that it may choose. Dense exchanges do not round values.

        Attributes:
            candidates: Options of each sparse algorithm.
        """

        candidates: tuple[RuleOptions, ...] = tuple(rule.Options() for rule in _CANDIDATES.values())

        def __post_init__(self) -> None:
            """Check the fields, and that each algorithm has its options."""
            super().__post_init__()
            given: object = self.candidates
            kinds = [rule.Options for rule in _CANDIDATES.values()]
            if not isinstance(given, tuple) or [type(options) for options in given] != kinds:
                raise ValueError(f"candidates must be the options of {', '.join(_CANDIDATES)}, not {given!r}")

        @classmethod
        def read(cls, settings: Mapping[str, Any]) -> Auto.Options:
            """Create the options from settings; each algorithm takes those that it knows."""
            candidates = tuple(rule.Options.read(settings) for rule in _CANDIDATES.values())
            return cls(wire=settings.get("wire"), indices=settings.get("indices"), candidates=candidates)

        def known(self) -> set[str]:
            """Return the names of the settings that any of the algorithms takes."""
            return {"wire", "indices"}.union(*(options.known() for options in self.candidates))

    def __init__(self, context: BucketContext, transport: Transport, options: Options) -> None:
        super().__init__(context, transport, options)
        self._context = context
        given: dict[str, Any] = dict(zip(_CANDIDATES, options.candidates, strict=True))
        self._keep: float | None = given["oktopk"].keep
        self._nodes = transport.by_node(given["hierarchical"].node_ranks)
        if not self._nodes.nested:
            del given["hierarchical"]
        self._collectives: dict[str, Any] = {
            name: _CANDIDATES[name](context, transport, own) for name, own in given.items()
        }
        self.choice = "dense"
        self._decided = (0, 0)  # size and k of the current choice
        self._known: dict[tuple[int, int], str] = {}  # choices so far
        if transport.size > 1:
            self._figures()  # not in a step: exchanges that are constructed later take the figures over

    def _figures(self) -> tuple[Link, Node | None, Compute]:
        """Return link, node and compute costs. A collective call the first time."""
        like = self._context.like
        return *measure_network(self._transport, self._nodes, like), measure_compute(self._transport, like)

    def decide(self, size: int, k: int) -> bool:
        """Choose for this size and k, if they have changed, and return whether the choice is dense."""
        if (size, k) != self._decided and self._transport.size > 1:
            if (size, k) not in self._known:
                self._choose(size, k)
            self.choice, self._decided = self._known[size, k], (size, k)
        return self.choice == "dense"

    def _choose(self, size: int, k: int) -> None:
        like, ranks = self._context.like, self._transport.size
        link, node, compute = self._figures()
        wire, indices = self._wire.format.width, self._options.indices
        names = ("dense", *self._collectives)
        costs = table(size, max(k, 1), ranks, link, compute, like.itemsize, node, names, wire, indices, self._keep)
        best = choice(costs, self._keep).algorithm
        if self._transport.rank == 0 and (not self._known or best != self.choice):
            _LOG.info("%s", _explain(costs, best, size, k, ranks))
        self._known[size, k] = best

    @property
    def _chosen(self) -> Any:
        """The chosen algorithm; TopkA for vectors with indices if dense was chosen."""
        return self._collectives.get(self.choice, self._collectives["topka"])

    def region(self, size: int) -> tuple[int, int] | None:
        """Return the region of the chosen algorithm."""
        region: tuple[int, int] | None = self._chosen.region(size)
        return region

    def allreduce(self, vector: SparseVector, k: int) -> Exchange:
        """Sum the ranks' vectors with the chosen algorithm."""
        if vector.indices is None:
            return super().allreduce(vector, k)
        exchange: Exchange = self._chosen.allreduce(vector, k)
        return exchange

    def allreduce_owned(self, vector: SparseVector, k: int, own: Accumulator) -> Exchange:
        """Sum the ranks' vectors, and what the owners hold, with the chosen algorithm."""
        exchange: Exchange = self._chosen.allreduce_owned(vector, k, own)
        return exchange

    def state_dict(self) -> dict[str, Any]:
        """Return the current choice and the states of all algorithms."""
        states = {name: collective.state_dict() for name, collective in self._collectives.items()}
        return {"choice": self.choice, "decided": list(self._decided), "states": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state from ``state_dict``; its choice is kept until size or k change."""
        if state["choice"] not in _CHOICES:
            raise ValueError(f"choice of auto must be one of {', '.join(_CHOICES)}, not {state['choice']!r:.100}")
        size, k = (checked_integer(number, "decided of auto") for number in state["decided"])
        self.choice, self._decided = state["choice"], (size, k)
        for name in self._collectives.keys() & state["states"].keys():  # nodes may have changed
            self._collectives[name].load_state_dict(state["states"][name])


def _explain(costs: Sequence[Cost], best: str, size: int, k: int, ranks: int) -> str:
    """Return a message with the choice and a table of the predictions, in the order of ``costs``."""
    lines = [f"{best} is chosen for {k} of {size} elements on {ranks} ranks; predicted times in ms:"]
    lines.append(f"{'':12} {'total':>10} {'selection':>10} {'bandwidth':>10} {'latency':>10} {'merging':>10}")
    for cost in costs:
        parts = (cost.total, cost.selection, cost.bandwidth, cost.latency, cost.merging)
        lines.append(f"{cost.algorithm:12} " + " ".join(f"{1000 * seconds:10.3f}" for seconds in parts))
    return "\n".join(lines)
