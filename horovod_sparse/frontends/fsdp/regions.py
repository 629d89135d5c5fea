"""Layout of the regions of a fully sharded model's buckets, and its conversion to another number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from horovod_sparse.engine.state import leader
from horovod_sparse.frontends.fsdp.scattering import Unit
from horovod_sparse.frontends.reshard import held_in


def layout_of(units: Sequence[Unit]) -> dict[str, dict[str, list[int]]]:
    """Return first position and width of each parameter in the regions of each bucket, by the bucket's key."""
    layout: dict[str, dict[str, list[int]]] = {}
    for unit in units:
        for name, parameter in unit.parameters.items():
            if not parameter.small:
                layout.setdefault(parameter.bucket_key, {})[name] = [parameter.place, parameter.width]
    return layout


def merged_states(
    states: Sequence[Mapping[str, Any]], own: Mapping[str, Any], sizes: Mapping[str, int]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the states that a rank takes over from another number of ranks, and what it takes from all, in its layout.

    Args:
        states: States of all old ranks, in their order.
        own: State of this rank, for its layout.
        sizes: Numbers of elements of the parameters.

    Returns:
        States with the memories of old ranks, whose sum over the new ranks is that over the old ones; and a state with
        what an optimizer holds of this rank's region.

    Raises:
        ValueError: The states belong to another model, or their memories have different units.
    """
    old, new = states[0]["layout"], own["layout"]
    if {key: list(parts) for key, parts in old.items()} != {key: list(parts) for key, parts in new.items()}:
        raise ValueError(
            f"the state holds residuals of {old}, but here they are {new}: load it with the model, dense_below and "
            "param groups it was saved with"
        )
    conversion = _Conversion(states, own, sizes)
    taken = range(_node_of(own), len(states[0]["owners"]), len(own["owners"]))
    together = [[state for state in states if _node_of(state) == node] for node in taken]
    return [conversion.with_memories(parts) for parts in together], conversion.common_part()


def _node_of(state: Mapping[str, Any]) -> int:
    """Return the node of the rank that has saved a state, by the owners: one rank of each node, or else all ranks."""
    number: int = state["owners"].index(state["shard"])
    return number


class _Conversion:
    """Conversion of the states of all old ranks to the regions of this rank; arguments as of ``merged_states``."""

    def __init__(self, states: Sequence[Mapping[str, Any]], own: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
        self._states, self._own, self._sizes = states, own, sizes

    def with_memories(self, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return one state with the memories of old ranks of which each had other regions."""
        buckets = []
        for number, first in enumerate(parts[0]["buckets"]):
            memory = dict(first.get("memory", {}))
            for name in [name for name, value in memory.items() if isinstance(value, torch.Tensor)]:
                rows = {
                    owner: row
                    for part in parts
                    for owner, row in zip(
                        part["owners"], _rows(part, part["buckets"][number]["memory"][name]), strict=True
                    )
                }
                memory[name] = self._moved(first["parameters"][0], rows)[self._own["owners"]].flatten()
            buckets.append({**first, "memory": memory} if memory else first)
        return {**parts[0], "buckets": buckets}

    def common_part(self) -> dict[str, Any]:
        """Return the state of the old rank 0, with what the optimizers of all ranks hold of this rank's region."""
        buckets = leader(dict(self._states[0]))["buckets"]
        for number, bucket in enumerate(buckets):
            if "handover" in bucket:
                self._require_same_factors([state["buckets"][number] for state in self._states])
                bucket["handover"] = self._handover(number, bucket["parameters"][0])
                bucket |= self._buffers(number)
        return {"buckets": buckets}

    def _handover(self, number: int, key: str) -> dict[str, Any]:
        rows = {}
        width = sum(width for _, width in self._states[0]["layout"][key].values())
        for state in self._states:
            held = held_in(state["buckets"][number]["handover"], width * len(state["owners"]))
            rows[state["shard"]] = _rows(state, held)[_node_of(state)]
        row = self._moved(key, rows)[self._own["shard"]]
        (indices,) = row.nonzero(as_tuple=True)
        begin = _node_of(self._own) * len(row)
        mode = self._states[0]["buckets"][number]["handover"]["mode"]
        return {"indices": (begin + indices).int(), "values": row[indices], "mode": mode}

    def _buffers(self, number: int) -> dict[str, Any]:
        """Return the momentum buffers of this rank's shards, if there are any."""
        saved = [state["buckets"][number].get("buffers", {}) for state in self._states]
        buffers = {}
        for name in set.intersection(*map(set, saved)):
            full = torch.cat([one[name].flatten() for one in saved])
            width = next(parts[name][1] for parts in self._own["layout"].values() if name in parts)
            buffers[name] = full[self._own["shard"] * width :][:width].clone()
        return {"buffers": buffers} if buffers else {}

    def _moved(self, key: str, rows: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Return values of a bucket's elements by new ranks from those by old ranks; what is missing is zero."""
        before, new, ranks = self._states[0]["layout"][key], self._own["layout"][key], self._own["shards"]
        like = next(iter(rows.values()))
        moved = like.new_zeros(ranks, sum(width for _, width in new.values()))
        for name, (place, width) in new.items():
            first, length = before[name]
            flat = like.new_zeros(max(len(self._states) * length, ranks * width))
            for owner, row in rows.items():
                flat[owner * length : (owner + 1) * length] = row[first : first + length]
            flat[self._sizes[name] :] = 0  # what a padding held
            moved[:, place : place + width] = flat[: ranks * width].view(ranks, width)
        return moved

    @staticmethod
    def _require_same_factors(buckets: Sequence[Mapping[str, Any]]) -> None:
        facts = {
            (
                0.0 if bucket["mean_unit"] or bucket["memory"].get("of_gradients") else bucket["unit"],
                bucket["gradient_unit"],
                bool(bucket["memory"].get("of_gradients")),
                bucket["handover"]["mode"],
            )
            for bucket in buckets
        }
        if len(facts) > 1:
            raise ValueError(
                f"residuals of {buckets[0]['parameters'][0]} have different units {sorted(facts)} on different ranks, "
                "as after gradients that were not finite: load them with the number of ranks they were saved with, or "
                "save again after another step"
            )


def _rows(state: Mapping[str, Any], array: torch.Tensor) -> torch.Tensor:
    """Return an array of values of a bucket's elements by the owners in a state."""
    return array.view(len(state["owners"]), -1)
