"""Communication hook for torch's DistributedDataParallel, and torch's process group over MPI ranks.

::

    hvs.ddp.init_process_group()
    model = DistributedDataParallel(model)
    state = hvs.ddp.SparseState(hvs.Compression.oktopk(density=0.01), optimizer, model.named_parameters())
    model.register_comm_hook(state, hvs.ddp.sparse_hook)
"""

from __future__ import annotations

from horovod_sparse.frontends.ddp.process_group import init_process_group
from horovod_sparse.frontends.ddp.state import SparseState, sparse_hook

__all__ = ["SparseState", "init_process_group", "sparse_hook"]
