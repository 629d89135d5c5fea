"""The whole step of one bucket in NumPy, on all ranks at once: what the pipeline must do, written as plainly as can be.

Arrays are [ranks, elements]. Where sums are exact, the pipeline gives the same numbers to the last bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class Held(NamedTuple):
    """The ranks' residuals, and the unit that makes them updates; 0: nothing yet."""

    residuals: Array
    unit: float = 0.0


def accumulate(held: Held, gradients: Array, unit: float) -> Array:
    """The residuals in the unit of this step, plus the gradients."""
    return held.residuals * (held.unit / unit if held.unit and unit else 1.0) + gradients


def exchange(acc: Array, chosen: Array, unit: float, held: Held, collective: str, k: int) -> tuple[Array, Held]:
    """The total of the entries chosen, and what is held afterwards; a collective returns what its total leaves out."""
    sent = np.where(chosen, acc, 0)
    total, returned = sent.sum(0), np.zeros_like(sent)
    if collective == "oktopk" and not chosen.all():
        kept = np.abs(total) >= np.partition(np.abs(total), -k)[-k]
        total, returned = np.where(kept, total, 0), np.where(kept, 0, sent)
    if collective == "gtopk" and not chosen.all():
        total, returned = merge_tree(sent, k)
    return total, Held(acc - sent + returned, unit or held.unit)


def merge_tree(sums: Array, k: int) -> tuple[Array, Array]:
    """The binomial tree of gTopk: each rank keeps the k largest of its own and of what it has merged."""
    kept = np.where(largest(sums, k), sums, 0)
    returned, distance = sums - kept, 1
    while distance < len(sums):
        for low in range(0, len(sums) - distance, 2 * distance):
            merged = kept[low] + kept[low + distance]
            kept[low] = np.where(largest(merged, k), merged, 0)
            returned[low] += merged - kept[low]
        distance *= 2
    return kept[0], returned


def largest(x: Array, k: int) -> Array:
    """The k largest magnitudes of each row; ties: lower index."""
    return np.argsort(np.argsort(-np.abs(x), kind="stable"), kind="stable") < k


def block(x: Array, k: int, start: int) -> Array:
    """Positions from ``start`` on, which wrap around; the same in each row."""
    size = x.shape[-1]
    return np.broadcast_to((np.arange(size) - start) % size < k, x.shape)


# By sparsifier, for options with which nothing depends on earlier steps; the others' choice is taken as given.
SELECT = {
    "topk": lambda acc, k, start: largest(acc, k),
    "multilevel": lambda acc, k, start: largest(acc, k),
    "reusedtopk": lambda acc, k, start: largest(acc, k),
    "threshold": lambda acc, k, start: np.abs(acc) >= 16,
    "stable": lambda acc, k, start: np.broadcast_to(largest(np.square(acc).sum(0), k), acc.shape),
    "randomblock": block,
}
