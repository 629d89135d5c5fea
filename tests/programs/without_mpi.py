"""Trains with DDP under torchrun, where neither mpi4py nor Horovod can be imported; rank 1 fails if it is told to.

    without_mpi.py none|exit|raise|kill|sleep|stop[@STEP] SPEC [FOLDER]

The fault happens in step 5, or another, in the first attempt of torchrun only. With a folder, the training resumes from
its newest checkpoint, and saves one every second step.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time


class Forbidden:
    """Import hook of a machine without MPI."""

    def find_spec(self, name, *_):
        if name.partition(".")[0] in ("mpi4py", "horovod"):
            raise ImportError(f"{name} is forbidden")


sys.meta_path.insert(0, Forbidden())

import torch  # noqa: E402
from torch import distributed, nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import horovod_sparse as hvs  # noqa: E402
from horovod_sparse.control import watch  # noqa: E402

watch._PERIOD, watch._PATIENCE = 0.2, 1.5  # looks often, and waits less for an answer
STEPS = 10
FAULTS = {
    "none": lambda: None,
    "exit": lambda: sys.exit(0),
    "raise": lambda: {}["the data set is gone"],
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "sleep": lambda: time.sleep(1000),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}


def digest(model):
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


def main(fault, spec, folder=None):
    distributed.init_process_group("gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 10))
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    limits = {"stall_timeout": 2, "stall_abort": 4} if fault in ("sleep", "stop") else {}
    state = hvs.ddp.SparseState(hvs.parse(spec), optimizer, model.named_parameters(), **limits)
    replica.register_comm_hook(state, hvs.ddp.sparse_hook)
    checkpoints, first, notes = None, 0, []
    if folder is not None:
        checkpoints = hvs.checkpoint.Checkpoints(folder)
        restored = checkpoints.load(model=model, optimizer=optimizer)
        if restored is not None:
            first, notes = restored.step, restored.notes
    fault, _, at = fault.partition("@")
    for step in range(first, STEPS):
        if step == int(at or 5) and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            FAULTS[fault]()
        generator = torch.Generator().manual_seed(100 * step + rank)
        x = torch.randn(8, 20, generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(replica(x), x[:, :10].argmax(1)).backward()
        optimizer.step()
        if checkpoints is not None and step % 2:
            checkpoints.save(step + 1, model=model, optimizer=optimizer)
    report = {"rank": rank, "ranks": ranks, "first": first, "digest": digest(model), "notes": notes}
    sys.stdout.write(f"\n{json.dumps(report | {'sent': state.traffic.bytes_sent})}\n")
    distributed.destroy_process_group()


main(*sys.argv[1:])
