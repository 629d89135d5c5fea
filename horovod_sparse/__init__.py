"""Sparse gradient exchange with error feedback for Horovod.

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

from typing import TYPE_CHECKING, Any

from horovod_sparse import trace
from horovod_sparse.compression import Compression, Sparse, parse
from horovod_sparse.vector import SparseVector

if TYPE_CHECKING:
    from horovod_sparse.optimizer import DistributedOptimizer

__version__ = "0.1.0"

__all__ = ["Compression", "DistributedOptimizer", "Sparse", "SparseVector", "parse", "trace"]


def __getattr__(name: str) -> Any:
    """Loads torch and Horovod only when the optimizer is asked for: kernels and collectives do without them."""
    if name == "DistributedOptimizer":
        from horovod_sparse.optimizer import DistributedOptimizer

        return DistributedOptimizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
