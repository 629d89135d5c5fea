"""The laws of rules, for tests of your own.

Each ``check_`` function builds a rule on every rank, gives it random input, and raises an ``AssertionError`` on all
ranks where a law does not hold on any. ``run_ranks`` runs it on threads, which need no MPI. Neither pytest nor
hypothesis is needed::

    @pytest.mark.parametrize("ranks", [1, 2, 3, 8])
    def test_first_positions(ranks):
        run_ranks(ranks, lambda transport: check_sparsifier(transport, FirstPositions, start=7))
"""

from __future__ import annotations

from horovod_sparse.rules.testing.collectives import Case, check_collective, check_exchange
from horovod_sparse.rules.testing.memories import check_memory
from horovod_sparse.rules.testing.schedules import check_schedule
from horovod_sparse.rules.testing.sparsifiers import check_sparsifier
from horovod_sparse.transport.in_process import run_ranks

__all__ = [
    "Case",
    "check_collective",
    "check_exchange",
    "check_memory",
    "check_schedule",
    "check_sparsifier",
    "run_ranks",
]
