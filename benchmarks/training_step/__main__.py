"""Where the time of a training step goes, as in Fig. 4 of Yoon and Oh (2022), and what compression adds to computing.

    python -m benchmarks.training_step --device cuda --model vgg16 --batch 128 --density 0.001 --output runs/1.jsonl
    mpirun -n 4 python -m benchmarks.training_step --device cuda --output runs/4.jsonl    # ranks share the GPU
    torchrun --nproc-per-node 2 -m benchmarks.training_step --device cuda              # over Gloo
    python -m benchmarks.training_step --device cuda --model gpt2 --batch 8 --density 0.01 --overlap
    python -m benchmarks.training_step.figure runs/1.jsonl runs/4.jsonl --output runs/step

Needs no Horovod. Every rank trains with each contender in turn, on random data, with SGD and momentum:

- alone: computing only
- dense: the dense exchange of this package
- sorted: top-k with torch.topk, as in most published measurements (examples/sorted_topk.py)
- randomk: random entries, without error feedback
- ours: top-k of this package
- recommended: momentum before the selection, values in 4 bits, the collective that `auto` chooses
- any other configuration, such as oktopk:density=0.01

One rank selects and applies, but sends nothing. Times are medians in ms, with quartiles for the step; on a GPU the
device's. Compression is selecting and applying; communication includes waiting for late ranks. Without --overlap, the
exchange follows the backward pass, so that the parts and the rest, which is mostly Python, add up to the step.
"""

from __future__ import annotations

import argparse
import atexit
import os
import sys
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from statistics import median

import torch
from torch import distributed

from benchmarks import command_line, single_rank
from benchmarks.kernels.selection import machine
from benchmarks.runner import Column, Found, Turns, add_arguments, column, run, table
from benchmarks.training_step.exchange import CONTENDERS, configuration_of
from benchmarks.training_step.measure import measure
from benchmarks.training_step.models import MODELS
from horovod_sparse import ddp
from horovod_sparse.cli.units import at_least, real
from horovod_sparse.frontends.members import transport_of
from horovod_sparse.transport.base import Transport

# Variables of launchers: torchrun, Open MPI, other MPIs, and SLURM with PMIx.
LAUNCHED = ("TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK")


def connect(device: str) -> Transport:
    """Return the transport of all ranks, and select this rank's GPU, which ranks may share."""
    if not any(name in os.environ for name in LAUNCHED):
        alone: Transport = single_rank()
        return alone
    ddp.init_process_group("gloo")
    atexit.register(distributed.destroy_process_group)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    transport = transport_of(distributed.group.WORLD)
    assert transport is not None
    return transport


def show(found: Found) -> str:
    """Return the table, with the medians over the turns."""

    def of(name: str, place: int, turns: Turns) -> float:
        return float(median(turn["ms"][name][place] for turn in turns))

    def ratio(base: str, turns: Turns) -> str:
        return f"{of('step', 0, turns) / of('step', 0, found[base]):.3f}" if base in found else ""

    def part(name: str) -> Column:
        return lambda turns: f"{of(name, 0, turns):.3f}"

    first = next(iter(found.values()))[0]
    columns: dict[str, Column] = {
        "step": part("step"),
        "quartiles": lambda turns: f"{of('step', 1, turns):.2f}-{of('step', 2, turns):.2f}",
        **{name: part(name) for name in first["ms"] if name != "step"},
        "kB sent": column("kilobytes_sent", ".3f"),
        "MiB peak": column("peak_mib", ".0f"),
        **{f"/ {base}": partial(ratio, base) for base in ("alone", "dense")},
    }
    return table("", found, columns)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = command_line("training_step", __doc__)
    add_arguments(parser, [*CONTENDERS], turns=1)
    add = parser.add_argument
    add("--model", choices=MODELS, default="vgg16")
    add("--batch", type=at_least(1), default=128, help="images or sequences per rank and step (default: 128)")
    add("--length", type=at_least(1), default=1024, help="most tokens of a sequence (default: 1024)")
    add("--density", type=real(below=1), default=0.001, help="share of the entries (default: 0.001)")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--overlap", action="store_true", help="exchange during the backward pass, as in training")
    add("--steps", type=at_least(1), default=30, help="measured steps (default: 30)")
    add("--warmup", type=at_least(0), default=8, help="steps before them (default: 8)")
    options = parser.parse_args()
    try:
        for contender in options.contenders:
            configuration_of(contender, options.density)
    except ValueError as error:
        parser.error(str(error))
    return options


def main() -> int:
    """Measure on all ranks; print and save on rank 0."""
    options = parse_arguments()
    transport = connect(options.device)
    facts = {"machine": machine(options.device)}
    names = ("model", "batch", "length", "density", "device", "overlap", "steps", "warmup")
    cell = {name: getattr(options, name) for name in names} | {"ranks": transport.size}
    if transport.rank == 0:
        print("   ".join(f"{name}: {value}" for name, value in facts["machine"].items()))
    open_cell = lambda **_: nullcontext(lambda name: asdict(measure(options, transport, name)) | facts)  # noqa: E731
    run(options, [cell], open_cell, show, transport.rank, transport.broadcast_object)
    transport.barrier()
    return 0


if __name__ == "__main__":
    sys.exit(main())
