"""Checkpoints of a training with sparse exchange: saved by all ranks together, loaded on any number of them.

::

    checkpoints = hvs.checkpoint.Checkpoints("checkpoints", keep=3)
    restored = checkpoints.load(model=model, optimizer=optimizer, scheduler=scheduler)
    step = restored.step if restored else 0
    with hvs.checkpoint.on_preemption() as preempted:
        while step < steps:
            ...
            step += 1
            if preempted() or step % 1000 == 0:
                checkpoints.save(step, model=model, optimizer=optimizer, scheduler=scheduler)
            if preempted():
                break
"""

from __future__ import annotations

from horovod_sparse.checkpoint.checkpoints import Checkpoints, Restored
from horovod_sparse.checkpoint.preemption import on_preemption
from horovod_sparse.checkpoint.together import CheckpointError

__all__ = ["CheckpointError", "Checkpoints", "Restored", "on_preemption"]
