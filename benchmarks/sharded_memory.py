"""Peak memory of a rank of a fully sharded model by the memory of its sparse reduce-scatter, and with FSDP2 alone.

    python -m benchmarks.sharded_memory --ranks 2 4

Each measurement starts new processes with mpirun. Figures are the peak resident memory of the largest rank, less that
before the model, in bytes per parameter of the complete model. The model has layers of 2 ** 20 parameters in float32
and trains for some steps of SGD without momentum, or with it where the compression takes it over.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import horovod_sparse as hvs
from benchmarks import command_line
from benchmarks.runner import Measure, Record, add_arguments, choose, column, last_line, program, run, table
from horovod_sparse.cli.units import at_least

_SPECS = {
    "FSDP2": "",
    "residual": "topka:density=0.01",
    "conef, sketch": "conef:density=0.01,saving=0.9",
    "conef, 16 bits": "topka:density=0.01,memory=conef,compressor=quantize,bits=16",
    "conef, 8 bits": "topka:density=0.01,memory=conef,compressor=quantize",
    "conef, 4 bits": "topka:density=0.01,memory=conef,compressor=quantize,bits=4",
    "improved, 8 bits": "topka:density=0.01,memory=improved,compressor=quantize",
    "residual, nodes of 2": "hierarchical:density=0.01,node_ranks=2",
    "momentum": "topka:density=0.01,memory=momentum",
    "FSDP2, momentum": "",
}


def main() -> None:
    """Measure, and print a table for each number of ranks."""
    parser = command_line("sharded_memory", __doc__)
    add_arguments(parser, list(_SPECS), turns=1)
    add = parser.add_argument
    add("--ranks", type=at_least(1), nargs="+", default=[2, 4], help="numbers of ranks (default: 2 4)")
    add("--millions", type=at_least(1), default=64, help="parameters in units of 2**20 (default: %(default)s)")
    add("--steps", type=at_least(1), default=4, help="steps of training (default: %(default)s)")
    options = parser.parse_args()
    choose(parser, options, _SPECS)
    cells = [{"ranks": ranks, "millions": options.millions, "steps": options.steps} for ranks in options.ranks]
    columns = {"bytes per parameter": column("bytes", of=max)}
    run(options, cells, _open_cell, partial(table, "", columns=columns))


@contextmanager
def _open_cell(ranks: int, millions: int, steps: int) -> Iterator[Measure]:
    def measure(name: str) -> Record:
        command = [sys.executable, *program("benchmarks.sharded_memory:contender", name, millions, steps)]
        env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**16)}  # freed memory goes back to the system at once
        done = subprocess.run(
            ["mpirun", "-np", str(ranks), *command], capture_output=True, text=True, check=False, env=env
        )
        if done.returncode:
            raise RuntimeError(f"{name} on {ranks} ranks failed: {done.stderr[-2000:]}")
        return {"bytes": last_line(done.stdout)}

    yield measure


def contender(name: str, millions: int, steps: int) -> float:
    """Train, and return the bytes per parameter of the rank that needs most; a collective call."""
    hvs.ddp.init_process_group("gloo")
    ranks = distributed.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    warm_up = nn.Linear(8, 8)
    fully_shard(warm_up, mesh=mesh)
    warm_up(torch.ones(1, 8)).sum().backward()  # loads what torch loads late
    before = _peak()
    model = nn.Sequential()
    for _ in range(millions):
        layer = nn.Linear(1024, 1024, bias=False)
        fully_shard(layer, mesh=mesh)
        model.append(layer)
    fully_shard(model, mesh=mesh)
    momentum = 0.9 if "momentum" in name else 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=momentum)
    if _SPECS[name]:
        hvs.fsdp.sparse_reduce_scatter(model, hvs.parse(_SPECS[name]), optimizer)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, 1024)).sum().backward()
        optimizer.step()
    most = torch.tensor((_peak() - before) / millions / 2**20)
    distributed.all_reduce(most, distributed.ReduceOp.MAX)
    distributed.destroy_process_group()
    return most.item()


def _peak() -> int:
    """Return the largest resident memory of this process so far, in bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main()
