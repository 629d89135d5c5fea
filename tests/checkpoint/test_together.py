"""A failure on one rank is the same failure on all."""

from __future__ import annotations

import pytest
from checkpointing import refusal

from horovod_sparse.checkpoint.together import together

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize(("error", "text"), [(ValueError("seven"), "seven"), (KeyError("a"), "KeyError('a')")])
def test_an_error_on_the_last_rank_reaches_all(comm, transport, error, text):
    last = comm.Get_size() - 1

    def attempt():
        with together(transport, "it failed"):
            if comm.Get_rank() == last:
                raise error

    assert refusal(comm, attempt) == f"it failed: rank {last}: {text}"


def test_errors_on_all_ranks_are_shown_for_three_of_them(comm, transport):
    def attempt():
        with together(transport, "it failed"):
            raise ValueError("here")

    shown = "; ".join(f"rank {rank}: here" for rank in range(min(3, comm.Get_size())))
    more = f"; and {comm.Get_size() - 3} more ranks" if comm.Get_size() > 3 else ""
    assert refusal(comm, attempt) == f"it failed: {shown}{more}"
