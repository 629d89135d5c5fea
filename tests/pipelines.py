"""Steps of a bucket's pipeline, and the comparison of every step with a reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from laws import everywhere
from numpy.typing import NDArray

from horovod_sparse.rules import Conditions
from horovod_sparse.rules.testing.values import eighths
from horovod_sparse.transport.base import Transport

Array = NDArray[Any]


def own(transport: Transport, *seed: int) -> np.random.Generator:
    """Return a generator that differs between ranks."""
    return np.random.default_rng([*seed, transport.rank])


def run(pipeline: Any, gradient: Array | Sequence[tuple[int, Array]], **conditions: Any) -> Array:
    """Run one step with a gradient of all positions, or with segments; return the gradient that the optimizer sees."""
    segments = gradient if isinstance(gradient, Sequence) else [(0, gradient)]
    context = pipeline._context
    output: Array = np.full(context.size, np.nan, context.like.dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        pipeline.run(segments, [(0, output)], Conditions(**conditions))
    return output


def residual(pipeline: Any) -> Array:
    """Return a copy of the residual of this rank, in float64."""
    kept: Array = pipeline.state_dict()["memory"]["residual"].astype(np.float64)
    return kept


def continue_alike(transport: Transport, one: Any, other: Any, gradients: Sequence[Array], **conditions: Any) -> None:
    """Assert that two pipelines return the same bits in the steps to come."""
    for gradient in gradients:
        totals = [run(pipeline, gradient.copy(), **conditions) for pipeline in (one, other)]
        assert everywhere(transport, totals[0].tobytes() == totals[1].tobytes())


def check_steps(transport: Transport, pipeline: Any, select: Callable[[Array, int], Array], steps: int) -> None:
    """Assert that every step sums all ranks' values at the reference's positions, and that all others stay.

    Args:
        transport: Transport of the ranks.
        pipeline: Pipeline of this rank.
        select: The reference: returns a mask of positions for the ranks' accumulators (ranks, elements) and the number
            of the step.
        steps: Number of steps.
    """
    rank, shape = transport.rank, (transport.size, pipeline._context.size)
    accumulators, generator = np.zeros(shape, np.float32), np.random.default_rng(5)
    for number in range(steps):
        gradients = eighths(generator, shape, 1000)
        total = run(pipeline, gradients[rank].copy())
        accumulators += gradients
        chosen = select(accumulators, number)
        assert everywhere(transport, np.array_equal(total, np.where(chosen, accumulators.sum(0), 0))), number
        accumulators[:, chosen] = 0
        assert everywhere(transport, np.array_equal(residual(pipeline), accumulators[rank]))
