"""Where the time of a training step goes, as in Fig. 4 of Yoon and Oh (2022), and what compression adds to computing.

    python -m benchmarks.training_step --device cuda --model vgg16 --batch 128 --density 0.001 --json runs/1.json
    mpirun -n 4 python -m benchmarks.training_step --device cuda --json runs/4.json    # ranks share the GPU
    torchrun --nproc-per-node 2 -m benchmarks.training_step --device cuda              # over Gloo
    python -m benchmarks.training_step --device cuda --model gpt2 --batch 8 --density 0.01 --overlap
    python -m benchmarks.training_step.figure runs/1.json runs/4.json --output runs/step

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
from dataclasses import asdict
from pathlib import Path

import torch
from torch import distributed

from benchmarks import command_line, save, single_rank
from benchmarks.kernels.selection import machine
from benchmarks.training_step.exchange import CONTENDERS, configuration_of
from benchmarks.training_step.measure import PARTS, Measurement, measure
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


def ratios(found: dict[str, Measurement]) -> dict[str, dict[str, float]]:
    """Return the median step of each contender as a multiple of computing alone and of the dense exchange."""
    step = {name: one.ms["step"][0] for name, one in found.items()}
    return {
        name: {f"to_{base}": step[name] / step[base] for base in ("alone", "dense") if base in step} for name in found
    }


def show(found: dict[str, Measurement], overlap: bool) -> None:
    """Print the table."""
    parts = [*PARTS] if overlap else [*PARTS, "rest"]
    heads = ("step", "quartiles", *parts, "kB sent", "MiB peak", "/ alone", "/ dense")
    print(f"{'':14}" + "".join(f"{head:>15}" for head in heads))
    for (name, one), ratio in zip(found.items(), ratios(found).values(), strict=True):
        median, low, high = one.ms["step"]
        numbers = [one.ms[part][0] for part in parts]
        numbers += [one.kilobytes_sent, one.peak_mib or 0, ratio.get("to_alone", 0), ratio.get("to_dense", 0)]
        row = "".join(f"{number:15.3f}" for number in numbers)
        print(f"{name[:14]:14}{median:15.3f}{f'{low:.2f}-{high:.2f}':>15}{row}")


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = command_line("training_step", __doc__)
    add = parser.add_argument
    add("--model", choices=MODELS, default="vgg16")
    add("--batch", type=at_least(1), default=128, help="images or sequences per rank and step (default: 128)")
    add("--length", type=at_least(1), default=1024, help="most tokens of a sequence (default: 1024)")
    add("--density", type=real(below=1), default=0.001, help="share of the entries (default: 0.001)")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--overlap", action="store_true", help="exchange during the backward pass, as in training")
    add("--contenders", nargs="+", default=[*CONTENDERS], metavar="NAME", help="names or configurations; default: all")
    add("--steps", type=at_least(1), default=30, help="measured steps (default: 30)")
    add("--warmup", type=at_least(0), default=8, help="steps before them (default: 8)")
    add("--json", type=Path, help="write the measurements to this file")
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
    found = {name: measure(options, transport, name) for name in options.contenders}
    if transport.rank == 0:
        settings = {name: value for name, value in vars(options).items() if name not in ("json", "contenders")}
        environment = machine(options.device)
        print("   ".join(f"{name}: {value}" for name, value in environment.items()))
        print("   ".join(f"{name}: {value}" for name, value in settings.items()) + f"   ranks: {transport.size}")
        show(found, options.overlap)
        if options.json:
            results = {
                name: asdict(one) | ratio
                for (name, one), ratio in zip(found.items(), ratios(found).values(), strict=True)
            }
            save(options.json, {"machine": environment, **settings, "ranks": transport.size, "contenders": results})
    transport.barrier()
    return 0


if __name__ == "__main__":
    sys.exit(main())
