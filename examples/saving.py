"""Checkpoints of train.py: when to save, and where to resume."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from frontends import FrontEnd
from record import Recorder
from torch import Tensor

import horovod_sparse as hvs


@dataclass
class Position:
    """Position that the training has reached.

    Attributes:
        step: Number of optimizer steps so far.
        epoch: Number of completed epochs.
        batch: Number of steps done in the current epoch.
        loss: Sum of this rank's losses over these steps; stays on the device until it is needed.
        seconds: Time that these steps took on this rank, as of the last save.
        images: Number of images per step, over all ranks.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    loss: Tensor | float = 0.0
    seconds: float = 0.0
    images: int = 0

    def advance(self, loss: Tensor | float) -> None:
        """Count a step and add its loss."""
        self.step += 1
        self.batch += 1
        self.loss += loss

    def next_epoch(self) -> None:
        """Move to the start of the next epoch."""
        self.epoch, self.batch, self.loss, self.seconds = self.epoch + 1, 0, 0.0, 0.0

    def resized(self, images: int, steps: int) -> Position:
        """Return the same position in the data for new numbers of images per step and of steps per epoch."""
        batch = min(self.batch * self.images // images, steps - 1)
        loss = self.loss * batch / self.batch if self.batch else 0.0
        return Position(self.step, self.epoch, batch, loss, self.seconds, images)


class Saving:
    """Periodic checkpoints of the run, and one on preemption; inactive without ``--checkpoint``.

    Args:
        args: Arguments of train.py.
        front_end: Front end that connects the ranks.
        preempted: Function that returns whether the run must end; called once per step.
        recorder: Recorder whose state is saved as well.
        **states: Model, optimizer and other objects with a state.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        front_end: FrontEnd,
        preempted: Callable[[], bool],
        recorder: Recorder,
        **states: Any,
    ) -> None:
        self._rank = front_end.rank
        self._device = args.device
        self._every = args.checkpoint_every
        self._resume = args.resume
        self._digest = args.digest
        self._checkpoints = hvs.checkpoint.Checkpoints(args.checkpoint, args.keep) if args.checkpoint else None
        self._preempted = preempted
        self._recorder = recorder
        self._states = {"exchange": front_end.exchange, **states}
        self._began = 0.0
        self._kept = self._under_way = -1  # step saved or loaded last; step being saved

    def resume(self, images: int, steps: int) -> Position:
        """Load the checkpoint selected by ``--resume``.

        Args:
            images: Number of images per step, over all ranks.
            steps: Number of steps per epoch.

        Returns:
            Position to resume from; the beginning if no checkpoint was loaded.
        """
        if self._checkpoints is None or self._resume == "none":
            return Position(images=images)
        try:
            step = None if self._resume == "latest" else self._resume
            restored = self._checkpoints.load(step=step, digest=self._digest, **self._states)
        except hvs.checkpoint.CheckpointError as error:
            # The error is the same on every rank; rank 0 prints it.
            sys.exit(f"train.py: {error} (--resume STEP)" if self._rank == 0 else 1)
        if restored is None:
            return Position(images=images)
        self._recorder.load_state_dict(restored.data["recorder"])
        position = Position(**restored.data["position"])
        if position.images != images:
            position = position.resized(images, steps)
            # The learning rate depends on the fraction of the training that is done.
            self._states["scheduler"].last_epoch = position.epoch * steps + position.batch
        self._kept = position.step
        self._say(f"resuming from step {position.step}")
        return position

    def begin(self, position: Position) -> None:
        """Start the clock of an epoch, including the time that earlier runs spent on it."""
        self._began = time.perf_counter() - position.seconds

    @property
    def seconds(self) -> float:
        """Seconds that this rank has spent on the epoch, without saves and interruptions; waits for the device."""
        if self._device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - self._began

    def leaves(self, position: Position) -> bool:
        """Save if a checkpoint is due; return whether the run must end here. Call it after every step."""
        if self._checkpoints is None:
            return False
        if self._preempted():
            saved = self._save(position, background=False)
            if saved:
                self._say(f"preempted at step {position.step}")
            return saved
        if position.step % self._every == 0 if self._every else position.batch == 0:
            self._save(position, background=True)
        return False

    def finish(self, position: Position) -> None:
        """Save the end of the training, unless it is saved already."""
        if self._checkpoints is None:
            return
        self._settle()
        if position.step != self._kept:
            self._save(position, background=False)

    def _save(self, position: Position, background: bool) -> bool:
        """Save synchronously, or in the background; return False if it has failed by the time of the return."""
        assert self._checkpoints is not None
        seconds = self.seconds
        start = time.perf_counter()
        position.seconds = seconds if position.batch else 0.0
        position.loss = float(position.loss)
        data = {"position": asdict(position), "recorder": self._recorder.state_dict()}
        self._settle()
        try:
            if background:
                self._checkpoints.async_save(position.step, data=data, **self._states)
                self._under_way = position.step
            else:
                digest = self._checkpoints.save(position.step, data=data, **self._states)
                self._saved(position.step, digest)
        except hvs.checkpoint.CheckpointError as error:
            self._say(f"warning: {error}; training continues")
            return False
        finally:
            self._began += time.perf_counter() - start
        return True

    def _settle(self) -> None:
        """Wait for the save in progress."""
        assert self._checkpoints is not None
        try:
            digest = self._checkpoints.wait()
        except hvs.checkpoint.CheckpointError as error:
            self._say(f"warning: {error}; training continues")
            return
        if digest is not None:
            self._saved(self._under_way, digest)

    def _saved(self, step: int, digest: str) -> None:
        self._kept = step
        self._say(f"saved step {step}, digest {digest}")

    def _say(self, what: str) -> None:
        """Print a line on rank 0."""
        if self._rank == 0:
            print(f"train.py: {what}", flush=True)
