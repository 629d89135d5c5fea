"""Seconds from the death of a rank to the next step, steps lost, and the cost of saving, by the size of a model.

    python -m benchmarks.restarts --folder /scratch/restarts --millions 1 25 100

Starts torchrun with two ranks that train with DDP and ``hvs.checkpoint.Training``. A step sleeps, as if it waited for a
GPU, and then exchanges the gradients of all parameters. One of the ranks is killed again and again, at a random moment
after a regular save.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import distributed, nn

import horovod_sparse as hvs
from benchmarks import command_line
from horovod_sparse.checkpoint.folder import Folder

LIMIT = 600  # seconds to wait for anything
COMPRESSION = "topka:density=0.01"


class Restart(NamedTuple):
    """Seconds from a kill to the start of the new processes and to their first step, and the steps taken again."""

    process: float
    step: float
    lost: int


class Model(nn.Module):
    """Parameters whose gradients are their values."""

    def __init__(self, millions: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ParameterList(torch.randn(1000, 1000) for _ in range(millions))

    def forward(self) -> torch.Tensor:
        """Return half of the square of their norm."""
        total: torch.Tensor = sum(layer.square().sum() for layer in self.layers) / 2
        return total


def _born() -> float:
    """Return when this process was started, in seconds since the epoch."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    now = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - now + ticks / os.sysconf("SC_CLK_TCK")


def train(options: argparse.Namespace) -> None:
    """Train on one rank, and append what happens to the trace."""
    hvs.ddp.init_process_group("gloo")
    rank, folder = distributed.get_rank(), Path(options.folder)

    def trace(*words: object) -> None:
        with (folder / "trace").open("a") as file:
            print(*words, time.time(), file=file)

    trace("born", rank, os.getpid(), _born())
    model = Model(options.millions[0])
    replica = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    state = hvs.ddp.SparseState(hvs.parse(COMPRESSION), optimizer, model.named_parameters())
    replica.register_comm_hook(state, hvs.ddp.sparse_hook)
    training = hvs.checkpoint.Training(folder / "checkpoints", every=options.every, model=model, optimizer=optimizer)
    for step in training.steps(10**9):
        time.sleep(options.device_ms / 1e3)
        optimizer.zero_grad()
        replica().backward()
        optimizer.step()
        if (folder / "stop").exists():
            training.stop()
        if rank == 0:
            trace("step", step, training.overhead)
    distributed.destroy_process_group()


class Run:
    """A training under torchrun that is disturbed."""

    def __init__(self, options: argparse.Namespace, millions: int) -> None:
        self._folder = Path(options.folder) / str(millions)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        (self._folder / "trace").touch()
        arguments = ["--millions", str(millions), "--device-ms", str(options.device_ms), "--every", str(options.every)]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [
            "--max-restarts",
            str(options.kills),
            "-m",
            "benchmarks.restarts",
            "--rank",
            "--folder",
            str(self._folder),
        ]
        environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with (self._folder / "output").open("wb") as output:
            self._process = subprocess.Popen(
                [*torchrun, *command, *arguments], env=environment, stdout=output, stderr=output
            )

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()

    def lines(self, kind: str) -> list[list[str]]:
        """Return the lines of the trace of one kind."""
        lines = [line.split() for line in (self._folder / "trace").read_text().splitlines()]
        return [words[1:] for words in lines if words[:1] == [kind] and len(words) == 4 + (kind == "born")]

    def until(self, condition: Any) -> None:
        """Wait for a condition while the training runs."""
        end = time.monotonic() + LIMIT
        while not condition():
            if time.monotonic() > end or self._process.poll() is not None:
                raise RuntimeError(f"the training has ended or hangs: see {self._folder / 'output'}")
            time.sleep(0.02)

    def steps(self) -> list[int]:
        """Return the steps of the regular checkpoints, newest first."""
        return [one.step for one in Folder(self._folder / "checkpoints").checkpoints() if one.step]

    def kill(self, generator: random.Random, within: float) -> Restart:
        """Kill a rank within some seconds after a regular save, and wait for the next step."""
        before = self.steps()
        self.until(lambda: self.steps() not in ([], before))
        time.sleep(generator.uniform(0, within))
        ranks, steps = self.lines("born"), len(self.lines("step"))
        _, pid, *_ = generator.choice(ranks[-2:])
        reached, start = int(self.lines("step")[-1][0]), time.time()
        os.kill(int(pid), signal.SIGKILL)
        self.until(lambda: len(self.lines("born")) >= len(ranks) + 2)
        born = max(float(words[2]) for words in self.lines("born")[-2:])
        self.until(lambda: any(float(words[-1]) > born for words in self.lines("step")[steps:]))
        step, _, at = next(words for words in self.lines("step")[steps:] if float(words[-1]) > born)
        return Restart(born - start, float(at) - start, max(reached + 1 - int(step), 0))

    def end(self, seconds: float) -> tuple[float, float, int]:
        """Train undisturbed, and end; return the share that saves cost, ms per step, and steps between two saves."""
        time.sleep(seconds)
        steps, saved = self.lines("step"), [*self.steps(), 0, 0]
        (self._folder / "stop").touch()
        if self._process.wait(LIMIT) != 0:
            raise RuntimeError(f"the training failed: see {self._folder / 'output'}")
        times = [float(words[-1]) for words in steps[-50:]]
        return float(steps[-1][1]), 1e3 * (times[-1] - times[0]) / (len(times) - 1), saved[0] - saved[1]


def main() -> None:
    """Measure, and print a row for each size."""
    options = _parse()
    if options.rank:
        train(options)
        return
    print("parameters, ms a step, s to new processes, s to the next step, steps lost, steps between saves, % for saves")
    for millions in options.millions:
        generator = random.Random(millions)
        with Run(options, millions) as run:
            restarts = [run.kill(generator, options.within) for _ in range(options.kills)]
            overhead, ms, between = run.end(options.seconds)
        process, step, lost = ([getattr(one, name) for one in restarts] for name in Restart._fields)
        print(
            f"{millions} M, {ms:.0f}, {_range(process)}, {_range(step)}, {_range(lost)}, {between}, {overhead:.2%}",
            flush=True,
        )
        shutil.rmtree(Path(options.folder) / str(millions))


def _range(values: list[float]) -> str:
    return f"{median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def _interval(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _parse() -> argparse.Namespace:
    parser = command_line("restarts", __doc__)
    parser.add_argument("--folder", required=True, help="folder for checkpoints")
    parser.add_argument("--millions", type=int, nargs="+", default=[1, 25, 100], help="millions of parameters")
    parser.add_argument("--kills", type=int, default=5, help="kills for each size")
    parser.add_argument("--within", type=float, default=10, help="a kill follows a save within these seconds")
    parser.add_argument("--seconds", type=float, default=120, help="seconds without kills at the end")
    parser.add_argument("--device-ms", type=float, default=100, help="milliseconds that a step sleeps")
    parser.add_argument("--every", type=_interval, default="1%", help="interval of the saves")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
