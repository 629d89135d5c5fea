"""ImprovedContractive also feeds back what the error compressor misses."""

from __future__ import annotations

import numpy as np
import pytest
from rules import eighths, held, made, send, some, written

from horovod_sparse.memories import Contractive, ImprovedContractive

SIZE = 400
POSITIONS = some(np.random.default_rng(1), SIZE, 40)


@pytest.mark.parametrize("version", [1, 2])
def test_improved_is_more_accurate_than_contractive(version):
    """With 4 bits: a second code of the first one's error; and the largest entries kept exactly."""
    gradient = np.random.default_rng(2).standard_t(2, SIZE).astype(np.float32)
    errors = []
    for kind, options in ((Contractive, {}), (ImprovedContractive, {"version": version})):
        memory = made(kind, SIZE, compressor="quantize", bits=4, **options)
        _, delivered = send(memory, gradient, POSITIONS)
        errors.append(np.linalg.norm(held(memory, SIZE) - (gradient - written(delivered))))
    assert errors[1] < errors[0] / 2


def test_version_2_keeps_the_largest_errors_as_many_as_entries_were_sent():
    memory = made(ImprovedContractive, SIZE, version=2)
    accumulated, delivered = send(memory, eighths(np.random.default_rng(4), SIZE), POSITIONS)
    state, rest = memory.state_dict(), accumulated - written(delivered)
    assert state["indices"].size == len(POSITIONS)
    assert np.array_equal(state["values"], rest[state["indices"]])
    assert np.abs(np.delete(rest, state["indices"])).max() <= np.abs(state["values"]).min()
