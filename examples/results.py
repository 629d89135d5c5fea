"""Results of train.py, read from its result.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

DENSE = ("none", "fp16")  # compressions of Horovod and of DistributedDataParallel themselves
PARTS = {
    "forward": ("forward",),
    "backward": ("backward",),
    "compression": ("select", "apply"),
    "communication": ("agree", "exchange"),
    "update": ("update",),
}


@dataclass(frozen=True)
class Run:
    """One run of train.py.

    Attributes:
        name: Name of its folder.
        content: What its result.json holds; ``record.py`` wrote it.
    """

    name: str
    content: dict[str, Any]

    @property
    def compression(self) -> str:
        """The run's --compression."""
        return str(self.content["configuration"]["compression"])

    @property
    def front_end(self) -> str:
        """The run's --frontend."""
        return str(self.content["configuration"].get("frontend", "horovod"))

    @property
    def task(self) -> tuple[str, str]:
        """The run's --data and --model; accuracies of other ones are not comparable."""
        return self.content["configuration"]["data"], self.content["configuration"]["model"]

    @property
    def dense(self) -> bool:
        """Tells whether the gradients travelled whole and unrounded."""
        return self.compression == "none"

    @property
    def densities(self) -> dict[str, list[float]]:
        """The density of every step, by bucket; empty where the exchange was dense."""
        return dict(self.content["densities"])

    @property
    def last(self) -> dict[str, Any]:
        """The record of the last epoch."""
        epochs: list[dict[str, Any]] = self.content["epochs"]
        return epochs[-1]

    @property
    def overlap(self) -> bool:
        """Tells whether gradients were exchanged beside the backward pass."""
        return not self.content["configuration"].get("no_overlap", False)

    def curve(self, key: str) -> list[float]:
        """One value per epoch."""
        return [epoch[key] for epoch in self.content["epochs"]]

    def ms(self, stage: str) -> float | None:
        """Milliseconds per step of a stage; None for the stages that the run does not show."""
        if self.compression in DENSE and stage in ("select", "agree", "exchange", "apply"):
            return None
        if self.front_end == "ddp" and stage == "synchronize":
            return None
        return float(median(epoch["ms_per_step"][stage] for epoch in self.content["epochs"]))

    def parts(self) -> dict[str, float]:
        """Milliseconds per step by kind of work; on top of each other a whole step, but for overlap and small things.

        A dense exchange shows as the time that is waited for it. With DistributedDataParallel that is backward's.
        """
        sums = {part: sum(self.ms(stage) or 0.0 for stage in stages) for part, stages in PARTS.items()}
        if self.compression in DENSE:
            sums["communication"] = self.ms("synchronize") or 0.0
        return sums


def read(folder: Path) -> Run:
    """Reads a run.

    Raises:
        ValueError: The folder has no result.json, or one that train.py did not write.
    """
    path = folder / "result.json"
    try:
        content = json.loads(path.read_text())
        run = Run(folder.resolve().name, content)
        run.compression, run.task, run.last  # noqa: B018 - what is missing must show here
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ValueError(
            f"{path} holds no results ({type(error).__name__}: {error}): run examples/train.py --output {folder} first"
        ) from error
    return run
