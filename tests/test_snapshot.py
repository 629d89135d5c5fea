"""Copies of a state that can be taken again and again."""

from __future__ import annotations

import numpy as np

from horovod_sparse.snapshot import snapshot


def state(size=3, dtype=np.float32):
    return {"step": 1, "memory": {"residual": np.arange(size, dtype=dtype), "unit": 0.5}, "seen": [[0.1, 2.0]]}


def test_a_copy_does_not_change_with_what_was_copied():
    live = state()
    copy = snapshot(live)
    live["memory"]["residual"][:] = 7
    live["step"] = 2
    assert copy["memory"]["residual"].tolist() == [0, 1, 2]
    assert (copy["step"], copy["memory"]["unit"], copy["seen"]) == (1, 0.5, [[0.1, 2.0]])


def test_an_earlier_copy_gives_its_memory():
    first = snapshot(state())
    array = first["memory"]["residual"]
    live = state()
    live["memory"]["residual"] += 1
    second = snapshot(live, first)
    assert second["memory"]["residual"] is array
    assert array.tolist() == [1, 2, 3]


def test_an_array_of_another_size_or_dtype_is_copied_anew():
    first = snapshot(state())
    for other in (state(size=4), state(dtype=np.float64), {"memory": {"velocity": np.ones(2)}}):
        copy = snapshot(other, first)
        for key, array in other["memory"].items():
            if isinstance(array, np.ndarray):
                assert copy["memory"][key] is not array
                assert copy["memory"][key].dtype == array.dtype
                assert np.array_equal(copy["memory"][key], array)
