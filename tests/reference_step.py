"""Reference of the whole step of a bucket in plain NumPy, on all ranks at once.

Arrays have shape (ranks, elements). If sums are exact, the pipeline returns bit-identical numbers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class Held(NamedTuple):
    """Residuals of all ranks, and the unit that converts them to updates; unit 0 if there are none yet."""

    residuals: Array
    unit: float = 0.0


def accumulate(held: Held, gradients: Array, unit: float) -> Array:
    """Return the residuals in the unit of this step, plus the gradients; only these if they are worth no update."""
    if held.unit and not unit:
        return gradients
    return held.residuals * (held.unit / unit if held.unit and unit else 1.0) + gradients


def exchange(acc: Array, chosen: Array, unit: float, held: Held, collective: str, k: int) -> tuple[Array, Held]:
    """Return the total of the chosen entries, and the new residuals, which include what the total leaves out."""
    if collective == "union":
        chosen = np.broadcast_to(chosen.any(0), chosen.shape)
    sent = np.where(chosen, acc, 0)
    total, returned = sent.sum(0), np.zeros_like(sent)
    if collective == "oktopk" and not chosen.all():
        order = np.argsort(np.where(chosen.any(0), -np.abs(total), 1), kind="stable")  # ties: the lowest position
        kept = np.zeros(total.size, bool)
        kept[order[:k]] = True
        total, returned = np.where(kept, total, 0), np.where(kept, 0, sent)
    if collective == "gtopk" and not chosen.all():
        total, returned = merge_tree(sent, k)
    if collective == "spardl" and not chosen.all():
        total, returned = cut_hops(sent, k)
    if held.unit and not unit:  # the memory pauses
        return total, held
    return total, Held(acc - sent + returned, unit or held.unit)


def merge_tree(sums: Array, k: int) -> tuple[Array, Array]:
    """Sum over the binomial tree of gTopk: each rank keeps the k largest of its own and of every merged vector."""
    kept = np.where(largest(sums, k), sums, 0)
    returned, distance = sums - kept, 1
    while distance < len(sums):
        for low in range(0, len(sums) - distance, 2 * distance):
            merged = kept[low] + kept[low + distance]
            kept[low] = np.where(largest(merged, k), merged, 0)
            returned[low] += merged - kept[low]
        distance *= 2
    return kept[0], returned


def cut_hops(sums: Array, k: int) -> tuple[Array, Array]:
    """Sum over the hops of SparDL: each rank keeps the k/P largest of a block, of its own and after every addition."""
    ranks, size = sums.shape
    most, held, returned = -(-k // ranks), ranks, np.zeros_like(sums)
    cuts = [rank * size // ranks for rank in range(ranks + 1)]
    blocks = {
        (rank, part): sums[rank, cuts[part] : cuts[part + 1]].copy() for rank in range(ranks) for part in range(ranks)
    }

    def cut(rank: int, part: int) -> None:
        block = blocks[rank, part]
        dropped = np.where(largest(block[None], most)[0], 0, block)
        returned[rank, cuts[part] : cuts[part + 1]] += dropped
        block -= dropped

    for rank, part in blocks:
        cut(rank, part)
    for distance in (16, 8, 4, 2, 1):
        if distance < held:
            before = {key: block.copy() for key, block in blocks.items()}
            for rank in range(ranks):
                for offset in range(distance, held):
                    part, to = (rank + offset) % ranks, (rank + distance) % ranks
                    blocks[to, part] += before[rank, part]
                    cut(to, part)
            held = distance
    return np.concatenate([blocks[rank, rank] for rank in range(ranks)]), returned


def largest(x: Array, k: int) -> Array:
    """Return a mask of the k largest magnitudes of each row; ties go to the lower index."""
    return np.argsort(np.argsort(-np.abs(x), kind="stable"), kind="stable") < k


def block(x: Array, k: int, start: int) -> Array:
    """Return a mask of k positions from ``start`` on, with wrap-around, the same in each row."""
    size = x.shape[-1]
    return np.broadcast_to((np.arange(size) - start) % size < k, x.shape)


# By sparsifier, for options without dependence on earlier steps; choices of other sparsifiers are an input.
SELECT = {
    "topk": lambda acc, k, start: largest(acc, k),
    "multilevel": lambda acc, k, start: largest(acc, k),
    "reusedtopk": lambda acc, k, start: largest(acc, k),
    "threshold": lambda acc, k, start: np.abs(acc) >= 16,
    "stable": lambda acc, k, start: np.broadcast_to(largest(np.square(acc).sum(0), k), acc.shape),
    "randomblock": block,
}
