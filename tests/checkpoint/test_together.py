"""A failure on one rank is the same failure on all."""

from __future__ import annotations

import pytest
from checkpointing import refusal

from horovod_sparse.checkpoint.together import together

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize(("error", "text"), [(ValueError("seven"), "seven"), (KeyError("a"), "KeyError('a')")])
@pytest.mark.parametrize("who", ["the last", "all"])
def test_errors_reach_all_ranks_and_show_at_most_three(comm, transport, error, text, who):
    failing = range(0 if who == "all" else comm.Get_size() - 1, comm.Get_size())

    def attempt():
        with together(transport, "it failed"):
            if comm.Get_rank() in failing:
                raise error

    shown = "; ".join(f"rank {rank}: {text}" for rank in failing[:3])
    more = f"; and {len(failing) - 3} more ranks" if len(failing) > 3 else ""
    assert refusal(comm, attempt) == f"it failed: {shown}{more}"
