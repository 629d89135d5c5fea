"""Trains with Lightning's Trainer, which knows of one process only, and Horovod's front end: start it with mpirun."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import lightning_task
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from small_task import distribute, options, report


class Learner(lightning_task.Learner):
    """Exchanges gradients by Horovod's optimizer, and before it clips them."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return distribute(super().configure_optimizers(), self.net, self.options)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        if gradient_clip_val:
            optimizer.synchronize()  # step() must not exchange the gradients again
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), gradient_clip_val)


def main() -> None:
    learner = Learner(options(__doc__))
    hvd.init()
    steps = lightning_task.fit(learner, hvd.rank(), hvd.size(), devices=1, plugins=[LightningEnvironment()])
    report(hvd.rank(), learner.net, steps)


if __name__ == "__main__":
    main()
