"""Memories of several ranks merge into one that holds what they held together."""

from __future__ import annotations

import numpy as np
import pytest
from memories.errors import LIKE, block, eighths, held, step

from horovod_sparse.memories import MEMORIES
from horovod_sparse.place import Place

SIZE = 2000
# The error allowed, relative to the norm of the sum: sums are exact, counters round, and codes round once more.
KINDS = [
    ("residual", {}, 0.0),
    ("momentum", {}, 1e-6),
    ("momentum", {"nesterov": True}, 1e-6),
    ("none", {}, 0.0),
    ("conef", {}, 1e-6),
    ("conef", {"compressor": "quantize"}, 0.02),
    ("partial", {"compressor": "quantize", "beta": 0.25}, 0.02),
    ("improved", {"version": 1}, 1e-6),
    ("improved", {"version": 2}, 1e-6),
    ("improved", {"version": 1, "compressor": "quantize"}, 0.02),
]


def memory_of(rank, name, options, size=SIZE):
    return MEMORIES[name](Place(size, LIKE, bucket=2, rank=rank, ranks=4), **options)


def filled(rank, name, options):
    memory = memory_of(rank, name, options)
    generator = np.random.default_rng(rank)
    for _ in range(2):
        step(memory, eighths(generator, SIZE), block(generator, SIZE, 100), returns=10)
    return memory


@pytest.mark.parametrize(("name", "options", "error"), KINDS, ids=str)
@pytest.mark.parametrize("ranks", [0, 1, 3])
def test_a_merged_memory_holds_the_sum(name, options, error, ranks):
    memories = [filled(rank, name, options) for rank in range(ranks)]
    heir = filled(7, name, options)
    heir.load_state_dict(heir.merge([memory.state_dict() for memory in memories]))
    expected = np.sum([held(memory, SIZE) for memory in memories], 0) if memories else np.zeros(SIZE)
    assert np.linalg.norm(held(heir, SIZE) - expected) <= error * np.linalg.norm(expected)
    assert ranks == 0 or name == "none" or np.linalg.norm(expected) > 1


@pytest.mark.parametrize(("name", "options", "error"), KINDS, ids=str)
def test_to_merge_changes_nothing_else(name, options, error):
    memory, twin = filled(0, name, options), filled(0, name, options)
    states = [filled(rank, name, options).state_dict() for rank in (1, 2)]
    memory.merge(states)
    assert np.array_equal(held(memory, SIZE), held(twin, SIZE))


@pytest.mark.parametrize(("name", "options", "error"), [kind for kind in KINDS if kind[0] != "none"], ids=str)
def test_states_of_another_size_are_refused(name, options, error):
    others = [memory_of(rank, name, options, SIZE + 300).state_dict() for rank in range(2)]
    with pytest.raises(ValueError, match=r"fit .*load the state with the .*it was saved with"):
        memory_of(0, name, options).merge(others)
