"""Training statistics as a file of JSON lines, which ``horovod-sparse report`` reads."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NAME = "statistics.jsonl"


class Log:
    """Writer of ``statistics.jsonl`` in a run's folder; create it on one rank, usually rank 0.

    ::

        log = metrics.Log("runs/sparse", compression="oktopk:density=0.01")
        log.write(step, optimizer.statistics(norms=True), loss=loss.item())

    A run that resumes from a checkpoint appends to the file. If it repeats steps, the later records count.

    Args:
        folder: Folder of the run; created if missing.
        **about: JSON values that describe the run, such as its settings.
    """

    def __init__(self, folder: str | os.PathLike[str], **about: Any) -> None:
        self._path = Path(folder) / NAME
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._append({"about": about})

    def write(self, step: int, statistics: Mapping[str, float], **numbers: float) -> None:
        """Append a record as one line.

        Args:
            step: Number of training steps so far.
            statistics: Result of ``optimizer.statistics()``, or the available numbers of a dense exchange.
            **numbers: Further numbers; the report plots ``loss`` and ``accuracy``, and shows ``epoch``.
        """
        values = {name: _json(value) for name, value in (numbers | dict(statistics)).items()}
        self._append({"step": step, "time": time.time(), **values})

    def _append(self, record: Mapping[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")


def _json(value: float) -> float | None:
    """Return a number, or the value of a one-element array or tensor, for JSON; None if it is not finite."""
    number = value if isinstance(value, int) else float(value)
    return number if math.isfinite(number) else None


def read(folder: str | os.PathLike[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Read the file that a ``Log`` has written into the folder of a run.

    Returns:
        Description of the run, and its records in the order of steps. Numbers that were not finite are None.

    Raises:
        ValueError: The file is missing, damaged or without a record.
    """
    path = Path(folder) / NAME
    about: dict[str, Any] = {}
    records: list[dict[str, Any]] = []
    try:
        for line in path.read_text().splitlines(keepends=True):
            if not line.endswith("\n"):
                break  # being written, or cut off when the program was killed
            record = json.loads(line)
            if "about" in record:
                about = dict(record["about"])
                continue
            step = record["step"]
            while records and records[-1]["step"] >= step:
                records.pop()
            records.append(record)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"cannot read {path} ({type(error).__name__}: {error}): hvs.metrics.Log writes it") from error
    if not records:
        raise ValueError(f"{path} has no record yet: log.write(step, optimizer.statistics()) adds one")
    return about, records
