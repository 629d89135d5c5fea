"""Laws of every memory: keeping, merging, restoring, and which entries count as delivered."""

from __future__ import annotations

import numpy as np
import pytest
from rules import LIKE, NOWHERE, eighths, held, made, normal, opened, send, some

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.memories import MEMORIES
from horovod_sparse.memories.base import delivered
from horovod_sparse.rules import BucketContext
from horovod_sparse.vector import SparseVector

SIZE = 2000
# The error allowed of a merged state, relative to the norm: sums are exact, counters round, and codes round once more.
KINDS = [
    ("residual", {}, 0.0),
    ("momentum", {"momentum": 0.9}, 1e-6),
    ("momentum", {"momentum": 0.9, "fresh": 0.4, "masking": True}, 1e-6),
    ("none", {}, 0.0),
    ("conef", {}, 1e-6),
    ("conef", {"compressor": "quantize"}, 0.02),
    ("conef", {"compressor": "quantize", "bits": 16}, 1e-4),
    ("partial", {"compressor": "quantize", "beta": 0.25}, 0.02),
    ("improved", {"version": 1, "compressor": "quantize"}, 0.02),
    ("improved", {"version": 2}, 1e-6),
    ("improved", {"version": 1, "compressor": "quantize", "bits": 4}, 0.2),
]
every_memory = pytest.mark.parametrize(("name", "options", "error"), KINDS, ids=str)


def built(rank, name, options, size=SIZE):
    return made(MEMORIES[name], BucketContext(size, LIKE, bucket=2, rank=rank, ranks=4), **options)


def filled(rank, name, options):
    memory, generator = built(rank, name, options), np.random.default_rng(rank)
    for _ in range(2):
        send(memory, eighths(generator, SIZE), some(generator, SIZE, 100), returns=10)
    return memory


@every_memory
def test_a_merged_memory_holds_the_sum_and_merging_changes_nothing_else(name, options, error):
    for ranks in (0, 1, 3):
        memories = [filled(rank, name, options) for rank in range(ranks)]
        heir, twin = filled(7, name, options), filled(7, name, options)
        merged = heir.merge([memory.state_dict() for memory in memories])
        assert np.array_equal(held(heir, SIZE), held(twin, SIZE))
        heir.load_state_dict(merged)
        expected = np.sum([held(memory, SIZE) for memory in memories], 0) if memories else np.zeros(SIZE)
        assert np.linalg.norm(held(heir, SIZE) - expected) <= error * np.linalg.norm(expected)
        assert ranks == 0 or name == "none" or np.linalg.norm(expected) > 1


@every_memory
def test_a_restored_memory_continues(name, options, error):
    """The arrays are separate, although the state is not a copy."""
    one, other = filled(0, name, options), built(0, name, options)
    other.load_state_dict(one.state_dict())
    for seed in range(2):
        assert np.array_equal(*(send(memory, normal(seed, SIZE), 40, scale=0.5)[0] for memory in (one, other)))


@every_memory
def test_a_state_of_another_size_is_refused(name, options, error):
    states = [built(rank, name, options, SIZE + 300).state_dict() for rank in range(2)]
    if name == "none":
        with pytest.raises(ValueError, match=r"NoMemory has no state, .*\['residual'\]"):
            built(0, name, options).load_state_dict({"residual": LIKE})
        return
    for use in (lambda memory: memory.merge(states), lambda memory: memory.load_state_dict(states[0])):
        with pytest.raises(ValueError, match=r"fit .*load the state with the .*it was saved with"):
            use(built(0, name, options))


@every_memory
@pytest.mark.parametrize("whole", [False, True])
def test_a_failed_exchange_returns_everything_to_the_memory(name, options, error, whole):
    memory, untouched = (built(0, name, options) for _ in range(2))
    gradient = eighths(np.random.default_rng(4), SIZE)
    accumulator = opened(memory, gradient)
    vector = accumulator.take_all() if whole else accumulator.take_largest(50)
    memory.close(accumulator, vector, vector)
    send(untouched, gradient, NOWHERE)
    # Version 2 of the improved one keeps as many of the largest entries as it meant to send.
    if options.get("version") != 2:
        assert np.array_equal(held(memory, SIZE), held(untouched, SIZE))


# A part of its error waits; a velocity stays.
LASTING = ("partial", "momentum")


@pytest.mark.parametrize(("name", "options", "error"), [kind for kind in KINDS if kind[0] not in LASTING], ids=str)
def test_a_dense_step_leaves_nothing_behind(name, options, error):
    memory = filled(0, name, options)
    send(memory, eighths(np.random.default_rng(5), SIZE), None)
    assert np.abs(held(memory, SIZE)).max() < 1e-3


@every_memory
def test_a_new_unit_rescales_what_is_held(name, options, error):
    memory, before = filled(0, name, options), held(filled(0, name, options), SIZE)
    after, _ = send(memory, np.zeros(SIZE, np.float32), NOWHERE, scale=0.5)
    np.testing.assert_allclose(after, before / 2, rtol=1e-6, atol=1e-6)


ACCUMULATOR = Accumulator(np.zeros(10, np.float32), [(1, np.ones(3, np.float32)), (6, np.ones(2, np.float32))])


def vector(entries):
    return SparseVector(np.array(list(entries), np.int32), np.array(list(entries.values()), np.float32), 10)


@pytest.mark.parametrize(
    ("sent", "returned", "expected"),
    [
        ({1: 5, 3: -2}, {}, [1, 3]),
        ({1: 5, 3: -2}, {3: -2}, [1]),
        ({1: 5, 3: -2}, {1: 5, 3: -2}, []),
        ({1: 5, 3: -2}, {3: -0.125}, [1, 3]),  # what rounding took away
        ({1: 5, 3: -2}, {2: 7, 9: 1}, [1, 3]),  # other ranks' entries
        ({1: 5, 3: 0}, {}, [1]),  # a held position of a shared vector
        ({}, {2: 7}, []),
    ],
)
def test_entries_not_returned_completely_count_as_delivered(sent, returned, expected):
    assert delivered(ACCUMULATOR, vector(sent), vector(returned)).tolist() == expected


def test_a_dense_step_delivers_all_active_elements_unless_it_failed():
    whole = SparseVector.full(np.ones(10, np.float32))
    assert delivered(ACCUMULATOR, whole, whole.nothing()).tolist() == [1, 2, 3, 6, 7]
    assert delivered(ACCUMULATOR, whole, whole).tolist() == []
    rounding = SparseVector.full(np.full(whole.size, 1e-3, np.float32))
    assert delivered(ACCUMULATOR, whole, rounding).tolist() == [1, 2, 3, 6, 7]
