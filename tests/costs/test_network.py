"""The patterns' bytes and messages, counted on small networks one message at a time."""

from __future__ import annotations

import math

import pytest

from horovod_sparse.costs import network
from horovod_sparse.costs.network import Link, Network, Node

OUTER, INNER = Link(alpha=1.0, beta=1.0), Link(alpha=0.01, beta=0.01)
BLOCK = 1 << 20  # bytes of one rank's block


def crossing(pairs, per_node):
    """The most messages that a node sends to other nodes."""
    senders = [sender // per_node for sender, receiver in pairs if sender // per_node != receiver // per_node]
    return max(map(senders.count, senders), default=0)


def bytes_between_nodes(steps):
    return sum(step.nbytes for step in steps if step.link == OUTER)


@pytest.mark.parametrize(("ranks", "levels"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (9, 4), (4096, 12)])
def test_short_messages_and_trees_take_log_p_steps(ranks, levels):
    of = Network(ranks, OUTER)
    assert [step.messages for step in of.counts()] == [levels]
    assert [step.messages for step in of.allgather(network.RING_BYTES - 1)] == [levels]
    assert sum(step.messages for step in of.tree(BLOCK)) == levels
    assert sum(step.nbytes for step in of.tree(BLOCK)) == levels * BLOCK


@pytest.mark.parametrize(("ranks", "gathers"), [(1, True), (2, True), (32, True), (33, False), (64, False)])
def test_short_sums_gather_everything_on_few_ranks(ranks, gathers):
    of = Network(ranks, OUTER)
    (step,) = of.counts(1024)
    assert step.messages == of.levels
    assert step.nbytes == pytest.approx(1024 * (ranks - 1) if gathers else 2048 * (ranks - 1) / ranks)
    assert of.sum(1024) == ([step] if gathers else [*of.direct(1024), *of.allgather(1024)])


@pytest.mark.parametrize("per_node", [2, 3, 4])
@pytest.mark.parametrize("nodes", [2, 3, 4])
def test_ranks_of_a_node_send_directly_over_its_one_link(per_node, nodes):
    ranks = per_node * nodes
    pairs = [(i, j) for i in range(ranks) for j in range(ranks)]
    steps = Network(ranks, OUTER, Node(per_node, INNER)).direct(ranks * BLOCK)
    assert bytes_between_nodes(steps) == pytest.approx(crossing(pairs, per_node) * BLOCK)


@pytest.mark.parametrize("per_node", [2, 3, 4])
def test_a_ring_leaves_each_node_once(per_node):
    ranks = 3 * per_node
    pairs = [(i, (i + 1) % ranks) for i in range(ranks)]
    steps = Network(ranks, OUTER, Node(per_node, INNER)).allgather(ranks * BLOCK)
    assert bytes_between_nodes(steps) == pytest.approx(crossing(pairs, per_node) * (ranks - 1) * BLOCK)


@pytest.mark.parametrize("per_node", [2, 3, 4])
def test_a_sum_leaves_each_node_as_often_as_that_of_a_rank_alone(per_node):
    alone, shared = Network(3, OUTER).sum(3e6), Network(3 * per_node, OUTER, Node(per_node, INNER)).sum(3e6)
    assert bytes_between_nodes(shared) == pytest.approx(bytes_between_nodes(alone)) == pytest.approx(4e6)


@pytest.mark.parametrize("per_node", [2, 4, 8])
def test_the_lowest_levels_of_a_tree_stay_inside_the_nodes(per_node):
    ranks = 4 * per_node
    distances = [1 << level for level in range(ranks.bit_length() - 1)]
    outside = [distance for distance in distances if distance // per_node]  # from rank 0 to another node
    steps = Network(ranks, OUTER, Node(per_node, INNER)).tree(BLOCK)
    assert bytes_between_nodes(steps) == len(outside) * BLOCK
    assert sum(step.messages for step in steps) == math.log2(ranks)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_ranks_that_fit_on_one_node_never_use_the_link_between_nodes(ranks):
    of = Network(ranks, OUTER, Node(8, INNER))
    patterns = (of.allgather, of.allreduce, of.sum, of.direct, of.tree)
    for steps in (of.counts(), *(pattern(BLOCK) for pattern in patterns)):
        assert bytes_between_nodes(steps) == 0
        assert sum(step.nbytes for step in steps) > 0


def test_nodes_of_one_rank_are_no_nodes():
    alone, plain = Network(6, OUTER, Node(1, INNER)), Network(6, OUTER)
    assert alone.direct(BLOCK) == plain.direct(BLOCK)
    assert alone.tree(BLOCK) == plain.tree(BLOCK)
