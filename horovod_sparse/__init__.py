"""Sparse gradient exchange with error feedback for Horovod.

One changed line in a Horovod script::

    import horovod.torch as hvd
    import horovod_sparse as hvs

    hvd.init()
    optimizer = hvs.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvs.Compression.topka(density=0.01),
    )
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from horovod_sparse import trace

if TYPE_CHECKING:
    from horovod_sparse import checkpoint
    from horovod_sparse.compression import Compression, Sparse, parse, register
    from horovod_sparse.pipeline.allreduce import SparseAllreduce
    from horovod_sparse.rules import SparseVector
    from horovod_sparse.training import ddp
    from horovod_sparse.training.local import LocalOptimizer
    from horovod_sparse.training.optimizer import DistributedOptimizer
    from horovod_sparse.training.outer import OuterSGD

__version__ = "0.1.0"

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "LocalOptimizer",
    "OuterSGD",
    "Sparse",
    "SparseAllreduce",
    "SparseVector",
    "checkpoint",
    "ddp",
    "parse",
    "register",
    "trace",
]

# Loaded when asked for: `horovod-sparse check` must run where MPI does not start, and collectives where neither
# torch nor Horovod is installed.
_MODULES = {"checkpoint": "checkpoint", "ddp": "training.ddp"}
_MODULE_OF = {
    "Compression": "compression",
    "Sparse": "compression",
    "parse": "compression",
    "register": "compression",
    "DistributedOptimizer": "training.optimizer",
    "LocalOptimizer": "training.local",
    "OuterSGD": "training.outer",
    "SparseAllreduce": "pipeline.allreduce",
    "SparseVector": "rules",
}


def __getattr__(name: str) -> Any:
    """Loads a public name from its module on first use."""
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{_MODULES[name]}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
