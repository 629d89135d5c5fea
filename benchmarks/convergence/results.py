"""The records of the convergence benchmark, by task and run, averaged over the seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from benchmarks.convergence.runs import DENSE, PARTIAL

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Results:
    """All records.

    Attributes:
        ranks: Number of ranks.
        records: One for each task, run and seed, as ``train`` returns them.
    """

    ranks: int
    records: Sequence[Record]

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks."""
        return list(dict.fromkeys(record["task"] for record in self.records))

    def runs(self, task: str) -> list[str]:
        """Names of a task's runs, group by group."""
        return [run for names in self.groups(task).values() for run in names]

    def groups(self, task: str) -> dict[str, list[str]]:
        """Names of the runs of each group of a task, but for those of partial feedback."""
        group_of = {
            record["run"]: record["group"]
            for record in self.records
            if record["task"] == task and record["group"] != PARTIAL
        }
        names = dict.fromkeys(group_of.values())
        return {name: [run for run, group in group_of.items() if group == name] for name in names}

    def of(self, task: str, run: str) -> list[Record]:
        """A run's records, one a seed; none where it was not made."""
        return [record for record in self.records if (record["task"], record["run"]) == (task, run)]

    def diverged(self, task: str, run: str) -> int:
        """For how many seeds a run diverged."""
        return sum(record["final"] is None for record in self.of(task, run))

    def finals(self, task: str, run: str) -> list[float]:
        """The metric after the last step, of each seed that did not diverge."""
        return [record["final"] for record in self.of(task, run) if record["final"] is not None]

    def bytes_per_step(self, task: str, run: str) -> float:
        """Bytes that a rank sends in a step, mean over the seeds; NaN where none came to an evaluation."""
        lasts = [record["curve"][-1] for record in self.of(task, run) if record["curve"]]
        return mean(last["bytes_sent"] / last["step"] for last in lasts) if lasts else math.nan

    def reduction(self, task: str, run: str) -> float:
        """Ratio of the bytes that dense training sends to those of a run; NaN where one of them is not known."""
        return self.bytes_per_step(task, DENSE) / self.bytes_per_step(task, run)

    def baseline(self, task: str, run: str) -> list[float]:
        """The metric of the dense run that a run is compared with, as ``finals``; empty without such a run."""
        return self.finals(task, self.of(task, run)[0]["baseline"])

    def loss(self, task: str, run: str) -> float:
        """Loss of a run against its dense baseline, in percent; infinite where a seed diverged.

        Points of accuracy, or by how much the perplexity is larger. Negative for a run that is better than dense.
        NaN without a dense run.
        """
        dense = self.baseline(task, run)
        if not dense:
            return math.nan
        if self.diverged(task, run):
            return math.inf
        final = mean(self.finals(task, run))
        if self.of(task, run)[0]["metric"] == "accuracy":
            return 100 * (mean(dense) - final)
        return 100 * (final / mean(dense) - 1)
