"""NoMemory: every step starts from nothing."""

from __future__ import annotations

import numpy as np
from rules import NOWHERE, made, opened, send

from horovod_sparse.memories import NoMemory


def test_every_step_sees_its_gradient_alone_also_after_a_poisoned_one():
    memory, gradient = made(NoMemory, 4), np.array([1, -3, 2, 0], np.float32)
    for number in range(3):
        assert np.array_equal(send(memory, gradient, 1, scale=7.0)[0], gradient)
        send(memory, np.full(4, [np.nan, np.inf, 0][number], np.float32), NOWHERE)
    assert opened(memory, gradient, scale=7.0).take_largest(1).entries[0].tolist() == [1]
    assert memory.state_dict() == {}
