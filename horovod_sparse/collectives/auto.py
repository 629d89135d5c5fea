"""Auto: measures the network and chooses the fastest of the equally accurate collectives, dense included."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from horovod_sparse.collectives.base import Base
from horovod_sparse.collectives.hierarchical import Hierarchical
from horovod_sparse.collectives.oktopk import OkTopk
from horovod_sparse.collectives.topka import TopkA
from horovod_sparse.collectives.topkdsa import TopkDSA
from horovod_sparse.costs.accuracy import KEEP, sums
from horovod_sparse.costs.formulas import Cost
from horovod_sparse.costs.measure import measure_compute, measure_network
from horovod_sparse.costs.model import CANDIDATES, table
from horovod_sparse.rules import Accumulator, BucketContext, Reduced, SparseVector
from horovod_sparse.rules.options import integer, number
from horovod_sparse.rules.states import checked_integer

if TYPE_CHECKING:
    from horovod_sparse.costs.formulas import Compute
    from horovod_sparse.costs.network import Link, Node
    from horovod_sparse.transport.base import Transport

_LOG = logging.getLogger("horovod_sparse")
_RULES: dict[str, Any] = {"topka": TopkA, "topkdsa": TopkDSA, "oktopk": OkTopk, "hierarchical": Hierarchical}
_CHOICES = ("dense", *_RULES)


class Auto(Base):
    """Chooses a collective for the bucket's size and the current k, and again when either changes.

    All candidates train equally well at equal k, so the one that is predicted to be fastest is chosen. Hierarchical,
    TopkA within nodes and Ok-Topk between them, is a candidate where several nodes have the same number of ranks, more
    than one. Links and kernels are measured once per communicator, in under a second, and the ranks agree on the
    results, so that all make the same choice. Rank 0 logs the predictions behind a new choice at level INFO of the
    logger ``horovod_sparse``. With one rank the choice is dense, and nothing is measured or logged. Each algorithm
    keeps its thresholds while another one runs.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(OkTopk.Options):
        """Options of Auto: those of Ok-Topk, which the others share where they have them.

        Attributes:
            keep: Option of Ok-Topk.
            node_ranks: Option of Hierarchical.
        """

        keep: float | str | None = number(
            "auto",
            least=KEEP,
            word="auto",
            hint="with fewer sums Ok-Topk is less accurate than the others at the same density, so auto, which "
            "compares times, does not take it; collective=oktopk takes any",
        )
        node_ranks: int | None = integer(None, least=1)

    def __init__(self, context: BucketContext, transport: Transport, options: Options) -> None:
        super().__init__(context, transport, options)
        self._context = context
        self._nodes = transport.by_node(options.node_ranks)
        self._keep = sums(options.keep, context.ranks, context.adaptive)
        names = (*CANDIDATES, "hierarchical") if self._nodes.nested else CANDIDATES
        settings = asdict(options)
        self._collectives: dict[str, Any] = {
            name: _RULES[name](context, transport, _RULES[name].Options.read(settings)) for name in names
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
        wire, indices, keep = self._wire.format.width, self._options.indices, self._keep
        names = ("dense", *self._collectives)
        costs = table(size, max(k, 1), ranks, link, compute, like.itemsize, node, names, wire, indices, keep)
        best = costs[0].algorithm
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

    def allreduce(self, vector: SparseVector, k: int) -> Reduced:
        """Sum the ranks' vectors with the chosen algorithm."""
        if vector.indices is None:
            return super().allreduce(vector, k)
        reduced: Reduced = self._chosen.allreduce(vector, k)
        return reduced

    def allreduce_owned(self, vector: SparseVector, k: int, own: Accumulator) -> Reduced:
        """Sum the ranks' vectors, and what the owners hold, with the chosen algorithm."""
        reduced: Reduced = self._chosen.allreduce_owned(vector, k, own)
        return reduced

    def state_dict(self) -> dict[str, Any]:
        """Return the nodes, the current choice and the states of all algorithms."""
        states = {name: collective.state_dict() for name, collective in self._collectives.items()}
        return {
            "nodes": self._nodes.firsts,
            "choice": self.choice,
            "decided": list(self._decided),
            "states": states,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state from ``state_dict``, saved on the same nodes; its choice is kept until size or k change."""
        if state["choice"] not in _CHOICES:
            raise ValueError(f"choice of auto must be one of {', '.join(_CHOICES)}, not {state['choice']!r:.100}")
        size, k = (checked_integer(number, "decided of auto") for number in state["decided"])
        self.choice, self._decided = state["choice"], (size, k)
        for name, collective in self._collectives.items():
            collective.load_state_dict(state["states"][name])


def _explain(costs: Sequence[Cost], best: str, size: int, k: int, ranks: int) -> str:
    """Return a message with the choice and a table of the predictions, in the order of ``costs``."""
    lines = [f"{best} is chosen for {k} of {size} elements on {ranks} ranks; predicted times in ms:"]
    lines.append(f"{'':12} {'total':>10} {'selection':>10} {'bandwidth':>10} {'latency':>10} {'merging':>10}")
    for cost in costs:
        parts = (cost.total, cost.selection, cost.bandwidth, cost.latency, cost.merging)
        lines.append(f"{cost.algorithm:12} " + " ".join(f"{1000 * seconds:10.3f}" for seconds in parts))
    return "\n".join(lines)
