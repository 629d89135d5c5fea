"""Collective saving and loading of checkpoints."""

from __future__ import annotations

import logging
import os
import secrets
from concurrent import futures
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from horovod_sparse.checkpoint.folder import Folder
from horovod_sparse.checkpoint.manifest import CheckpointError, Manifest
from horovod_sparse.checkpoint.parts import own_state, shared_state
from horovod_sparse.checkpoint.restore import Restored, layouts_of, read, restore
from horovod_sparse.checkpoint.sharded import number_in, split
from horovod_sparse.checkpoint.staging import Staging
from horovod_sparse.checkpoint.state import require_loadable
from horovod_sparse.checkpoint.store import Snapshot, failed, store
from horovod_sparse.checkpoint.together import CALL, together
from horovod_sparse.control.lifecycle import process
from horovod_sparse.frontends.members import job, transport_of
from horovod_sparse.frontends.registry import exchange_of

_LOG = logging.getLogger("horovod_sparse")


class Checkpoints:
    """Folder of checkpoints. All methods are collective: every rank of the process set calls them.

    A checkpoint is a folder such as ``step-00000120``. ``shared.pt`` holds what is the same on all ranks (model,
    optimizer, schedulers). ``rank-00000.pt`` and so on hold the state of each rank (residuals, thresholds, generators,
    buffers, data). ``manifest.json`` holds the SHA-256 of each file. The folder gets this name once all of it is on
    disk. Loading executes no code (``torch.load`` with ``weights_only``).

    Args:
        directory: Path of the folder, on a file system that all nodes share; created by the first save. Use a separate
            folder for each training: rank 0 locks it from the first save until its process ends. Of several objects
            in one process, the last one that began to save there may save.
        keep: Number of checkpoints to keep. A save deletes older ones, by time of saving, not by step.
        process_set: Ranks that train together: a Horovod process set, a torch process group or an MPI communicator; by
            default all ranks.
        local: Whether the folder is on a disk of the node instead. Each rank then has a folder of its own in it, such
            as ``rank-00003``, with its own files, and the ranks load a checkpoint that all of them have.

    Raises:
        ValueError: ``keep`` is below 1, or this rank is not part of the process set.
    """

    def __init__(
        self, directory: str | os.PathLike[str], keep: int = 3, process_set: Any = None, *, local: bool = False
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1 checkpoint, not {keep}")
        transport = transport_of(process_set)
        if transport is None:
            raise ValueError(f"rank {job().rank} is not part of {process_set}: create Checkpoints on its ranks only")
        self._transport = transport
        self._background_transport = transport.duplicate()  # keeps messages of the thread separate
        path = Path(directory)
        self._folder = Folder(path / f"rank-{transport.rank:05d}" if local else path, local)
        self._keep = keep
        self._staging = Staging()
        self._thread = process.background("horovod_sparse_save", CALL)
        self._under_way: futures.Future[str] | None = None

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
        """Save the state of the training. Call it after ``step()``, on all ranks at the same step.

        If it fails, it fails on all ranks, partial files are removed, and training can continue.

        Args:
            step: Step number; a checkpoint of the same step is replaced.
            model: Model; its parameters are saved from rank 0, its buffers from every rank.
            optimizer: Any optimizer; one made by ``hvs.DistributedOptimizer`` is saved with the state of its exchange.
            exchange: What exchanges the gradients; None: it is found by the optimizer or the model's parameters.
            data: Further state of this rank, such as its position in the data: numbers, strings, tensors, and lists or
                dicts of them.
            **others: Schedulers, a GradScaler, or other objects with ``state_dict``; saved from rank 0.

        Returns:
            Digest of the whole checkpoint. Store it where others cannot write, and pass it to ``load``.

        Raises:
            CheckpointError: The checkpoint could not be saved; or it was saved, but the asynchronous save before it
                failed. Raised on all ranks.
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
        """Copy the state of the training, and return while a thread writes the copies to disk.

        Takes the arguments of ``save``. One save is in progress at a time: the next save, ``load`` and program exit
        wait for it. The copies need as much host memory as the files need on disk.

        Raises:
            CheckpointError: The state could not be copied; or this save has started, but the asynchronous save before
                it failed. Raised on all ranks.
        """
        late = self._finish()
        snapshot = self._collect(step, self._staging, model, optimizer, exchange, data, others)
        alive = ExitStack()
        alive.enter_context(process.communicating())  # delays shutdown from now on, as the thread may start late
        self._under_way = self._thread.submit(partial(self._store_in_background, snapshot, alive))
        if late is not None:
            raise late

    def wait(self) -> str | None:
        """Wait for the asynchronous save in progress; return the checkpoint's digest, or None if there was none.

        Raises:
            CheckpointError: The save failed. Raised on all ranks.
        """
        under_way = self._under_way
        if under_way is None:
            return None
        with process.communicating(CALL, self._transport):
            futures.wait([under_way])
        self._under_way = None  # after an interrupted wait, the next save must still wait for this one
        return under_way.result()

    @property
    def in_progress(self) -> bool:
        """True while this rank's part of an asynchronous save is in progress; not a collective call."""
        return self._under_way is not None and not self._under_way.done()

    def _finish(self) -> CheckpointError | None:
        """Wait for the asynchronous save in progress; return its error if it failed."""
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
        """Collect the state of the training, copied if ``staging`` is given; a collective call."""
        token = self._agree(step)
        layouts, rank = layouts_of(self._transport, failed(step), model), self._transport.rank
        with together(self._transport, failed(step)):
            exchange = exchange_of(model, exchange or optimizer)
            if staging is not None:
                staging.begin()
            own = own_state(model, exchange, data or {}, None if staging is None else staging.array)
            complete = not number_in(layouts, rank) or (self._folder.local and any(layouts))
            state = {} if not complete else shared_state(model, optimizer, exchange, others)
            state, own["shards"] = split(state) if any(layouts) else (state, {})
            shared = {} if rank else {**state, "layouts": layouts}
            for name, state in (*own.items(), *shared.items()):
                require_loadable(state, name)
            if staging is not None:
                own, shared = staging.copy(own), staging.copy(shared)
        return Snapshot(step, token, own, shared)

    def _agree(self, step: int) -> str:
        """Check that all ranks save the same step; return rank 0's token for this save."""
        with process.communicating(CALL, self._transport):
            first, token = self._transport.broadcast_object((step, secrets.token_hex(4)))
            valid = type(step) is int and 0 <= step == first
            steps = self._transport.allgather_object(step) if self._transport.anywhere(not valid) else []
        if steps != [step] * len(steps):
            raise CheckpointError(f"ranks save different steps: {steps}: save on all ranks at the same step")
        wrong = [rank_step for rank_step in steps if type(rank_step) is not int or rank_step < 0]
        if wrong:
            raise CheckpointError(f"step must be an integer of at least 0, not {wrong[0]!r}")
        known: str = token
        return known

    def _store_in_background(self, snapshot: Snapshot, alive: ExitStack) -> str:
        with alive:
            try:
                return store(self._background_transport, self._folder, snapshot, self._keep, call="")
            except CheckpointError as error:
                if self._background_transport.rank == 0:  # log it now: the next call may come late or never
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
        """Load a checkpoint into objects that were created as in the run that saved it.

        With the same world size, training continues bit for bit like an uninterrupted run. With another world size,
        the residuals still sum to the same update; ``Restored.notes`` lists what could not be carried over.

        Args:
            model: Model to load.
            optimizer: Optimizer to load; a wrapped one also gets residuals, thresholds and densities.
            exchange: What gets them instead; None: it is found by the optimizer or the model's parameters.
            step: Step of the checkpoint; None: the one that was saved last.
            digest: Digest that the checkpoint must have; None: any.
            **others: Objects to load, by the names that were passed to ``save``.

        Returns:
            Step, data and notes of the checkpoint; None if there is none, and neither a step nor a digest is given.

        Raises:
            CheckpointError: The checkpoint is damaged; the message names an intact one, if there is any. Or it does not
                fit; the objects may be partly changed. Or a file cannot be read, or the asynchronous save in progress
                failed; nothing is loaded. Raised on all ranks.
        """
        self.wait()
        manifest: Manifest | None = None
        try:
            manifest = self._choose(step, digest)
            if manifest is None:
                return None
            content = read(self._transport, self._folder, manifest, model)
        except CheckpointError as error:
            raise self._refusal(error, manifest) from error
        return restore(self._transport, content, model, optimizer, exchange or optimizer, others)

    def newest(self) -> int | None:
        """Return the step of the checkpoint that ``load`` takes by default; None if there is none.

        Raises:
            CheckpointError: The newest one is damaged, or one cannot be read. Raised on all ranks.
        """
        self.wait()
        try:
            manifest = self._choose(None, None)
        except CheckpointError as error:
            raise self._refusal(error, None) from error
        return None if manifest is None else manifest.step

    def _refusal(self, error: CheckpointError, manifest: Manifest | None) -> CheckpointError:
        """Return an error that names the remedy: an intact checkpoint, if one is damaged; a collective call."""
        if error.system:
            return CheckpointError(
                f"{error}. It may be intact: start again when it can be read, or remove it if it never can", system=True
            )
        intact = self._intact(manifest)
        offer = "" if intact is None else f". The checkpoint of step {intact} is intact: load it with step={intact}"
        return CheckpointError(f"{error}{offer}", intact, damaged=True)

    def _choose(self, step: int | None, digest: str | None) -> Manifest | None:
        """Return on all ranks the manifest of the checkpoint to load, if there is any."""
        manifest: Manifest | None = None
        own: dict[str, Manifest] = {}
        with together(self._transport, f"{self._folder.path} cannot be loaded"):
            if self._folder.local:
                own = {one.digest: one for one in self._folder.checkpoints() if one.ranks == self._transport.size}
            elif self._transport.rank == 0:
                manifest = self._folder.choose(step, digest)
        with process.communicating(CALL, self._transport):
            if not self._folder.local:
                chosen: Manifest | None = self._transport.broadcast_object(manifest)
                return chosen
            everywhere = set.intersection(*map(set, self._transport.allgather_object([*own])))
        fitting = [one for one in own.values() if one.digest in everywhere]
        fitting = [one for one in fitting if step in (None, one.step) and digest in (None, one.digest)]
        if not fitting and (step, digest) != (None, None):
            raise CheckpointError(
                f"{self._folder.path.parent} does not hold step {step}, digest {digest}, on all ranks, only steps "
                f"{sorted(one.step for one in own.values() if one.digest in everywhere)}"
            )
        return max(fitting, key=lambda one: one.number, default=None)

    def _intact(self, refused: Manifest | None) -> int | None:
        """Return the step of the newest other checkpoint that rank 0 finds intact; None if there is none."""
        other = None
        if self._folder.local:
            return None
        with together(self._transport, f"{self._folder.path} cannot be searched for an intact checkpoint"):
            if self._transport.rank == 0:
                other = self._folder.intact(besides=refused.step if refused else None)
        with process.communicating(CALL, self._transport):
            other = self._transport.broadcast_object(other)
        return None if other is None else int(other.step)
