"""States stay finite for any input, and nothing is lost if sums are finite."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
import pytest
from laws import content, digest, everywhere, same_bits, summed, thorough
from pipelines import own, residual, run
from rules import LIKE, eighths

from horovod_sparse.collectives import COLLECTIVES
from horovod_sparse.config import Sparse
from horovod_sparse.engine.pipeline import pipeline_for
from horovod_sparse.engine.pipeline.headroom import Headroom
from horovod_sparse.memories import MEMORIES
from horovod_sparse.rules import BucketContext
from horovod_sparse.sparsifiers import SPARSIFIERS

SIZE = 90
SHARING = ("randomblock", "randomk", "stable", "arctopk")
COMPRESSED = ("conef", "partial", "improved")
OPTIONS = {
    "threshold": {"threshold": 16.0},
    "stable": {"block": 1, "refresh": 3},
    "arctopk": {"block": 1, "refresh": 3},
    "hierarchical": {"outer": "gtopk", "node_ranks": 2},
    "oktopk": {"tau_threshold": 4, "tau_partition": 4},
    "reusedtopk": {"tau_threshold": 4},
}
COMBINATIONS = [
    (sparsifier, collective)
    for sparsifier, collective in itertools.product(SPARSIFIERS, COLLECTIVES)
    if collective != "shared" or sparsifier in SHARING
]
# Every rule once, and those whose state the issue of overflow was found in.
ONCE = [
    *((one, "shared" if one in SHARING else "topka") for one in SPARSIFIERS),
    *(("topk", one) for one in COLLECTIVES if one not in ("topka", "shared")),
    ("reusedtopk", "oktopk"),
    ("randomk", "hierarchical"),
]
CODES = {"compressor": "quantize"}
CASES = [
    *((*pair, {}) for pair in ONCE),
    *(("topk", one, {"keep": 1, **outer}) for one, outer in (("oktopk", {}), ("hierarchical", {"outer": "oktopk"}))),
    *(("topk", one, {"memory": memory}) for one in ("gtopk", "hierarchical") for memory in ("none", "momentum")),
    *(("topk", one, {"memory": memory, **CODES}) for one in ("gtopk", "hierarchical") for memory in COMPRESSED),
    *(("randomk", "shared", {"memory": memory, "saving": 0.01}) for memory in COMPRESSED),
    *(
        ("reusedtopk", one, {"wire": wire, "dtype": "float64" if wire == "float32" else "float32"})
        for one in ("oktopk", "hierarchical", "topkdsa")
        for wire in ("float16", "bfloat16", "float32")
    ),
]
# Of a step's elements, which come from these at random.
NUMBERS = {
    "plain": (0.0, -0.0, 1.0, -3.0, 1e-3),
    "denormal": (0.0, 1e-42, -1e-45, 1e-38),
    "huge": (3e38, -3e38, 3.4e38, 1e38, 1.0, 0.0),
    "large": (1e33, -3e34, 1e36, 1.0),
    "wide": (1e-42, 1.0, -1e10, 1e20, 1e30),
    "not finite": (np.nan, np.inf, -np.inf, 1.0, 3e38),
}


def build(transport, sparsifier, collective, memory="residual", dtype="float32", **settings):
    for name in (sparsifier, collective):
        settings = {**OPTIONS.get(name, {}), **settings}
    sparse = Sparse.of(0.05, sparsifier, memory, collective, **settings)
    return pipeline_for(sparse, SIZE, LIKE.astype(dtype), transport)


def drawn(generator, dtype="float32"):
    """Draw numbers of one kind, mostly ordinary ones, so that earlier states must survive."""
    kind = str(generator.choice([*NUMBERS, "plain", "plain"]))
    return generator.choice(NUMBERS[kind], SIZE).astype(dtype)


def finite(state):
    """Return whether all numbers of a state are finite."""
    if isinstance(state, Mapping):
        return all(map(finite, state.values()))
    is_number = isinstance(state, float) or getattr(state, "dtype", np.dtype("i4")).kind == "f"
    return not is_number or bool(np.isfinite(state).all())


def assert_laws(transport, pipeline, steps, dtype="float32"):
    """Run steps with random numbers, of a different kind on each rank, and check the laws after each.

    A step that is sent dense leaves the memory alone, or, if that was only found out in the exchange, leaves with each
    rank what the others cannot add.
    """
    generator, bits, taken = own(transport, 1), [], 0
    conserves = "residual" in pipeline.state_dict()["memory"] and "velocity" not in pipeline.state_dict()["memory"]
    for number in range(steps):
        before, counted = content(pipeline.state_dict()), pipeline.state_dict()["steps"]
        old = pipeline.state_dict()["memory"]["residual"].copy() if conserves else 0
        gradient = drawn(generator, dtype) if number > 2 else eighths(generator, SIZE).astype(dtype)
        total = run(pipeline, gradient)
        state = pipeline.state_dict()
        assert everywhere(transport, finite(state)), f"step {number}: {state}"
        bits.append(digest(total))
        if state["steps"] > counted:
            taken += 1
            assert everywhere(transport, np.isfinite(total).all())
        elif not before["stable"]:
            assert everywhere(transport, content(state) == before), number
        if conserves:
            with np.errstate(over="ignore", invalid="ignore"):
                parts = [array.astype(np.float64) for array in (old, gradient)]
                fed = summed(transport, sum(parts))
                size = summed(transport, sum(map(abs, parts)))  # a dense step adds gradients alone: they do not cancel
            held = summed(transport, state["memory"]["residual"].astype(np.float64))
            known = np.isfinite(fed) & (size < 3e38)
            error = abs(total[known] + held[known] - fed[known])
            assert everywhere(transport, (error <= 1e-5 * size[known]).all()), number
    assert transport.broadcast_object(bits) == bits
    return taken


@pytest.mark.law
@pytest.mark.parametrize(("sparsifier", "collective", "settings"), CASES, ids=str)
def test_states_stay_finite_and_nothing_is_lost_with_random_numbers(transport, sparsifier, collective, settings):
    pipeline = build(transport, sparsifier, collective, **settings)
    assert assert_laws(transport, pipeline, 40 if thorough() else 10, settings.get("dtype", "float32"))


@pytest.mark.nightly
@pytest.mark.parametrize(("sparsifier", "collective"), COMBINATIONS)
def test_hundreds_of_steps_of_random_numbers_with_every_combination(transport, sparsifier, collective):
    assert assert_laws(transport, build(transport, sparsifier, collective), 300) > 20


@pytest.mark.law
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize(("sparsifier", "collective"), [("topk", "topka"), ("randomk", "shared"), ("stable", "shared")])
def test_gradients_near_the_largest_float_are_sent_dense_and_leave_the_memory_alone(
    transport, caplog, sparsifier, collective, memory
):
    settings = CODES if memory in COMPRESSED else {}
    pipeline = build(transport, sparsifier, collective, memory, **settings)
    plain = eighths(own(transport, 5), SIZE)
    run(pipeline, plain)
    before, huge = content(pipeline.state_dict()), np.full(SIZE, 3e38 * (transport.rank == 0), np.float32)
    for _ in range(5):
        assert everywhere(transport, np.array_equal(run(pipeline, huge), np.full(SIZE, 3e38, np.float32)))
        assert everywhere(transport, content(pipeline.state_dict()) == before)
    assert everywhere(
        transport, (f"rank {transport.rank}: bucket 0, step 1: gradients are sent dense" in caplog.text) == huge.any()
    )
    assert everywhere(transport, np.isfinite(run(pipeline, plain)).all() and pipeline.state_dict()["steps"] == 2)


@pytest.mark.law
def test_a_factor_that_would_overflow_the_residual_empties_it(transport):
    """A loss scale that rises by forty orders of magnitude scales the residual up by as much."""
    pipeline, plain = build(transport, "topk", "topka"), eighths(np.random.default_rng(6), SIZE)
    run(pipeline, plain)
    assert everywhere(transport, run(pipeline, plain, loss_scale=1e40).any())
    assert everywhere(transport, not pipeline.state_dict()["memory"]["residual"].any())
    assert same_bits(transport, run(pipeline, plain))
    assert everywhere(transport, finite(pipeline.state_dict()))


@pytest.mark.law
@pytest.mark.parametrize("collective", ["oktopk", "hierarchical"])
def test_what_an_owner_keeps_of_other_ranks_counts(transport, collective):
    """The last rank, whose gradients are zero, keeps sums of the others; then a loss scale rises by 13 orders."""
    nodes = {"outer": "oktopk", "node_ranks": 1} if collective == "hierarchical" else {}
    pipeline = build(transport, "topk", collective, keep=1, **nodes)
    share = SIZE // transport.size // transport.size
    begin = SIZE - (transport.rank + 1) * share if transport.rank < transport.size - 1 else SIZE
    gradient = np.zeros(SIZE, np.float32)
    gradient[begin : begin + share] = 1e27 * np.arange(1, share + 1)[: SIZE - begin]
    for _ in range(6):
        run(pipeline, gradient.copy())
    assert transport.size != 3 or transport.allgather_object(bool(residual(pipeline).any()))[-1]
    run(pipeline, np.zeros_like(gradient), loss_scale=1e13)
    assert everywhere(transport, finite(pipeline.state_dict()))


class Counting:
    """A memory that counts how often it is measured."""

    def __init__(self, value):
        self.array, self.measured = np.full(4, value, np.float32), 0

    def state_dict(self):
        self.measured += 1
        return {"nested": {"array": self.array, "indices": np.arange(4)}, "unit": 7.0}


@pytest.mark.parametrize("ranks", [1, 3, 64])
def test_the_memory_is_measured_only_occasionally(ranks):
    memory = Counting(1e-3)
    headroom = Headroom(BucketContext(4, LIKE, ranks=ranks), memory)
    assert all(headroom.suffices(0.1, 25_000_000, 1.0) for _ in range(400))
    assert memory.measured <= 400 / 8
