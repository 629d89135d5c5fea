"""Tests of the laws (invariants) that every rule must obey, for use with custom rules.

Each ``check_`` function builds a rule on every rank and feeds it random input. If a law is violated on any rank, all
ranks raise an ``AssertionError``. ``run_ranks`` runs the ranks as threads, without MPI. Neither pytest nor hypothesis
is required::

    @pytest.mark.parametrize("ranks", [1, 2, 3, 8])
    def test_first_positions(ranks):
        run_ranks(ranks, lambda transport: check_sparsifier(transport, FirstPositions, start=7))
"""

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
