"""Times of the collectives on an emulated cluster, compared with the dense ring and with the cost model.

Every combination of rate, number of ranks and density is a cell. Its times are those of `horovod-sparse bench
collectives` and include the selection. Its predictions are those of horovod_sparse.costs, from measurements at the same
rate with the same ranks. The model is right in a cell if its first choice is the fastest or takes at most 20 % longer.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import subcommand
from benchmarks.cluster.comparison import Cell, Row, as_json, plot, table, verdict
from benchmarks.cluster.emulated import Cluster
from horovod_sparse.cli.units import at_least, count, density, listed
from horovod_sparse.costs.model import CANDIDATES, Compute, predict
from horovod_sparse.costs.network import Link

ALGORITHMS = ("dense", *CANDIDATES, "gtopk")
# Measured on request only: it does not send the largest entries, so a comparison of times alone would be unfair.
SHARED = "stable"

# Open MPI's default choice takes twice as long on such a network, so a comparison with it would mean little. The sparse
# collectives must not run with these options, which turn even their shortest sums into rings.
RING = ("--mca", "coll_tuned_use_dynamic_rules", "1", "--mca", "coll_tuned_allreduce_algorithm", "4")
# A few iterations suffice: the dense ring is slow, and every iteration does the same.
DENSE = ("--iters", "3", "--warmup", "1")

_BENCH = ("-c", "import sys; from horovod_sparse.cli import main; sys.exit(main())", "bench", "collectives")


def add_parser(commands: Any) -> None:
    """Add this subcommand."""
    about = "compare the collectives with the dense ring and the cost model"
    add = subcommand(commands, "collectives", about, __doc__, run).add_argument
    add("--nodes", type=at_least(2), default=8, help="nodes of the cluster")
    add("--rates", type=listed(str), default="1gbit,100mbit", help="rates of the links")
    add("--ranks", type=listed(at_least(2)), default="2,4,8", help="numbers of ranks, at most one on each node")
    add("--parameters", type=count, default="25M", help="elements of a vector")
    add("--densities", type=listed(density), default="0.001,0.01,0.02", help="densities of the sparse collectives")
    algorithms = f"presets to measure, {SHARED} too; dense is the ring"
    add("--algorithms", type=listed(str), default=",".join(ALGORITHMS), help=algorithms)
    add("--iters", type=at_least(1), default=20, help="timed iterations of the sparse collectives")
    add("--check", type=int, choices=(0, 1), default=1, help="verify the results; takes minutes at 100 Mbit/s")
    add("--output", type=Path, default=Path("runs/cluster"), help="folder for collectives.json")
    add("--plot", action="store_true", help="also write collectives.png")


def run(options: argparse.Namespace) -> int:
    """Measure all cells, print their tables and write the results.

    Raises:
        ValueError: An algorithm is unknown, or there are more ranks than nodes.
        RuntimeError: A benchmark failed, or one of its results was wrong.
    """
    for name in options.algorithms:
        if name not in (*ALGORITHMS, SHARED):
            raise ValueError(f"unknown algorithm {name!r}; known are: {', '.join((*ALGORITHMS, SHARED))}")
    if max(options.ranks) > options.nodes:
        raise ValueError(f"{max(options.ranks)} ranks on {options.nodes} nodes: give --nodes {max(options.ranks)}")
    options.output.mkdir(parents=True, exist_ok=True)
    cells: list[Cell] = []
    with Cluster(options.nodes, options.rates[0]) as cluster:
        for rate, ranks in itertools.product(options.rates, options.ranks):
            cluster.set_rate(rate)
            new = measure(cluster, rate, ranks, options)
            print(table(new), flush=True)
            cells += new
            result = {"command": sys.argv, "verdict": verdict(cells), "cells": as_json(cells)}
            (options.output / "collectives.json").write_text(json.dumps(result, indent=2) + "\n")
    print("\n" + json.dumps(verdict(cells), indent=2))
    if options.plot:
        plot(cells, options.output / "collectives.png")
    return 0


def measure(cluster: Cluster, rate: str, ranks: int, options: argparse.Namespace) -> list[Cell]:
    """Return the cells of one rate and number of ranks."""
    found = cluster.call(ranks, "benchmarks.cluster.collectives:link_and_compute")
    link, compute = Link(**found["link"]), Compute(**found["compute"])
    sparse = [name for name in options.algorithms if name != "dense"]
    rows = _bench(cluster, ranks, sparse, options, ["--iters", str(options.iters)]) if sparse else []
    if "dense" in options.algorithms:
        rows += _bench(cluster, ranks, ["dense"], options, DENSE, RING)
    cells = []
    for cell_density in options.densities:
        # The dense rows belong to every density.
        here = [row for row in rows if row["density"] == cell_density or row["algorithm"] == "dense"]
        compared = [_compare(row, cell_density, ranks, link, compute) for row in here]
        cells.append(Cell(rate, ranks, cell_density, options.parameters, link, compute, compared))
    return cells


def _compare(row: dict[str, Any], density: float, ranks: int, link: Link, compute: Compute) -> Row:
    """Return a row of the benchmark with its prediction."""
    k = max(1, round(density * row["size"]))
    algorithm = "shared" if row["algorithm"] == SHARED else row["algorithm"]
    predicted = predict(algorithm, row["size"], k, ranks, link, compute)
    return Row(
        row["algorithm"],
        measured=row["max_ms"],
        best=row["best_ms"],
        exchange=row["exchange_ms"],
        predicted=1e3 * predicted.total,
        wire_bytes=row["wire_bytes"],
    )


def _bench(
    cluster: Cluster,
    ranks: int,
    algorithms: Sequence[str],
    options: argparse.Namespace,
    flags: Sequence[str],
    mpirun_options: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Return the rows of `horovod-sparse bench collectives`."""
    nbytes = str(4 * options.parameters)
    densities = ",".join(map(str, options.densities))
    with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
        common = ["-b", nbytes, "-e", nbytes, "--check", str(options.check), "--density", densities]
        mine = ["--json", file.name, "--algorithms", ",".join(algorithms), *flags]
        cluster.python(ranks, [*_BENCH, *common, *mine], mpirun_options)
        rows: list[dict[str, Any]] = json.load(file)["rows"]
    return rows


def link_and_compute() -> dict[str, Any]:
    """Return the cost model's inputs, measured on all ranks together; a collective call."""
    import numpy as np
    from mpi4py import MPI

    from horovod_sparse.costs.measure import measure_compute, measure_link
    from horovod_sparse.transport.mpi import MPITransport

    transport = MPITransport(MPI.COMM_WORLD)
    # There is one rank on a node, so the ranks do not know that nodes share cores.
    sharing = math.ceil(transport.size / (os.cpu_count() or 1))
    link, compute = measure_link(transport), measure_compute(transport, np.empty(0, np.float32), sharing)
    return {"link": asdict(link), "compute": asdict(compute)}
