"""Failures of one rank become failures of all of them alike, so that none waits for another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from horovod_sparse.checkpoint.errors import CheckpointError
from horovod_sparse.control.lifecycle import process
from horovod_sparse.transport.base import Transport

CALL = "Checkpoints.save() or load()"  # for reports of stalls
_SHOWN = 3  # ranks whose errors a message holds
_PERIOD = 0.001  # seconds between two looks for ranks that are still busy


@contextmanager
def together(transport: Transport, what: str, call: str = CALL) -> Iterator[None]:
    """Lets a block fail on all ranks where it fails on one. A collective call, when the block is left.

    Args:
        transport: The ranks that take part.
        what: What has failed then; begins the message.
        call: What the program waits in, for reports of stalls; empty: it does not wait, but a thread beside it.

    Raises:
        CheckpointError: The block has raised on this or another rank; the message is the same on all ranks.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    with process.communicating(call, transport):
        wait_for_all(transport)
        everyone = transport.allgather_object(None if error is None else _text(error))
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(everyone) if text is not None]
    if failed:
        more = f"; and {len(failed) - _SHOWN} more ranks" if len(failed) > _SHOWN else ""
        raise CheckpointError(f"{what}: {'; '.join(failed[:_SHOWN])}{more}") from error


def wait_for_all(transport: Transport) -> None:
    """Waits until all ranks have come here; asleep, as a rank that writes to the disk or trains needs the core."""
    transport.barrier(pause=_PERIOD)


def _text(error: Exception) -> str:
    known = isinstance(error, OSError | RuntimeError | ValueError) and not isinstance(error, RecursionError)
    return str(error) if known else repr(error)
