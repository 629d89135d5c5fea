"""Saving and loading, on all ranks together."""

from __future__ import annotations

import logging
import os
import secrets
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from horovod_sparse.checkpoint.errors import CheckpointError
from horovod_sparse.checkpoint.folder import Folder
from horovod_sparse.checkpoint.manifest import Manifest
from horovod_sparse.checkpoint.parts import exchange_of, own_state, shared_state
from horovod_sparse.checkpoint.restore import Restored, read, restore
from horovod_sparse.checkpoint.staging import Staging
from horovod_sparse.checkpoint.state import require_loadable
from horovod_sparse.checkpoint.store import Snapshot, failed, store
from horovod_sparse.checkpoint.together import CALL, together
from horovod_sparse.control.lifecycle import process
from horovod_sparse.frontends.members import transport_of
from horovod_sparse.transport.mpi import job

_LOG = logging.getLogger("horovod_sparse")


class Checkpoints:
    """A folder of checkpoints. All calls are collective: every rank of the process set makes them.

    A checkpoint is a folder ``step-00000120``: ``shared.pt`` with what is the same on all ranks (model, optimizer,
    schedulers), ``rank-00000.pt`` and so on with what is each rank's own (residuals and thresholds, generators,
    buffers, data), and ``manifest.json`` with the SHA-256 of each. It appears under its name when all of it is on the
    disk. Loading executes no code (``torch.load`` with ``weights_only``).

    Args:
        directory: The folder, on a file system that all nodes share; made when something is saved. One training each:
            from the first save to its end, rank 0 holds a lock.
        keep: Checkpoints to keep; older ones are deleted after a save. Which are older is told by when they were saved,
            not by their steps.
        process_set: The ranks that train together: a Horovod process set, a torch process group or an MPI communicator;
            by default all.

    Raises:
        ValueError: keep is below 1, or this rank is not part of the process set.
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int = 3, process_set: Any = None) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1 checkpoint, not {keep}")
        transport = transport_of(process_set)
        if transport is None:
            raise ValueError(f"rank {job().rank} is not part of {process_set}: make Checkpoints on its ranks only")
        self._transport = transport
        self._beside = transport.duplicate()  # the thread's: it must not meet messages of the program
        self._folder = Folder(Path(directory))
        self._keep = keep
        self._staging = Staging()
        self._thread = process.background("horovod_sparse_save", CALL)
        self._under_way: Future[str] | None = None

    def save(
        self,
        step: int,
        *,
        model: nn.Module,
        optimizer: Any,
        exchange: Any = None,
        data: dict[str, Any] | None = None,
        **others: Any,
    ) -> str:
        """Saves the state of the training. To be called after ``step()``, by all ranks at the same step.

        Where it fails, it fails on all ranks, nothing is left behind, and the training can go on.

        Args:
            step: Number of the step; a checkpoint of the same step is replaced.
            model: Its parameters, from rank 0, and its buffers, from every rank.
            optimizer: Of ``hvs.DistributedOptimizer``, with everything that its exchange remembers, or any other.
            exchange: A ``SparseState``, where one exchanges the gradients; by default what the optimizer holds.
            data: What else this rank needs to go on, such as its position in the data: numbers, strings, tensors, and
                lists or dicts of them.
            **others: Schedulers, a GradScaler, or anything else that has ``state_dict``, from rank 0.

        Returns:
            The checkpoint's digest, over everything in it: for ``load``, kept where others cannot write.

        Raises:
            CheckpointError: Something could not be saved. Raised on all ranks. Also where the save that was under way
                has failed; this one is done then.
        """
        late = self._finish()
        snapshot = self._collect(step, None, model, optimizer, exchange, data, others)
        digest = store(self._transport, self._folder, snapshot, self._keep, CALL)
        if late is not None:
            raise late
        return digest

    def async_save(
        self,
        step: int,
        *,
        model: nn.Module,
        optimizer: Any,
        exchange: Any = None,
        data: dict[str, Any] | None = None,
        **others: Any,
    ) -> None:
        """Saves beside the training: as ``save``, but returns when everything is copied. A thread writes the copies.

        One save is under way at a time: the next one waits for it, and so do ``load`` and the end of the program. The
        copies need as much memory on the host as the files.

        Raises:
            CheckpointError: Something could not be copied. Also where the save that was under way has failed; this one
                has begun then. Raised on all ranks.
        """
        late = self._finish()
        snapshot = self._collect(step, self._staging, model, optimizer, exchange, data, others)
        alive = ExitStack()
        alive.enter_context(process.communicating())  # from here on, as the thread may begin late
        self._under_way = self._thread.submit(partial(self._store_beside, snapshot, alive))
        if late is not None:
            raise late

    def wait(self) -> str | None:
        """Waits for the save that is under way.

        Returns:
            Its digest; None: there was none.

        Raises:
            CheckpointError: It has failed. Raised on all ranks.
        """
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return None
        with process.communicating(CALL, self._transport):
            return under_way.result()

    def _finish(self) -> CheckpointError | None:
        """Waits for the save that is under way; gives the error with which it has failed."""
        try:
            self.wait()
        except CheckpointError as error:
            return error
        return None

    def _collect(
        self,
        step: int,
        staging: Staging | None,
        model: nn.Module,
        optimizer: Any,
        exchange: Any,
        data: dict[str, Any] | None,
        others: dict[str, Any],
    ) -> Snapshot:
        """The state of the training itself, or copies of it; a collective call."""
        token = self._agree(step)
        with together(self._transport, failed(step)):
            exchange = exchange_of(exchange or optimizer)
            if staging is not None:
                staging.begin()
            own = own_state(model, exchange, data or {}, None if staging is None else staging.array)
            shared = shared_state(model, optimizer, exchange, others) if self._transport.rank == 0 else {}
            for name, state in (*own.items(), *shared.items()):
                require_loadable(state, name)
            if staging is not None:
                own, shared = staging.copy(own), staging.copy(shared)
        return Snapshot(step, token, own, shared)

    def _agree(self, step: int) -> str:
        """Makes sure that all ranks save the same step; gives rank 0's token for this save."""
        with process.communicating(CALL, self._transport):
            everyone = self._transport.allgather_object((step, secrets.token_hex(4)))
        steps = [one for one, _ in everyone]
        if steps != [step] * len(steps):
            raise CheckpointError(f"ranks save different steps: {steps}: let all ranks save at the same step")
        if type(step) is not int or step < 0:
            raise CheckpointError(f"step must be a whole number of at least 0, not {step!r}")
        token: str = everyone[0][1]
        return token

    def _store_beside(self, snapshot: Snapshot, alive: ExitStack) -> str:
        with alive:
            try:
                return store(self._beside, self._folder, snapshot, self._keep, call="")
            except CheckpointError as error:
                if self._beside.rank == 0:  # now, as the next call may be far, or none
                    _LOG.error("%s", error)
                raise

    def load(
        self,
        *,
        model: nn.Module,
        optimizer: Any,
        exchange: Any = None,
        step: int | None = None,
        digest: str | None = None,
        **others: Any,
    ) -> Restored | None:
        """Loads a checkpoint into objects that were made as in the run that saved it.

        On as many ranks, training then goes on with the bits of an uninterrupted run. On fewer or more ranks, the sum
        of the residuals is what it was, as updates; what cannot be carried over is noted.

        Args:
            model: As ``save`` had it; and so are the others.
            optimizer: Takes over its own state and, if it is wrapped, residuals, thresholds and densities.
            exchange: A ``SparseState`` that takes these over.
            step: Which checkpoint; None: the one that was saved last.
            digest: Refuses any checkpoint but the one with this digest.
            **others: By the names they were saved with.

        Returns:
            What remains; None when there is no checkpoint and no step was asked for. Nothing has changed then.

        Raises:
            CheckpointError: The checkpoint is damaged, or does not fit. It names an intact one, if there is any.
                Raised on all ranks. What was loaded into may be half changed. Also where the save that was under way
                has failed; nothing has changed then.
        """
        self.wait()
        manifest: Manifest | None = None
        try:
            with together(self._transport, f"{self._folder.path} cannot be loaded"):
                if self._transport.rank == 0:
                    manifest = self._folder.choose(step, digest)
            with process.communicating(CALL, self._transport):
                manifest = self._transport.broadcast_object(manifest)
            if manifest is None:
                return None
            content = read(self._transport, self._folder, manifest)
        except CheckpointError as error:
            raise CheckpointError(f"{error}{self._offer(manifest)}") from error
        return restore(self._transport, content, model, optimizer, exchange_of(exchange or optimizer), others)

    def _offer(self, refused: Manifest | None) -> str:
        other = None
        with suppress(CheckpointError), together(self._transport, ""):
            if self._transport.rank == 0:
                other = self._folder.intact(besides=refused.step if refused else None)
        with process.communicating(CALL, self._transport):
            other = self._transport.broadcast_object(other)
        if other is None:
            return ""
        return f". The checkpoint of step {other.step} is intact: load it with step={other.step}"
