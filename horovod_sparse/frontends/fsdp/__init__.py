"""Sparse exchange of the gradients of a model that FSDP2 (``fully_shard``) shards: between replicas, or of its shards.

Between replicas::

    mesh = init_device_mesh("cuda", (replicas, shards), mesh_dim_names=("replicate", "shard"))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters())
    hvs.fsdp.sparse_all_reduce(
        model, group=mesh.get_group("replicate"), compression=hvs.Compression.recommended(), optimizer=optimizer
    )

Fully sharded, without replicas::

    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    hvs.fsdp.sparse_reduce_scatter(model, compression=hvs.Compression.topka(density=0.04), optimizer=optimizer)
    hvs.fsdp.rounded_all_gather(model, bits=8)
"""

from __future__ import annotations

from horovod_sparse.frontends.fsdp.exchange import ReplicaExchange, sparse_all_reduce
from horovod_sparse.frontends.fsdp.gathering import rounded_all_gather
from horovod_sparse.frontends.fsdp.sharded import ShardedExchange, sparse_reduce_scatter

__all__ = ["ReplicaExchange", "ShardedExchange", "rounded_all_gather", "sparse_all_reduce", "sparse_reduce_scatter"]
