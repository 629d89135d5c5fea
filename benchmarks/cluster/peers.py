"""Times from gradients to their average on an emulated cluster, compared with MPI, Horovod and DDP.

Contenders: Open MPI's allreduce as a ring, Horovod with float16, torch's DDP over Gloo, DDP with its PowerSGD hook of
rank 4, and configurations of this package, through its pipeline. All average one square float32 matrix, with one rank
on each node. A round starts when all ranks have their gradients and ends when the slowest rank has the average. DDP's
rounds include the backward pass of a product, without which DDP exchanges nothing. Bytes are counted at the sockets and
include the headers of MPI's messages. CPU time is that of a rank, and includes the polling of libraries that poll.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from benchmarks import power_sgd, subcommand
from benchmarks.cluster.collectives import RING
from benchmarks.cluster.emulated import Cluster
from benchmarks.cluster.network import DATA_NETWORK
from benchmarks.runner import Found, Measure, Turns, add_arguments, column, run, table, values
from horovod_sparse.cli.units import at_least, count, listed

if TYPE_CHECKING:
    from mpi4py import MPI

    from horovod_sparse.kernels.types import Array

_CONTENDERS = ("ring", "horovod-fp16", "ddp", "ddp-powersgd", "oktopk", "oktopk:wire=bfloat16", "oktopk:wire=log8")
# Options of mpirun. By default, Gloo uses the network of the host names, which has no rate limit.
_GLOO = ("-x", "GLOO_SOCKET_IFNAME=eth0")
_OPTIONS = {"ring": RING, "horovod-fp16": RING, "ddp": _GLOO, "ddp-powersgd": _GLOO}
# Averages the matrix, in place or into another array.
Round = Callable[[], object]
_WARMUP = 3  # PowerSGD does not compress its first two rounds


def add_parser(commands: Any) -> None:
    """Add this subcommand."""
    parser = subcommand(commands, "peers", "compare with Open MPI, Horovod and DDP", __doc__, start)
    add_arguments(parser, _CONTENDERS, turns=1)
    add = parser.add_argument
    add("--nodes", type=at_least(2), default=8, help="number of nodes, one rank on each")
    add("--rates", type=listed(str), default="1gbit,100mbit,10mbit", help="rates of the links")
    add("--parameters", type=count, default="25M", help="elements of the matrix; rounded to a square")
    add("--steps", type=at_least(1), default=6, help="timed averages per turn")


def start(options: argparse.Namespace) -> int:
    """Measure all contenders at each rate and print the tables."""
    side = max(1, math.isqrt(options.parameters))
    same = {"nodes": options.nodes, "side": side, "steps": options.steps}
    return run(options, [{"rate": rate, **same} for rate in options.rates], _open_cell, show)


@contextmanager
def _open_cell(rate: str, nodes: int, side: int, steps: int) -> Iterator[Measure]:
    function = "benchmarks.cluster.peers:contender"
    with Cluster(nodes, rate) as cluster:
        yield lambda name: cluster.call(nodes, function, name, side, steps, options=_OPTIONS.get(name, ()))


def show(found: Found) -> str:
    """Return the table of a cell; the last column is the speedup over the ring, if the ring was measured."""
    ring = min(values(found["ring"], "milliseconds")) if "ring" in found else 0.0

    def ratio(turns: Turns) -> str:
        return f"{ring / min(values(turns, 'milliseconds')):.2f}" if ring else ""

    times = {"min ms": column("milliseconds", ".1f", min), "median ms": column("milliseconds", ".1f")}
    more = {"CPU ms": column("cpu_milliseconds", ".1f"), "MB sent": column("megabytes"), "ring / min": ratio}
    return table("", found, {**times, **more})


# --- under mpirun --------------------------------------------------------------------------------------------------


def ring(gradient: Array, comm: MPI.Intracomm) -> Round:
    """Return a round of MPI's allreduce of a flat array, in place."""
    from mpi4py import MPI

    def average() -> None:
        comm.Allreduce(MPI.IN_PLACE, gradient)
        gradient[...] /= comm.Get_size()

    return average


def horovod_fp16(gradient: Array) -> Round:
    """Return a round of Horovod's allreduce with its float16 compressor."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    tensor = torch.from_numpy(gradient)
    return lambda: hvd.allreduce(tensor, compression=hvd.Compression.fp16, name="matrix")


def ddp(gradient: Array, power: bool = False) -> Round:
    """Return a round of DDP: a backward pass with one bucket, optionally with the PowerSGD hook of rank 4."""
    import torch

    from horovod_sparse.frontends.ddp.process_group import init_process_group

    side = math.isqrt(gradient.size)
    factor = torch.from_numpy(gradient).view(side, side)

    class Product(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(side, side))

        def forward(self) -> torch.Tensor:
            return (self.weight * factor).sum()

    init_process_group("gloo")
    model = Product()
    plain = torch.nn.parallel.DistributedDataParallel
    parallel = power_sgd(model)[0] if power else plain(model, bucket_cap_mb=1 << 14)

    def average() -> None:
        parallel().backward()
        model.weight.grad = None

    return average


def ours(spec: str, gradient: Array, comm: MPI.Intracomm) -> Round:
    """Return a round of a configuration's pipeline, in place, called as in training."""
    from horovod_sparse.config import parse
    from horovod_sparse.engine.pipeline import pipeline_for
    from horovod_sparse.transport.mpi import MPITransport

    sparse = parse(spec)
    pipeline = pipeline_for(sparse, gradient.size, gradient[:0], MPITransport(comm), factor=1 / comm.Get_size())
    segments = [(0, gradient)]
    return lambda: pipeline.run(segments, segments)


def contender(name: str, side: int, rounds: int) -> dict[str, Any]:
    """Time one contender on all ranks, and return measurements that are the same on every rank.

    Returns:
        ``milliseconds`` of the slowest rank in each round; ``cpu_milliseconds``, the CPU time, and ``megabytes`` sent,
        per rank and round, averaged over ranks and rounds.
    """
    import numpy as np
    from mpi4py import MPI

    from benchmarks.cluster.socket_bytes import socket_bytes

    comm = MPI.COMM_WORLD
    initial = np.random.default_rng(comm.Get_rank()).standard_normal(side * side, dtype=np.float32)
    gradient = initial.copy()
    known: dict[str, Callable[[], Round]] = {
        "ring": lambda: ring(gradient, comm),
        "horovod-fp16": lambda: horovod_fp16(gradient),
        "ddp": lambda: ddp(gradient),
        "ddp-powersgd": lambda: ddp(gradient, power=True),
    }
    average = known[name]() if name in known else ours(name, gradient, comm)
    mine: list[float] = []
    sent, cpu = 0, 0.0
    for number in range(-_WARMUP, rounds):
        gradient[...] = initial
        if number == 0:
            time.sleep(0.3)  # waits for the last acknowledgements
            sent, cpu = -socket_bytes(DATA_NETWORK)[0], 0.0
        comm.Barrier()
        begin, cpu = time.perf_counter(), cpu - time.process_time()
        average()
        cpu += time.process_time()
        mine.append(1e3 * (time.perf_counter() - begin))
    comm.Barrier()
    time.sleep(0.3)
    sent += socket_bytes(DATA_NETWORK)[0]
    slowest = np.max(comm.allgather(mine[_WARMUP:]), axis=0).tolist()
    busy, bytes_sent = (np.mean(comm.allgather((cpu, sent)), axis=0) / rounds).tolist()
    return {"milliseconds": slowest, "cpu_milliseconds": 1e3 * busy, "megabytes": bytes_sent / 1e6}
