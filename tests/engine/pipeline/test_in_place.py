"""Results in the gradients' own arrays, and undoable steps: the same bits, with fewer passes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from laws import content, everywhere, same_bits, summed
from pipelines import own, residual
from rules import LIKE, eighths

from horovod_sparse.config import Sparse
from horovod_sparse.engine.pipeline import pipeline_for
from horovod_sparse.memories import MEMORIES
from horovod_sparse.rules import Conditions
from horovod_sparse.sparsifiers import SPARSIFIERS

SIZE = 600
OTHER_FORMATS = [np.dtype(kind) for kind in (np.float16, ml_dtypes.bfloat16, np.float64)]
# A bucket of any size, with steps that do not depend on earlier ones' choices only.
OPTIONS = {
    "threshold": {"threshold": 16.0},
    "stable": {"block": 1, "refresh": 2},
    "arctopk": {"block": 1, "refresh": 2},
}


def build(transport, undoable=False, **settings):
    return pipeline_for(Sparse.of(0.05, **settings), SIZE, LIKE, transport, factor=0.5, undoable=undoable)


def parameters(gradient, dtype):
    """Gradients of two parameters, with a third between them that is held."""
    parts = [gradient[:200], gradient[200:350], gradient[350:]]
    return [(start, part.astype(dtype)) for start, part in zip((0, 200, 350), parts, strict=True)]


def step(pipeline, outputs, held=1, in_place=True):
    """Run one step; return the gradients that the optimizer would see."""
    gradients = [pair for number, pair in enumerate(outputs) if number != held]
    if not in_place:
        gradients = [(start, array.copy()) for start, array in gradients]
    pipeline.run(gradients, outputs, Conditions())
    return np.concatenate([array.astype(np.float64) for _, array in outputs])


def settings_of(sparsifier, memory):
    compressed = {"compressor": "quantize"} if "compressor" in MEMORIES[memory].Options().known() else {}
    return {"sparsifier": sparsifier, "memory": memory, **OPTIONS.get(sparsifier, {}), **compressed}


COMBINATIONS = [*((name, "residual") for name in SPARSIFIERS), *(("topk", name) for name in MEMORIES)]


@pytest.mark.law
@pytest.mark.parametrize(
    ("sparsifier", "memory", "dtype"),
    [
        *((*pair, np.dtype(np.float32)) for pair in COMBINATIONS),
        *(("topk", memory, dtype) for memory in ("residual", "momentum") for dtype in OTHER_FORMATS),
    ],
    ids=str,
)
def test_results_in_place_are_bitwise_identical(transport, sparsifier, memory, dtype):
    settings = settings_of(sparsifier, memory)
    one, other = build(transport, **settings), build(transport, **settings)
    for number in range(4):
        gradient = eighths(own(transport, number), SIZE, 256)
        held = 1 if number % 2 else 3  # none
        first = step(one, parameters(gradient, dtype), held)
        assert everywhere(
            transport, np.array_equal(first, step(other, parameters(gradient, dtype), held, in_place=False))
        )
        assert same_bits(transport, first)
        assert everywhere(transport, content(one.state_dict()) == content(other.state_dict()))


@pytest.mark.law
def test_gradients_that_are_not_outputs_stay_unchanged(transport):
    pipeline, gradient = build(transport), eighths(own(transport), SIZE)
    output, before = np.empty_like(gradient), gradient.copy()
    pipeline.run([(0, gradient)], [(0, output)], Conditions())
    pipeline.run([(0, gradient[:300]), (300, gradient[300:])], [(0, gradient[:300]), (300, output[300:])], Conditions())
    assert everywhere(transport, np.array_equal(gradient[300:], before[300:]))


@pytest.mark.law
@pytest.mark.parametrize("undoable", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_an_exchange_that_fails_loses_nothing(transport, monkeypatch, undoable, in_place):
    pipeline, gradient = build(transport, undoable), eighths(own(transport), SIZE)
    step(pipeline, [(0, gradient.copy())])
    before = residual(pipeline)

    def fail(vector, k):
        raise OSError("the network is down")

    monkeypatch.setattr(pipeline.rules.collective, "allreduce", fail)
    with pytest.raises(OSError, match="down"):
        step(pipeline, [(0, gradient.copy())], in_place=in_place)
    assert everywhere(transport, np.array_equal(residual(pipeline), before + gradient))


@pytest.mark.law
@pytest.mark.parametrize(("sparsifier", "memory"), COMBINATIONS)
def test_undoable_steps_are_bitwise_identical_and_a_nonfinite_one_is_undone(transport, sparsifier, memory):
    settings = settings_of(sparsifier, memory)
    one, other, ranks = build(transport, undoable=True, **settings), build(transport, **settings), transport.size
    for number in range(4):
        before, gradient = content(one.state_dict()), eighths(own(transport, number), SIZE, 256)
        bad = gradient.copy()
        if transport.rank == number % ranks:
            bad[[7, 400]] = [np.inf, np.nan]
        seen = step(one, parameters(bad, np.float32), held=3)
        with np.errstate(invalid="ignore"):
            assert everywhere(
                transport, np.array_equal(seen, 0.5 * summed(transport, bad.astype(np.float64)), equal_nan=True)
            )
        assert everywhere(transport, content(one.state_dict()) == before)
        if number % 2:
            step(one, parameters(gradient + 1, np.float32))
            one.undo()
            assert everywhere(transport, content(one.state_dict()) == before)
        totals = [step(pipeline, parameters(gradient, np.float32)) for pipeline in (one, other)]
        assert everywhere(transport, np.array_equal(*totals))
        assert everywhere(transport, content(one.state_dict()) == content(other.state_dict()))


def test_the_state_before_a_step_is_kept_without_a_copy(transport):
    pipeline = build(transport, undoable=True)
    step(pipeline, [(0, eighths(own(transport, 1), SIZE))])
    array = pipeline.rules.memory.state_dict()["residual"]
    before = array.copy()
    step(pipeline, [(0, eighths(own(transport, 2), SIZE))])
    assert everywhere(transport, np.array_equal(array, before))
    pipeline.undo()
    assert pipeline.rules.memory.state_dict()["residual"] is array
