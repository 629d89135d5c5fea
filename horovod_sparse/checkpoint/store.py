"""Collective writing of a snapshot to disk, by the calling thread or a background thread."""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass
from typing import Any

from horovod_sparse.checkpoint.folder import Folder
from horovod_sparse.checkpoint.manifest import SHARED, CheckpointError, Manifest, shard
from horovod_sparse.checkpoint.shards import write
from horovod_sparse.checkpoint.together import together, wait_for_all
from horovod_sparse.control.lifecycle import process
from horovod_sparse.engine.state import require_finite
from horovod_sparse.transport.base import Transport

_LOG = logging.getLogger("horovod_sparse")


@dataclass(frozen=True)
class Snapshot:
    """Training state of one step, as saved by one rank.

    Attributes:
        step: Step number.
        token: Unique identifier of this save; the same on all ranks.
        own: Part of this rank.
        shared: Part that is the same on all ranks; empty except on rank 0.
    """

    step: int
    token: str
    own: dict[str, Any]
    shared: dict[str, Any]


def failed(step: int) -> str:
    """Return the start of the error message of a failed save."""
    return f"step {step} could not be saved"


def store(transport: Transport, folder: Folder, snapshot: Snapshot, keep: int, call: str) -> str:
    """Write a checkpoint, rename it once all of it is on disk, and delete older ones; return its digest.

    A collective call, during which nothing else uses the transport. ``call`` is for stall reports, see ``together``.

    Raises:
        CheckpointError: The checkpoint could not be written. Raised on all ranks, after partial files are removed.
    """
    what, partial = failed(snapshot.step), folder.partial(snapshot.step, snapshot.token)
    leads = folder.local or transport.rank == 0
    try:
        with together(transport, what, call):
            require_finite(snapshot.own["compression"], "compression")
            if leads:
                folder.prepare()
        with together(transport, what, call):
            files = {shard(transport.rank): write(partial, shard(transport.rank), snapshot.own)}
            if transport.rank == 0:
                files[SHARED] = write(partial, SHARED, snapshot.shared)
            number = folder.last_number if leads else 0
        with process.communicating(call, transport):
            written, numbers = zip(*transport.allgather_object((files, number)), strict=True)
        everything = {name: entry for of_rank in written for name, entry in of_rank.items()}
        manifest = Manifest(snapshot.step, 1 + max(numbers), transport.size, everything)
        with together(transport, what, call):
            if leads:
                folder.complete(partial, manifest, files if folder.local else everything)
        with together(transport, what, call):  # all ranks have completed it
            if leads:
                folder.prune(keep)
        if transport.rank == 0:
            _LOG.info("saved step %d to %s, digest %s", snapshot.step, folder.of(snapshot.step), manifest.digest)
    except CheckpointError:
        shutil.rmtree(partial, ignore_errors=True)
        with process.communicating(call, transport):
            wait_for_all(transport)  # another save must not begin while a rank is still cleaning up
        raise
    finally:
        folder.saving = False
    return manifest.digest
