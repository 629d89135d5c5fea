"""One step of a bucket: its reference, and the laws for every combination of rules."""

from __future__ import annotations

import itertools
from collections import Counter

import laws
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from laws import content, everywhere, same_bits, sum_bytes, summed, thorough
from pipelines import continue_alike, own, residual, run
from reference_step import SELECT, Held, accumulate, exchange
from rules import LIKE, eighths

from horovod_sparse import metrics
from horovod_sparse.collectives import COLLECTIVES
from horovod_sparse.config import Compression, Sparse
from horovod_sparse.engine.pipeline import pipeline_for
from horovod_sparse.engine.pipeline.dense import DensePipeline
from horovod_sparse.memories import MEMORIES
from horovod_sparse.rules import BucketContext, Momentum, snapshot
from horovod_sparse.sparsifiers import SPARSIFIERS

SHARING = ["randomblock", "randomk", "stable", "arctopk"]
# Where a bucket of any size does not do with the defaults, or where a step would depend on earlier ones.
OPTIONS = {
    "threshold": {"threshold": 16.0},
    "stable": {"block": 1, "refresh": 1},
    "arctopk": {"block": 1},
    **{name: {"tau_threshold": 1} for name in ("reusedtopk", "oktopk", "auto")},
    "hierarchical": {"outer": "topka", "node_ranks": 2},
}
ALL = [pair for pair in itertools.product(SPARSIFIERS, COLLECTIVES) if pair[1] != "shared" or pair[0] in SHARING]
# Every collective and every sparsifier once; at one world size all of them with each other, in CI every third. Auto
# delegates to others of them.
ONCE = [(one, other) for one, other in ALL if one == "topk" or other == ("shared" if one in SHARING else "topka")]
REST = [pair for pair in ALL if thorough() and pair not in ONCE]
COMBINATIONS = [
    *ONCE,
    *(
        pytest.param(*pair, marks=pytest.mark.nightly if number % 3 or pair[1] == "auto" else pytest.mark.full)
        for number, pair in enumerate(REST)
    ),
]
# Collectives that return nothing, something and a lot.
COMMON = [("topk", "topka"), ("topk", "gtopk"), ("reusedtopk", "oktopk"), ("randomblock", "shared"), ("topk", "union")]


def build(transport, size, density=0.1, factor=1.0, undoable=False, **settings):
    return pipeline_for(Sparse.of(density, **settings), size, LIKE, transport, factor=factor, undoable=undoable)


# --- what a step does ---


@pytest.mark.law
@pytest.mark.parametrize(("sparsifier", "collective"), COMBINATIONS)
@pytest.mark.parametrize(
    ("size", "density", "dense_steps"), [(1, 0.5, 0), (1500, 0.01, 1), (300, 0.3, 0), (90, 1e-4, 2)]
)
def test_every_step_equals_the_reference(transport, sparsifier, collective, size, density, dense_steps):
    """With learning rates that are powers of two, all numbers are exact."""
    settings = {**OPTIONS.get(sparsifier, {}), **OPTIONS.get(collective, {}), "dense_steps": dense_steps}
    pipeline = build(transport, size, density, 0.5, sparsifier=sparsifier, collective=collective, **settings)
    taken, take = [], pipeline.rules.sparsifier.take
    pipeline.rules.sparsifier.take = lambda *given: taken.append(take(*given)) or taken[-1]
    rank, ranks, k = transport.rank, transport.size, max(1, round(density * size))
    left, generator = Held(np.zeros((ranks, size))), np.random.default_rng(size)
    for number, rate in enumerate((1.0, 0.5, 0.0, 2.0)):
        taken.clear()
        gradients = eighths(generator, (ranks, size), 256)
        total = run(pipeline, gradients[rank].copy(), learning_rate=rate, loss_scale=4.0)

        unit, algorithm = 0.5 * rate / 4.0, getattr(pipeline.rules.collective, "choice", collective)
        acc, chosen = accumulate(left, gradients, unit), np.ones((ranks, size), bool)
        everything = number < dense_steps or k >= size or algorithm == "dense"
        if not everything and sparsifier in SELECT:
            chosen = SELECT[sparsifier](acc, k, np.random.default_rng([0, 0, number, 0]).integers(size))
        elif not everything:
            chosen = np.array(transport.allgather_object(np.isin(np.arange(size), taken[0].indices)))
        expected, left = exchange(acc, chosen, unit, left, algorithm, k)
        assert everywhere(transport, np.array_equal(total, 0.5 * expected))
        assert everywhere(transport, np.array_equal(residual(pipeline), left.residuals[rank]))
        assert everywhere(transport, everything == (not taken))


@pytest.mark.law
@pytest.mark.parametrize("sparsifier", ["topk", "gaussiank", "sidco", "dgc"])
def test_fewer_elements_than_ranks_are_all_sent(transport, sparsifier):
    """Only rank 0 has the one parameter, as where the others have frozen it."""
    here = [(0, np.ones(1, np.float32))] if transport.rank == 0 else []
    assert everywhere(transport, run(build(transport, 10, sparsifier=sparsifier), here)[0] == 1)


@pytest.mark.law
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_density_one_is_a_dense_allreduce(transport, collective):
    pipeline = build(
        transport, 20_000, 1.0, collective=collective, sparsifier="randomk" if collective == "shared" else "topk"
    )
    gradient = eighths(own(transport), 20_000)
    assert everywhere(transport, np.array_equal(run(pipeline, gradient), summed(transport, gradient)))
    assert everywhere(transport, not residual(pipeline).any())
    assert abs(pipeline.traffic.bytes_sent - sum_bytes(transport, 80_000)) <= 8


@pytest.mark.law
def test_ranks_with_different_held_positions_agree_on_k(transport):
    """A parameter frozen on some ranks only: the others' k would otherwise differ, and with it what a total holds."""
    pipeline, half = build(transport, 400, 0.05, collective="oktopk"), transport.rank % 2
    run(pipeline, eighths(own(transport), 400))
    before = residual(pipeline)
    assert same_bits(transport, run(pipeline, [(0, eighths(own(transport), 400 - 200 * half))]))
    active = 400 - 200 * half
    assert everywhere(transport, np.array_equal(residual(pipeline)[active:], before[active:]))


# --- one decision a step ---


@pytest.mark.mpi
def test_the_schedule_gets_the_step_number_and_squared_norms(transport):
    settings = {"cf_max": 100.0, "cf_step": 10.0, "dense_steps": 1, "window": 1, "eps": 0.5}
    pipeline = build(transport, 100, 0.1, schedule="gravac", **settings)
    gradient, seen = np.array([4.0] * 1 + [2.0] * 9 + [1.0] * 90, np.float32), []
    choose = pipeline.rules.schedule.choose
    pipeline.rules.schedule.choose = lambda squares, rest: seen.append([*squares, rest()]) or choose(squares, rest)
    metrics.clear()
    metrics.enable()
    try:
        for _ in range(4):
            run(pipeline, gradient)
    finally:
        metrics.enable(False)
    densities = [one.details["density"] for one in metrics.spans() if one.name == "density"]
    # Dense by its number; the first window; dense for want of gain, 52 / 142.
    assert densities == [1.0, 0.1, 1.0, 1.0]
    weighed = [one.details for one in metrics.spans() if one.name == "weigh"]
    assert seen[0] == [52, 16, 90]
    assert weighed[1]["gains"] == pytest.approx([52 / 142, 16 / 142])
    assert [one["chosen"] for one in weighed] == [0, None, None]
    assert everywhere(transport, not residual(pipeline).any())


# --- steps that go wrong ---


@pytest.mark.parametrize("preset", ["topka", "dense"])
def test_a_rank_without_backward_contributes_zeros(transport, preset):
    pipeline, idle = pipeline_for(getattr(Compression, preset)(), 10, LIKE, transport, factor=0.5), transport.rank != 0
    gradient = np.zeros(10, np.float32)
    gradient[3] = 0.0 if idle else 2.0
    assert everywhere(transport, np.array_equal(run(pipeline, gradient, idle=idle), np.eye(10)[3]))


def test_a_dense_bucket_sends_one_message_and_keeps_no_state(transport):
    ranks = transport.size
    context = BucketContext(1000, LIKE, 0, transport.rank, ranks, consensus=None)  # to ask for it would be an error
    pipeline = DensePipeline(context, transport.channel(), factor=1 / 4)
    gradient = eighths(own(transport), 1000)
    total = run(pipeline, gradient)
    pipeline.undo()
    assert everywhere(transport, np.array_equal(total, summed(transport, gradient) / 4))
    assert abs(pipeline.traffic.bytes_sent - sum_bytes(transport, 4004)) <= 8
    assert pipeline.state_dict() == {}


# --- every memory ---


@pytest.mark.law
@pytest.mark.parametrize("wire", [None, "bfloat16"])
@pytest.mark.parametrize(("sparsifier", "collective"), COMMON)
@pytest.mark.parametrize(("size", "density"), [(1, 1.0), (2000, 0.01), (300, 0.3)])
def test_momentum_is_dropped_only_at_delivered_positions(transport, sparsifier, collective, wire, size, density):
    """Velocities enter the residuals: total + sum of v' = sum of (v + m u + g), with rounded values, too."""
    names = {"sparsifier": sparsifier, "memory": "momentum", "collective": collective}
    pipeline, generator = build(transport, size, density, **names, momentum=0.5, wire=wire), own(transport, size)
    for _ in range(3):
        gradient = eighths(generator, size, 256)
        velocity = 0.5 * pipeline.state_dict()["memory"]["velocity"] + gradient
        before = summed(transport, residual(pipeline) + velocity)
        total = run(pipeline, gradient).astype(np.float64)
        assert everywhere(transport, np.array_equal(total + summed(transport, residual(pipeline)), before))
        kept = pipeline.state_dict()["memory"]["velocity"]
        assert everywhere(transport, np.all((kept == velocity) | (kept == 0)))


@pytest.mark.slow
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize(("sparsifier", "collective"), [*COMMON, ("topk", "oktopk")])
def test_every_combination_continues_bitwise_identically_after_restart_and_undo(
    transport, sparsifier, collective, memory
):
    names = {"sparsifier": sparsifier, "memory": memory, "collective": collective, "schedule": "accordion"}
    settings = {"wire": "float16", "interval": 1, "steps_per_epoch": 2}
    momentum = Momentum(0.9 if memory == "momentum" else 0.0)  # of the optimizer, taken over
    if collective != "shared" and "compressor" in MEMORIES[memory].Options().known():
        settings["compressor"] = "quantize"  # a sketch needs random positions
    if (sparsifier, collective) == ("topk", "oktopk"):
        settings |= {"keep": 2, "tau_threshold": 4, "tau_partition": 3}
    one, other = (build(transport, 500, 0.05, undoable=True, **names, **settings) for _ in range(2))
    gradients = iter(own(transport).standard_normal((6, 500)).astype(np.float32))
    for _ in range(3):
        assert same_bits(transport, run(one, next(gradients), learning_rate=0.3, momentum=momentum))
        one.commit()
    before = content(one.state_dict())
    other.load_state_dict(snapshot(one.state_dict()))
    run(one, next(gradients), learning_rate=0.1, momentum=momentum)
    assert everywhere(transport, content(one.state_dict()) != before)
    one.undo()
    assert everywhere(transport, content(one.state_dict()) == before)
    continue_alike(transport, one, other, list(gradients), learning_rate=0.2, momentum=momentum)
    assert everywhere(transport, content(one.state_dict()) == content(other.state_dict()))


class Script:
    """Schedule that sends what a list says, step by step."""

    def __init__(self, sends):
        self._sends = iter(sends)
        self.predictable, self.weighs, self.wire_of_all = True, False, None

    def densities(self, step):
        density, self.wire_of_all = next(self._sends)
        return (density,)

    def state_dict(self):
        return {}


SENDS = [(1.0, None), (1.0, "float16"), (1.0, "log8"), (0.1, None), (0.01, None)]


@pytest.mark.law
@laws.examples(30)
@given(
    sends=st.lists(st.sampled_from(SENDS), min_size=1, max_size=40),
    dtype=st.sampled_from([np.float32, np.float16]),
    held=st.booleans(),
    loaded=st.integers(1, 40),
    seed=st.integers(0, 1000),
)
@example(sends=[(0.1, None), (1.0, None)], dtype=np.float32, held=False, loaded=1, seed=0)
def test_nothing_is_lost_if_dense_rounded_and_sparse_steps_alternate(transport, sends, dtype, held, loaded, seed):
    """With an empty memory, which gradients can bypass, a filled one and a loaded one; held positions occur, too."""
    pipeline, schedule, events = build(transport, 300, collective="topka"), Script(sends), Counter()
    pipeline.rules.schedule = schedule
    generator, given_, total = own(transport, seed), np.zeros(300), np.zeros(300)
    for number, (density, wire) in enumerate(sends):
        if number == loaded:
            state, events = snapshot(pipeline.state_dict()), pipeline.counts.events
            pipeline = build(transport, 300, collective="topka")
            pipeline.load_state_dict(state)
            pipeline.rules.schedule = schedule
        gradient = eighths(generator, 300, 8).astype(dtype)
        start = 100 * (held and number % 3 == 1 and transport.rank == 0)
        output = run(pipeline, [(start, gradient[start:150]), (150, gradient[150:])])
        given_[start:] += gradient[start:]
        total += output
        assert same_bits(transport, output)
        if density == 1 and not wire and not held:
            assert everywhere(transport, not residual(pipeline).any())
    kept = summed(transport, residual(pipeline))
    assert everywhere(transport, np.array_equal(total + kept, summed(transport, given_)))
    dense = {wire: sends.count((1.0, wire)) for wire in (None, "float16", "log8")}
    counted = {"dense" if wire is None else f"dense_{wire}": count for wire, count in dense.items()}
    events = events + pipeline.counts.events
    assert {name: events[f"steps_{name}"] for name in counted} == counted


@pytest.mark.law
def test_merged_states_hold_the_sum_of_updates(transport):
    """Rank 0 takes over the residuals of all ranks; the others start empty."""
    old, new = (build(transport, 200, factor=0.25, sparsifier="reusedtopk", collective="oktopk") for _ in range(2))
    for number in range(3):
        run(old, eighths(own(transport, number), 200), learning_rate=0.5)
    states = transport.allgather_object(snapshot(old.state_dict()))
    with pytest.raises(ValueError, match=r"have different units .* save again"):  # of a rank that was in join()
        new.merge([{**states[-1], "unit": 2 * states[-1]["unit"]}], states[0])
    state, notes = new.merge(states if transport.rank == 0 else [], states[0])
    new.load_state_dict(state)
    assert everywhere(transport, np.array_equal(summed(transport, residual(new)), summed(transport, residual(old))))
    assert everywhere(transport, transport.rank == 0 or not residual(new).any())
    assert (new.state_dict()["unit"], new.state_dict()["steps"]) == (0.5 * 0.25, 3)
    assert [note.rpartition(" of ")[2] for note in notes] == [
        "ReusedTopK start from scratch",
        "OkTopk start from scratch",
    ]
    assert same_bits(transport, run(new, eighths(own(transport, 4), 200), learning_rate=0.25))
