"""Record of a run: learning curves, traffic and times, in ``result.json``."""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from watch import Watch, plain

import horovod_sparse
from horovod_sparse import metrics

if TYPE_CHECKING:
    from frontends import FrontEnd  # only needed for annotations

# Spans of train.py and of the library. "synchronize" is the time the script waits for the exchange.
STAGES = ("forward", "backward", "select", "agree", "exchange", "apply", "synchronize", "update")


class Recorder:
    """Per-epoch records, averaged over the ranks.

    Args:
        args: Arguments of train.py; written to the result.
        front_end: Front end that connects the ranks.
        model: Model being trained.
        optimizer: Optimizer of the model.
        steps: Number of optimizer steps per epoch.
        watch: Writer of these records and of the exchange's statistics; None on all ranks except rank 0.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        front_end: FrontEnd,
        model: nn.Module,
        optimizer: Any,
        steps: int,
        watch: Watch | None = None,
    ) -> None:
        self._args = args
        self._front_end = front_end
        self._model = model
        self._count = sum(parameter.numel() for parameter in model.parameters())
        self._optimizer = optimizer
        self._steps = steps
        self._watch = watch
        self._epochs: list[dict[str, Any]] = []
        self._densities: dict[str, list[float]] = {}  # one value per step, by bucket
        # Carried over from a resumed run: seconds per stage in the current epoch, and bytes sent.
        self._spent: dict[str, float] = {}
        self._sent = 0.0
        self._in_progress = False  # True between begin_epoch() and end_epoch()

    def begin_epoch(self) -> None:
        """Discard the spans of the previous epoch."""
        metrics.clear()
        self._in_progress = True

    def end_epoch(self, train_loss: float, test_loss: float, accuracy: float, seconds: float) -> None:
        """Add the record of an epoch; a collective call.

        Args:
            train_loss: Mean training loss of this rank.
            test_loss: Mean loss over all ranks' test images.
            accuracy: Fraction of all ranks' test images that are classified correctly.
            seconds: Training time of this rank in the epoch.
        """
        spent, self._densities = self._times(), self._densities_so_far()
        self._spent, self._in_progress = {}, False
        mine = [train_loss, seconds, self._bytes_sent(), *(spent[stage] for stage in STAGES)]
        average = self._front_end.sum(torch.tensor(mine, dtype=torch.float64), "record") / self._front_end.size
        mean_loss, mean_seconds, sent, *stages = average.tolist()
        before = self._epochs[-1]["bytes_sent"] if self._epochs else 0.0
        images = self._steps * self._args.batch_size * self._args.backward_passes_per_step * self._front_end.size
        self._epochs.append(
            {
                "epoch": len(self._epochs) + 1,
                "train_loss": mean_loss,
                "test_loss": test_loss,
                "test_accuracy": accuracy,
                "lr": self._optimizer.param_groups[0]["lr"],
                "samples_per_second": images / mean_seconds,
                "bytes_sent": sent,
                "bytes_per_step": (sent - before) / self._steps,
                "ms_per_step": {
                    "step": 1e3 * mean_seconds / self._steps,
                    **{stage: 1e3 * time / self._steps for stage, time in zip(STAGES, stages, strict=True)},
                },
            }
        )
        if self._watch is not None:
            self._report(self._watch, self._epochs[-1], seconds, spent)

    def _report(self, watch: Watch, epoch: dict[str, Any], seconds: float, spent: dict[str, float]) -> None:
        """Write an epoch to the watch, with the times of this rank: where it waits for another, their mean is shorter.

        Stage times come from spans; on a GPU they are device times.
        """
        of_exchange = ("select", "agree", "exchange", "apply")
        if hasattr(self._front_end.exchange, "statistics"):
            statistics = self._front_end.exchange.statistics(norms=True)
            statistics |= {f"total/seconds_{stage}": spent[stage] for stage in of_exchange if statistics}
        else:
            statistics = {"total/steps": self._steps, "total/bytes_sent": self._steps * epoch["bytes_per_step"]}
        watch.write(
            epoch["epoch"] * self._steps,
            statistics,
            epoch=epoch["epoch"],
            loss=epoch["train_loss"],
            test_loss=epoch["test_loss"],
            accuracy=epoch["test_accuracy"],
            lr=epoch["lr"],
            samples_per_second=epoch["samples_per_second"],
            seconds_step=seconds,
            **{f"seconds_{stage}": spent[stage] for stage in STAGES if stage not in of_exchange and spent[stage]},
        )

    def _times(self) -> dict[str, float]:
        """Return the seconds per stage in the current epoch."""
        spent = metrics.totals()
        return {stage: self._spent.get(stage, 0.0) + spent.get(stage, 0.0) for stage in STAGES}

    def _densities_so_far(self) -> dict[str, list[float]]:
        """Return the densities of all steps so far, by bucket; the same on every rank."""
        densities = {bucket: list(so_far) for bucket, so_far in self._densities.items()}
        for span in metrics.spans():
            if span.name == "density":
                densities.setdefault(str(span.details["bucket"]), []).append(span.details["density"])
        return densities

    def state_dict(self) -> dict[str, Any]:
        """Return all records of this rank, including those of the current epoch."""
        return {
            "epochs": self._epochs,
            "densities": self._densities_so_far() if self._in_progress else self._densities,
            "spent": self._times() if self._in_progress else {},
            "sent": self._bytes_sent() if hasattr(self._front_end.exchange, "traffic") else 0.0,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state returned by ``state_dict``."""
        self._epochs, self._densities = list(state["epochs"]), state["densities"]
        self._spent, self._sent = state["spent"], state["sent"]

    def _bytes_sent(self) -> float:
        """Return the gradient bytes that this rank has sent so far.

        Dense exchanges do not count bytes. For them, a ring allreduce is assumed, which is bandwidth-optimal and sends
        2 (P-1)/P times the size of the gradients.
        """
        if hasattr(self._front_end.exchange, "traffic"):
            return self._sent + float(self._front_end.exchange.traffic.bytes_sent)
        width = 2 if self._args.compression == "fp16" else 4
        per_step = 2 * (self._front_end.size - 1) / self._front_end.size * width * self._count
        before = self._epochs[-1]["bytes_sent"] if self._epochs else 0.0
        return float(before + per_step * self._steps)

    def write(self) -> None:
        """Write ``result.json``, and with --trace ``trace.json`` with the last epoch; a collective call."""
        if self._args.trace:
            metrics.export(self._args.output / "trace.json", self._front_end.comm)
        if self._front_end.rank == 0:
            result = {
                "configuration": {key: plain(value) for key, value in vars(self._args).items()},
                "ranks": self._front_end.size,
                "parameter_count": self._count,
                "parameters": digest(self._model),
                "steps_per_epoch": self._steps,
                "versions": versions(),
                "epochs": self._epochs,
                "densities": self._densities,
            }
            write_json(self._args.output / "result.json", result)


def digest(model: nn.Module) -> str:
    """Return the hexadecimal SHA-256 of the parameters' bits; equal for bit-identical models."""
    bits = hashlib.sha256()
    for parameter in model.parameters():
        bits.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return bits.hexdigest()


def versions() -> dict[str, str]:
    """Return the versions and the machine type that the results of a run depend on."""
    horovod, mpi4py, mpi = (sys.modules.get(name) for name in ("horovod", "mpi4py", "mpi4py.MPI"))  # optional
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        **({"horovod": horovod.__version__} if horovod else {}),
        "horovod_sparse": horovod_sparse.__version__,
        **({"mpi4py": mpi4py.__version__} if mpi4py else {}),
        **({"mpi": mpi.Get_library_version().strip("\0").splitlines()[0]} if mpi else {}),
        "machine": platform.machine(),
    }


def write_json(path: Path, content: Any) -> None:
    """Write to a temporary file and rename it, so that readers never see a partial file."""
    partial = path.with_name(f"{path.name}.tmp")
    partial.write_text(json.dumps(content, indent=2) + "\n")
    partial.replace(path)
