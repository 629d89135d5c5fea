"""Rows of `horovod-sparse advise`: configurations, their costs bucket by bucket, and the choice of the preset."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import horovod_sparse as hvs
from horovod_sparse.cli.predictions import Plan, dense_rows, preset, sparse_rows
from horovod_sparse.costs.accuracy import sums
from horovod_sparse.costs.model import Compute, predict
from horovod_sparse.costs.network import Link, Node

CORE = Compute(select=1e-9, accumulate=0.5e-9, reduce=0, merge=5e-9, cut=5e-9, code=3e-9, convert=3e-9)
NODE = Node(4, Link(2e-6, 1e-11))


def plan(size=25_000_000, ranks=16, gbit=10.0, computing=0.0, node=None):
    return Plan(size, ranks, Link(5e-6, 8e-9 / gbit), CORE, node, computing=computing)


@pytest.mark.parametrize("density", [None, 0.01])
def test_every_row_is_a_configuration_in_text_and_in_python(density):
    for row in (*dense_rows(plan()), *sparse_rows(plan(node=NODE), density)[0]):
        if row.code.startswith("hvs."):
            assert eval(row.code, {"hvs": hvs}) == hvs.parse(row.compression)  # noqa: S307 - our own
        else:
            assert row.code == f"hvd.Compression.{row.compression}"


@given(gbit=st.floats(0.001, 1000), computing=st.floats(1e-3, 10), size=st.integers(10**5, 10**9))
def test_the_preset_chooses_the_largest_density_that_costs_no_time(gbit, computing, size):
    here = plan(size=size, gbit=gbit, computing=computing)
    rows, chosen = sparse_rows(here, None)
    every = [*rows, *(row for row in dense_rows(here) if row.cost.algorithm == "rounded")]
    limit = (1 + preset().schedule.max_exposed) * min(row.step for row in every)
    assert chosen.step <= limit
    assert all(row.step > limit for row in every if row.density > chosen.density)
    assert chosen in rows or rows[0].step > limit  # not rounded if it need not be
    tried = [row.density for row in rows]
    assert tried[: len(preset().schedule.densities)] == sorted(preset().schedule.densities, reverse=True)
    others = [row for row in every if row.density not in tried[4:]]
    bytes_decide = all(row.step > (1 + preset().schedule.max_exposed) * rows[4].step for row in others)
    assert tried[5:] == [preset().schedule.least] * bytes_decide


@pytest.mark.parametrize(("ranks", "nested"), [(16, True), (18, False)])
def test_nodes_sum_up_first_only_if_they_have_equal_numbers_of_ranks(ranks, nested):
    """As in auto."""
    assert ("hierarchical" in plan(ranks=ranks, node=NODE).collectives) == nested


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("ranks", [4, 64, 1024])
def test_rows_are_priced_as_the_preset_runs_them(ranks, adaptive):
    for row in sparse_rows(replace(plan(ranks=ranks), adaptive=adaptive), 0.01)[0]:
        collective = hvs.parse(row.compression).collective
        keep = sums(getattr(collective, "keep", None), ranks, adaptive)
        alone = predict(row.cost.algorithm, 6_250_000, 62_500, ranks, Link(5e-6, 0.8e-9), CORE, wire=0.5, keep=keep)
        assert row.cost.total == pytest.approx(4 * alone.total)
