"""Trainings that wrote statistics, read for the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

from horovod_sparse.metrics.log import read

# Parts of a step: name, key of its seconds in a record, whether it runs on the exchange's thread.
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
    """A training.

    Attributes:
        name: Name of its folder.
        about: What its ``Log`` was told of it.
        records: What was written, in the order of the steps.
    """

    name: str
    about: dict[str, Any]
    records: list[dict[str, Any]]

    @property
    def label(self) -> str:
        """Its name, with the compression where that is known."""
        return f"{self.name} ({self.about['compression']})" if "compression" in self.about else self.name

    @property
    def task(self) -> tuple[Any, Any]:
        """Data and model; accuracies of other ones are not comparable."""
        return self.about.get("data"), self.about.get("model")

    def curve(self, key: str) -> tuple[list[int], list[float]]:
        """Steps and the values there; records without this number are left out."""
        pairs = [(record["step"], record[key]) for record in self.records if record.get(key) is not None]
        return [step for step, _ in pairs], [float(value) for _, value in pairs]

    def over_bytes(self, key: str) -> tuple[list[float], list[float]]:
        """Bytes that a rank has sent so far, and the values there."""
        sent = accumulate(record.get("total/bytes_sent") or 0 for record in self.records)
        pairs = zip(sent, self.records, strict=True)
        known = [(nbytes, record[key]) for nbytes, record in pairs if record.get(key) is not None]
        return [float(nbytes) for nbytes, _ in known], [float(value) for _, value in known]

    def last(self, key: str) -> float | None:
        """The last value of a number; None: there is none."""
        values = self.curve(key)[1]
        return values[-1] if values else None

    def middle(self, key: str) -> float | None:
        """The median of a number over the records; None: there is none."""
        values = self.curve(key)[1]
        return median(values) if values else None

    def total(self, key: str) -> float:
        """A sum over the whole training."""
        return sum(self.curve(key)[1])

    def per_step(self, key: str) -> float | None:
        """A sum for each step: the median over the records; None: it was not written."""
        steps = [(record.get(key), record.get("total/steps")) for record in self.records]
        values = [value / count for value, count in steps if value is not None and count]
        return float(median(values)) if values else None

    def ms(self) -> dict[str, float | None]:
        """Milliseconds of a step by part; None: it was not written."""
        seconds = {name: self.per_step(key) for name, key, _ in STAGES}
        return {name: None if one is None else 1e3 * one for name, one in seconds.items()}


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Reads runs, and names them by their folders, or by whole paths where two folders have one name.

    Raises:
        ValueError: A folder has no statistics.
    """
    names = [folder.resolve().name for folder in folders]
    unique = len(set(names)) == len(names)
    return [Run(name if unique else str(folder), *read(folder)) for name, folder in zip(names, folders, strict=True)]
