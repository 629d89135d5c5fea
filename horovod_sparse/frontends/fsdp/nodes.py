"""Dense sums of the gradients of a node's ranks, so that a sparse exchange runs between nodes only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed

from horovod_sparse.config import Sparse
from horovod_sparse.transport.base import Transport
from horovod_sparse.transport.nodes import Nodes

# reduce_scatter_tensor until torch 2.12
_reduce_scatter: Any = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor


class NodeSums:
    """Reduce-scatter within a node, after which each rank has the sums of what its peers own.

    The peers are the ranks with the same number in their nodes. They exchange the sums. So what a rank remembers has
    the size of the model divided by the number of ranks of a node.

    A collective call of all ranks.

    Args:
        nodes: The nodes of all ranks.
        transport: All ranks.
        world: World rank of each.

    Attributes:
        owners: The peers, this rank among them.
    """

    def __init__(self, nodes: Nodes, transport: Transport, world: Sequence[int]) -> None:
        firsts = nodes.own.allgather_integers(transport.rank)[0, 0]
        numbers, node_of = transport.allgather_integers(nodes.own.rank, firsts).T.tolist()
        self._order = sorted(range(transport.size), key=lambda rank: (numbers[rank], rank))
        self.owners = [rank for rank in self._order if numbers[rank] == nodes.own.rank]
        for first in dict.fromkeys(node_of):  # each rank creates the groups of all nodes: torch numbers them
            group = distributed.new_group([world[rank] for rank, other in enumerate(node_of) if other == first])
            if first == node_of[transport.rank]:
                self._group = group

    def sum(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the sums of the rows of ``owners`` over the node's ranks; a collective call of these.

        Args:
            rows: The shards of this rank's gradients for each rank.
        """
        sums = rows.new_empty(len(self.owners), rows.shape[1])
        _reduce_scatter(sums, torch.stack([rows[rank] for rank in self._order]), group=self._group)
        return sums


def nodes_for(compression: Sparse, transport: Transport) -> Nodes | None:
    """Return the nodes in which gradients are summed dense; None if the exchange runs between all ranks.

    They are for compressions whose collective distinguishes nodes, such as ``auto``, where several nodes have the same
    number of ranks, more than one, and all ranks of the job shard the model. A collective call.
    """
    if not hasattr(compression.collective, "node_ranks") or transport.size < distributed.get_world_size():
        return None
    nodes = transport.by_node(compression.collective.node_ranks)
    return nodes if nodes.nested else None
