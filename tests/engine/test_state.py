"""States convert to tensors for files and back to arrays, bit for bit."""

from __future__ import annotations

import numpy as np
import torch
from states import same

from horovod_sparse.engine.state import leader, to_arrays, to_tensors

STATE = {"unit": 0.5, "memory": {"residual": np.arange(4, dtype=np.float32)}, "schedule": {"until": 3, "name": "high"}}


def test_arrays_become_tensors_and_arrays_again():
    tensors = to_tensors(STATE)
    assert isinstance(tensors["memory"]["residual"], torch.Tensor)
    assert same(to_arrays(tensors), STATE)


def test_tensors_are_copies():
    tensors = to_tensors(STATE)
    tensors["memory"]["residual"][0] = 9
    assert STATE["memory"]["residual"][0] == 0


def test_a_leaders_state_has_no_memories():
    assert leader({"buckets": [STATE]}) == {"buckets": [{**STATE, "memory": {}}]}
    assert leader(None) == {"buckets": []}
