"""MultiLevel: TopK's entries, found in two levels."""

from __future__ import annotations

import numpy as np
from rules import made

from horovod_sparse.accumulator import Accumulator
from horovod_sparse.rules import Step
from horovod_sparse.sparsifiers import MultiLevel


def test_the_first_level_leaves_one_in_cf_min_of_what_is_not_held(monkeypatch):
    levels = []
    whole = Accumulator.take_largest
    monkeypatch.setattr(Accumulator, "take_largest", lambda self, k, threads: levels.append(k) or whole(self, k))
    for k in (5, 50):
        accumulator = Accumulator(np.ones(300, np.float32), [(7, np.arange(200, dtype=np.float32))])
        made(MultiLevel, 300, cf_min=10).take(accumulator, k, Step())
    assert levels == [20, 50]
