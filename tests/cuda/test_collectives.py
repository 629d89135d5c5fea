"""Cost of an exchange of device vectors; tests/collectives checks its results on host and device."""

from __future__ import annotations

import numpy as np
import pytest
from devices import cupy
from exchanges import STAGED, allocations, through
from laws import make

from horovod_sparse.transport import pinned
from horovod_sparse.vector import SparseVector

pytestmark = pytest.mark.mpi

transfers = getattr(cupy, "transfers", {})  # only the stand-in counts


def steps(transport, put, shared):
    """Return vectors of one density with slightly different lengths."""
    for seed in range(5):
        generator = np.random.default_rng([seed, 0 if shared else transport.rank])
        indices = np.flatnonzero(generator.random(8000) < 0.1).astype(np.int32)
        values = generator.standard_normal(indices.size).astype(np.float32)
        yield SparseVector(put(indices), put(values), 8000, shared=shared)


# How often it is waited for in a step that renews nothing: for the number of entries of each sum, before messages or
# pieces of a dense sum leave, and for headers and plain indices of what arrived, which are checked. On more ranks,
# gTopk's tree has more levels, and Ok-Topk and TopkDSA send more often.
@pytest.mark.parametrize(
    ("name", "waits"), [("dense", 2), ("shared", 2), ("topka", 4), ("topkdsa", 10), ("gtopk", 14), ("oktopk", 12)]
)
def test_pinned_memory_is_allocated_once_with_few_synchronizations(transport, name, waits):
    counts = []
    with through(STAGED) as put, allocations() as sizes:
        # Measuring the link would allocate, too.
        collective = make(transport, name, put=put, **({} if name == "dense" else {"indices": "plain"}))
        for vector in steps(transport, put, shared=name == "shared"):
            cupy.cuda.get_current_stream().synchronize()
            transfers.clear()
            collective.allreduce(vector, 800)
            counts.append(len(sizes))
        held = sum(block.size for blocks in pinned.pool()._idle.values() for block in blocks)
    if transport.size <= 4:
        assert sum(transfers.values()) <= waits, transfers
    assert counts[-1] - counts[2] <= 1, sizes  # at most one that grew
    # A message's block is less than twice as long; a rank may hold a message of every rank, and what it sends.
    selection = 8 * 800 * 1.2 * transport.size
    assert held <= (4 * 32_000 if name == "dense" else 2 * 2 * selection) + (1 << 12) * transport.size
    assert (held > 0) == (transport.size > 1) or name == "shared"  # whose sums are short: they are gathered
