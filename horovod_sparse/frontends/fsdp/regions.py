"""Layout of the regions of a fully sharded model's buckets, and its conversion to another number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from horovod_sparse.frontends.fsdp.scattering import Unit


def layout_of(units: Sequence[Unit]) -> dict[str, dict[str, list[int]]]:
    """Return first position and width of each parameter in the regions of each bucket, by the bucket's key."""
    layout: dict[str, dict[str, list[int]]] = {}
    for unit in units:
        for name, part in unit.parts.items():
            if not part.small:
                layout.setdefault(part.key, {})[name] = [part.place, part.width]
    return layout


def resharded(state: Mapping[str, Any], own: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return a rank's state with the arrays of its memories in the layout of another number of ranks.

    Args:
        state: State of an old rank.
        own: State of this rank, for its layout.
        sizes: Numbers of elements of the parameters.

    Raises:
        ValueError: The state belongs to another model.
    """
    old, new = state["layout"], own["layout"]
    if {key: list(parts) for key, parts in old.items()} != {key: list(parts) for key, parts in new.items()}:
        raise ValueError(
            f"the state holds residuals of {old}, but here they are {new}: load it with the model, dense_below and "
            "param groups it was saved with"
        )
    buckets = []
    for bucket in state["buckets"]:
        key = bucket["parameters"][0]
        memory = {
            name: _moved(array, state["shards"], old[key], own["shards"], new[key], sizes)
            for name, array in bucket.get("memory", {}).items()
        }
        buckets.append({**bucket, "memory": memory} if "memory" in bucket else bucket)
    return {**state, "buckets": buckets}


def _moved(
    array: torch.Tensor,
    before: int,
    old: Mapping[str, Sequence[int]],
    after: int,
    new: Mapping[str, Sequence[int]],
    sizes: Mapping[str, int],
) -> torch.Tensor:
    """Return an array of values of all elements of a bucket in the layout of another number of ranks."""
    rows = array.view(before, -1)
    moved = array.new_zeros(after, sum(width for _, width in new.values()))
    for name, (place, width) in new.items():
        first, length = old[name]
        flat = array.new_zeros(after * width)
        flat[: sizes[name]] = rows[:, first : first + length].flatten()[: sizes[name]]
        moved[:, place : place + width] = flat.view(after, width)
    return moved.flatten()
