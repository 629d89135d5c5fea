"""One step of a bucket: its reference, and the laws for every combination of rules."""

from __future__ import annotations

import itertools

import laws
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from laws import content, everywhere, same_bits, sum_bytes, summed, thorough
from reference_step import SELECT, Held, accumulate, exchange
from rules import LIKE, eighths

from horovod_sparse import metrics
from horovod_sparse.collectives import COLLECTIVES, auto
from horovod_sparse.config import Compression, Sparse
from horovod_sparse.engine.pipeline import pipeline_for
from horovod_sparse.engine.pipeline.dense import DensePipeline
from horovod_sparse.memories import MEMORIES
from horovod_sparse.rules import BucketContext, Conditions, snapshot
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
# Every collective and every sparsifier once; all of them with each other in `make test-ci`, at one world size.
ONCE = [(one, other) for one, other in ALL if one == "topk" or other == ("shared" if one in SHARING else "topka")]
COMBINATIONS = [
    *ONCE,
    *(pytest.param(*pair, marks=pytest.mark.full) for pair in ALL if thorough() and pair not in ONCE),
]
# Collectives that return nothing, something and a lot.
COMMON = [("topk", "topka"), ("topk", "gtopk"), ("reusedtopk", "oktopk"), ("randomblock", "shared"), ("topk", "union")]


def build(transport, size, density=0.1, factor=1.0, undoable=False, **settings):
    return pipeline_for(Sparse.of(density, **settings), size, LIKE, transport, factor=factor, undoable=undoable)


def own(transport, *seed):
    return np.random.default_rng([*seed, transport.rank])


def run(pipeline, gradient, **conditions):
    """Run one exchange of a bucket with one parameter; return the gradient that the optimizer would see."""
    output = np.full_like(gradient, np.nan)
    pipeline.run([(0, gradient)], [(0, output)], Conditions(**conditions))
    return output


def remembered(pipeline):
    return pipeline.rules.memory.state_dict()["residual"].astype(np.float64)


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
        assert everywhere(transport, np.array_equal(remembered(pipeline), left.residuals[rank]))
        assert everywhere(transport, everything == (not taken))


@pytest.mark.law
@pytest.mark.parametrize("sparsifier", ["topk", "gaussiank", "sidco", "dgc"])
def test_fewer_elements_than_ranks_are_all_sent(transport, sparsifier):
    """Only rank 0 has the one parameter, as where the others have frozen it."""
    pipeline, given = build(transport, 10, sparsifier=sparsifier), np.zeros(1, np.float32)
    here = [(0, np.ones(1, np.float32))] if transport.rank == 0 else []
    pipeline.run(here, [(0, given)], Conditions())
    assert everywhere(transport, given[0] == 1)


@pytest.mark.law
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_density_one_is_a_dense_allreduce(transport, collective):
    pipeline = build(
        transport, 20_000, 1.0, collective=collective, sparsifier="randomk" if collective == "shared" else "topk"
    )
    gradient = eighths(own(transport), 20_000)
    assert everywhere(transport, np.array_equal(run(pipeline, gradient), summed(transport, gradient)))
    assert everywhere(transport, not remembered(pipeline).any())
    assert abs(pipeline.traffic.bytes_sent - sum_bytes(transport, 80_000)) <= 8


@pytest.mark.law
def test_ranks_with_different_held_positions_agree_on_k(transport):
    """A parameter frozen on some ranks only: the others' k would otherwise differ, and with it what a total holds."""
    pipeline, half = build(transport, 400, 0.05, collective="oktopk"), transport.rank % 2
    run(pipeline, eighths(own(transport), 400))
    before, output = remembered(pipeline), np.full(400, np.nan, np.float32)
    pipeline.run([(0, eighths(own(transport), 400 - 200 * half))], [(0, output)], Conditions())
    assert same_bits(transport, output)
    active = 400 - 200 * half
    assert everywhere(transport, np.array_equal(remembered(pipeline)[active:], before[active:]))


def test_without_memory_the_rest_is_dropped(transport):
    pipeline = build(transport, 100, memory="none")
    gradient = np.arange(100, dtype=np.float32)
    first, second = run(pipeline, gradient), run(pipeline, gradient)
    assert everywhere(transport, np.array_equal(first, second))
    assert everywhere(transport, np.count_nonzero(first) == 10)


# --- one decision a step ---


@pytest.mark.mpi
@pytest.mark.law
@pytest.mark.parametrize(
    ("settings", "decisions", "reused"),
    [
        ({"schedule": "gravac", "cf_max": 40.0, "eps": 0.1}, [100], 4),
        ({"schedule": "warmup", "warmup_densities": (0.1, 0.05, 0.1), "steps_per_epoch": 1}, [100, 50], 3),
    ],
    ids=["gravac", "warmup"],
)
def test_auto_decides_once_per_k_and_each_algorithm_keeps_its_state(
    transport, monkeypatch, settings, decisions, reused
):
    """GraVAC sends fewer entries than that k in some steps, and the warm-up changes it."""
    asked, table = [], auto.table

    def fake(size, k, *given, **more):
        asked.append(k)
        best = "oktopk" if k == 100 else "topka"
        return [cost for cost in table(size, k, *given, **more) if cost.algorithm == best]

    monkeypatch.setattr(auto, "table", fake)
    pipeline = build(transport, 1000, 0.1, memory="none", collective="auto", **settings)
    algorithms, gradient = dict(pipeline.rules.collective._collectives), eighths(own(transport), 1000, 2**14)
    for number in range(5):
        run(pipeline, gradient)
        assert len(asked) <= number + 1
    alone = transport.size == 1  # nothing to choose
    assert asked == ([] if alone else decisions)
    assert pipeline.rules.collective._collectives == algorithms
    assert algorithms["oktopk"].state_dict()["threshold"]["left"] == (0 if alone else 32 - 1 - reused)


@pytest.mark.law
def test_a_nonfinite_step_changes_no_decision_and_no_state(transport, monkeypatch):
    pipeline = build(transport, 100, 0.1, collective="auto", schedule="warmup", steps_per_epoch=3)
    for number in range(4):
        run(pipeline, eighths(own(transport, number), 100))
    before, gradient = content(pipeline.state_dict()), eighths(own(transport), 100)
    monkeypatch.setattr(pipeline.rules.collective, "decide", None)
    monkeypatch.setattr(pipeline.rules.schedule, "densities", None)
    for bad in (np.nan, np.inf, -np.inf):
        if transport.rank == transport.size - 1:
            gradient[17] = bad
        total = run(pipeline, gradient)
        assert everywhere(transport, not np.isfinite(total[17]) and np.isfinite(np.delete(total, 17)).all())
        assert everywhere(transport, content(pipeline.state_dict()) == before)


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
    assert everywhere(transport, not remembered(pipeline).any())


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
        before = summed(transport, remembered(pipeline) + velocity)
        total = run(pipeline, gradient).astype(np.float64)
        assert everywhere(transport, np.array_equal(total + summed(transport, remembered(pipeline)), before))
        kept = pipeline.state_dict()["memory"]["velocity"]
        assert everywhere(transport, np.all((kept == velocity) | (kept == 0)))


@pytest.mark.slow
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize(("sparsifier", "collective"), COMMON)
def test_every_combination_continues_bitwise_identically_after_restart_and_undo(
    transport, sparsifier, collective, memory
):
    names = {"sparsifier": sparsifier, "memory": memory, "collective": collective, "schedule": "accordion"}
    settings = {"wire": "float16", "interval": 1, "steps_per_epoch": 2}
    if collective != "shared" and "compressor" in MEMORIES[memory].Options().known():
        settings["compressor"] = "quantize"  # a sketch needs random positions
    one, other = (build(transport, 500, 0.05, undoable=True, **names, **settings) for _ in range(2))
    gradients = iter(own(transport).standard_normal((6, 500)).astype(np.float32))
    for _ in range(3):
        assert same_bits(transport, run(one, next(gradients), learning_rate=0.3))
    before = content(one.state_dict())
    other.load_state_dict(snapshot(one.state_dict()))
    run(one, next(gradients), learning_rate=0.1)
    assert everywhere(transport, content(one.state_dict()) != before)
    one.undo()
    assert everywhere(transport, content(one.state_dict()) == before)
    for gradient in gradients:
        totals = [run(pipeline, gradient.copy(), learning_rate=0.2) for pipeline in (one, other)]
        assert everywhere(transport, np.array_equal(*totals))
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
@given(sends=st.lists(st.sampled_from(SENDS), min_size=1, max_size=40), held=st.booleans(), seed=st.integers(0, 1000))
def test_nothing_is_lost_if_dense_rounded_and_sparse_steps_alternate(transport, sends, held, seed):
    """With an empty memory, which gradients can bypass, and with a filled one; held positions occur, too."""
    pipeline = build(transport, 300, memory="residual", collective="topka")
    pipeline.rules.schedule = Script(sends)
    generator, given_, total = own(transport, seed), np.zeros(300), np.zeros(300)
    for number, (density, wire) in enumerate(sends):
        gradient = eighths(generator, 300, 8)
        start = 100 * (held and number % 3 == 1 and transport.rank == 0)
        output = np.zeros(300, np.float32)
        pipeline.run([(start, gradient[start:])], [(0, output)], Conditions())
        given_[start:] += gradient[start:]
        total += output
        assert same_bits(transport, output)
        if density == 1 and not wire and not held:
            assert everywhere(transport, not remembered(pipeline).any())
    kept = summed(transport, remembered(pipeline))
    assert everywhere(transport, np.array_equal(total + kept, summed(transport, given_)))
    dense = {wire: sends.count((1.0, wire)) for wire in (None, "float16", "log8")}
    counted = {"dense" if wire is None else f"dense_{wire}": count for wire, count in dense.items()}
    assert {name: pipeline.counts.events[f"steps_{name}"] for name in counted} == counted


@pytest.mark.law
@pytest.mark.parametrize("put", ["float16 gradients", "gaps", "several"])
def test_bypassing_an_empty_memory_does_not_change_the_result(transport, put):
    through, past = (build(transport, 300, 1.0) for _ in range(2))
    through.rules.memory.empty = False
    gradient = eighths(own(transport), 300, 8).astype(np.float16 if put == "float16 gradients" else np.float32)
    cuts = {"gaps": [(10, 50), (80, 300)], "several": [(0, 120), (120, 300)]}.get(put, [(0, 300)])
    segments = [(begin, gradient[begin:end].copy()) for begin, end in cuts]
    outputs = [np.full(300, np.nan, np.float32) for _ in range(2)]
    for pipeline, output in zip((through, past), outputs, strict=True):
        pipeline.run(segments, [(0, output)], Conditions())
    assert everywhere(transport, np.array_equal(*outputs))
    assert everywhere(transport, not remembered(past).any() and not remembered(through).any())
    assert past.rules.memory.empty


@pytest.mark.law
def test_a_dense_step_delivers_a_loaded_residual(transport):
    old, new = (build(transport, 300, 0.1) for _ in range(2))
    run(old, eighths(own(transport), 300, 8))
    new.load_state_dict(snapshot(old.state_dict()))
    new.rules.schedule = Script([(1.0, None)])
    held = summed(transport, remembered(new))
    assert everywhere(transport, np.array_equal(run(new, np.zeros(300, np.float32)), held))
    assert everywhere(transport, held.any() and not remembered(new).any())


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
    assert everywhere(transport, np.array_equal(summed(transport, remembered(new)), summed(transport, remembered(old))))
    assert everywhere(transport, transport.rank == 0 or not remembered(new).any())
    assert (new.state_dict()["unit"], new.state_dict()["steps"]) == (0.5 * 0.25, 3)
    assert [note.rpartition(" of ")[2] for note in notes] == [
        "ReusedTopK start from scratch",
        "OkTopk start from scratch",
    ]
    assert same_bits(transport, run(new, eighths(own(transport, 4), 200), learning_rate=0.25))
