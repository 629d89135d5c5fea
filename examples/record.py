"""What a run writes down: learning curves, traffic and times, in ``result.json``."""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import horovod
import horovod.torch as hvd
import mpi4py
import numpy as np
import torch
from mpi4py import MPI
from torch import nn

import horovod_sparse
from horovod_sparse import trace

# Spans of train.py and of the library. "synchronize" is the time the script waits for the exchange.
STAGES = ("forward", "backward", "select", "agree", "exchange", "apply", "synchronize", "update")


class Recorder:
    """Collects one record an epoch, averaged over the ranks.

    Args:
        args: train.py's arguments; written down as they are.
        model: The model.
        optimizer: Its optimizer, as ``hvs.DistributedOptimizer`` returned it.
        steps: Optimizer steps per epoch.
    """

    def __init__(self, args: argparse.Namespace, model: nn.Module, optimizer: Any, steps: int) -> None:
        self._args = args
        self._parameters = sum(parameter.numel() for parameter in model.parameters())
        self._optimizer = optimizer
        self._steps = steps
        self._epochs: list[dict[str, Any]] = []
        self._densities: dict[str, list[float]] = {}  # of every step, by bucket
        if hvd.rank() == 0:
            args.output.mkdir(parents=True, exist_ok=True)  # fails before the training rather than after it

    def end_epoch(self, train_loss: float, test_loss: float, accuracy: float, seconds: float) -> None:
        """Adds an epoch; a collective call.

        Args:
            train_loss: This rank's mean loss.
            test_loss: Mean loss of all ranks' test images.
            accuracy: Fraction of all ranks' test images that are classified right.
            seconds: Time the epoch's training took this rank.
        """
        spent = trace.totals()
        for span in trace.spans():
            if span.name == "density":  # the same on every rank
                self._densities.setdefault(str(span.details["bucket"]), []).append(span.details["density"])
        mine = [train_loss, seconds, self._bytes_sent(), *(spent.get(stage, 0.0) for stage in STAGES)]
        average = hvd.allreduce(torch.tensor(mine, dtype=torch.float64), op=hvd.Average, name="record")
        mean_loss, seconds, sent, *stages = average.tolist()
        before = self._epochs[-1]["bytes_sent"] if self._epochs else 0.0
        images = self._steps * self._args.batch_size * self._args.backward_passes_per_step * hvd.size()
        self._epochs.append(
            {
                "epoch": len(self._epochs) + 1,
                "train_loss": mean_loss,
                "test_loss": test_loss,
                "test_accuracy": accuracy,
                "lr": self._optimizer.param_groups[0]["lr"],
                "samples_per_second": images / seconds,
                "bytes_sent": sent,
                "bytes_per_step": (sent - before) / self._steps,
                "ms_per_step": {
                    "step": 1e3 * seconds / self._steps,
                    **{stage: 1e3 * time / self._steps for stage, time in zip(STAGES, stages, strict=True)},
                },
            }
        )

    def _bytes_sent(self) -> float:
        """Gradient bytes this rank has sent so far.

        Horovod counts none: a ring allreduce, which sends the fewest, sends 2 (P-1)/P of the gradients' bytes.
        """
        if hasattr(self._optimizer, "traffic"):
            return float(self._optimizer.traffic.bytes_sent)
        width = 2 if self._args.compression == "fp16" else 4
        per_step = 2 * (hvd.size() - 1) / hvd.size() * width * self._parameters
        return float(per_step * self._steps * (len(self._epochs) + 1))

    def write(self) -> None:
        """Writes ``result.json``, and with --trace the last epoch's ``trace.json``; a collective call."""
        if self._args.trace:
            trace.export(self._args.output / "trace.json", MPI.COMM_WORLD)
        if hvd.rank() == 0:
            result = {
                "configuration": {key: _json_value(value) for key, value in vars(self._args).items()},
                "ranks": hvd.size(),
                "parameters": self._parameters,
                "steps_per_epoch": self._steps,
                "versions": versions(),
                "epochs": self._epochs,
                "densities": self._densities,
            }
            write_json(self._args.output / "result.json", result)


def versions() -> dict[str, str]:
    """What the run's numbers depend on."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "horovod": horovod.__version__,
        "horovod_sparse": horovod_sparse.__version__,
        "mpi4py": mpi4py.__version__,
        "mpi": MPI.Get_library_version().strip("\0").splitlines()[0],
        "machine": platform.machine(),
    }


def write_json(path: Path, content: Any) -> None:
    """Writes beside and renames, so that a reader never sees half a file."""
    beside = path.with_name(f"{path.name}.tmp")
    beside.write_text(json.dumps(content, indent=2) + "\n")
    beside.replace(path)


def _json_value(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
