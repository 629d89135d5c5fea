"""Steps that start before the ranks agree take fewer rounds of messages, and lose nothing if they disagree."""

from __future__ import annotations

import numpy as np
import pytest
from laws import content, everywhere, same_bits, summed
from pipelines import own, run
from rules import LIKE, eighths

from horovod_sparse.config import Sparse
from horovod_sparse.engine.pipeline import pipeline_for
from horovod_sparse.memories import MEMORIES

pytestmark = pytest.mark.law

SIZE = 600
STEADY = 3  # steps after which nothing but the exchange is waited for


def build(transport, density=0.05, undoable=False, **settings):
    return pipeline_for(Sparse.of(density, **settings), SIZE, LIKE, transport, undoable=undoable)


def gradient_of(transport, number):
    return eighths(own(transport, number), SIZE, 256)


def steady(transport, **settings):
    pipeline = build(transport, **settings)
    for number in range(STEADY):
        run(pipeline, gradient_of(transport, number))
    return pipeline


def log2(ranks):
    return (ranks - 1).bit_length()


@pytest.mark.parametrize(
    ("settings", "rounds"),
    [
        ({"collective": "topka"}, lambda ranks: 1),
        ({"collective": "topka", "wire": "log4", "sparsifier": "reusedtopk"}, lambda ranks: 1),
        ({"collective": "shared", "sparsifier": "randomblock"}, lambda ranks: 1),
        ({"collective": "union"}, lambda ranks: 2),
        ({"collective": "topkdsa", "throttle": 16}, lambda ranks: 1 + (ranks > 1)),
        ({"collective": "gtopk"}, lambda ranks: 2 * log2(ranks)),
        ({"collective": "spardl"}, lambda ranks: log2(ranks) + 1),
        ({"collective": "oktopk", "throttle": 16}, lambda ranks: 2 + (ranks > 1)),
        ({"collective": "hierarchical", "outer": "topka", "node_ranks": 2}, lambda ranks: 1 if ranks == 2 else 3),
        ({"collective": "dense"}, lambda ranks: 1 if 4 * SIZE * ranks <= 1 << 15 else 2),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("undoable", [False, True])
def test_rounds_of_a_step(transport, settings, rounds, undoable):
    """The first steps also wait for the agreement; a restored pipeline learns the lengths of messages in one step."""
    pipeline, counted = build(transport, undoable=undoable, **settings), []
    gradient = np.random.default_rng(transport.rank).standard_normal(SIZE).astype(np.float32)  # without ties
    for number in range(STEADY + 3):
        if number == STEADY + 1:
            state, pipeline = pipeline.state_dict(), build(transport, undoable=undoable, **settings)
            pipeline.load_state_dict(state)
        run(pipeline, gradient)
        pipeline.rules.memory.state_dict()["residual"][:] = 0
        counted.append(int(transport.allgather_integers(pipeline.statistics(norms=False).rounds).max()))
    if transport.size > 1:
        assert everywhere(transport, counted[STEADY] == counted[-1] == rounds(transport.size)), counted
        assert everywhere(transport, counted[0] > counted[STEADY + 1] >= counted[-1]), counted


@pytest.mark.parametrize("schedule", ["warmup", "accordion", "gravac"])
def test_a_density_that_depends_on_epoch_or_other_ranks_is_agreed_before_the_exchange(transport, schedule):
    steps = {"cf_max": 100.0} if schedule == "gravac" else {"steps_per_epoch": 2}
    pipeline = build(transport, 0.01, schedule=schedule, **steps)
    for number in range(6):
        run(pipeline, gradient_of(transport, number))
        assert everywhere(transport, pipeline.statistics(norms=False).rounds >= 2 * (transport.size > 1))


OWNERS = {"collective": "oktopk", "keep": 2, "tau_threshold": 4, "tau_partition": 3, "wire": "fitted3"}
TOPKA = {"collective": "topka"}


@pytest.mark.parametrize("undoable", [False, True])
@pytest.mark.parametrize(
    ("settings", "memory"),
    [
        *((settings, memory) for settings in (TOPKA, OWNERS) for memory in MEMORIES),
        ({**TOPKA, "wire": "fitted2"}, "residual"),
        ({"collective": "oktopk"}, "residual"),
        ({"collective": "dense", "wire": "fitted3"}, "residual"),
    ],
    ids=lambda one: "-".join(map(str, one.values())) if isinstance(one, dict) else one,
)
def test_a_nonfinite_gradient_is_delivered_and_does_not_enter_the_state(transport, settings, memory, undoable):
    """Neither does one that is finite, but too large to be summed."""
    compressor = {"compressor": "quantize"} if "compressor" in MEMORIES[memory].Options().known() else {}
    pipeline = steady(transport, memory=memory, undoable=undoable, **settings, **compressor)
    for number in range(4):
        before, bad = content(pipeline.state_dict()), gradient_of(transport, 10 + number)
        if transport.rank == number % transport.size:
            bad[[7, 400]] = [np.inf, np.nan] if number < 3 else 3e38
        total = run(pipeline, bad)
        assert everywhere(transport, np.flatnonzero(~(np.abs(total) < 1e38)).tolist() == [7, 400])
        assert same_bits(transport, total)
        if undoable or memory == "none":  # all gradients are sent dense
            with np.errstate(invalid="ignore"):
                assert everywhere(transport, np.array_equal(total, summed(transport, bad), equal_nan=True))
        if undoable:
            assert everywhere(transport, content(pipeline.state_dict()) == before)
        for later in range(2):
            assert everywhere(transport, np.isfinite(run(pipeline, gradient_of(transport, 20 + later))).all())


def test_a_change_of_the_active_elements_takes_effect_in_the_next_step(transport):
    pipeline, asked = steady(transport, density=0.1), []
    pipeline.statistics(norms=False)
    for number, taking_part in enumerate([SIZE, SIZE // 2, SIZE // 2, SIZE // 2, SIZE, SIZE // 2, SIZE, SIZE]):
        run(pipeline, [(0, gradient_of(transport, number)[:taking_part])])
        counts = pipeline.statistics(norms=False)
        asked.append((counts.asked, counts.rounds))
    one, two = (1, 2) if transport.size > 1 else (0, 0)
    expected = [(60, one), (60, one), (30, two), (30, one), (30, one), (30, two), (60, two), (60, two)]
    assert everywhere(transport, asked == expected), asked


@pytest.mark.parametrize(
    "settings", [{}, {"memory": "momentum", "momentum": 0.9}, {"memory": "none", "collective": "dense"}], ids=str
)
def test_a_step_without_backward_on_any_rank_changes_nothing(transport, settings):
    pipeline = steady(transport, **settings)
    before = content(pipeline.state_dict())
    with pytest.raises(RuntimeError, match=f"rank {transport.rank}: .*without backward.*call loss.backward"):
        run(pipeline, np.zeros(SIZE, np.float32), idle=True)
    assert everywhere(transport, content(pipeline.state_dict()) == before)
    assert everywhere(transport, np.isfinite(run(pipeline, gradient_of(transport, 9))).all())
