"""examples/restart.py, or the training with given gradients below, with a rank that is killed where a file says.

    struck.py STRIKE TRACE given|restart [arguments]

STRIKE is a file with "PHASE RANK", which is renamed before that rank is killed with SIGKILL. PHASE is one of:

    construct  before the training is created
    restore    while the checkpoint is read
    save       after a part of a checkpoint has been written, which has no name yet
    first      after the first step of this process
    step       some steps later

TRACE is a file to which rank 0 appends "start", "step" and "done", with step, number of ranks and time. ``given`` is
a training whose gradients are prescribed: the sum of those in all steps that counted, of which a checkpoint holds the
sum so far, must be in the parameters and the residuals.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import horovod_sparse as hvs
from horovod_sparse.checkpoint import restore, store, training
from horovod_sparse.control.lifecycle import process

TESTS = Path(__file__).resolve().parents[1]
sys.path.append(str(TESTS))
STRIKE, TRACE, KIND, ARGUMENTS = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4:]
BORN = time.time()
LATER = 8  # steps


def strike(*phases: str) -> None:
    """Kill this process if the file says so."""
    try:
        phase, rank = STRIKE.read_text().split()
    except (OSError, ValueError):
        return
    names = ("OMPI_COMM_WORLD_RANK", "RANK", "SLURM_PROCID")
    if phase in phases and rank == next(os.environ[name] for name in names if name in os.environ):
        STRIKE.rename(STRIKE.with_suffix(".done"))
        os.kill(os.getpid(), signal.SIGKILL)


def trace(event: str, step: int, ranks: int) -> None:
    with TRACE.open("a") as file:
        file.write(f"{event} {step} {ranks} {BORN:.3f} {time.time():.3f}\n")


class Struck(training.Training):
    """Training that is killed at a phase."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        strike("construct")
        super().__init__(*arguments, **settings)
        self.taken = 0
        if self._transport.rank == 0:
            trace("start", self.step, self._transport.size)

    def _agree(self, *arguments: Any) -> list[bool]:
        self.taken += 1
        strike(*(["first"] if self.taken == 1 else []), *(["step"] if self.taken > LATER else []))
        if self._transport.rank == 0:
            trace("step", self.step, self._transport.size)
        return super()._agree(*arguments)


def around(owner: Any, name: str, phase: str, before: bool) -> None:
    function = getattr(owner, name)

    def struck(*arguments: Any) -> Any:
        if before:
            strike(phase)
        result = function(*arguments)
        strike(phase)
        return result

    setattr(owner, name, struck)


class Sum:
    """Sum of the updates that all ranks were given, as data of a training."""

    def __init__(self) -> None:
        self.given = 0.0

    def state_dict(self) -> dict[str, float]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.given = state["given"]


def ended(folder: str) -> bool:
    """Return on all ranks whether a file has appeared that ends the training; the last step is then incomplete."""
    found = torch.tensor([distributed.get_rank() == 0 and Path(folder).with_name("stop").exists()], dtype=torch.int32)
    distributed.all_reduce(found)
    return bool(found)


def given(folder: str, steps: str, every: str, compression: str) -> None:
    """Train with DDP; rank 0 appends the sums to the trace."""
    from training import Given, owed

    hvs.ddp.init_process_group("gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    model, data = Given(), Sum()
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    state = hvs.ddp.SparseState(hvs.parse(compression), optimizer, model.named_parameters())
    replica.register_comm_hook(state, hvs.ddp.sparse_hook)
    own = Struck(folder, model=model, optimizer=optimizer, data=data, every=int(every), run=compression)
    for step in own.steps(int(steps)):
        if ended(folder):
            break
        optimizer.zero_grad()
        replica(rank, step).backward()
        optimizer.step()
        data.given += 0.5 * sum(model.total(other, step) for other in range(ranks)) / ranks
        time.sleep(0.02)
    left: list[Any] = [None] * ranks
    distributed.all_gather_object(left, owed(state))
    if rank == 0:
        with TRACE.open("a") as file:
            file.write(f"done {own.step} {ranks} {model.moved()} {sum(left)} {data.given}\n")  # six words
    distributed.destroy_process_group()


around(store, "write", "save", before=False)
around(restore, "read_own", "restore", before=True)
if KIND == "given":
    try:
        given(*ARGUMENTS)
    except SystemExit as preempted:
        process.close()
        sys.stderr.flush()
        os._exit(int(str(preempted)))  # without the teardown of the server's modules, which takes seconds
else:
    training.Training = Struck  # type: ignore[misc]
    sys.argv = ["restart.py", *ARGUMENTS]
    runpy.run_path(str(TESTS.parent / "examples" / "restart.py"), run_name="__main__")
