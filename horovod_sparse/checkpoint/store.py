"""A state that was collected goes to the disk, by all ranks together: on the program's thread or beside it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from horovod_sparse.checkpoint.errors import CheckpointError
from horovod_sparse.checkpoint.folder import Folder
from horovod_sparse.checkpoint.manifest import SHARED, Entry, shard
from horovod_sparse.checkpoint.shards import write
from horovod_sparse.checkpoint.together import together, wait_for_all
from horovod_sparse.control.lifecycle import process
from horovod_sparse.engine.state import require_finite
from horovod_sparse.transport.base import Transport

_LOG = logging.getLogger("horovod_sparse")


@dataclass(frozen=True)
class Snapshot:
    """State of a training at one step.

    Attributes:
        step: Of the training.
        token: Of this save alone, the same on all ranks.
        own: This rank's own part.
        shared: The part that is the same on all ranks; empty on all but rank 0.
    """

    step: int
    token: str
    own: dict[str, Any]
    shared: dict[str, Any]


def failed(step: int) -> str:
    """The beginning of the message of a save that has failed."""
    return f"step {step} could not be saved"


def store(transport: Transport, folder: Folder, snapshot: Snapshot, keep: int, call: str) -> str:
    """Writes a checkpoint, gives it its name when all of it is on the disk, and deletes older ones; a collective call.

    Args:
        transport: The ranks; nobody else uses it meanwhile.
        folder: Of the checkpoints.
        snapshot: This rank's.
        keep: Checkpoints to keep.
        call: As for ``together``.

    Returns:
        The checkpoint's digest.

    Raises:
        CheckpointError: Something could not be written. Raised on all ranks; nothing is left behind.
    """
    what, partial = failed(snapshot.step), folder.partial(snapshot.step, snapshot.token)
    try:
        with together(transport, what, call):
            require_finite(snapshot.own["compression"], "compression")
            if transport.rank == 0:
                folder.prepare()
        with together(transport, what, call):
            files = {shard(transport.rank): write(partial, shard(transport.rank), snapshot.own)}
            if transport.rank == 0:
                files[SHARED] = write(partial, SHARED, snapshot.shared)
        return _complete(transport, folder, snapshot, files, keep, call)
    except CheckpointError:
        folder.discard(partial)
        with process.communicating(call, transport):
            wait_for_all(transport)  # another save must not begin while a rank still cleans up
        raise


def _complete(
    transport: Transport, folder: Folder, snapshot: Snapshot, files: dict[str, Entry], keep: int, call: str
) -> str:
    digest, partial = "", folder.partial(snapshot.step, snapshot.token)
    with process.communicating(call, transport):
        everyone = transport.gather_object(files)
    with together(transport, failed(snapshot.step), call):
        if everyone is not None:
            together_files = {name: entry for one in everyone for name, entry in one.items()}
            digest = folder.complete(partial, snapshot.step, len(everyone), together_files).digest
            folder.prune(keep)
            _LOG.info("step %d is saved in %s, digest %s", snapshot.step, folder.of(snapshot.step), digest)
    with process.communicating(call, transport):
        known: str = transport.broadcast_object(digest)
    return known
