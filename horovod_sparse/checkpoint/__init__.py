"""Checkpoints of sparse training, saved by all ranks together and loadable with any world size.

::

    training = hvs.checkpoint.Training("checkpoints", model=model, optimizer=optimizer, scheduler=scheduler, data=data)
    for step in training.steps(100_000):
        ...
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from horovod_sparse.checkpoint.checkpoints import Checkpoints
    from horovod_sparse.checkpoint.manifest import CheckpointError
    from horovod_sparse.checkpoint.preemption import on_preemption
    from horovod_sparse.checkpoint.restore import Restored
    from horovod_sparse.checkpoint.training import Training

__all__ = ["CheckpointError", "Checkpoints", "Restored", "Training", "on_preemption"]

# Imported lazily: `horovod-sparse checkpoint` must run where MPI does not start and torch is not installed.
_MODULE_OF = {
    "CheckpointError": "manifest",
    "Checkpoints": "checkpoints",
    "Restored": "restore",
    "Training": "training",
    "on_preemption": "preemption",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its module on first use."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
