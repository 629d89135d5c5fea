"""`horovod-sparse advise`: Predict the time of each exchange on a cluster, and recommend a compression.

The cost model is that of Li and Hoefler (PPoPP 2022, Table 1), plus selecting and merging. It covers one exchange of
all gradients, and models neither overlap with the backward pass nor convergence.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from horovod_sparse.cli import plot
from horovod_sparse.cli.units import at_least, bandwidth, count, density, seconds
from horovod_sparse.costs.model import LARGEST, Compute, Cost, break_even_bandwidth, choice, predict, table
from horovod_sparse.costs.network import Link, Node

# Accumulating and selecting reads gradient and residual, and writes the residual, in float32.
_BYTES_PER_ELEMENT = 12
# Conservative for one server core; `python -m benchmarks.kernels.selection` measures a machine.
_SELECT_BANDWIDTH = "20GB"
# Per entry, on one server core.
_MERGE_SECONDS = 5e-9
_CUT_SECONDS = 25e-9
_CODE_SECONDS = 3e-9
_GBIT = 1e9 / 8


@dataclass(frozen=True)
class Plan:
    """Input of a prediction; the attributes are arguments of ``costs.model.predict``."""

    size: int
    k: int
    ranks: int
    link: Link
    compute: Compute
    itemsize: int
    node: Node | None

    @property
    def candidates(self) -> tuple[str, ...]:
        """Sparse algorithms that can be recommended."""
        return LARGEST if self.node is None else (*LARGEST, "hierarchical")

    def at(self, bytes_per_second: float) -> Plan:
        """Return the same plan with another bandwidth."""
        return replace(self, link=Link(self.link.alpha, 1 / bytes_per_second))


def add_parser(subparsers: Any) -> None:
    """Add this subcommand."""
    about = str(__doc__).partition(": ")[2]
    parser = subparsers.add_parser("advise", help="predict which exchange is fastest on a cluster", description=about)
    add = parser.add_argument
    add("--parameters", type=count, required=True, metavar="N", help="number of model parameters, such as 25.6M")
    add("--ranks", type=at_least(1), required=True, metavar="P", help="world size, usually one rank per GPU")
    link = "bandwidth of a node's link per second, such as 10Gbit or 1.2GB"
    add("--bandwidth", type=bandwidth, required=True, help=link)
    add("--latency", type=seconds, default="5us", help="latency of a message between nodes (default: 5us)")
    add("--density", type=density, default="0.01", help="fraction of the gradients to send (default: 0.01)")
    add("--gpus-per-node", type=at_least(1), default=1, metavar="G", help="ranks that share a node's link (default: 1)")
    inner = "bandwidth inside a node, per direction (default: 100GB)"
    add("--inner-bandwidth", type=bandwidth, default="100GB", help=inner)
    add("--inner-latency", type=seconds, default="2us", help="latency of a message inside a node (default: 2us)")
    add(
        "--select-bandwidth",
        type=bandwidth,
        default=_SELECT_BANDWIDTH,
        help=f"memory bandwidth of the selection, which moves {_BYTES_PER_ELEMENT} bytes per element (default: "
        f"{_SELECT_BANDWIDTH}, one core)",
    )
    add("--json", type=Path, metavar="FILE", help="write the prediction to FILE")
    add("--plot", type=Path, metavar="FILE.png", help="plot time over bandwidth to FILE.png")
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Print the prediction, write the requested files, and return 0."""
    problem = plot.unwritable(options.json, plot=options.plot)
    if options.gpus_per_node > options.ranks:
        problem = f"--gpus-per-node {options.gpus_per_node} exceeds --ranks {options.ranks}, the total over all nodes"
    if problem:
        options.parser.error(problem)
    plan = read(options)
    costs = table(**vars(plan), algorithms=("dense", *plan.candidates))
    random = predict("shared", **vars(plan))
    even = break_even_bandwidth(**vars(plan), algorithms=plan.candidates)
    best = recommendation(choice(costs), options.density)
    recommended = f"Recommended: compression={best}"
    print("\n".join([head(plan), "", *rows(costs, random), "", recommended, verdict(plan, even)]))
    if options.json:
        content = {
            "plan": asdict(plan),
            "costs": [{**asdict(cost), "total": cost.total} for cost in (*costs, random)],
            "recommended": best,
            "break_even_bandwidth": even if math.isfinite(even) else None,  # null: sparse wins at every bandwidth
        }
        options.json.write_text(json.dumps(content, indent=2) + "\n")
    if options.plot:
        draw(plan, even, options.plot)
    return 0


def read(options: argparse.Namespace) -> Plan:
    """Return the plan for a command line. If all ranks fit on one node, its inner link connects them."""
    size = options.parameters
    select = _BYTES_PER_ELEMENT / options.select_bandwidth
    # The sums of the dense allreduce are free: GPUs add while the next chunk is in flight. This favours dense.
    compute = Compute(
        select=select, accumulate=select, reduce=0.0, merge=_MERGE_SECONDS, cut=_CUT_SECONDS, code=_CODE_SECONDS
    )
    outer = Link(options.latency, 1 / options.bandwidth)
    inner = Link(options.inner_latency, 1 / options.inner_bandwidth)
    alone = options.ranks <= options.gpus_per_node
    node = None if alone or options.gpus_per_node == 1 else Node(options.gpus_per_node, inner)
    k = max(1, round(options.density * size))
    link = inner if alone and options.gpus_per_node > 1 else outer
    return Plan(size, k, options.ranks, link, compute, itemsize=4, node=node)


def recommendation(best: Cost, density: float) -> str:
    """Return the code for ``compression``; the preset finds every algorithm on its own except the hierarchical one."""
    if best.algorithm == "dense":
        return "hvd.Compression.none"
    collective = ", collective='hierarchical'" if best.algorithm == "hierarchical" else ""
    return f"hvs.Compression.recommended(density={density:g}{collective})"


def head(plan: Plan) -> str:
    """Return a line that describes the model and the cluster."""
    nodes = "" if plan.node is None else f" on {math.ceil(plan.ranks / plan.node.ranks)} nodes"
    link = f"{_gbit(1 / plan.link.beta)} and {1e6 * plan.link.alpha:g} us per message"
    return f"{plan.size:,} parameters, k = {plan.k:,}; {plan.ranks} ranks{nodes}, links of {link}"


def rows(costs: list[Cost], random: Cost) -> list[str]:
    """Return the lines of the table, fastest first, followed by the random selection, which is never recommended."""
    names = ("compression", "ms", "selection", "bandwidth", "latency", "merging", "MB sent", "speedup")
    dense = next(cost.total for cost in costs if cost.algorithm == "dense")
    lines = [f"{names[0]:14}" + "".join(name.rjust(11) for name in names[1:])]
    for cost in (*costs, replace(random, algorithm="randomblock *")):
        parts = (cost.total, cost.selection, cost.bandwidth, cost.latency, cost.merging)
        cells = "".join(f"{1e3 * part:11.3f}" for part in parts)
        lines.append(f"{cost.algorithm:14}{cells}{cost.nbytes / 1e6:11.3f}{_ratio(cost.total, dense):>11}")
    return [
        *lines,
        "* selects at random: the cheapest exchange, but training converges more slowly. Never recommended.",
    ]


def verdict(plan: Plan, even: float) -> str:
    """Return a line with the bandwidths at which a sparse exchange is faster than dense."""
    if even == 0:
        return "No link is slow enough for sparse to win: it sends no fewer bytes than dense."
    if even == math.inf:
        return "Sparse wins at every bandwidth."
    return f"Sparse wins below {_gbit(even)}, dense above; this link has {_gbit(1 / plan.link.beta)}."


def draw(plan: Plan, even: float, path: Path) -> None:
    """Plot predicted times over a range of bandwidths around this link and the break-even point."""
    mine = 1 / plan.link.beta
    marked = {"this link": mine}
    if 0 < even < math.inf:
        marked["break-even"] = even
    low, high = min(marked.values()) / 30, max(marked.values()) * 30
    speeds = [low * (high / low) ** (step / 60) for step in range(61)]
    curves = {
        name: (
            [speed / _GBIT for speed in speeds],
            [1e3 * predict(name, **vars(plan.at(speed))).total for speed in speeds],
        )
        for name in ("dense", *plan.candidates)
    }
    title = f"{plan.size:,} parameters, {plan.ranks} ranks, k = {plan.k:,}"
    lines = {name: x / _GBIT for name, x in marked.items()}
    plot.save(path, title, "bandwidth in Gbit/s", "predicted time in ms", curves, lines)


def _ratio(seconds: float, dense: float) -> str:
    return f"{dense / seconds:.2f}x" if seconds > 0 else "-"


def _gbit(bytes_per_second: float) -> str:
    return f"{bytes_per_second / _GBIT:.4g} Gbit/s"
