"""Sparse gradient exchange with error feedback for Horovod and PyTorch, over MPI.

In a Horovod script, replace ``hvd.DistributedOptimizer`` and choose a compression::

    import horovod.torch as hvd
    import horovod_sparse as hvs

    hvd.init()
    optimizer = hvs.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvs.Compression.recommended(),
    )
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from horovod_sparse import metrics

if TYPE_CHECKING:
    from horovod_sparse import checkpoint
    from horovod_sparse.config import Compression, Sparse, parse, register
    from horovod_sparse.frontends import ddp, fsdp
    from horovod_sparse.frontends.arrays import SparseAllreduce
    from horovod_sparse.frontends.horovod.optimizer import DistributedOptimizer
    from horovod_sparse.frontends.local_sgd.optimizer import LocalOptimizer
    from horovod_sparse.frontends.local_sgd.outer import OuterSGD
    from horovod_sparse.rules import SparseVector

__version__ = "0.9.0"

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
    "fsdp",
    "metrics",
    "parse",
    "register",
]

# Loaded on first use: `horovod-sparse check` must run where MPI does not start, and collectives where neither torch nor
# Horovod is installed.
_MODULES = {"checkpoint": "checkpoint", "ddp": "frontends.ddp", "fsdp": "frontends.fsdp"}
_MODULE_OF = {
    "Compression": "config",
    "Sparse": "config",
    "parse": "config",
    "register": "config",
    "DistributedOptimizer": "frontends.horovod.optimizer",
    "LocalOptimizer": "frontends.local_sgd.optimizer",
    "OuterSGD": "frontends.local_sgd.outer",
    "SparseAllreduce": "frontends.arrays",
    "SparseVector": "rules",
}


def __getattr__(name: str) -> Any:
    """Load a public name from its module on first use."""
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{_MODULES[name]}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{_MODULE_OF[name]}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "horovod":
            raise
        raise ModuleNotFoundError(
            f"hvs.{name} needs Horovod, which is not installed: use hvs.ddp or hvs.fsdp, or install Horovod as in "
            "docs/install.md",
            name=error.name,
        ) from error
    return getattr(module, name)
