"""Records of the convergence benchmark by task and run, and confidence intervals of their differences."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from scipy.stats import t as student

from benchmarks.convergence.runs import CONFIRMATION, DENSE, FORMS, LARGE, PARTIAL, RUNS, SMALL

Record = Mapping[str, Any]

CONFIDENCE = 0.90  # of an interval; corresponds to one-sided tests at 5 %


def records_path(folder: Path) -> Path:
    """Return the path of the records in a folder of results."""
    return folder / "records.jsonl"


def read_records(path: Path) -> list[Record]:
    """Return the records of a file; an empty list if it does not exist.

    Raises:
        ValueError: The file contains anything but records.
    """
    if not path.exists():
        return []
    try:
        records = [json.loads(line) for line in path.read_text().splitlines()]
        return [dict(record) for record in records if record["run"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no records ({type(error).__name__}: {error})") from error


@dataclass(frozen=True)
class Interval:
    """Difference with its 90 % confidence interval, by Student's t over the seeds."""

    middle: float  # mean over the seeds
    error: float  # standard error of the mean; infinite for a single seed
    seeds: int

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Interval:
        """Return the interval of the mean of numbers, one per seed."""
        count = len(numbers)
        error = stdev(numbers) / math.sqrt(count) if count > 1 and all(map(math.isfinite, numbers)) else math.inf
        return cls(mean(numbers) if count else math.nan, error, count)

    @property
    def half(self) -> float:
        """Half of the interval's width; infinite for a single seed."""
        return float(student.ppf((1 + CONFIDENCE) / 2, self.seeds - 1)) * self.error if self.seeds > 1 else math.inf

    @property
    def low(self) -> float:
        """Lower end of the interval."""
        return self.middle - self.half

    @property
    def high(self) -> float:
        """Upper end of the interval."""
        return self.middle + self.half


@dataclass(frozen=True)
class Results:
    """Records as returned by ``train``, one for each task, run and seed."""

    records: Sequence[Record]

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks with records, the large ones first."""
        made = {record["task"] for record in self.records}
        return [task for task in (*LARGE, CONFIRMATION, *SMALL) if task in made]

    def at_best_rates(self, task: str) -> Results:
        """Return the results of a task at one learning rate per run: that with most seeds, then the best.

        The names of the runs are without the factors on the learning rates.
        """

        def quality(run: str) -> tuple[int, float]:
            finals = self.finals(task, run).values()
            return len(finals), -mean(finals) if finals else -math.inf

        runs = sorted({record["run"] for record in self.records if record["task"] == task}, key=quality)
        best = {run.partition("@")[0]: run for run in runs}
        return Results([{**record, "run": name} for name, run in best.items() for record in self.of(task, run)])

    def runs(self, task: str) -> list[str]:
        """Return the names of a task's runs, in the order of RUNS, without those of the tables of one number."""
        made = {record["run"] for record in self.records if record["task"] == task}
        return [run.name for run in RUNS.values() if run.name in made and run.group not in (PARTIAL, FORMS)]

    def of(self, task: str, run: str) -> list[Record]:
        """Return a run's records, one per seed; an empty list if it was not trained."""
        return [record for record in self.records if (record["task"], record["run"]) == (task, run)]

    def diverged(self, task: str, run: str) -> int:
        """Return the number of seeds for which a run diverged."""
        return sum(record["final"] is None for record in self.of(task, run))

    def finals(self, task: str, run: str) -> dict[int, float]:
        """Return the metric after the last step by seed, without the seeds that diverged."""
        return {record["seed"]: record["final"] for record in self.of(task, run) if record["final"] is not None}

    def bytes_per_step(self, task: str, run: str) -> float:
        """Return the bytes that a rank sends per step, mean over the seeds; NaN if no seed reached an evaluation."""
        return self._per_step("bytes_sent", task, run)

    def late_bytes_per_step(self, task: str, run: str) -> float:
        """Return ``bytes_per_step`` without the steps before the first evaluation, which may be dense."""
        curves = [record["curve"] for record in self.of(task, run) if len(record["curve"]) > 1]
        ends = [(curve[0], curve[-1]) for curve in curves]
        pairs = [(last["bytes_sent"] - first["bytes_sent"], last["step"] - first["step"]) for first, last in ends]
        return mean(nbytes / steps for nbytes, steps in pairs) if pairs else math.nan

    def floats_per_step(self, task: str, run: str) -> float:
        """Return the values, without indices, that a rank submits per step; mean and NaN as for bytes."""
        return self._per_step("entries_sent", task, run)

    def _per_step(self, what: str, task: str, run: str) -> float:
        lasts = [record["curve"][-1] for record in self.of(task, run) if record["curve"]]
        return mean(last[what] / last["step"] for last in lasts) if lasts else math.nan

    def milliseconds(self, task: str, run: str) -> dict[str, float]:
        """Return the milliseconds per step in each stage, the minimum over the seeds, as other load only adds time."""
        stages = [record["stages"] for record in self.of(task, run)]
        return {name: min(times[name] for times in stages) for name in stages[0]}

    def reduction(self, task: str, run: str) -> float:
        """Return the bytes that dense training sends divided by those of a run; NaN if either is unknown."""
        return self.bytes_per_step(task, DENSE) / self.bytes_per_step(task, run)

    def loss(self, task: str, run: str, than: str | None = None) -> Interval:
        """Return the loss of a run against another, in percent.

        The loss is in points of accuracy, or the relative increase of the perplexity. It is taken seed by seed, as runs
        of one seed share parameters and data. It is negative if the run is better, infinite if a seed diverged.

        Args:
            task: Name of the task.
            run: Name of the run.
            than: Name of the run to compare with; None: the dense baseline.
        """
        other = RUNS[run].baseline if than is None else than
        mine, theirs = self.finals(task, run), self.finals(task, other)
        if self.diverged(task, run):
            return Interval(math.inf, 0.0, len(mine))
        seeds = sorted(mine.keys() & theirs.keys())
        if self.of(task, run)[0]["metric"] == "accuracy":
            return Interval.of([100 * (theirs[seed] - mine[seed]) for seed in seeds])
        return Interval.of([100 * (mine[seed] / theirs[seed] - 1) for seed in seeds])
