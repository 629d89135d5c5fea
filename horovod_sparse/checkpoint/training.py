"""Training that continues after every kind of interruption."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from horovod_sparse.checkpoint.checkpoints import Checkpoints
from horovod_sparse.checkpoint.manifest import CheckpointError
from horovod_sparse.checkpoint.pace import Pace
from horovod_sparse.checkpoint.preemption import noticing
from horovod_sparse.checkpoint.restore import Restored
from horovod_sparse.checkpoint.store import failed
from horovod_sparse.checkpoint.together import together
from horovod_sparse.control.lifecycle import process
from horovod_sparse.frontends.members import job, transport_of

_KEEP = 2  # local checkpoints: the one that all ranks have completed, and the next one
PREEMPTED = 75  # EX_TEMPFAIL: launchers and loops start the training again
_LOG = logging.getLogger("horovod_sparse")


class Training:
    """Training that is saved while it runs, and continues where it was when it is started again.

    ::

        training = hvs.checkpoint.Training("checkpoints", model=model, optimizer=optimizer, data=loader)
        for step in training.steps(100_000):
            ...

    Creating it loads the newest checkpoint of the folder, on the same or another number of ranks. If that is damaged,
    an older intact one is loaded, with a warning. If there is none, the initial state is saved, so that what cannot be
    saved is refused before the first step. Afterwards, draw random numbers as in ``Checkpoints.load``. Creation and
    ``steps`` are collective.

    Args:
        directory: Folder of this training's checkpoints, on a file system that all nodes share.
        local: Folder on a disk of each node, for regular checkpoints that take less time. They are loaded where all
            ranks still have them: on the same number of ranks, on the same nodes.
        model: Model to save and load.
        optimizer: Optimizer, wrapped or not.
        exchange: What exchanges the gradients; None: it is found by the optimizer or the model's parameters.
        data: Object with ``state_dict`` and ``load_state_dict``, such as torchdata's ``StatefulDataLoader``: the state
            of this rank. On another number of ranks, every rank loads the state of rank 0.
        every: Interval of the saves: a number of steps, seconds ("600s"), or the share of the time that saves may cost
            ("1%"), which is measured during the training. Rank 0 decides.
        keep: Number of checkpoints to keep.
        run: Identity of the training, such as the text of its settings. A checkpoint of another run is refused.
        process_set: Ranks that train together, as for ``Checkpoints``.
        **others: Schedulers, a GradScaler, or other objects with ``state_dict``; saved from rank 0.

    Attributes:
        restored: Step, data and notes of the loaded checkpoint; None at the first start.
        step: Number of completed steps.

    Raises:
        CheckpointError: The checkpoint does not fit or belongs to another run, all are damaged, or the first one cannot
            be saved. Raised on all ranks.
        RuntimeError: torchrun may restart the ranks, in a store that holds the addresses of ended ones.
        ValueError: ``every`` or ``keep`` is not valid, or this rank is not part of the process set.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        local: str | os.PathLike[str] | None = None,
        model: nn.Module,
        optimizer: Any,
        exchange: Any = None,
        data: Any = None,
        every: int | str = "1%",
        keep: int = 3,
        run: str = "",
        process_set: Any = None,
        **others: Any,
    ) -> None:
        _require_new_store()
        self._shared = _Place(Checkpoints(directory, keep, process_set), Pace(every))
        transport = transport_of(process_set)
        assert transport is not None  # Checkpoints has refused other ranks
        self._transport = transport
        self._local: _Place | None = None
        if self._agree_on_local(local is not None):
            assert local is not None
            self._local = _Place(Checkpoints(local, _KEEP, process_set, local=True), Pace(every))
        self._places = [self._shared] if self._local is None else [self._local, self._shared]
        self._states = {"model": model, "optimizer": optimizer, "exchange": exchange, "run": _Run(run), **others}
        self._data = data
        self._stopped = False
        self.restored = self._load()
        self.step = self.restored.step if self.restored else 0
        if self.restored is None:
            for place in reversed(self._places):  # a shared folder that does not work must not cost local checkpoints
                self._save(place)

    def steps(self, total: int) -> Iterator[int]:
        """Yield the numbers of the steps that are left, from 0 to ``total`` - 1, and save meanwhile.

        After SIGUSR1 or SIGTERM on any rank, all ranks complete the step and save, and the program ends with status 75.
        Before the first step, and after the last one is saved, these signals do what they did outside.
        If a regular save fails, training continues. The state after the last step is always saved, but not if the loop
        is left before, by ``break`` or as the data end: the rank warns then.

        Raises:
            SystemExit: The training was preempted.
            CheckpointError: The last state, or that of a preemption, could not be saved. Raised on all ranks.
        """
        first = self.step
        with noticing() as noticed:
            while self.step < total:
                try:
                    yield self.step
                except GeneratorExit:
                    _LOG.warning(
                        "rank %d left the loop in step %d of %d, and what followed the last checkpoint is not saved: "
                        "if there was no error, let the data be endless, or call training.stop() to end early",
                        self._transport.rank,
                        self.step,
                        total,
                    )
                    raise
                self.step += 1
                due = [place.pace.due(self.step, place.checkpoints.in_progress) for place in self._places]
                preempted, stopped, *due = self._agree(noticed[0], due)
                if stopped:
                    self._stopped = False
                    break
                if preempted:
                    self._save_everywhere()
                    self._warn("preempted at step %d, ending with status %d", self.step, PREEMPTED)
                    raise SystemExit(PREEMPTED)
                for place, now in zip(self._places, due, strict=True):
                    if now and self.step < total:
                        self._async_save(place)
            if self.step > first:
                self._save_everywhere()

    def stop(self) -> None:
        """Let ``steps`` end and save after the current step; call it on any rank."""
        self._stopped = True

    @property
    def overhead(self) -> float:
        """Share of this process's training time that saves have cost on this rank, from 0 to 1."""
        return sum(place.pace.overhead for place in self._places)

    def _load(self) -> Restored | None:
        """Load the newest checkpoint, or an intact older one, and the position in the data."""
        restored = self._load_newest()
        if restored is not None and self._data is not None:
            with together(self._transport, f"step {restored.step} cannot be loaded", "Training()"):
                if "data" not in restored.data:
                    raise ValueError("it was saved without data: start the training without it, too")
                self._data.load_state_dict(restored.data["data"])
        return restored

    def _load_newest(self) -> Restored | None:
        shared = self._shared.checkpoints
        try:
            newest = shared.newest()
        except CheckpointError as error:
            if not error.damaged:
                raise
            newest = error.intact or 0
        if newest is None:  # a new training, whatever local folders hold
            return None
        restored = self._load_local(newest)
        if restored is not None:
            return restored
        try:
            return shared.load(**self._states)
        except CheckpointError as error:
            if not error.damaged:
                raise
            self._warn("%s: continuing from an intact one", error)
            restored = self._load_local(error.intact or 0)
            if restored is None and error.intact is None:
                raise
            return restored or shared.load(step=error.intact, **self._states)

    def _load_local(self, least: int) -> Restored | None:
        """Load the newest local checkpoint; None if there is none of step ``least`` or later, or it is unusable."""
        if self._local is None:
            return None
        try:
            step = self._local.checkpoints.newest()
            return None if step is None or step < least else self._local.checkpoints.load(**self._states)
        except CheckpointError as error:
            if not (error.damaged or error.system):
                raise
            self._warn("%s: continuing from the shared folder", error)
            return None

    def _warn(self, message: str, *values: object) -> None:
        if self._transport.rank == 0:
            _LOG.warning(message, *values)

    def _position(self) -> dict[str, Any]:
        """Return this rank's position in the data; a collective call."""
        with together(self._transport, failed(self.step)):
            return {} if self._data is None else {"data": self._data.state_dict()}

    def _agree_on_local(self, given: bool) -> bool:
        """Return whether local folders are used; ValueError on all ranks if only some are given one."""
        with process.communicating("Training()", self._transport):
            everyone = self._transport.allgather_object(given)
        if len(set(everyone)) > 1:
            ranks = [rank for rank, has in enumerate(everyone) if has]
            raise ValueError(
                f"local= is given on ranks {ranks} of {len(everyone)} only: give all ranks a folder, or none"
            )
        return given

    def _agree(self, noticed: int, due: Sequence[bool]) -> list[bool]:
        """Return on all ranks whether any was notified or stopped, and where rank 0 saves now."""
        due = due if self._transport.rank == 0 else [False] * len(due)
        flags = np.array([noticed, self._stopped, *due], np.int32)
        with process.communicating("Training.steps()", self._transport):
            ranks = self._transport.allreduce(flags)
        return [bool(flag) for flag in ranks]

    def _save_everywhere(self) -> None:
        """Save to the local folders, which may fail, and to the shared one."""
        if self._local is not None:
            try:
                self._save(self._local)
            except CheckpointError as error:
                self._warn("%s", error)
        self._save(self._shared)

    def _save(self, place: _Place) -> None:
        with suppress(CheckpointError):  # logged already, and about an older state
            place.checkpoints.wait()
        place.checkpoints.save(self.step, data=self._position(), **self._states)

    def _async_save(self, place: _Place) -> None:
        start = time.monotonic()
        try:
            place.checkpoints.async_save(self.step, data=self._position(), **self._states)
        except CheckpointError as error:
            self._warn("%s; training continues", error)
        place.pace.saved(time.monotonic() - start)


class _Place(NamedTuple):
    """A folder of checkpoints, and when to save there."""

    checkpoints: Checkpoints
    pace: Pace


class _Run:
    """Identity of a training as an object that is saved with it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def state_dict(self) -> dict[str, Any]:
        return {"name": self._name}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state != self.state_dict():
            raise ValueError(
                f"the checkpoint belongs to run {state.get('name')!r:.200}, but this is run {self._name!r:.200}: use "
                "another folder, or start the training with the settings it was saved with"
            )


def _require_new_store() -> None:
    """Raise RuntimeError if ranks that torchrun restarts would find the addresses of ended ones."""
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if shared and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        raise RuntimeError(
            f"rank {job().rank}: torchrun's agents would reuse their store after a restart, where ranks find the "
            "addresses of ended ones (pytorch#135712): start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
        )
