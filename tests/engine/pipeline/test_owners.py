"""Ok-Topk whose owners keep what they cut: the sums of a step, and nothing lost over hundreds of steps."""

from __future__ import annotations

import numpy as np
import pytest
from laws import content, everywhere, same_bits, summed
from pipelines import own, residual, run
from rules import LIKE, eighths

from horovod_sparse.config import parse
from horovod_sparse.engine.pipeline import pipeline_for

pytestmark = pytest.mark.law

SIZE, K = 1200, 60
TOPK = "oktopk:density=0.05,sparsifier=topk,tau_threshold=1"
EXACT = f"{TOPK},keep=1"


def build(transport, spec, size=SIZE, undoable=False):
    return pipeline_for(parse(spec), size, LIKE, transport, undoable=undoable)


def expected_step(transport, residuals, gradients, keep, boundaries):
    """Return the total and the residuals after a step, with every rank's in rows."""
    acc = residuals + gradients
    sums, rank = np.zeros(SIZE), np.arange(SIZE)
    for region in range(transport.size):
        inside = (boundaries[region] <= rank) & (rank < boundaries[region + 1])
        chosen = np.where(inside, 0, np.abs(acc[region]))
        sent = np.sort(np.argsort(-chosen, kind="stable")[:K])
        sent = sent[chosen[sent] > 0]
        sums[sent] += acc[region, sent]
        acc[region, sent] = 0
        sums[inside] += acc[region, inside]
        acc[region, inside] = 0
    kept = np.argsort(-np.abs(sums), kind="stable")[: keep * K]
    total = np.zeros(SIZE)
    total[kept] = sums[kept]
    sums[kept] = 0
    for region in range(transport.size):
        inside = slice(boundaries[region], boundaries[region + 1])
        acc[region, inside] = sums[inside]
    return total, acc


@pytest.mark.parametrize("keep", [1, 4])
def test_owners_send_the_largest_of_all_that_they_hold(transport, keep):
    pipeline = build(transport, f"{TOPK},keep={keep}")
    held, draw = np.zeros((transport.size, SIZE)), np.random.default_rng(0)
    for _ in range(10):
        boundaries = np.arange(transport.size + 1) * SIZE // transport.size
        gradients = draw.standard_normal((transport.size, SIZE)).astype(np.float32)
        total, held = expected_step(transport, held, gradients.astype(np.float64), keep, boundaries)
        ours = run(pipeline, gradients[transport.rank].copy())
        assert everywhere(transport, np.allclose(ours, total, atol=1e-4))
        assert everywhere(transport, np.allclose(residual(pipeline), held[transport.rank], atol=1e-4))


RULES = [
    EXACT,
    "oktopk:density=0.05,keep=2,tau_threshold=8,tau_partition=4",
    "oktopk:density=0.02,keep=3,sparsifier=dgc,wire=log4,tau_partition=8",
    "oktopk:density=0.05,keep=1,sparsifier=gaussiank,wire=bfloat16,indices=coded",
    "hierarchical:density=0.05,node_ranks=2,keep=2,wire=log8",
    "hierarchical:density=0.05,node_ranks=2,inner=dense,keep=2",
    "oktopk:density=0.05,keep=1,sparsifier=randomk,shared=False",
    "oktopk:density=0.05,keep=1,schedule=warmup,steps_per_epoch=50,warmup_densities=(1.0,0.1,1.0)",
    "oktopk:density=0.05,keep=1,schedule=gravac,cf_max=100,eps=0.1,window=5",
]


@pytest.mark.parametrize("spec", [*RULES[:3], *(pytest.param(spec, marks=pytest.mark.full) for spec in RULES[3:])])
def test_nothing_is_lost_in_500_steps(transport, spec):
    """Learning rates and loss scales change, ranks are idle, parameters are frozen, and gradients are not finite."""
    pipeline, draw = build(transport, spec), own(transport)
    given, delivered = np.zeros(SIZE), np.zeros(SIZE)
    for number in range(500):
        rate, scale = 2.0 ** -(number // 150), 2.0 ** (number // 200)
        gradient = eighths(draw, SIZE, 64)
        frozen = slice(100, 300) if 100 <= number < 250 or transport.rank == 0 else slice(0, 0)
        segments = [(0, gradient[: frozen.start]), (frozen.stop, gradient[frozen.stop :])]
        idle = transport.rank == 1 and number % 7 == 3
        broken = number % 90 == 50
        if idle:
            gradient[:] = 0
        if broken:
            gradient[1000] = np.inf
        before = content(pipeline.state_dict()["memory"]) if broken else None
        total = run(pipeline, segments, learning_rate=rate, loss_scale=scale, idle=idle)
        assert same_bits(transport, total)
        if broken:
            assert everywhere(transport, content(pipeline.state_dict()["memory"]) == before)
            continue
        unit = rate / scale
        for start, part in segments:
            given[start : start + part.size] += unit * part.astype(np.float64)
        delivered += unit * total
    held = summed(transport, unit * residual(pipeline))
    most = np.abs(given).max() + 1
    assert everywhere(transport, np.allclose(delivered + held, summed(transport, given), atol=1e-4 * most))
    assert everywhere(transport, bool(delivered[200]) or transport.size == 1)  # where rank 0 has it frozen


@pytest.mark.parametrize("spec", [f"{TOPK},keep=4", "oktopk:density=0.3,keep=1,sparsifier=randomk,shared=False"])
def test_residuals_of_frozen_parameters_are_kept_until_these_train_again(transport, spec):
    """A random selection on every rank draws their positions, too."""
    pipeline, draw = build(transport, spec), own(transport)
    for _ in range(5):
        run(pipeline, eighths(draw, SIZE, 64))
    kept = residual(pipeline)[300:900]
    for _ in range(20):
        segments = [(0, eighths(draw, 300, 64)), (900, eighths(draw, 300, 64))]
        assert everywhere(transport, not run(pipeline, segments)[300:900].any())
    assert everywhere(transport, np.array_equal(residual(pipeline)[300:900], kept))
    delivered = np.zeros(SIZE)
    for _ in range(100):
        delivered += run(pipeline, np.zeros(SIZE, np.float32))
    assert everywhere(transport, np.allclose(delivered[300:900], summed(transport, kept), atol=1e-3))


def test_what_an_owner_holds_where_only_others_train_survives_dense_steps(transport):
    """It is delivered with the entries that others send afterwards."""
    schedule = "schedule=warmup,steps_per_epoch=10,warmup_densities=(0.05,1.0)"
    pipeline, draw = build(transport, f"{EXACT},tau_partition=1000,{schedule}"), own(transport)
    end, given, delivered = SIZE // transport.size, np.zeros(SIZE), np.zeros(SIZE)

    def step(gradient, epoch):
        nonlocal delivered
        held = end if transport.rank == 0 else 0
        given[held:] += gradient[held:]
        delivered += run(pipeline, [(held, gradient[held:])], epoch=epoch)

    for number in range(20):
        step(eighths(draw, SIZE, 64), number // 10)
    waits = residual(pipeline)
    waits = transport.broadcast_object(waits)
    assert transport.size == 1 or (waits[:end].any() and not waits[end:].any())
    for begin in range(0, end, 40):
        gradient = np.zeros(SIZE, np.float32)
        gradient[begin : begin + 40] = 0.125 * (transport.rank == 1)
        step(gradient, 2)
    assert everywhere(transport, not residual(pipeline).any() or transport.size == 1)
    assert everywhere(transport, np.allclose(delivered, summed(transport, given)) or transport.size == 1)


def test_positions_that_only_the_owner_holds_are_delivered_with_what_others_send(transport):
    """In DDP, a parameter that a rank does not use takes no part in the step on that rank."""
    pipeline, ranks = build(transport, EXACT), transport.size
    if ranks == 1:
        return
    gradient = np.zeros(SIZE, np.float32)
    gradient[5] = 8
    segments = [(600, gradient[600:])] if transport.rank == 0 else [(0, gradient)]
    assert everywhere(transport, run(pipeline, segments)[5] == 8 * (ranks - 1))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_fewer_elements_than_ranks(transport, size):
    pipeline, delivered = build(transport, "oktopk:density=0.5,keep=1", size), np.zeros(size)
    for _ in range(20):
        delivered += run(pipeline, np.ones(size, np.float32))
    held = summed(transport, residual(pipeline))
    assert everywhere(transport, np.allclose(delivered + held, 20 * transport.size))
