"""Fully sharded models whose ranks sum their gradients within a node of two first, at 4 ranks or more.

Their results at density 1, and the law that nothing is lost, are in ``test_sharded.py``.
"""

from __future__ import annotations

import pytest
from laws import everywhere
from scattered import scattered, trained
from sharding import shard
from states import same
from training import mlp, sgd

import horovod_sparse as hvs

pytestmark = pytest.mark.mpi

SPEC = "hierarchical:node_ranks=2"


def nodes_of(ranks):
    """Return the number of nodes between which ranks exchange sums; each is one where nodes are not alike."""
    return ranks // 2 if ranks % 2 == 0 and ranks > 2 else ranks


def test_a_rank_remembers_its_part_of_the_model(comm, shards):
    """With other collectives, or with nodes that are not alike, each remembers all of it."""
    model = shard(mlp(), shards)
    exchange = scattered(model, hvs.parse(f"{SPEC},density=0.05,dense_below=0"), sgd(model))
    flat = shard(mlp(), shards)
    other = scattered(flat, hvs.parse("topka:density=0.05,dense_below=0"), sgd(flat))
    sizes = [
        sum(bucket["memory"]["residual"].numel() for bucket in one.state_dict()["buckets"] if "memory" in bucket)
        for one in (exchange, other)
    ]
    ranks = comm.Get_size()
    assert everywhere(comm, sizes[0] * ranks == sizes[1] * nodes_of(ranks))
    assert everywhere(comm, ranks == 1 or sizes[0] > 0)


def test_only_nodes_exchange_and_two_runs_have_the_same_bits(comm, shards):
    runs = [trained(comm, shards, hvs.parse(f"{SPEC},density=0.1,dense_below=0"), steps=6) for _ in range(2)]
    assert everywhere(comm, same(runs[0][0], runs[1][0]))
    _, flat = trained(comm, shards, hvs.parse("topka:density=0.1,dense_below=0"), steps=6)
    ranks = comm.Get_size()
    if nodes_of(ranks) < ranks:
        assert everywhere(comm, 0 < runs[0][1].traffic.bytes_sent < 0.5 * flat.traffic.bytes_sent)
