"""Steps per second with regular checkpoints by ``async_save`` or ``save``, and without checkpoints.

    mpirun -np 2 python -m benchmarks.saving --folder /scratch/saving

A step sleeps for ``--device-ms``, as if it waited for a GPU, and then exchanges the gradients of all parameters. The
three methods alternate in blocks of steps, as the machine may be shared. A block saves after its first step and waits
for its last save before it ends. Times are those of the slowest rank.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

import horovod_sparse as hvs
from benchmarks import command_line, interleaved


class Training:
    """A model of large layers whose steps sleep for a fixed time instead of computing gradients."""

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
        self._gradients = [torch.randn_like(parameter) for parameter in self.model]

    def step(self) -> None:
        """Sleep, and update the parameters with random gradients."""
        time.sleep(self._seconds)
        for parameter, gradient in zip(self.model, self._gradients, strict=True):
            parameter.grad = gradient.clone()
        self.optimizer.step()


def main() -> None:
    """Measure, and print a table on rank 0."""
    options = _parse()
    hvd.init()
    training = Training(options)
    folder = Path(options.folder) / "checkpoints"
    checkpoints = hvs.checkpoint.Checkpoints(folder, keep=2)
    methods = {
        "none": lambda _: None,
        "async_save": lambda step: checkpoints.async_save(step, model=training.model, optimizer=training.optimizer),
        "save": lambda step: checkpoints.save(step, model=training.model, optimizer=training.optimizer),
    }
    for save in methods.values():
        _block(training, save, checkpoints, options)  # allocates the copies, and caches the files
    rates = interleaved(methods.items(), lambda save: _block(training, save, checkpoints, options), options.rounds)
    if hvd.rank() == 0:
        _show(rates, options, sum(path.stat().st_size for path in folder.rglob("*.pt")) / 2)
        shutil.rmtree(folder)


def _block(training: Training, save: Callable[[int], Any], checkpoints: Any, options: argparse.Namespace) -> float:
    """Return the steps per second of one block on the slowest rank."""
    hvd.barrier()
    start = time.perf_counter()
    for step in range(1, options.steps + 1):
        training.step()
        if step % options.every == 1 % options.every:  # the same number of steps follows each save
            save(step)
    checkpoints.wait()
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    slowest: float = hvd.allreduce(seconds, op=hvd.Max, name="seconds").item()
    return float(options.steps) / slowest


def _show(rates: dict[str, list[float]], options: argparse.Namespace, size: float) -> None:
    print(
        f"{hvd.size()} ranks, {options.millions} Mi parameters, {size / 2**20:.0f} MiB per checkpoint, every "
        f"{options.every} steps, {options.device_ms:g} ms per step on the device, {options.compression}"
    )
    print(f"{'saved by':10} {'steps/s':>10} {'range':>16} {'slower by':>10} {'range of rounds':>18}")
    for method, found in rates.items():
        slower = [100 * (without / rate - 1) for without, rate in zip(rates["none"], found, strict=True)]
        spread, rounds = f"{min(found):.2f}-{max(found):.2f}", f"{min(slower):.1f}-{max(slower):.1f} %"
        print(f"{method:10} {median(found):10.2f} {spread:>16} {median(slower):8.1f} % {rounds:>18}")


def _parse() -> argparse.Namespace:
    parser = command_line("saving", __doc__)
    parser.add_argument("--folder", default="runs/saving", help="folder for the checkpoints (default: %(default)s)")
    parser.add_argument("--compression", default="topka:density=0.01", help="compression (default: %(default)s)")
    parser.add_argument("--millions", type=int, default=16, help="parameters in units of 2**20 (default: %(default)s)")
    parser.add_argument(
        "--device-ms", type=float, default=100, help="device time per step in ms (default: %(default)s)"
    )
    parser.add_argument("--every", type=int, default=20, help="steps between two saves (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="steps per block (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="blocks per method (default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
