"""Checkpoints of train.py: when they are saved, and where a run goes on."""

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
    """Point that the training has reached.

    Attributes:
        step: Optimizer steps so far.
        epoch: Epochs completed.
        batch: Steps of the epoch in progress.
        loss: Sum of this rank's losses over these steps; left on the device until it is needed.
        seconds: Time that these steps took this rank, in earlier runs.
        images: In a step of all ranks.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    loss: Tensor | float = 0.0
    seconds: float = 0.0
    images: int = 0

    def advance(self, loss: Tensor | float) -> None:
        """Counts a step."""
        self.step += 1
        self.batch += 1
        self.loss += loss

    def next_epoch(self) -> None:
        """Counts an epoch."""
        self.epoch, self.batch, self.loss, self.seconds = self.epoch + 1, 0, 0.0, 0.0

    def resized(self, images: int, steps: int) -> Position:
        """The same place in the data where a step has another number of images, and an epoch so many steps."""
        batch = min(self.batch * self.images // images, steps - 1)
        loss = self.loss * batch / self.batch if self.batch else 0.0
        return Position(self.step, self.epoch, batch, loss, self.seconds, images)


class Saving:
    """Saves the run now and then, and when it is preempted; does nothing without ``--checkpoint``.

    Args:
        args: train.py's arguments.
        front_end: To the other ranks.
        preempted: Tells whether the run has to end; called once a step.
        recorder: Saved as well.
        **states: Model, optimizer and whatever else has a state.
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
        self._kept = self._under_way = -1  # the step that was saved or loaded last, and the one that is being saved

    def resume(self, images: int, steps: int) -> Position:
        """Loads the checkpoint that was asked for.

        Args:
            images: In a step of all ranks.
            steps: Of an epoch.

        Returns:
            Where the run goes on: at the beginning, if there is no checkpoint.
        """
        if self._checkpoints is None or self._resume == "none":
            return Position(images=images)
        try:
            step = None if self._resume == "latest" else self._resume
            restored = self._checkpoints.load(step=step, digest=self._digest, **self._states)
        except hvs.checkpoint.CheckpointError as error:
            # The same on every rank: one tells it.
            sys.exit(f"train.py: {error} (--resume STEP)" if self._rank == 0 else 1)
        if restored is None:
            return Position(images=images)
        self._recorder.load_state_dict(restored.data["recorder"])
        position = Position(**restored.data["position"])
        if position.images != images:
            position = position.resized(images, steps)
            # The learning rate follows the share of the training that is done.
            self._states["scheduler"].last_epoch = position.epoch * steps + position.batch
        self._kept = position.step
        self._say(f"goes on from step {position.step}")
        return position

    def begin(self, position: Position) -> None:
        """Starts the clock of an epoch, or of the rest of it."""
        self._began = time.perf_counter() - position.seconds

    @property
    def seconds(self) -> float:
        """Time that the epoch has taken this rank so far, without interruptions; what was launched is waited for."""
        if self._device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - self._began

    def leaves(self, position: Position) -> bool:
        """Saves where it is time to; whether the run has to end here. To be called after every step."""
        if self._checkpoints is None:
            return False
        if self._preempted():
            saved = self._save(position, beside=False)
            if saved:
                self._say(f"preempted at step {position.step}")
            return saved
        if position.step % self._every == 0 if self._every else position.batch == 0:
            self._save(position, beside=True)
        return False

    def finish(self, position: Position) -> None:
        """Saves the end of the training, unless that was done."""
        if self._checkpoints is None:
            return
        self._settle()
        if position.step != self._kept:
            self._save(position, beside=False)

    def _save(self, position: Position, beside: bool) -> bool:
        """Saves, beside the training or at once; whether it has not failed so far."""
        assert self._checkpoints is not None
        seconds = self.seconds
        start = time.perf_counter()
        position.seconds = seconds if position.batch else 0.0
        position.loss = float(position.loss)
        data = {"position": asdict(position), "recorder": self._recorder.state_dict()}
        self._settle()
        try:
            if beside:
                self._checkpoints.async_save(position.step, data=data, **self._states)
                self._under_way = position.step
            else:
                digest = self._checkpoints.save(position.step, data=data, **self._states)
                self._saved(position.step, digest)
        except hvs.checkpoint.CheckpointError as error:
            self._say(f"warning: {error}; the training goes on")
            return False
        finally:
            self._began += time.perf_counter() - start
        return True

    def _settle(self) -> None:
        """Waits for the checkpoint that is under way."""
        assert self._checkpoints is not None
        try:
            digest = self._checkpoints.wait()
        except hvs.checkpoint.CheckpointError as error:
            self._say(f"warning: {error}; the training goes on")
            return
        if digest is not None:
            self._saved(self._under_way, digest)

    def _saved(self, step: int, digest: str) -> None:
        self._kept = step
        self._say(f"step {step} is saved, digest {digest}")

    def _say(self, what: str) -> None:
        """Prints a line, on rank 0."""
        if self._rank == 0:
            print(f"train.py: {what}", flush=True)
