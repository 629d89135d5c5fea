"""Sparse exchange between replicas of a model that FSDP2 (``fully_shard``) shards.

::

    mesh = init_device_mesh("cuda", (replicas, shards), mesh_dim_names=("replicate", "shard"))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters())
    hvs.fsdp.sparse_all_reduce(
        model, group=mesh.get_group("replicate"), compression=hvs.Compression.recommended(), optimizer=optimizer
    )
"""

from __future__ import annotations

from horovod_sparse.frontends.fsdp.exchange import ReplicaExchange, sparse_all_reduce

__all__ = ["ReplicaExchange", "sparse_all_reduce"]
