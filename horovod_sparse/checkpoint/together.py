"""Collective errors: a failure on one rank is raised on all ranks, so that none waits for another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from horovod_sparse.checkpoint.manifest import CheckpointError
from horovod_sparse.control.lifecycle import process
from horovod_sparse.transport.base import Transport

CALL = "Checkpoints.save() or load()"  # for stall reports
_SHOWN = 3  # ranks whose errors a message contains
_PERIOD = 0.001  # seconds between two polls for ranks that are still busy


@contextmanager
def together(transport: Transport, what: str, call: str = CALL) -> Iterator[None]:
    """Raise an error on all ranks if the block fails on any rank. The end of the block is a collective call.

    Args:
        transport: Transport of the ranks that take part.
        what: Start of the error message, such as "step 3 could not be saved".
        call: Public call that the program waits in, for stall reports; empty if only a background thread waits.

    Raises:
        CheckpointError: The block failed on this or another rank; the message is the same on all ranks.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    with process.communicating(call, transport):
        wait_for_all(transport)
        failure = transport.anywhere(error is not None)
        own = None if error is None else (_text(error), isinstance(error, OSError))
        everyone = transport.allgather_object(own) if failure else []
    failed = [(f"rank {rank}: {one[0]}", one[1]) for rank, one in enumerate(everyone) if one is not None]
    if failed:
        more = f"; and {len(failed) - _SHOWN} more ranks" if len(failed) > _SHOWN else ""
        texts = "; ".join(text for text, _ in failed[:_SHOWN])
        raise CheckpointError(f"{what}: {texts}{more}", system=any(system for _, system in failed)) from error


def wait_for_all(transport: Transport) -> None:
    """Wait until all ranks arrive; sleep meanwhile, as a rank that writes to disk or trains needs the core."""
    transport.barrier(pause=_PERIOD)


def _text(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    known = isinstance(error, OSError | RuntimeError | ValueError) and not isinstance(error, RecursionError)
    return str(error) if known else repr(error)
