"""Failures of one rank become failures of all of them alike, so that none waits for another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mpi4py import MPI

from horovod_sparse.mpi.lifetime import inside_mpi

CALL = "Checkpoints.save() or load()"  # for reports of stalls
_SHOWN = 3  # ranks whose errors a message holds


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved or loaded; the message names rank, path, cause and remedy."""


@contextmanager
def together(comm: MPI.Intracomm, what: str) -> Iterator[None]:
    """Lets a block fail on all ranks where it fails on one. A collective call, when the block is left.

    Args:
        comm: The ranks that take part.
        what: What has failed then; begins the message.

    Raises:
        CheckpointError: The block has raised on this or another rank; the message is the same on all ranks.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    with inside_mpi(CALL):
        everyone = comm.allgather(None if error is None else _text(error))
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(everyone) if text is not None]
    if failed:
        more = f"; and {len(failed) - _SHOWN} more ranks" if len(failed) > _SHOWN else ""
        raise CheckpointError(f"{what}: {'; '.join(failed[:_SHOWN])}{more}") from error


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, OSError | RuntimeError | ValueError) else repr(error)
