"""Test of the laws of memories."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.rules import Accumulator, SparseVector, Step
from horovod_sparse.rules.testing.values import context_of, dense, eighths, fail_together

_SIZE = 2000


def check_memory(transport: Any, rule: Any, error: float = 0.0, steps: int = 200, **options: Any) -> None:
    """Test the laws of a memory: hundreds of steps, failed exchanges, and loading and merging of states.

    Laws: the sum of all gradients equals the delivered entries plus the content of the memory. A failed exchange
    returns everything to the memory. A memory that loads the state of another continues with the same numbers. A merged
    state holds the sum of the states, and merging leaves the memory unchanged. A memory that modifies its content, such
    as one with momentum, or that is correct only in expectation, violates the first law.

    Args:
        transport: Transport between the ranks; any world size.
        rule: The memory class.
        error: Tolerance of every sum, relative to its norm. The gradients are chosen so that a plain residual is exact.
        steps: Number of steps for the first law.
        **options: Options of the memory; must be valid for a bucket of 2000 elements.

    Raises:
        AssertionError: A law is violated; raised on all ranks.
    """

    def build() -> Any:
        return rule(context_of(transport, _SIZE), rule.Options(**options))

    generator = np.random.default_rng(transport.rank)
    laws = {
        "gradients equal delivered entries plus memory": _conserves(build(), generator, error, steps),
        "a failed exchange returns everything to the memory": _recovers(build, generator, error),
        "a restored memory continues with the same numbers": _restores(build, generator),
        "a merged state holds the sum of the states": _merges(build, generator, error),
    }
    fail_together(transport, [law for law, holds in laws.items() if not holds])


def opened(memory: Any, gradient: NDArray[Any], scale: float = 1.0) -> Accumulator:
    """Open a memory with a dense gradient; ``scale`` is the factor on its content, as after a change of loss scale."""
    accumulator: Accumulator = memory.open(Step(gradients=[(0, gradient)], carry=scale), scale)
    return accumulator


def held(memory: Any, size: int) -> NDArray[Any]:
    """Return the content of a memory as a dense array."""
    content: NDArray[Any] = opened(memory, np.zeros(size, np.float32)).settle().copy()
    return content


def send(
    memory: Any, gradient: NDArray[Any], what: Any, returns: int = 0, scale: float = 1.0
) -> tuple[NDArray[Any], SparseVector]:
    """Run one step of a memory.

    Args:
        memory: The memory.
        gradient: Dense gradient of the bucket.
        what: Positions to send, or the number of largest magnitudes to send; None: everything.
        returns: Number of sent entries, counted from the end, that the exchange returns.
        scale: Factor on the content of the memory.

    Returns:
        The accumulated gradient as a dense array, and the entries that were delivered.
    """
    accumulator = opened(memory, gradient, scale)
    accumulated = accumulator.settle().copy()
    if what is None:
        vector = accumulator.take_all()
        memory.close(accumulator, vector, vector.nothing())
        return accumulated, vector
    vector = accumulator.take_largest(what) if isinstance(what, int) else accumulator.take_at(what, shared=True)
    kept = len(vector) - returns
    indices, values = vector.entries
    memory.close(accumulator, vector, SparseVector(indices[kept:], values[kept:], vector.size))
    return accumulated, SparseVector(indices[:kept], values[:kept], vector.size)


def _near(actual: NDArray[Any], expected: NDArray[Any], error: float) -> bool:
    return bool(np.linalg.norm(actual - expected) <= error * np.linalg.norm(expected))


def _conserves(memory: Any, generator: np.random.Generator, error: float, steps: int) -> bool:
    fed, delivered = np.zeros((2, _SIZE))
    for number in range(steps):
        gradient = eighths(generator, _SIZE)
        # Every 50th step sends everything. In the others, up to 19 sent entries return: none, some, or all of them.
        what = None if number % 50 == 49 else int(generator.integers(0, _SIZE // 10))
        _, vector = send(memory, gradient, what, returns=min(number % 20, what or 0))
        fed += gradient
        delivered += dense(vector)
    return _near(delivered + held(memory, _SIZE), fed, error)


def _recovers(build: Callable[[], Any], generator: np.random.Generator, error: float) -> bool:
    memory, gradient = build(), eighths(generator, _SIZE)
    for everything in (False, True):
        before = held(memory, _SIZE)
        accumulator = opened(memory, gradient)
        vector = accumulator.take_all() if everything else accumulator.take_largest(50)
        memory.close(accumulator, vector, vector)
        if not _near(held(memory, _SIZE), before + gradient, error):
            return False
    return True


def _restores(build: Callable[[], Any], generator: np.random.Generator) -> bool:
    original, restored = build(), build()
    send(original, eighths(generator, _SIZE), 100, returns=10)
    restored.load_state_dict(copy.deepcopy(original.state_dict()))
    gradients = eighths(generator, (2, _SIZE))
    pairs = [[send(memory, gradient, 40, scale=0.5)[0] for memory in (original, restored)] for gradient in gradients]
    return all(np.array_equal(expected, actual) for expected, actual in pairs)


def _merges(build: Callable[[], Any], generator: np.random.Generator, error: float) -> bool:
    merged, memories = build(), [build() for _ in range(3)]
    for memory in (merged, *memories):
        send(memory, eighths(generator, _SIZE), 100)
    for several in ([], memories):
        before = held(merged, _SIZE)
        state = merged.merge([copy.deepcopy(memory.state_dict()) for memory in several])
        expected = sum((held(memory, _SIZE) for memory in several), np.zeros(_SIZE))
        untouched = np.array_equal(held(merged, _SIZE), before)
        merged.load_state_dict(state)
        if not untouched or not _near(held(merged, _SIZE), expected, error):
            return False
    return True
