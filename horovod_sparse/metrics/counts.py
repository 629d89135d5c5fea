"""Counts of one bucket: plain sums that a step adds to, so that nothing is computed until somebody asks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

# Numbers of ``statistics`` that do not add up from call to call.
RATIOS = frozenset({"density_asked", "density", "ratio_to_dense", "gradient_norm", "residual_norm", "gain"})


@dataclass(slots=True)
class Counts:
    """Sums over the steps of a bucket, or of several.

    Attributes:
        steps: Exchanges.
        nonfinite: Of these, those in which a gradient was not finite, or a sum might not be; all travelled whole.
        elements: Elements that took part.
        asked: Entries k that the schedule asked for.
        entries: Entries that this rank handed in.
        result_entries: Entries of the totals.
        bytes_sent: Payload that left this rank.
        bytes_received: Payload that reached it.
        dense_bytes: What a ring allreduce of whole float32 (or float64) buckets would have sent.
        hidden: Nanoseconds of the exchange while gradients were still being handed in.
        exposed: Nanoseconds of the exchange after that.
        nanoseconds: On the exchange's thread, by stage.
        events: Whatever else was counted, by name.
        measured: Steps of which norms were taken.
        gradient: Sum of squares of the gradients in these.
        accumulated: That of residual and gradients together.
        selected: That of the entries handed in.
        held: That of the residual after the step.
    """

    steps: int = 0
    nonfinite: int = 0
    elements: int = 0
    asked: int = 0
    entries: int = 0
    result_entries: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
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
        """Counts a step."""
        self.steps += 1
        self.elements += elements
        self.asked += asked
        self.entries += entries
        self.result_entries += result_entries
        self.events[f"steps_{algorithm}"] += 1

    def add(self, other: Counts) -> None:
        """Adds what another bucket has counted."""
        for one in fields(self):
            mine, theirs = getattr(self, one.name), getattr(other, one.name)
            setattr(self, one.name, mine + theirs)


def statistics(buckets: Mapping[int, Counts]) -> dict[str, float]:
    """The numbers of each bucket and of all together, flat: ``bucket0/density``, ``total/density``.

    Sums, of this rank: ``steps`` (in total, those of the bucket that has most), ``steps_nonfinite``, and the steps by
    algorithm, such as ``steps_oktopk`` or ``steps_dense``; ``entries`` handed in and ``result_entries`` of the totals;
    ``bytes_sent`` and ``bytes_received``; ``thresholds_reused`` and ``thresholds_renewed``; ``seconds_select``,
    ``seconds_agree``, ``seconds_exchange`` and ``seconds_apply``, of the exchange's thread; ``seconds_hidden`` and
    ``seconds_exposed``, its time until the last gradient of the step was handed in, and after that.

    Ratios: ``density_asked`` and ``density``, of the elements that took part; ``ratio_to_dense``, bytes sent over those
    of a ring. Where norms were taken: ``gradient_norm`` and ``residual_norm``, and the ``gain``, the share of the
    squared norm of residual and gradient that was handed in.

    Args:
        buckets: By number. Buckets without a step are left out, and so is what cannot be told.
    """
    total = Counts()
    numbers: dict[str, float] = {}
    for bucket, counts in buckets.items():
        total.add(counts)
        numbers |= {f"bucket{bucket}/{name}": value for name, value in _numbers(counts).items()}
    total.steps = max((counts.steps for counts in buckets.values()), default=0)  # a step is one of all buckets
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
