"""Auto: measures the network, predicts every algorithm's time, and takes what is worth it, dense included."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from horovod_sparse.collectives.base import Base
from horovod_sparse.collectives.gtopk import GTopk
from horovod_sparse.collectives.oktopk import OkTopk
from horovod_sparse.collectives.topka import TopkA
from horovod_sparse.collectives.topkdsa import TopkDSA
from horovod_sparse.costs.formulas import Cost
from horovod_sparse.costs.measure import measure_compute, measure_link
from horovod_sparse.costs.model import ALGORITHMS, choice, table
from horovod_sparse.rules import BucketContext, Exchange, SparseVector
from horovod_sparse.rules.options import RuleOptions
from horovod_sparse.rules.states import checked_integer

if TYPE_CHECKING:
    from horovod_sparse.transport.base import Transport

_LOG = logging.getLogger("horovod_sparse")
_CANDIDATES: dict[str, type[Base]] = {"topka": TopkA, "topkdsa": TopkDSA, "gtopk": GTopk, "oktopk": OkTopk}


class Auto(Base):
    """Chooses a collective for the size of the bucket and the k in force, and anew when either changes.

    The link and the kernels are measured once for each communicator, in under a second, and agreed over the ranks, so
    that all of them choose alike. The table behind a choice is logged on rank 0, at level INFO of the logger
    ``horovod_sparse``. On one rank the choice is dense, and nothing is measured or logged. Each algorithm keeps its
    thresholds while another one runs.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(Base.Options):
        """Options of Auto, and of each algorithm that it may choose. Values that are sent dense are not rounded.

        Attributes:
            candidates: Options of the algorithms.
        """

        candidates: tuple[RuleOptions, ...] = tuple(one.Options() for one in _CANDIDATES.values())

        def __post_init__(self) -> None:
            """Checks that each algorithm has its options."""
            super().__post_init__()
            given: object = self.candidates
            kinds = [one.Options for one in _CANDIDATES.values()]
            if not isinstance(given, tuple) or [type(one) for one in given] != kinds:
                raise ValueError(f"candidates must be options of {', '.join(_CANDIDATES)}, not {given!r}")

        @classmethod
        def read(cls, settings: Mapping[str, Any]) -> Auto.Options:
            """Options out of settings, for whichever algorithms know them."""
            candidates = tuple(one.Options.read(settings) for one in _CANDIDATES.values())
            return cls(wire=settings.get("wire"), indices=settings.get("indices"), candidates=candidates)

        def known(self) -> set[str]:
            """Names of the settings that any of the algorithms takes."""
            return {"wire", "indices"}.union(*(one.known() for one in self.candidates))

    def __init__(self, context: BucketContext, transport: Transport, options: Options) -> None:
        super().__init__(context, transport, options)
        self._context = context
        parts = zip(_CANDIDATES.items(), options.candidates, strict=True)
        self._collectives: dict[str, Any] = {name: rule(context, transport, one) for (name, rule), one in parts}
        self.choice = "dense"
        self._decided = (0, 0)  # size and k of the choice in force

    def decide(self, size: int, k: int) -> bool:
        """Chooses for these numbers; tells whether the choice is dense."""
        if (size, k) != self._decided and self._transport.size > 1:
            self._choose(size, k)
        return self.choice == "dense"

    def _choose(self, size: int, k: int) -> None:
        first, self._decided = self._decided == (0, 0), (size, k)
        like, ranks = self._context.like, self._transport.size
        link, compute = measure_link(self._transport, like), measure_compute(self._transport, like)
        wire, indices = self._wire.format.width, self._options.indices
        costs = table(size, max(k, 1), ranks, link, compute, like.itemsize, wire=wire, indices=indices)
        best = choice(costs).algorithm
        if self._transport.rank == 0 and (first or best != self.choice):
            _LOG.info("%s", _explain(costs, best, size, k, ranks))
        self.choice = best

    def allreduce(self, vector: SparseVector, k: int) -> Exchange:
        """Sums the ranks' vectors by the chosen algorithm; by TopkA, if they have indices although dense was chosen."""
        if vector.indices is None:
            return super().allreduce(vector, k)
        exchange: Exchange = self._collectives.get(self.choice, self._collectives["topka"]).allreduce(vector, k)
        return exchange

    def state_dict(self) -> dict[str, Any]:
        """The choice in force, and the states of all algorithms."""
        states = {name: one.state_dict() for name, one in self._collectives.items()}
        return {"choice": self.choice, "decided": list(self._decided), "states": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over a state given by ``state_dict``; the choice stays in force until size or k change."""
        if state["choice"] not in ALGORITHMS:
            raise ValueError(f"choice of auto must be one of {', '.join(ALGORITHMS)}, not {state['choice']!r:.100}")
        size, k = (checked_integer(one, "decided of auto") for one in state["decided"])
        self.choice, self._decided = state["choice"], (size, k)
        for name, one in self._collectives.items():
            one.load_state_dict(state["states"][name])


def _explain(costs: Sequence[Cost], best: str, size: int, k: int, ranks: int) -> str:
    """The choice, and the predictions as a table, the fastest first."""
    lines = [f"{best} is chosen for {k} of {size} elements on {ranks} ranks, by these predictions (ms):"]
    lines.append(f"{'':10} {'total':>10} {'selection':>10} {'bandwidth':>10} {'latency':>10} {'merging':>10}")
    for cost in costs:
        parts = (cost.total, cost.selection, cost.bandwidth, cost.latency, cost.merging)
        lines.append(f"{cost.algorithm:10} " + " ".join(f"{1000 * seconds:10.3f}" for seconds in parts))
    return "\n".join(lines)
