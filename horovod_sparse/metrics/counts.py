"""Counters of one bucket: plain sums, from which statistics are computed on request."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

# Names in ``statistics`` that are not sums over the steps.
_RATIOS = frozenset(
    {"density_asked", "density", "ratio_to_dense", "gradient_norm", "residual_norm", "gain", "trial_exposed_share"}
)


def is_sum(name: str) -> bool:
    """Return whether the number of this name in ``statistics`` is a sum over the steps."""
    return name not in _RATIOS and not name.startswith("trial_seconds_")


@dataclass(slots=True)
class Counts:
    """Sums over the steps of one bucket, or of several.

    Attributes:
        steps: Exchanges.
        nonfinite: Exchanges that were sent dense because a gradient was not finite, or a sum might overflow.
        elements: Elements that took part.
        asked: Entries k that the schedule requested.
        entries: Entries that this rank sent.
        result_entries: Entries of the totals.
        bytes_sent: Payload that this rank sent.
        bytes_received: Payload that this rank received.
        rounds: Rounds of messages, each of which starts after the one before.
        dense_bytes: Bytes that a ring allreduce of dense float32 (or float64) buckets would have sent.
        hidden: Nanoseconds of the exchange before the last gradient of the step was available.
        exposed: Nanoseconds of the exchange after that.
        nanoseconds: Time on the worker thread, by stage.
        events: Other counts, by name.
        measured: Steps of which norms were taken.
        gradient: Sum of squares of the gradients in these steps.
        accumulated: Sum of squares of residual plus gradients.
        selected: Sum of squares of the entries sent.
        held: Sum of squares of the residual after the step.
    """

    steps: int = 0
    nonfinite: int = 0
    elements: int = 0
    asked: int = 0
    entries: int = 0
    result_entries: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    rounds: int = 0
    dense_bytes: float = 0.0
    hidden: int = 0
    exposed: int = 0
    nanoseconds: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    measured: int = 0
    gradient: float = 0.0
    accumulated: float = 0.0
    selected: float = 0.0
    held: float = 0.0

    def exchanged(self, elements: int, asked: int, entries: int, result_entries: int, algorithm: str) -> None:
        """Count a step."""
        self.steps += 1
        self.elements += elements
        self.asked += asked
        self.entries += entries
        self.result_entries += result_entries
        self.events[f"steps_{algorithm}"] += 1

    def add(self, other: Counts) -> None:
        """Add the counts of another bucket."""
        for count in fields(self):
            setattr(self, count.name, getattr(self, count.name) + getattr(other, count.name))


def statistics(buckets: Mapping[int, Counts]) -> dict[str, float]:
    """Return the statistics of each bucket and of all together, flat: ``bucket0/density``, ``total/density``.

    Sums over this rank's steps: ``steps`` (in total, those of the bucket with the most), ``steps_nonfinite``, and steps
    by algorithm, such as ``steps_oktopk`` or ``steps_dense``; ``entries`` sent and ``result_entries`` of the totals;
    ``bytes_sent`` and ``bytes_received``; ``rounds`` of messages, each of which starts after the one before;
    ``thresholds_reused`` and ``thresholds_renewed``; ``seconds_select``, ``seconds_agree``, ``seconds_exchange`` and
    ``seconds_apply`` on the worker thread; ``seconds_hidden`` and ``seconds_exposed``, the time of the exchange before
    and after the last gradient of the step was available.

    Ratios: ``density_asked`` and ``density``, relative to the elements that took part; ``ratio_to_dense``, bytes sent
    relative to a dense ring. If norms were taken: ``gradient_norm``, ``residual_norm``, and ``gain``, the share of the
    squared norm of residual plus gradients that was sent.

    Args:
        buckets: Counts by number of the bucket. Buckets without a step are left out, and so are unknown values.
    """
    total = Counts()
    numbers: dict[str, float] = {}
    for bucket, counts in buckets.items():
        total.add(counts)
        numbers |= {f"bucket{bucket}/{name}": value for name, value in _numbers(counts).items()}
    total.steps = max((counts.steps for counts in buckets.values()), default=0)  # a step covers all buckets
    return {f"total/{name}": value for name, value in _numbers(total).items()} | numbers


def _numbers(counts: Counts) -> dict[str, float]:
    if not counts.steps:
        return {}
    numbers: dict[str, float] = {
        "steps": counts.steps,
        "steps_nonfinite": counts.nonfinite,
        "density_asked": counts.asked / max(1, counts.elements),
        "density": counts.entries / max(1, counts.elements),
        "entries": counts.entries,
        "result_entries": counts.result_entries,
        "bytes_sent": counts.bytes_sent,
        "bytes_received": counts.bytes_received,
        "rounds": counts.rounds,
        **counts.events,
        **{f"seconds_{stage}": time / 1e9 for stage, time in counts.nanoseconds.items()},
        "seconds_hidden": counts.hidden / 1e9,
        "seconds_exposed": counts.exposed / 1e9,
    }
    if counts.dense_bytes:
        numbers["ratio_to_dense"] = counts.bytes_sent / counts.dense_bytes
    if counts.measured:
        numbers["gradient_norm"] = math.sqrt(counts.gradient)
        numbers["residual_norm"] = math.sqrt(counts.held)
        if counts.accumulated:
            numbers["gain"] = counts.selected / counts.accumulated
    return numbers
