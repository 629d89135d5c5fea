"""Moments as a schedule meets them, on one rank."""

from __future__ import annotations

from horovod_sparse.schedules import Moment


def moment(step=0, epoch=None, learning_rate=1.0, norm=1.0, mean=list):
    return Moment(step, epoch, learning_rate, lambda: norm**2, mean)


def run(schedule, steps, **settings):
    """The first candidate of each of so many steps."""
    return [schedule.densities(moment(step, **settings))[0] for step in range(steps)]
