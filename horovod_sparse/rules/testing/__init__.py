"""The laws of rules, for tests of your own, under mpirun or in a single process.

Each ``check_`` function builds a rule at a place of every rank, gives it random input, and raises an ``AssertionError``
on all ranks where a law does not hold on any. They need neither pytest nor hypothesis::

    @pytest.mark.parametrize("start", [0, 7])
    def test_first_positions(start):
        check_sparsifier(MPI.COMM_WORLD, FirstPositions, start=start)
"""

from __future__ import annotations

from horovod_sparse.rules.testing.collectives import Case, check_collective, check_exchange
from horovod_sparse.rules.testing.memories import check_memory
from horovod_sparse.rules.testing.schedules import check_schedule
from horovod_sparse.rules.testing.sparsifiers import check_sparsifier

__all__ = ["Case", "check_collective", "check_exchange", "check_memory", "check_schedule", "check_sparsifier"]
