"""Step time, bytes and memory of a fully sharded training on an emulated cluster.

The transformer of `stdlib-10m` (9.9 million parameters) trains on random words with AdamW, computing in bfloat16, with
one rank on each node. Contenders:

- "alone": FSDP2 with one shard, which sends nothing.
- "fsdp2": FSDP2, with gradients reduced and parameters gathered in bfloat16, over Gloo.
- "ddp TOPKA": DistributedDataParallel with a compression, such as `ddp recommended:density=0.01`.
- a compression: FSDP2 with this sparse reduce-scatter.

"+ 8" or "+ 4" after a contender of FSDP2 gathers its parameters in as many bits. Contenders alternate, as the machine
may be shared; a step takes as long as on its slowest rank, and its exposed time is what it takes longer than "alone".
Bytes are counted at the sockets and include the headers of Gloo's and MPI's messages. Memory is what the rank that
needs most has in use at most, beyond what it uses after all imports.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

from benchmarks import subcommand
from benchmarks.cluster.emulated import Cluster
from benchmarks.cluster.network import DATA_NETWORK
from benchmarks.runner import Found, Measure, Turns, add_arguments, column, run, spread, table, values
from horovod_sparse.cli.units import at_least, listed

ALONE, FSDP, _DDP = "alone", "fsdp2", "ddp "
_CONTENDERS = (
    ALONE,
    FSDP,
    "topka:density=0.04,wire=log8",
    "topka:density=0.01,wire=log8",
    "fsdp2 + 8",
    "topka:density=0.04,wire=log8 + 8",
    "topka:density=0.04,wire=log4 + 4",
    "ddp recommended:density=0.04,collective=topkdsa",
)
_WARMUP = 3
_SAMPLES = 4  # windows per rank and step


def add_parser(commands: Any) -> None:
    """Add this subcommand."""
    about = "time steps of a fully sharded model, with sparse gradients and rounded parameters"
    parser = subcommand(commands, "sharded", about, __doc__, start)
    add_arguments(parser, _CONTENDERS, turns=3)
    add = parser.add_argument
    add("--nodes", type=at_least(2), default=4, help="number of nodes, one rank on each")
    add("--rates", type=listed(str), default="1gbit,300mbit,100mbit", help="rates of the links")
    add("--steps", type=at_least(1), default=10, help="timed steps per turn")


def start(options: argparse.Namespace) -> int:
    """Measure all contenders at each rate and print the tables."""
    cells = [{"rate": rate, "nodes": options.nodes, "steps": options.steps} for rate in options.rates]
    return run(options, cells, _open_cell, show)


@contextmanager
def _open_cell(rate: str, nodes: int, steps: int) -> Iterator[Measure]:
    with Cluster(nodes, rate) as cluster:
        yield lambda name: cluster.call(nodes, "benchmarks.cluster.sharded:contender", name, steps)


def show(found: Found) -> str:
    """Return the table of a cell: step times over the turns, what is exposed of them, bytes, and memory."""
    alone = median(values(found[ALONE], "milliseconds")) if ALONE in found else 0.0

    def exposed(turns: Turns) -> str:
        return f"{median(values(turns, 'milliseconds')) - alone:.0f}" if alone else ""

    more = {"exposed": exposed, "MB sent": column("megabytes"), "MiB": column("memory", ".0f")}
    return table("ms a step", found, {**spread("milliseconds", ".0f"), **more})


# --- under mpirun --------------------------------------------------------------------------------------------------


def contender(name: str, steps: int) -> dict[str, float]:
    """Train some steps, and return measurements that are the same on every rank.

    Returns:
        ``milliseconds`` of the median step of the slowest rank, ``megabytes`` that a rank sends in a step, in the mean
        over the ranks, and ``memory``, in MiB, of the rank that needed most.
    """
    import os
    import resource
    import time

    import numpy as np
    import torch
    from mpi4py import MPI
    from torch.nn import functional as F  # noqa: N812 - the name everyone uses

    from benchmarks.cluster.socket_bytes import socket_bytes
    from benchmarks.convergence.tasks.text import STDLIB_VOCABULARY, WINDOW, larger_transformer
    from horovod_sparse import ddp

    comm = MPI.COMM_WORLD
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[comm.Get_rank() % len(cores)]})
    torch.set_num_threads(1)
    ddp.init_process_group("gloo")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    torch.manual_seed(0)
    model, optimizer = parallel(larger_transformer(), name)
    torch.manual_seed(comm.Get_rank())
    words, targets = torch.randint(STDLIB_VOCABULARY, (2, _SAMPLES, WINDOW))
    mine: list[float] = []
    sent = 0
    for number in range(-_WARMUP, steps):
        if number == 0:
            time.sleep(0.3)  # waits for the last acknowledgements
            sent = -socket_bytes(DATA_NETWORK)[0]
        comm.Barrier()
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(words).flatten(0, -2).float(), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        mine.append(1e3 * (time.perf_counter() - begin))
    comm.Barrier()
    time.sleep(0.3)
    sent += socket_bytes(DATA_NETWORK)[0]
    memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return {
        "milliseconds": float(np.median(np.max(comm.allgather(mine[_WARMUP:]), axis=0))),
        "megabytes": float(np.mean(comm.allgather(sent))) / steps / 1e6,
        "memory": max(comm.allgather(memory)),
    }


def parallel(model: Any, name: str) -> tuple[Any, Any]:
    """Return a model in the wrapper of a contender, and its optimizer."""
    import torch
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    import horovod_sparse as hvs

    if name.startswith(_DDP):
        replica = DistributedDataParallel(model.bfloat16())
        optimizer = torch.optim.AdamW(replica.parameters(), fused=True)
        state = hvs.ddp.SparseState(hvs.parse(name.removeprefix(_DDP)), optimizer, model.named_parameters())
        replica.register_comm_hook(state, hvs.ddp.sparse_hook)
        return replica, optimizer
    spec, _, bits = name.partition(" + ")
    ranks = distributed.get_world_size()
    mesh = init_device_mesh("cpu", (ranks, 1) if spec == ALONE else (1, ranks), mesh_dim_names=("alone", "shard"))
    settings: Any = {
        "mesh": mesh["shard"],
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
    }
    for layer in model.layers.layers:
        fully_shard(layer, **settings)
    fully_shard(model, **settings)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    if bits:
        hvs.fsdp.rounded_all_gather(model, int(bits))
    if spec not in (ALONE, FSDP):
        hvs.fsdp.sparse_reduce_scatter(model, hvs.parse(spec), optimizer)
    return model, optimizer
