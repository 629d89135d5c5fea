"""Rank 1 leaves while something of its own is in progress, and the other ranks are somewhere else.

    in_flight.py bucket save|preempted|construction|bucket|horovod|nowhere
    in_flight.py checkpoint
    in_flight.py SystemExit|TimeoutError|KeyboardInterrupt|caught

In the first two forms rank 1 leaves the program between backward() and step(), or while its checkpoint is being
written in the background. The others wait in the call that is named; "nowhere" and with "checkpoint" they compute for a
while, and then complete what rank 1 has begun. In the third form rank 1 waits in step(), where a signal handler raises
an exception, and the others compute. Rank 1 prints when it leaves, in seconds of the system's clock.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import time

import horovod.torch as hvd
import torch

import horovod_sparse as hvs
from horovod_sparse.checkpoint import checkpoints as saving

COMPUTING = 5  # seconds; more than a rank that has left is waited for

hvd.init()
how, where = sys.argv[1], sys.argv[-1]
EXCEPTIONS = {"SystemExit": SystemExit(3), "TimeoutError": TimeoutError("it took too long"), "caught": TimeoutError()}


def wrap(model: torch.nn.Module):
    compression = hvs.Compression.topka(density=0.1, dense_below=0)
    return hvs.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression)


def backward(model: torch.nn.Module) -> None:
    model(torch.randn(4, 100)).square().mean().backward()


def step(model: torch.nn.Module, optimizer) -> None:
    backward(model)
    optimizer.step()
    optimizer.zero_grad()


def leave() -> None:
    print(f"leaves at {time.time()}", flush=True)
    sys.exit(0)


def be_interrupted() -> None:
    def handler(*_: object) -> None:
        print(f"leaves at {time.time()}", flush=True)
        raise EXCEPTIONS.get(how, KeyboardInterrupt())

    signal.signal(signal.SIGALRM, handler)
    signal.alarm(1)
    try:
        step(model, optimizer)
    except TimeoutError:
        if how != "caught":
            raise
    step(model, optimizer)


def save_slowly() -> None:
    store = saving.store

    def slow_store(*arguments, **settings) -> str:
        time.sleep(COMPUTING * (hvd.rank() == 1))
        return store(*arguments, **settings)

    saving.store = slow_store
    checkpoints.async_save(1, model=model, optimizer=optimizer)


def wait_elsewhere() -> None:
    if where == "save":
        checkpoints.save(1, model=model, optimizer=optimizer)
    elif where == "preempted":
        preempted()
    elif where == "construction":
        wrap(torch.nn.Linear(100, 100))
    elif where == "bucket":
        step(other_model, other)
    elif where == "horovod":
        hvd.allreduce(torch.ones(3), name="metric")
    elif where == "checkpoint":
        checkpoints.wait()
    else:
        time.sleep(COMPUTING if where == "nowhere" else 4 * COMPUTING)
        backward(model)


model, other_model = torch.nn.Linear(100, 100), torch.nn.Linear(100, 100)
optimizer, other = wrap(model), wrap(other_model)
with hvs.checkpoint.on_preemption() as preempted, tempfile.TemporaryDirectory() as folder:
    checkpoints = hvs.checkpoint.Checkpoints(hvd.broadcast_object(folder))
    step(model, optimizer)
    step(other_model, other)
    assert not preempted()
    if how == "checkpoint":
        save_slowly()
    if hvd.rank() != 1:
        wait_elsewhere()
    elif how == "checkpoint":
        leave()
    elif how == "bucket":
        backward(model)
        leave()
    else:
        be_interrupted()
    print("completed", flush=True)
