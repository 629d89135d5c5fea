"""The laws of memories."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.rules import Accumulator, SparseVector, Step
from horovod_sparse.rules.testing.values import dense, eighths, fail_together, place_of

_SIZE = 2000


def check_memory(transport: Any, rule: Any, error: float = 0.0, steps: int = 200, **options: Any) -> None:
    """Lets a memory work for hundreds of steps, fail, and take over other memories; a collective call.

    Laws: what was fed in is what was delivered and what is held, in every step; a failed exchange gives everything
    back; one that takes over a state goes on with the same numbers; merged states hold their sum, and to merge changes
    nothing else. They are those of a memory that keeps what it is given; one that changes it on purpose, as a momentum
    does, or is right in expectation only, breaks the first.

    Args:
        transport: Connects the ranks, of which there may be any number.
        rule: The class.
        error: Allowed of every sum, relative to its norm. Numbers are such that a plain residual has none.
        steps: Steps of the first law.
        **options: Of the rule; they must fit a bucket of 2000 elements.

    Raises:
        AssertionError: A law does not hold; on all ranks.
    """

    def build() -> Any:
        return rule(place_of(transport, _SIZE), rule.Options(**options))

    generator = np.random.default_rng(transport.rank)
    laws = {
        "what was fed in is delivered or held": _conserves(build(), generator, error, steps),
        "a failed exchange gives everything back": _gives_back(build, generator, error),
        "a restored one goes on": _goes_on(build, generator),
        "merged states hold their sum": _merges(build, generator, error),
    }
    fail_together(transport, [law for law, holds in laws.items() if not holds])


def opened(memory: Any, gradient: NDArray[Any], scale: float = 1.0) -> Accumulator:
    """The accumulator of a memory in a step with a gradient, whose loss scale differs from that before it."""
    accumulator: Accumulator = memory.open(Step(gradients=[(0, gradient)], carry=scale), scale)
    return accumulator


def held(memory: Any, size: int) -> NDArray[Any]:
    """All that a memory would feed back, written out."""
    whole: NDArray[Any] = opened(memory, np.zeros(size, np.float32)).settle().copy()
    return whole


def send(
    memory: Any, gradient: NDArray[Any], what: Any, returns: int = 0, scale: float = 1.0
) -> tuple[NDArray[Any], SparseVector]:
    """One step of a memory.

    Args:
        memory: It.
        gradient: Of the whole bucket.
        what: The positions that are sent, or how many of the largest; None: everything.
        returns: So many of the entries sent, the last ones, come back.
        scale: Factor on what was remembered.

    Returns:
        The accumulated gradient, written out, and what was sent and did not come back.
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


def _near(one: NDArray[Any], other: NDArray[Any], error: float) -> bool:
    return bool(np.linalg.norm(one - other) <= error * np.linalg.norm(other))


def _conserves(memory: Any, generator: np.random.Generator, error: float, steps: int) -> bool:
    fed, delivered = np.zeros((2, _SIZE))
    for number in range(steps):
        gradient = eighths(generator, _SIZE)
        # None, some, or all: where everything travels, and where an exchange has failed.
        what = None if number % 50 == 49 else int(generator.integers(0, _SIZE // 10))
        _, vector = send(memory, gradient, what, returns=min(number % 20, what or 0))
        fed += gradient
        delivered += dense(vector)
    return _near(delivered + held(memory, _SIZE), fed, error)


def _gives_back(build: Callable[[], Any], generator: np.random.Generator, error: float) -> bool:
    memory, gradient = build(), eighths(generator, _SIZE)
    for whole in (False, True):
        before = held(memory, _SIZE)
        accumulator = opened(memory, gradient)
        vector = accumulator.take_all() if whole else accumulator.take_largest(50)
        memory.close(accumulator, vector, vector)
        if not _near(held(memory, _SIZE), before + gradient, error):
            return False
    return True


def _goes_on(build: Callable[[], Any], generator: np.random.Generator) -> bool:
    one, other = build(), build()
    send(one, eighths(generator, _SIZE), 100, returns=10)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    gradients = eighths(generator, (2, _SIZE))
    pairs = [[send(memory, gradient, 40, scale=0.5)[0] for memory in (one, other)] for gradient in gradients]
    return all(np.array_equal(mine, theirs) for mine, theirs in pairs)


def _merges(build: Callable[[], Any], generator: np.random.Generator, error: float) -> bool:
    heir, memories = build(), [build() for _ in range(3)]
    for memory in (heir, *memories):
        send(memory, eighths(generator, _SIZE), 100)
    for several in ([], memories):
        before = held(heir, _SIZE)
        state = heir.merge([copy.deepcopy(memory.state_dict()) for memory in several])
        expected = sum((held(memory, _SIZE) for memory in several), np.zeros(_SIZE))
        untouched = np.array_equal(held(heir, _SIZE), before)
        heir.load_state_dict(state)
        if not untouched or not _near(held(heir, _SIZE), expected, error):
            return False
    return True
