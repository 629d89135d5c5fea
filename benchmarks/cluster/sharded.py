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
import itertools
import sys
from collections import defaultdict
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks import last_line, print_on_rank_0, subcommand
from benchmarks.cluster.emulated import Cluster
from benchmarks.cluster.network import DATA_NETWORK
from horovod_sparse.cli.units import at_least

ALONE, FSDP, _DDP = "alone", "fsdp2", "ddp "
_WARMUP = 3
_SAMPLES = 4  # windows per rank and step


@dataclass(frozen=True)
class Turn:
    """Measurements of one run of a contender.

    Attributes:
        milliseconds: Median step of the slowest rank.
        megabytes: Sent by a rank in a step, mean over the ranks.
        memory: MiB of the rank that needed most.
    """

    milliseconds: float
    megabytes: float
    memory: float


def add_parser(commands: Any) -> None:
    """Add this subcommand."""
    about = "time steps of a fully sharded model, with sparse gradients and rounded parameters"
    add = subcommand(commands, "sharded", about, __doc__, run).add_argument
    add("--nodes", type=at_least(2), default=4, help="number of nodes, one rank on each")
    add("--rates", nargs="+", default=["1gbit", "300mbit", "100mbit"], help="rates of the links")
    add("--steps", type=at_least(1), default=10, help="timed steps per turn")
    add("--turns", type=at_least(1), default=3, help="turns of each contender")
    add(
        "--contenders",
        nargs="+",
        default=[
            ALONE,
            FSDP,
            "topka:density=0.04,wire=log8",
            "topka:density=0.01,wire=log8",
            "fsdp2 + 8",
            "topka:density=0.04,wire=log8 + 8",
            "topka:density=0.04,wire=log4 + 4",
            "ddp recommended:density=0.04,collective=topkdsa",
        ],
        help="what to compare",
    )


def run(options: argparse.Namespace) -> int:
    """Measure all contenders at each rate and print the tables."""
    with Cluster(options.nodes, options.rates[0]) as cluster:
        for rate in options.rates:
            cluster.set_rate(rate)
            found: defaultdict[str, list[Turn]] = defaultdict(list)
            for _, name in itertools.product(range(options.turns), options.contenders):
                arguments = ["-m", "benchmarks.cluster.sharded", name, str(options.steps)]
                found[name].append(Turn(**last_line(cluster.python(options.nodes, arguments))))
            print(f"\n{rate}, {options.nodes} ranks", *rows(found), sep="\n", flush=True)
    return 0


def rows(found: dict[str, list[Turn]]) -> list[str]:
    """Return the lines of a table: step times over the turns, what is exposed of them, bytes, and memory."""
    alone = median(turn.milliseconds for turn in found[ALONE]) if ALONE in found else 0.0
    lines = [f"{'':50}{'ms':>8}{'least':>8}{'most':>8}{'exposed':>9}{'MB sent':>9}{'MiB':>7}"]
    for name, turns in found.items():
        times = [turn.milliseconds for turn in turns]
        sent, memory = (median(getattr(turn, of) for turn in turns) for of in ("megabytes", "memory"))
        exposed = f"{median(times) - alone:9.0f}" if alone else " " * 9
        lines.append(
            f"{name:50}{median(times):8.0f}{min(times):8.0f}{max(times):8.0f}{exposed}{sent:9.2f}{memory:7.0f}"
        )
    return lines


# --- under mpirun --------------------------------------------------------------------------------------------------


def contender(name: str, steps: int) -> dict[str, float]:
    """Train some steps; return the fields of a ``Turn``, the same on every rank."""
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


if __name__ == "__main__":
    print_on_rank_0(contender(sys.argv[1], int(sys.argv[2])))
