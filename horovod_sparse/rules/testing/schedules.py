"""Test of the laws of schedules."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from horovod_sparse.rules import Step
from horovod_sparse.rules.testing.values import context_of, eighths, fail_together


def check_schedule(transport: Any, rule: Any, density: float = 0.01, steps: int = 200, **options: Any) -> None:
    """Test the laws of a schedule over hundreds of steps; a collective call.

    Laws: the densities of a step are in (0, 1] and descend. There is only one unless the schedule weighs candidates.
    They are equal on all ranks. A schedule that loads the state of another returns the same densities.

    Args:
        transport: Transport between the ranks; any world size.
        rule: The schedule class.
        density: Configured density.
        steps: Number of steps, in epochs of 20.
        **options: Options of the schedule.

    Raises:
        AssertionError: A law is violated; raised on all ranks.
    """
    context, generator = context_of(transport, 100), np.random.default_rng(transport.rank)
    schedule, history, failures = rule(context, density, rule.Options(**options)), [], []
    for number in range(steps):
        gradient = eighths(generator, 100) * np.float32(2.0 ** (number // 40 % 3))
        step = Step(1.0, 1.0, number // 20, number=number, gradients=[(0, gradient)])
        restored = rule(context, density, rule.Options(**options))
        restored.load_state_dict(copy.deepcopy(schedule.state_dict()))
        densities, again = [*schedule.densities(step)], [*restored.densities(step)]
        laws = {
            "densities are in (0, 1]": bool(densities) and all(0 < value <= 1 for value in densities),
            "densities descend": densities == sorted(densities, reverse=True),
            "a schedule that does not weigh returns one density": schedule.weighs or len(densities) == 1,
            "a restored schedule returns the same densities": densities == again,
        }
        failures += [f"{law}, in step {number}: {densities}" for law, holds in laws.items() if not holds]
        history.append(densities)
    if transport.broadcast_object(history) != history:
        failures.append("densities are equal on all ranks")
    fail_together(transport, failures)
