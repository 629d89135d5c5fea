"""The laws of schedules."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from horovod_sparse.rules import Step
from horovod_sparse.rules.testing.values import eighths, fail_together, place_of


def check_schedule(transport: Any, rule: Any, density: float = 0.01, steps: int = 200, **options: Any) -> None:
    """Asks a schedule for the densities of hundreds of steps; a collective call.

    Laws: the candidates of a step are in (0, 1] and descend, and there is only one where the schedule does not weigh;
    all ranks have the same; and one that takes over another one's state goes on with the same.

    Args:
        transport: Connects the ranks, of which there may be any number.
        rule: The class.
        density: The configuration's.
        steps: Steps, in epochs of 20.
        **options: Of the rule.

    Raises:
        AssertionError: A law does not hold; on all ranks.
    """
    context, generator = place_of(transport, 100), np.random.default_rng(transport.rank)
    one, everyones, failures = rule(context, density, rule.Options(**options)), [], []
    for number in range(steps):
        gradient = eighths(generator, 100) * np.float32(2.0 ** (number // 40 % 3))
        step = Step(1.0, 1.0, number // 20, number=number, gradients=[(0, gradient)])
        other = rule(context, density, rule.Options(**options))
        other.load_state_dict(copy.deepcopy(one.state_dict()))
        densities, again = ([*schedule.densities(step)] for schedule in (one, other))
        laws = {
            "densities are in (0, 1]": bool(densities) and all(0 < value <= 1 for value in densities),
            "densities descend": densities == sorted(densities, reverse=True),
            "without weighing there is one": one.weighs or len(densities) == 1,
            "a restored one goes on": densities == again,
        }
        failures += [f"{law}, in step {number}: {densities}" for law, holds in laws.items() if not holds]
        everyones.append(densities)
    if transport.broadcast_object(everyones) != everyones:
        failures.append("all ranks have the same")
    fail_together(transport, failures)
