"""Steps per second with regular checkpoints by ``async_save`` or ``save``, and without checkpoints.

    mpirun -np 2 python -m benchmarks.saving --folder /scratch/saving

A step sleeps for ``--device-ms``, as if it waited for a GPU, and then exchanges the gradients of all parameters. The
three contenders take turns. A turn saves after its first step and waits for its last save before it ends. Times are
those of the slowest rank. "Slower" compares with the turn of the same number that saves nothing.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

import horovod_sparse as hvs
from benchmarks import command_line
from benchmarks.runner import Found, Measure, Record, Turns, add_arguments, column, run, spread, table, values
from horovod_sparse.cli.units import at_least

_NONE = "none"


class Training:
    """A model of large layers whose steps sleep for a fixed time instead of computing gradients."""

    def __init__(self, compression: str, millions: int, device_ms: float) -> None:
        torch.manual_seed(0)
        self.model = nn.ParameterList(torch.randn(1024, 1024) for _ in range(millions))
        plain = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.optimizer: Any = hvs.DistributedOptimizer(
            plain,
            named_parameters=self.model.named_parameters(),
            compression=hvs.parse(compression),
        )
        self._seconds = device_ms / 1e3
        self._gradients = [torch.randn_like(parameter) for parameter in self.model]

    def step(self) -> None:
        """Sleep, and update the parameters with random gradients."""
        time.sleep(self._seconds)
        for parameter, gradient in zip(self.model, self._gradients, strict=True):
            parameter.grad = gradient.clone()
        self.optimizer.step()


def main() -> None:
    """Measure, and print a table on rank 0."""
    parser = command_line("saving", __doc__)
    add_arguments(parser, (_NONE, "async_save", "save"), turns=5)
    add = parser.add_argument
    add("--folder", default="runs/saving", help="folder for the checkpoints (default: %(default)s)")
    add("--compression", default="topka:density=0.01", help="compression (default: %(default)s)")
    add("--millions", type=at_least(1), default=16, help="parameters in units of 2**20 (default: %(default)s)")
    add("--device-ms", type=float, default=100, help="device time per step in ms (default: %(default)s)")
    add("--every", type=at_least(1), default=20, help="steps between two saves (default: %(default)s)")
    add("--steps", type=at_least(1), default=100, help="steps per turn (default: %(default)s)")
    options = parser.parse_args()
    hvd.init()
    names = ("millions", "every", "device_ms", "compression", "steps")
    cell = {"ranks": hvd.size(), **{name: getattr(options, name) for name in names}}
    open_cell = partial(_open_cell, options.contenders, Path(options.folder) / "checkpoints")
    run(options, [cell], open_cell, show, hvd.rank(), hvd.broadcast_object)


@contextmanager
def _open_cell(
    contenders: Sequence[str],
    folder: Path,
    ranks: int,
    millions: int,
    every: int,
    device_ms: float,
    compression: str,
    steps: int,
) -> Iterator[Measure]:
    del ranks  # a setting of mpirun
    training = Training(compression, millions, device_ms)
    checkpoints = hvs.checkpoint.Checkpoints(folder, keep=2)

    def measure(name: str) -> Record:
        """Return the steps per second of one turn on the slowest rank."""
        save = (lambda *_, **__: None) if name == _NONE else getattr(checkpoints, name)
        hvd.barrier()
        start = time.perf_counter()
        for step in range(1, steps + 1):
            training.step()
            if step % every == 1 % every:  # the same number of steps follows each save
                save(step, model=training.model, optimizer=training.optimizer)
        checkpoints.wait()
        seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        size = sum(path.stat().st_size for path in folder.rglob("*.pt")) / 2
        return {"rate": steps / hvd.allreduce(seconds, op=hvd.Max, name="seconds").item(), "MiB": size / 2**20}

    for name in contenders:
        measure(name)  # allocates the copies, and caches the files
    yield measure
    if hvd.rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)


def show(found: Found) -> str:
    """Return the table: steps per second, how much slower than without saving, and the size of a checkpoint."""

    def slower(turns: Turns) -> list[Record]:
        pairs = zip(values(found[_NONE], "rate"), values(turns, "rate"), strict=True)
        return [{"slower": 100 * (without / rate - 1)} for without, rate in pairs]

    rates = {f"steps/s, {head}": of for head, of in spread("rate", ".2f").items()}
    percent = {f"slower by %, {head}": lambda turns, of=of: of(slower(turns)) for head, of in spread("slower").items()}
    return table("saved by", found, {**rates, **(percent if _NONE in found else {}), "MiB": column("MiB", ".0f", max)})


if __name__ == "__main__":
    main()
