"""Steps per second with a checkpoint every so many steps, saved beside the training or by the program, against without.

    mpirun -np 2 python -m benchmarks.saving --folder /scratch/saving

A step waits for a device, as where GPUs compute (``--device-ms``), after that the gradients of all parameters are
exchanged. The three ways take turns, a block of steps each, as the machine may be shared; a block begins with a save,
and the last one is waited for within it. The slowest rank's time counts.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

import horovod_sparse as hvs
from benchmarks import command_line

_WAYS = ("none", "beside", "program")


class Training:
    """A model of large layers, whose gradients are numbers, so that a step takes the time that is asked for.

    Args:
        options: Of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.model = nn.ParameterList(torch.randn(1024, 1024) for _ in range(options.millions))
        plain = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.optimizer: Any = hvs.DistributedOptimizer(
            plain,
            named_parameters=self.model.named_parameters(),
            compression=hvs.parse(options.compression),
        )
        self._seconds = options.device_ms / 1e3
        self._gradients = [torch.randn_like(one) for one in self.model]

    def step(self) -> None:
        """One step."""
        time.sleep(self._seconds)
        for parameter, gradient in zip(self.model, self._gradients, strict=True):
            parameter.grad = gradient.clone()
        self.optimizer.step()


def main() -> None:
    """Measures, and prints a table on rank 0."""
    options = _parse()
    hvd.init()
    training = Training(options)
    folder = Path(options.folder) / "checkpoints"
    checkpoints = hvs.checkpoint.Checkpoints(folder, keep=2)
    ways = {
        "none": lambda _: None,
        "beside": lambda step: checkpoints.async_save(step, model=training.model, optimizer=training.optimizer),
        "program": lambda step: checkpoints.save(step, model=training.model, optimizer=training.optimizer),
    }
    for save in ways.values():
        _block(training, save, checkpoints, options)  # memory for the copies, files in the cache
    rates: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(options.rounds):
        for way, save in ways.items():
            rates[way].append(_block(training, save, checkpoints, options))
    if hvd.rank() == 0:
        _show(rates, options, sum(path.stat().st_size for path in folder.rglob("*.pt")) / 2)
        shutil.rmtree(folder)


def _block(training: Training, save: Callable[[int], Any], checkpoints: Any, options: argparse.Namespace) -> float:
    """Steps per second of the slowest rank."""
    hvd.barrier()
    start = time.perf_counter()
    for step in range(1, options.steps + 1):
        training.step()
        if step % options.every == 1 % options.every:  # so that as many steps follow each save
            save(step)
    checkpoints.wait()
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    slowest: float = hvd.allreduce(seconds, op=hvd.Max, name="seconds").item()
    return float(options.steps) / slowest


def _show(rates: dict[str, list[float]], options: argparse.Namespace, size: float) -> None:
    print(
        f"{hvd.size()} ranks, {options.millions} Mi parameters, {size / 2**20:.0f} MiB a checkpoint, every "
        f"{options.every} steps of {options.device_ms:g} ms on the device, {options.compression}"
    )
    print(f"{'saved by':10} {'steps/s':>10} {'range':>16} {'slower by':>10} {'range of rounds':>18}")
    for way in _WAYS:
        slower = [100 * (without / rate - 1) for without, rate in zip(rates["none"], rates[way], strict=True)]
        rate, spread = statistics.median(rates[way]), f"{min(rates[way]):.2f}-{max(rates[way]):.2f}"
        rounds = f"{min(slower):.1f}-{max(slower):.1f} %"
        print(f"{way:10} {rate:10.2f} {spread:>16} {statistics.median(slower):8.1f} % {rounds:>18}")


def _parse() -> argparse.Namespace:
    parser = command_line("saving", __doc__)
    parser.add_argument("--folder", default="runs/saving", help="for the checkpoints (default: %(default)s)")
    parser.add_argument("--compression", default="topka:density=0.01", help="default: %(default)s")
    parser.add_argument("--millions", type=int, default=16, help="parameters in units of 2**20 (default: %(default)s)")
    parser.add_argument("--device-ms", type=float, default=100, help="of a step (default: %(default)s)")
    parser.add_argument("--every", type=int, default=20, help="steps from save to save (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="of a block (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="blocks of each way (default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
