"""Learning rate schedules."""

from __future__ import annotations

import math

SCHEDULES = ("constant", "step", "cosine")


def learning_rate_factor(schedule: str, step: int, warmup: int, steps: int) -> float:
    """Return the multiplier of the learning rate: a linear warm-up, then the schedule.

    Args:
        schedule: ``constant``; ``step``: 0.1 after 1/2 and 0.01 after 3/4 of the steps that follow the warm-up;
            ``cosine``: decay to 0.
        step: Number of optimizer steps so far.
        warmup: Number of warm-up steps; the last one uses the full learning rate.
        steps: Total number of optimizer steps, including the warm-up.

    Raises:
        ValueError: The schedule is unknown.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"unknown schedule {schedule!r}; known are: {', '.join(SCHEDULES)}")
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    if schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * done))
    if schedule == "step":
        return 1.0 if done < 0.5 else 0.1 if done < 0.75 else 0.01
    return 1.0
