"""`horovod-sparse advise`: Predict exchange and step times of the compressions on a cluster, and recommend one.

The cost model is that of Li and Hoefler (PPoPP 2022, Table 1), plus selecting, merging and converting. With --compute,
it covers the overlap with the backward pass, too. Nothing is measured. Accuracy is not modelled, but the nearest that
was measured is quoted.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from horovod_sparse.cli import plot, predictions
from horovod_sparse.cli.predictions import Plan, Row
from horovod_sparse.cli.units import at_least, bandwidth, count, density, seconds
from horovod_sparse.costs import accuracy
from horovod_sparse.costs.model import Compute, break_even_bandwidth
from horovod_sparse.costs.network import Link, Node

# Default of --memory-bandwidth. CPU: what one core reached, with momentum before the selection. GPU: that of an A100,
# divided by 1.3, as the kernels move more than they must; not measured.
_MEMORY = {"cpu": "25GB", "gpu": "1.5TB"}
# Bytes per element that must be moved: gradient, residual and velocity are read and written where entries are selected;
# gradient and residual are read, and the residual written, where everything is sent.
_SELECT_BYTES, _ACCUMULATE_BYTES = 24, 12
# Work per entry, index or value, as the bytes that move in the same time; from the times of one CPU core.
_MERGE_BYTES, _CUT_BYTES, _CODE_BYTES, _CONVERT_BYTES = 125, 125, 75, 75
# A round of messages of a GPU: copies and synchronization. Bandwidth of such a copy: PCIe 4.0 x16.
_HOST_ROUND, _HOST_BANDWIDTH = 50e-6, 25e9
_WIDTHS = {"float32": 4, "bfloat16": 2}  # bytes of a gradient
_USUAL = 0.01  # density of the break-even point if none is given
# What takes the place of Horovod's compressions with DDP and FSDP2.
_HOOKS = {
    "hvd.Compression.none": " (with DDP and FSDP2: stay dense, without a hook)",
    "hvd.Compression.fp16": " (with DDP: torch's fp16_compress_hook)",
}
_GBIT = 1e9 / 8


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
    computing = "time of a step without exchange, such as 120ms: predicts step times and the choice of the preset, too"
    add("--compute", type=seconds, default=0.0, metavar="TIME", help=computing)
    compared = "compare the collectives at this density, instead of the densities that `recommended` tries"
    add("--density", type=density, help=compared)
    add(
        "--optimizer", choices=("sgd", "adam", "adamw"), default="sgd", help="adam: any but SGD and Muon (default: sgd)"
    )
    dtype = "of the gradients that Horovod, DDP or FSDP2 send without compression (default: float32)"
    add("--dtype", choices=tuple(_WIDTHS), default="float32", help=dtype)
    shards = "FSDP2 with replicas: ranks that hold a replica together, a multiple of --gpus-per-node (default: 1)"
    add("--shards", type=at_least(1), default=1, metavar="S", help=shards)
    add("--gpus-per-node", type=at_least(1), default=1, metavar="G", help="ranks that share a node's link (default: 1)")
    inner = "bandwidth inside a node, per direction (default: 100GB)"
    add("--inner-bandwidth", type=bandwidth, default="100GB", help=inner)
    add("--inner-latency", type=seconds, default="2us", help="latency of a message inside a node (default: 2us)")
    add("--device", choices=tuple(_MEMORY), default="cpu", help="where the gradients are (default: cpu)")
    memory = f"memory bandwidth of the kernels (default: {_MEMORY['cpu']}, one core; GPU: {_MEMORY['gpu']}, an A100)"
    add("--memory-bandwidth", type=bandwidth, help=memory)
    measured = (
        "bus bandwidth of Horovod's own dense allreduce, such as 90GB: busbw of nccl-tests (default: that of MPI)"
    )
    add("--dense-bandwidth", type=bandwidth, help=measured)
    add("--json", type=Path, metavar="FILE", help="write the prediction to FILE")
    add("--plot", type=Path, metavar="FILE.png", help="plot time over bandwidth to FILE.png")
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Print the prediction, write the requested files, and return 0."""
    problem = plot.unwritable(options.json, plot=options.plot)
    if options.gpus_per_node > options.ranks:
        problem = f"--gpus-per-node {options.gpus_per_node} exceeds --ranks {options.ranks}, the total over all nodes"
    if options.ranks % options.shards or (options.shards > 1 and options.shards % options.gpus_per_node):
        problem = f"--shards {options.shards} must divide --ranks {options.ranks}, and be a multiple of --gpus-per-node"
    if 1 < options.shards == options.ranks:
        problem = f"--shards {options.shards} leaves one replica: what fully sharded models exchange is not predicted"
    if problem:
        options.parser.error(problem)
    plan = read(options)
    dense, (sparse, chosen) = predictions.dense_rows(plan), predictions.sparse_rows(plan, options.density)
    rows = [*dense, *sparse]
    first = predictions.hardly_slower(rows)[0]  # the most precise of them: rows are in this order
    best = first.code if first in dense else code(options.density)
    remarks = about_shards(plan, options.shards, options.gpus_per_node) if options.shards > 1 else []
    remarks += about_dense(plan, options.device, chosen, rows)
    remarks += about_accuracy(plan, chosen)
    if first in sparse or not plan.computing:
        remarks += about_steps(plan, sparse, options.density is None)
    marked = {"this link": plan.bandwidth}
    if plan.dense_bandwidth is None:
        of = options.density or _USUAL
        even = break_even(plan, of)
        remarks.append(verdict(plan, of, even))
        if 0 < even < math.inf:
            marked["break-even"] = even
    hook = _HOOKS.get(best, "")
    print(
        "\n".join([head(plan), "", *lines(rows, chosen, plan), "", f"Recommended: compression={best}{hook}", *remarks])
    )
    if options.json:
        found = [{**asdict(row), "exchange": row.cost.total} for row in rows]
        content = {"plan": asdict(plan), "rows": found, "chosen": chosen and chosen.compression, "recommended": best}
        options.json.write_text(json.dumps({**content, "bandwidths": marked}, indent=2) + "\n")
    if options.plot:
        draw(plan, options.density, marked, options.plot)
    return 0


def read(options: argparse.Namespace) -> Plan:
    """Return the plan for a command line.

    If all ranks fit on one node, its inner link connects them. With FSDP2, each rank of a replica exchanges its shard
    with one rank of each other replica, while the other ranks of its node do the same over the node's link.
    """
    gpu = options.device == "gpu"
    memory = options.memory_bandwidth or bandwidth(_MEMORY[options.device])
    # The sums of a dense allreduce are free: they are formed while the next part is in flight. This favours dense.
    compute = Compute(
        select=_SELECT_BYTES / memory,
        accumulate=_ACCUMULATE_BYTES / memory,
        reduce=0.0,
        merge=_MERGE_BYTES / memory,
        cut=_CUT_BYTES / memory,
        code=_CODE_BYTES / memory,
        convert=_CONVERT_BYTES / memory,
        wait=_HOST_ROUND if gpu else 0.0,
    )
    staging = 2 / _HOST_BANDWIDTH if gpu else 0.0
    sharing = options.gpus_per_node if options.shards > 1 else 1
    outer = Link(options.latency, sharing / options.bandwidth, staging)
    inner = Link(options.inner_latency, 1 / options.inner_bandwidth, staging)
    alone = options.ranks <= options.gpus_per_node
    nested = options.gpus_per_node > 1 and options.shards == 1
    node = Node(options.gpus_per_node, inner) if nested and not alone else None
    link = inner if nested and alone else outer
    size, ranks = math.ceil(options.parameters / options.shards), options.ranks // options.shards
    dense_bandwidth = options.dense_bandwidth and options.dense_bandwidth / sharing
    rest = (dense_bandwidth, options.compute, _WIDTHS[options.dtype], options.optimizer != "sgd")
    return Plan(size, ranks, link, compute, node, *rest)


def code(density: float | None) -> str:
    """Return the preset's code: without a density it measures, and it finds the collective by itself."""
    return f"hvs.Compression.recommended({'' if density is None else f'density={density:g}'})"


def head(plan: Plan) -> str:
    """Return a line that describes the cluster."""
    nodes = "" if plan.node is None else f" on {math.ceil(plan.ranks / plan.node.ranks)} nodes"
    link = f"{_gbit(plan.bandwidth)} and {1e6 * plan.link.alpha:g} us per message"
    computing = f", {1e3 * plan.computing:g} ms to compute a step" if plan.computing else ""
    return f"{plan.size:,} parameters; {plan.ranks} ranks{nodes}, links of {link}{computing}"


def lines(rows: Sequence[Row], chosen: Row | None, plan: Plan) -> list[str]:
    """Return the lines of the table; times are in milliseconds."""
    times = ("exchange", "exposed", "step") if plan.computing else ("exchange",)
    parts = ("selection", "bandwidth", "latency", "merging")
    width = max(len(row.compression) for row in rows)
    heads = "".join(f"{name:>10}" for name in (*times, *parts)) + f"{'rounds':>7}{'MB sent':>9}{'speedup':>8}"
    found = [f"{'compression':{width}}  {'algorithm':12}{heads}"]
    for row in rows:
        seconds = {"exchange": row.cost.total, "exposed": row.exposed, "step": row.step, **asdict(row.cost)}
        cells = "".join(f"{1e3 * seconds[name]:10.2f}" for name in (*times, *parts))
        cells += f"{row.cost.rounds:7}{row.cost.nbytes / 1e6:9.2f}{_ratio(rows[0].step, row.step):>8}"
        mark = "  <- chosen" if row == chosen else ""
        found.append(f"{row.compression:{width}}  {row.cost.algorithm:12}{cells}{mark}")
    return found


def about_shards(plan: Plan, shards: int, sharing: int) -> list[str]:
    """Return a line on what the ranks of an FSDP2 model with replicas exchange."""
    share = "" if sharing == 1 else f", each over its share of the link, which {sharing} ranks use at a time"
    return [f"The {shards} ranks of a replica exchange {plan.size:,} gradients each, with other replicas{share}."]


def about_dense(plan: Plan, device: str, chosen: Row | None, rows: Sequence[Row]) -> list[str]:
    """Return a line on the library whose dense allreduce is priced: MPI, or that of --dense-bandwidth."""
    through = "MPI through host memory" if device == "gpu" else "MPI"
    if plan.dense_bandwidth is None:
        remark = (
            f"All rows are priced for {through}. If your Horovod uses NCCL, none and fp16 are faster: give "
            "--dense-bandwidth, the busbw of all_reduce_perf (nccl-tests)."
        )
        return [remark] if device == "gpu" else []
    remark = f"none and fp16 are priced at --dense-bandwidth. What this package sends dense travels by {through}"
    if chosen is not None and chosen.density == 1 and chosen.step > rows[0].step:
        remark += (
            f", and `recommended` would do so here: {1e3 * chosen.step:.3g} ms instead of {1e3 * rows[0].step:.3g}"
        )
    return [f"{remark}."]


def about_accuracy(plan: Plan, chosen: Row | None) -> list[str]:
    """Return a line on the accuracy measured at the density that the preset chooses; none if it sends everything."""
    if chosen is None or chosen.density == 1:
        return []
    found = accuracy.known(chosen.density, plan.ranks, "AdamW" if plan.adaptive else "SGD")
    if found is None:
        return [f"The accuracy at a density of {chosen.density:g} was not measured."]
    how = f"{found.optimizer}, {found.collective}, {found.ranks} ranks, {found.steps} steps"
    of = f"Measured at a density of {found.density:g}, perplexity of a small language model against dense training"
    return [f"{of}: {found.loss:+.1%} ({how}). More in docs/schedules.md."]


def about_steps(plan: Plan, rows: Sequence[Row], chooses: bool) -> list[str]:
    """Return a line that asks for the computing time, or proposes local steps if ranks wait for most of a step."""
    if not plan.computing:
        density = ", and which density `recommended` chooses" if chooses else ""
        return [f"Give --compute TIME to see what a step takes{density}."]
    least = min(rows, key=lambda row: row.step)
    if least.exposed <= least.step / 2:
        return []
    # No backward pass hides the exchange after local steps: propose a number of them that takes as long as it does.
    steps = 2 ** math.ceil(math.log2(least.cost.total / plan.computing))
    local = (
        f"compression=hvs.Compression.auto(density={least.density:g}, wire={predictions.preset().collective.wire!r})"
    )
    waits = f"Even at a density of {least.density:g}, ranks wait for {least.exposed / least.step:.0%} of a step."
    instead = f"hvs.LocalOptimizer(..., local_steps={steps}, {local})"
    return [f"{waits} Local steps exchange less often (docs/local-steps.md): {instead}"]


def break_even(plan: Plan, density: float) -> float:
    """Return the bandwidth below which a sparse exchange is faster than Horovod's; see ``break_even_bandwidth``."""
    width = predictions.WIDTHS[predictions.preset().collective.wire]
    if density == 1:
        return 0.0
    return break_even_bandwidth(**plan.bucket(density), algorithms=plan.collectives, wire=width, dense=plan.width)


def verdict(plan: Plan, density: float, even: float) -> str:
    """Return a line with the bandwidths at which a sparse exchange is faster than dense."""
    if even == 0:
        return f"No link is slow enough for a density of {density:g} to win: it sends no fewer bytes than dense."
    if even == math.inf:
        return f"If nothing hides the exchange, a density of {density:g} wins at every bandwidth."
    bandwidths = f"wins below {_gbit(even)}, dense above; this link has {_gbit(plan.bandwidth)}"
    return f"If nothing hides the exchange, a density of {density:g} {bandwidths}."


def draw(plan: Plan, density: float | None, marked: dict[str, float], path: Path) -> None:
    """Plot predicted exchange times over a range of bandwidths around the marked ones."""
    low, high = min(marked.values()) / 30, max(marked.values()) * 30
    speeds = [low * (high / low) ** (step / 60) for step in range(61)]
    curves: dict[str, tuple[list[float], list[float]]] = {}
    for speed in speeds:
        there = plan.at(speed)
        for row in (*predictions.dense_rows(there), *predictions.sparse_rows(there, density)[0]):
            x, y = curves.setdefault(row.compression, ([], []))
            x.append(speed / _GBIT)
            y.append(1e3 * row.cost.total)
    title = f"{plan.size:,} parameters, {plan.ranks} ranks"
    marks = {name: speed / _GBIT for name, speed in marked.items()}
    plot.save(path, title, "bandwidth in Gbit/s", "predicted time of the exchange in ms", curves, marks)


def _ratio(dense: float, seconds: float) -> str:
    return f"{dense / seconds:.2f}x" if seconds > 0 else "-"


def _gbit(bytes_per_second: float) -> str:
    return f"{bytes_per_second / _GBIT:.4g} Gbit/s"
