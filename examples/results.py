"""Results of train.py, read from ``result.json``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

DENSE = ("none", "fp16")  # compressions built into Horovod and DistributedDataParallel
PARTS = {
    "forward": ("forward",),
    "backward": ("backward",),
    "compression": ("select", "apply"),
    "communication": ("agree", "exchange"),
    "update": ("update",),
}


@dataclass(frozen=True)
class Run:
    """Run of train.py.

    Attributes:
        name: Name of the output folder.
        content: Content of result.json, as written by ``record.py``.
    """

    name: str
    content: dict[str, Any]

    @property
    def compression(self) -> str:
        """Value of --compression."""
        return str(self.content["configuration"]["compression"])

    @property
    def front_end(self) -> str:
        """Value of --frontend."""
        return str(self.content["configuration"].get("frontend", "horovod"))

    @property
    def task(self) -> tuple[str, str]:
        """Values of --data and --model; accuracies are comparable only between runs of the same task."""
        return self.content["configuration"]["data"], self.content["configuration"]["model"]

    @property
    def dense(self) -> bool:
        """Whether the run exchanged dense gradients in full precision."""
        return self.compression == "none"

    @property
    def densities(self) -> dict[str, list[float]]:
        """Density of every step, by bucket; empty for a dense exchange."""
        return dict(self.content["densities"])

    @property
    def last(self) -> dict[str, Any]:
        """Record of the last epoch."""
        epochs: list[dict[str, Any]] = self.content["epochs"]
        return epochs[-1]

    @property
    def overlap(self) -> bool:
        """Whether the exchange overlapped the backward pass."""
        return not self.content["configuration"].get("no_overlap", False)

    def curve(self, key: str) -> list[float]:
        """Return the values of a key, one per epoch."""
        return [epoch[key] for epoch in self.content["epochs"]]

    def ms(self, stage: str) -> float | None:
        """Return the median time of a stage in ms per step; None if the run does not measure the stage."""
        if self.compression in DENSE and stage in ("select", "agree", "exchange", "apply"):
            return None
        if self.front_end == "ddp" and stage == "synchronize":
            return None
        return float(median(epoch["ms_per_step"][stage] for epoch in self.content["epochs"]))

    def parts(self) -> dict[str, float]:
        """Return the time per step by kind of work, in ms.

        The times add up to the step time, except for overlap and minor work. The communication time of a dense exchange
        is the time spent waiting for it. With DistributedDataParallel, that time is part of the backward pass.
        """
        sums = {part: sum(self.ms(stage) or 0.0 for stage in stages) for part, stages in PARTS.items()}
        if self.compression in DENSE:
            sums["communication"] = self.ms("synchronize") or 0.0
        return sums


def read(folder: Path) -> Run:
    """Read a run.

    Raises:
        ValueError: The folder has no result.json, or train.py did not write it.
    """
    path = folder / "result.json"
    try:
        content = json.loads(path.read_text())
        run = Run(folder.resolve().name, content)
        run.compression, run.task, run.last  # noqa: B018 - raises if a value is missing
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ValueError(
            f"{path} has no results ({type(error).__name__}: {error}): run examples/train.py --output {folder} first"
        ) from error
    return run
