"""Checkpoints of train.py: when to save and where to resume."""

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
    """Progress of the training.

    Attributes:
        step: Number of optimizer steps so far.
        epoch: Number of completed epochs.
        batch: Number of steps so far in the current epoch.
        loss: Sum of this rank's losses in the current epoch; stays on the device until it is saved or reported.
        seconds: Time this rank has spent on the current epoch, as of the last save.
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
        """Return the equivalent position after a change of the batch size or the world size.

        Args:
            images: New number of images per step, over all ranks.
            steps: New number of steps per epoch.
        """
        batch = min(self.batch * self.images // images, steps - 1)
        loss = self.loss * batch / self.batch if self.batch else 0.0
        return Position(self.step, self.epoch, batch, loss, self.seconds, images)


class Saving:
    """Periodic checkpoints, and a checkpoint on preemption; inactive without ``--checkpoint``.

    Args:
        args: Arguments of train.py.
        front_end: Front end that connects the ranks.
        preempted: Collective function that returns whether the run must end; called once per step.
        recorder: Recorder; its state is part of the checkpoint.
        **states: Model, optimizer and other stateful objects to save.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        front_end: FrontEnd,
        preempted: Callable[[], bool],
        recorder: Recorder,
        **states: Any,
    ) -> None:
        self._args, self._rank = args, front_end.rank
        self._checkpoints = hvs.checkpoint.Checkpoints(args.checkpoint, args.keep) if args.checkpoint else None
        self._preempted = preempted
        self._recorder = recorder
        self._states = {"exchange": front_end.exchange, **states}
        self._began = 0.0
        self._last_step = -1  # last step saved or loaded
        self._pending_step = -1  # step of the save in progress

    def resume(self, images: int, steps: int) -> Position:
        """Load the checkpoint selected by ``--resume``.

        Args:
            images: Number of images per step, over all ranks.
            steps: Number of steps per epoch.

        Returns:
            Position to resume from; the beginning if no checkpoint was loaded.
        """
        if self._checkpoints is None or self._args.resume == "none":
            return Position(images=images)
        try:
            step = None if self._args.resume == "latest" else self._args.resume
            restored = self._checkpoints.load(step=step, digest=self._args.digest, **self._states)
        except hvs.checkpoint.CheckpointError as error:
            # All ranks raise the same error; only rank 0 prints it.
            sys.exit(f"train.py: {error} (--resume STEP)" if self._rank == 0 else 1)
        if restored is None:
            return Position(images=images)
        self._recorder.load_state_dict(restored.data["recorder"])
        position = Position(**restored.data["position"])
        if position.images != images:
            position = position.resized(images, steps)
            # The learning rate depends on the completed fraction of the training.
            self._states["scheduler"].last_epoch = position.epoch * steps + position.batch
        self._last_step = position.step
        self._print(f"resuming from step {position.step}")
        return position

    def begin(self, position: Position) -> None:
        """Start the timer of an epoch at the time that earlier runs spent on it."""
        self._began = time.perf_counter() - position.seconds

    @property
    def seconds(self) -> float:
        """Seconds this rank has spent on the epoch, excluding saves and interruptions; synchronizes the device."""
        if self._args.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - self._began

    def leaves(self, position: Position) -> bool:
        """Save a checkpoint if one is due; return whether the run must end. Call it after every step."""
        if self._checkpoints is None:
            return False
        if self._preempted():
            saved = self._save(position, background=False)
            if saved:
                self._print(f"preempted at step {position.step}")
            return saved
        every = self._args.checkpoint_every
        if position.step % every == 0 if every else position.batch == 0:
            self._save(position, background=True)
        return False

    def finish(self, position: Position) -> None:
        """Save the final state unless it has been saved already."""
        if self._checkpoints is None:
            return
        self._wait()
        if position.step != self._last_step:
            self._save(position, background=False)

    def _save(self, position: Position, background: bool) -> bool:
        """Save a checkpoint; return False if the save failed. A background save can still fail after the return."""
        assert self._checkpoints is not None
        seconds = self.seconds
        start = time.perf_counter()
        position.seconds = seconds if position.batch else 0.0
        position.loss = float(position.loss)
        data = {"position": asdict(position), "recorder": self._recorder.state_dict()}
        self._wait()
        try:
            if background:
                self._checkpoints.async_save(position.step, data=data, **self._states)
                self._pending_step = position.step
            else:
                digest = self._checkpoints.save(position.step, data=data, **self._states)
                self._saved(position.step, digest)
        except hvs.checkpoint.CheckpointError as error:
            self._print(f"warning: {error}; training continues")
            return False
        finally:
            self._began += time.perf_counter() - start
        return True

    def _wait(self) -> None:
        """Wait for the background save in progress, if any, and report its result."""
        assert self._checkpoints is not None
        try:
            digest = self._checkpoints.wait()
        except hvs.checkpoint.CheckpointError as error:
            self._print(f"warning: {error}; training continues")
            return
        if digest is not None:
            self._saved(self._pending_step, digest)

    def _saved(self, step: int, digest: str) -> None:
        self._last_step = step
        self._print(f"saved step {step}, digest {digest}")

    def _print(self, message: str) -> None:
        """Print a line on rank 0."""
        if self._rank == 0:
            print(f"train.py: {message}", flush=True)
