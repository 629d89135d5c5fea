"""Peak memory of a rank of a fully sharded model by the memory of its sparse reduce-scatter, and with FSDP2 alone.

    python -m benchmarks.sharded_memory --ranks 2 4

Each row starts new processes with mpirun. Figures are the peak resident memory of the largest rank, less that before
the model, in bytes per parameter of the complete model. The model has layers of 2 ** 20 parameters in float32 and
trains for some steps of SGD without momentum, or with it where the compression takes it over.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import subprocess
import sys

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import horovod_sparse as hvs
from benchmarks import command_line

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
    """Measure, and print a table."""
    options = _parse()
    if options.row is not None:
        _train(options)
        return
    print(f"{'bytes per parameter':22}" + "".join(f"{ranks:>4} ranks" for ranks in options.ranks))
    for row in options.rows:
        found = [_measure(row, ranks, options) for ranks in options.ranks]
        print(f"{row:22}" + "".join(f"{one:10.2f}" for one in found), flush=True)


def _measure(row: str, ranks: int, options: argparse.Namespace) -> float:
    module = [sys.executable, "-m", "benchmarks.sharded_memory", "--row", row]
    program = [*module, "--millions", str(options.millions), "--steps", str(options.steps)]
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**16)}  # freed memory goes back to the system at once
    done = subprocess.run(["mpirun", "-np", str(ranks), *program], capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        raise RuntimeError(f"{row} on {ranks} ranks failed: {done.stderr[-2000:]}")
    return max(map(float, re.findall(r"peak ([0-9.]+);", done.stdout)))


def _train(options: argparse.Namespace) -> None:
    hvs.ddp.init_process_group("gloo")
    ranks = distributed.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    warm_up = nn.Linear(8, 8)
    fully_shard(warm_up, mesh=mesh)
    warm_up(torch.ones(1, 8)).sum().backward()  # loads what torch loads late
    before = _peak()
    model = nn.Sequential()
    for _ in range(options.millions):
        layer = nn.Linear(1024, 1024, bias=False)
        fully_shard(layer, mesh=mesh)
        model.append(layer)
    fully_shard(model, mesh=mesh)
    momentum = 0.9 if "momentum" in options.row else 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=momentum)
    if _SPECS[options.row]:
        hvs.fsdp.sparse_reduce_scatter(model, hvs.parse(_SPECS[options.row]), optimizer)
    for _ in range(options.steps):
        optimizer.zero_grad()
        model(torch.ones(1, 1024)).sum().backward()
        optimizer.step()
    print(f"peak {(_peak() - before) / options.millions / 2**20:.3f};", flush=True)
    distributed.barrier()
    distributed.destroy_process_group()


def _peak() -> int:
    """Return the largest resident memory of this process so far, in bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _parse() -> argparse.Namespace:
    parser = command_line("sharded_memory", __doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks (default: 2 4)")
    parser.add_argument("--millions", type=int, default=64, help="parameters in units of 2**20 (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="steps of training (default: %(default)s)")
    parser.add_argument("--rows", choices=_SPECS, nargs="+", default=list(_SPECS), help="rows (default: all)")
    parser.add_argument("--row", choices=_SPECS, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
