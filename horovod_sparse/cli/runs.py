"""Statistics of training runs, as read for the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

from horovod_sparse.metrics.log import read

# Stages of a step: name, key of the seconds in a record, and whether the stage runs on the exchange thread.
STAGES = (
    ("forward", "seconds_forward", False),
    ("backward", "seconds_backward", False),
    ("select", "total/seconds_select", True),
    ("agree", "total/seconds_agree", True),
    ("exchange", "total/seconds_exchange", True),
    ("apply", "total/seconds_apply", True),
    ("wait", "seconds_synchronize", False),
    ("update", "seconds_update", False),
    ("whole step", "seconds_step", False),
)


@dataclass(frozen=True)
class Run:
    """Statistics of one training run.

    Attributes:
        name: Name of the run's folder.
        about: Settings that were passed to the ``Log`` of the run.
        records: Records of the log, in the order of the steps.
    """

    name: str
    about: dict[str, Any]
    records: list[dict[str, Any]]

    @property
    def label(self) -> str:
        """Name of the run, with the compression if it is known."""
        return f"{self.name} ({self.about['compression']})" if "compression" in self.about else self.name

    @property
    def task(self) -> tuple[Any, Any]:
        """Data and model; accuracies of different tasks are not comparable."""
        return self.about.get("data"), self.about.get("model")

    def curve(self, key: str) -> tuple[list[int], list[float]]:
        """Return steps and values of a number; records without it are left out."""
        pairs = [(record["step"], record[key]) for record in self.records if record.get(key) is not None]
        return [step for step, _ in pairs], [float(value) for _, value in pairs]

    def over_bytes(self, key: str) -> tuple[list[float], list[float]]:
        """Return the bytes sent so far by the rank and the values of a number; records without it are left out."""
        sent = accumulate(record.get("total/bytes_sent") or 0 for record in self.records)
        pairs = zip(sent, self.records, strict=True)
        known = [(nbytes, record[key]) for nbytes, record in pairs if record.get(key) is not None]
        return [float(nbytes) for nbytes, _ in known], [float(value) for _, value in known]

    def last(self, key: str) -> float | None:
        """Return the last value of a number; None if there is none."""
        values = self.curve(key)[1]
        return values[-1] if values else None

    def middle(self, key: str) -> float | None:
        """Return the median of a number over the records; None if there is none."""
        values = self.curve(key)[1]
        return median(values) if values else None

    def total(self, key: str) -> float:
        """Return the sum of a number over all records."""
        return sum(self.curve(key)[1])

    def per_step(self, key: str) -> float | None:
        """Return a number per step: the median over the records; None if there is none."""
        steps = [(record.get(key), record.get("total/steps")) for record in self.records]
        values = [value / count for value, count in steps if value is not None and count]
        return float(median(values)) if values else None

    def ms(self) -> dict[str, float | None]:
        """Return the milliseconds per step of each stage; None if not recorded."""
        seconds = {name: self.per_step(key) for name, key, _ in STAGES}
        return {name: None if value is None else 1e3 * value for name, value in seconds.items()}


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read runs; they are named after their folders, or after their paths if two folders have the same name.

    Raises:
        ValueError: A folder has no statistics.
    """
    names = [folder.resolve().name for folder in folders]
    unique = len(set(names)) == len(names)
    return [Run(name if unique else str(folder), *read(folder)) for name, folder in zip(names, folders, strict=True)]
