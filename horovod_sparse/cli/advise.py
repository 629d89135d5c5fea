"""`horovod-sparse advise`: predicts what each exchange would cost on a cluster, and recommends a compression.

The cost model is that of Li and Hoefler (PPoPP 2022, Table 1), plus selecting and merging, for all gradients in one
exchange. It knows neither how much of an exchange the backward pass would hide nor how training converges.
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

# Accumulating and selecting reads gradient and residual and writes the residual, in float32.
_BYTES_PER_ELEMENT = 12
# Modest for a core of a server; `python -m benchmarks.kernels.selection` shows what a machine does.
_SELECT_BANDWIDTH = "20GB"
# For an entry, on a core of a server.
_MERGE_SECONDS = 5e-9
_CUT_SECONDS = 25e-9
_CODE_SECONDS = 3e-9
_GBIT = 1e9 / 8


@dataclass(frozen=True)
class Plan:
    """Question that is asked: gradients of so many elements, k of which each rank selects, and a cluster.

    The other attributes are those of ``costs.model.predict``.
    """

    size: int
    k: int
    ranks: int
    link: Link
    compute: Compute
    itemsize: int
    node: Node | None

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the functions of the cost model."""
        return vars(self)

    @property
    def candidates(self) -> tuple[str, ...]:
        """The sparse algorithms that may be recommended."""
        return LARGEST if self.node is None else (*LARGEST, "hierarchical")

    def at(self, bytes_per_second: float) -> Plan:
        """The same with another bandwidth."""
        return replace(self, link=Link(self.link.alpha, 1 / bytes_per_second))


def add_parser(subparsers: Any) -> None:
    """Adds this subcommand."""
    about = str(__doc__).partition(": ")[2]
    parser = subparsers.add_parser("advise", help="predict which exchange pays on a cluster", description=about)
    add = parser.add_argument
    add("--parameters", type=count, required=True, metavar="N", help="of the model, e.g. 25.6M")
    add("--ranks", type=at_least(1), required=True, metavar="P", help="processes, as a rule one for each GPU")
    add("--bandwidth", type=bandwidth, required=True, help="of a node's link, e.g. 10Gbit or 1.2GB per second")
    add("--latency", type=seconds, default="5us", help="of a message between nodes (default: 5us)")
    add("--density", type=density, default="0.01", help="fraction of the gradients to send (default: 0.01)")
    add("--gpus-per-node", type=at_least(1), default=1, metavar="G", help="ranks that share a node's link (default: 1)")
    add("--inner-bandwidth", type=bandwidth, default="100GB", help="in a node, in one direction (default: 100GB)")
    add("--inner-latency", type=seconds, default="2us", help="of a message in a node (default: 2us)")
    add(
        "--select-bandwidth",
        type=bandwidth,
        default=_SELECT_BANDWIDTH,
        help=f"of the selection, at {_BYTES_PER_ELEMENT} bytes an element (default: {_SELECT_BANDWIDTH}: one core)",
    )
    add("--json", type=Path, metavar="FILE", help="write the prediction")
    add("--plot", type=Path, metavar="FILE.png", help="draw time over bandwidth")
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Prints the prediction and writes the files that were asked for; returns 0."""
    problem = plot.unwritable(options.json, plot=options.plot)
    if options.gpus_per_node > options.ranks:
        problem = f"--gpus-per-node {options.gpus_per_node} are more than the {options.ranks} --ranks of all nodes"
    if problem:
        options.parser.error(problem)
    plan = read(options)
    costs = table(**plan.arguments, algorithms=("dense", *plan.candidates))
    random = predict("shared", **plan.arguments)
    even = break_even_bandwidth(**plan.arguments, algorithms=plan.candidates)
    best = recommendation(choice(costs), options.density)
    print(
        "\n".join([head(plan), "", *rows(costs, random), "", f"Recommended: compression={best}", verdict(plan, even)])
    )
    if options.json:
        content = {
            "plan": asdict(plan),
            "costs": [{**asdict(cost), "total": cost.total} for cost in (*costs, random)],
            "recommended": best,
            "break_even_bandwidth": even if math.isfinite(even) else None,  # null: sparse wins at any
        }
        options.json.write_text(json.dumps(content, indent=2) + "\n")
    if options.plot:
        draw(plan, even, options.plot)
    return 0


def read(options: argparse.Namespace) -> Plan:
    """Plan that the command line asks for. Ranks that all fit on one node are joined by its inner link."""
    size = options.parameters
    select = _BYTES_PER_ELEMENT / options.select_bandwidth
    # Dense is not charged for its sums: GPUs add while the next piece travels. In doubt, the figures favour dense.
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
    """Text to write for ``compression``: the recommended preset, which finds the algorithm by itself but for one."""
    if best.algorithm == "dense":
        return "hvd.Compression.none"
    collective = ", collective='hierarchical'" if best.algorithm == "hierarchical" else ""
    return f"hvs.Compression.recommended(density={density:g}{collective})"


def head(plan: Plan) -> str:
    """Line that says what the prediction is for."""
    nodes = "" if plan.node is None else f" on {math.ceil(plan.ranks / plan.node.ranks)} nodes"
    link = f"{_gbit(1 / plan.link.beta)} and {1e6 * plan.link.alpha:g} us a message"
    return f"{plan.size:,} parameters, k = {plan.k:,}; {plan.ranks} ranks{nodes}, links of {link}"


def rows(costs: list[Cost], random: Cost) -> list[str]:
    """The table, the fastest first, and apart from it what time alone must not recommend."""
    names = ("compression", "ms", "selection", "bandwidth", "latency", "merging", "MB sent", "speedup")
    dense = next(cost.total for cost in costs if cost.algorithm == "dense")
    lines = [f"{names[0]:14}" + "".join(name.rjust(11) for name in names[1:])]
    for cost in (*costs, replace(random, algorithm="randomblock *")):
        parts = (cost.total, cost.selection, cost.bandwidth, cost.latency, cost.merging)
        cells = "".join(f"{1e3 * part:11.3f}" for part in parts)
        lines.append(f"{cost.algorithm:14}{cells}{cost.nbytes / 1e6:11.3f}{_ratio(cost.total, dense):>11}")
    return [
        *lines,
        "* chooses at random: the cheapest exchange, but training converges slower. Not recommended by time.",
    ]


def verdict(plan: Plan, even: float) -> str:
    """The links that are slow enough for a sparse exchange."""
    if even == 0:
        return "No link is slow enough for sparse to win: it sends as many bytes as dense."
    if even == math.inf:
        return "Sparse wins at every bandwidth."
    return f"Sparse wins below {_gbit(even)}, dense above; this link has {_gbit(1 / plan.link.beta)}."


def draw(plan: Plan, even: float, path: Path) -> None:
    """Draws predicted times over bandwidths around this one and the break-even point."""
    mine = 1 / plan.link.beta
    marked = {"this link": mine}
    if 0 < even < math.inf:
        marked["break-even"] = even
    low, high = min(marked.values()) / 30, max(marked.values()) * 30
    speeds = [low * (high / low) ** (step / 60) for step in range(61)]
    curves = {
        name: (
            [speed / _GBIT for speed in speeds],
            [1e3 * predict(name, **plan.at(speed).arguments).total for speed in speeds],
        )
        for name in ("dense", *plan.candidates)
    }
    title = f"{plan.size:,} parameters, {plan.ranks} ranks, k = {plan.k:,}"
    plot.save(
        path,
        title,
        "bandwidth in Gbit/s",
        "predicted time in ms",
        curves,
        {name: x / _GBIT for name, x in marked.items()},
    )


def _ratio(seconds: float, dense: float) -> str:
    return f"{dense / seconds:.2f}x" if seconds > 0 else "-"


def _gbit(bytes_per_second: float) -> str:
    return f"{bytes_per_second / _GBIT:.4g} Gbit/s"
