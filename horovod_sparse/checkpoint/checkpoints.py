"""Saving and loading, on all ranks together."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI
from torch import nn

from horovod_sparse.checkpoint.folder import Folder
from horovod_sparse.checkpoint.manifest import SHARED, Entry, Manifest, shard
from horovod_sparse.checkpoint.parts import compare, exchange_of, load_others, own_state, shared_state
from horovod_sparse.checkpoint.state import require_loadable, set_generators
from horovod_sparse.checkpoint.together import CALL, CheckpointError, together
from horovod_sparse.mpi.lifetime import inside_mpi
from horovod_sparse.training.communicator import communicator
from horovod_sparse.training.state import leader

_LOG = logging.getLogger("horovod_sparse")


@dataclass(frozen=True)
class Restored:
    """Results of loading, besides what went into model, optimizer and the others.

    Attributes:
        step: Given when it was saved.
        data: This rank's, given when it was saved. On another number of ranks: that of rank 0, on every rank.
        notes: What could not be carried over; the same on every rank.
    """

    step: int
    data: dict[str, Any]
    notes: tuple[str, ...]


class Checkpoints:
    """A folder of checkpoints. All calls are collective: every rank of the process set makes them.

    A checkpoint is a folder ``step-00000120``: ``shared.pt`` with what is the same on all ranks (model, optimizer,
    schedulers), ``rank-00000.pt`` and so on with what is each rank's own (residuals and thresholds, generators,
    buffers, data), and ``manifest.json`` with the SHA-256 of each. It appears under its name when all of it is on the
    disk. Loading executes no code (``torch.load`` with ``weights_only``).

    Args:
        directory: The folder, on a file system that all nodes share; made when something is saved. One training each.
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
        comm = communicator(process_set)
        if comm is None:
            raise ValueError(
                f"rank {MPI.COMM_WORLD.Get_rank()} is not part of {process_set}: make Checkpoints on its ranks only"
            )
        self._comm = comm
        self._folder = Folder(Path(directory))
        self._keep = keep

    def save(
        self,
        step: int,
        *,
        model: nn.Module,
        optimizer: Any,
        exchange: Any = None,
        data: dict[str, Any] | None = None,
        **others: Any,
    ) -> None:
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

        Raises:
            CheckpointError: Something could not be saved. Raised on all ranks.
        """
        self._require_one_step(step)
        what = f"step {step} could not be saved"
        try:
            with together(self._comm, what):
                exchange = exchange_of(exchange or optimizer)
                own = own_state(model, exchange, data or {})
                shared = shared_state(model, optimizer, exchange, others) if self._rank == 0 else {}
                for name, state in (*own.items(), *shared.items()):
                    require_loadable(state, name)
                if self._rank == 0:
                    self._folder.prepare()
            with together(self._comm, what):
                files = {shard(self._rank): self._folder.write(step, shard(self._rank), own)}
                if self._rank == 0:
                    files[SHARED] = self._folder.write(step, SHARED, shared)
            self._complete(step, files, what)
        except CheckpointError:
            self._folder.discard(step)
            with inside_mpi(CALL):
                self._comm.Barrier()  # another save must not begin while a rank still cleans up
            raise

    def _require_one_step(self, step: int) -> None:
        with inside_mpi(CALL):
            steps = self._comm.allgather(step)
        if steps != [step] * len(steps):
            raise CheckpointError(f"ranks save different steps: {steps}: let all ranks save at the same step")
        if type(step) is not int or step < 0:
            raise CheckpointError(f"step must be a whole number of at least 0, not {step!r}")

    def _complete(self, step: int, files: dict[str, Entry], what: str) -> None:
        with inside_mpi(CALL):
            everyone = self._comm.gather(files)
        with together(self._comm, what):
            if everyone is not None:
                together_files = {name: entry for one in everyone for name, entry in one.items()}
                self._folder.complete(step, len(everyone), together_files)
                self._folder.prune(self._keep)

    @property
    def _rank(self) -> int:
        return self._comm.Get_rank()

    def load(
        self, *, model: nn.Module, optimizer: Any, exchange: Any = None, step: int | None = None, **others: Any
    ) -> Restored | None:
        """Loads a checkpoint into objects that were made as in the run that saved it.

        On as many ranks, training then goes on with the bits of an uninterrupted run. On fewer or more ranks, the sum
        of the residuals is what it was, as updates; what cannot be carried over is noted.

        Args:
            model: As ``save`` had it; and so are the others.
            optimizer: Takes over its own state and, if it is wrapped, residuals, thresholds and densities.
            exchange: A ``SparseState`` that takes these over.
            step: Which checkpoint; None: the one that was saved last.
            **others: By the names they were saved with.

        Returns:
            What remains; None when there is no checkpoint and no step was asked for. Nothing has changed then.

        Raises:
            CheckpointError: The checkpoint is damaged, or does not fit. It names an intact one, if there is any.
                Raised on all ranks. What was loaded into may be half changed.
        """
        manifest: Manifest | None = None
        try:
            with together(self._comm, f"{self._folder.path} cannot be loaded"):
                if self._rank == 0:
                    manifest = self._folder.choose(step)
            with inside_mpi(CALL):
                manifest = self._comm.bcast(manifest)
            if manifest is None:
                return None
            with together(self._comm, f"step {manifest.step} cannot be loaded"):
                shared = self._read(manifest, SHARED)
                # On other ranks than those that saved it, they are dealt out.
                mine = range(self._rank, manifest.ranks, self._comm.Get_size())
                shards = [self._read(manifest, shard(rank)) for rank in mine]
        except CheckpointError as error:
            raise CheckpointError(f"{error}{self._offer(manifest)}") from error
        return self._restore(manifest, shared, shards, model, optimizer, exchange_of(exchange or optimizer), others)

    def _restore(
        self,
        manifest: Manifest,
        shared: dict[str, Any],
        shards: list[dict[str, Any]],
        model: nn.Module,
        optimizer: Any,
        exchange: Any,
        others: dict[str, Any],
    ) -> Restored:
        what = f"step {manifest.step} cannot be loaded"
        with together(self._comm, what):
            notes = compare(exchange, shared["compression"])
        sparse = shared["compression"] is not None and not notes
        if manifest.ranks == self._comm.Get_size():
            (own,) = shards
            state, data = own["compression"], own["data"]
            model_state = {**shared["model"], **own["buffers"]}
        else:
            first, data = self._first(shards)
            model_state = shared["model"]
            notes += self._new_ranks(manifest)
            with together(self._comm, what):
                if sparse:
                    states = [one["compression"] for one in shards]
                    state, more = exchange.merge(states, first)
                    notes += more
        with together(self._comm, what):
            model.load_state_dict(model_state)
            optimizer.load_state_dict(shared["optimizer"])
            notes += load_others(others, shared["others"])
            if sparse:
                exchange.load_state_dict(state)  # last: with local steps, parts of the others are this rank's own
            if shards and self._rank < manifest.ranks:
                set_generators(shards[0]["generators"])
        if self._rank == 0:
            for note in notes:
                _LOG.warning("step %d was loaded, but %s", manifest.step, note)
        return Restored(manifest.step, data, tuple(notes))

    def _read(self, manifest: Manifest, name: str) -> dict[str, Any]:
        folder = self._folder.of(manifest.step)
        manifest.verify(folder, name)
        content: dict[str, Any] = torch.load(folder / name, map_location="cpu", weights_only=True)
        return content

    def _first(self, shards: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
        """State that the old rank 0 remembered of the exchange, without the memories, and its data, on all ranks."""
        mine = (leader(shards[0]["compression"]), shards[0]["data"]) if self._rank == 0 else None
        with inside_mpi(CALL):
            first: tuple[dict[str, Any], dict[str, Any]] = self._comm.bcast(mine)
        return first

    def _new_ranks(self, manifest: Manifest) -> list[str]:
        ranks = self._comm.Get_size()
        notes = [f"{manifest.ranks} ranks saved it and {ranks} go on, with the data and buffers of rank 0"]
        if ranks > manifest.ranks:
            new = "rank {0} is" if ranks == manifest.ranks + 1 else "ranks {0} to {1} are"
            notes.append(f"{new.format(manifest.ranks, ranks - 1)} new: generators there keep their seeds")
        return notes

    def _offer(self, refused: Manifest | None) -> str:
        other = None
        if self._rank == 0:
            with suppress(OSError):
                other = self._folder.intact(besides=refused.step if refused else None)
        with inside_mpi(CALL):
            other = self._comm.bcast(other)
        if other is None:
            return ""
        return f". The checkpoint of step {other.step} is intact: load it with step={other.step}"
