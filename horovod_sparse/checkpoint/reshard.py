"""A checkpoint on another number of ranks: what every rank held is divided among those that are there now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from horovod_sparse.optimizer import _to_arrays, _to_tensors


def sources(rank: int, ranks: int, saved_by: int) -> range:
    """The old ranks whose states a rank takes over.

    Args:
        rank: This rank.
        ranks: Ranks now.
        saved_by: Ranks then.
    """
    return range(rank, saved_by, ranks)


def merge(optimizer: Any, states: Sequence[dict[str, Any]], first: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The state of this rank's exchange, from those of other ranks.

    The sum of the memories over all ranks is what it was, as updates. What is the same on all ranks comes from the
    first one. What belongs to one rank or to a number of ranks is that of the optimizer as it is, usually new.

    Args:
        optimizer: That of this rank, as ``hvs.DistributedOptimizer`` gave it.
        states: Those that this rank takes over, as ``compression_state_dict`` gave them; there may be none.
        first: The old rank 0's, in which memories may be left out.

    Returns:
        A state for ``load_compression_state_dict``, and what has not been carried over.

    Raises:
        ValueError: Buckets or memories are others than those of the optimizer.
    """
    mine = optimizer.compression_state_dict()
    layout, saved = ([bucket["parameters"] for bucket in state["buckets"]] for state in (mine, first))
    if not layout or not saved:
        return mine, _without_exchange(mine=bool(layout), saved=bool(saved))
    if layout != saved:
        raise ValueError(
            f"the checkpoint holds buckets of {saved}, but this optimizer has {layout}: load it with the model, "
            "bucket_bytes, dense_below and groups it was saved with"
        )
    merged, notes = [], []
    for number, (worker_bucket, pipeline) in enumerate(
        zip(optimizer._worker.buckets, optimizer._worker.pipelines, strict=True)
    ):
        old = [_to_arrays(state["buckets"][number]["memory"]) for state in states]
        with worker_bucket.device.work():
            memory = _to_tensors(pipeline.memory.merge(old))
        bucket, leader = mine["buckets"][number], first["buckets"][number]
        kept = {key: leader[key] for key in ("parameters", "unit", "steps", "schedule")}
        if pipeline.sparsifier.replicated:
            kept["sparsifier"] = leader["sparsifier"]
        elif bucket["sparsifier"]:
            notes.append(f"thresholds of {type(pipeline.sparsifier).__name__} start anew")
        if bucket["collective"]:
            notes.append(f"thresholds and regions of {type(pipeline.collective).__name__} start anew")
        merged.append({**bucket, **kept, "memory": memory})
    return {"buckets": merged}, list(dict.fromkeys(notes))


def leader(state: dict[str, Any] | None) -> dict[str, Any]:
    """A rank's state without its memories, which are large; no buckets where the exchange was Horovod's own."""
    if state is None:
        return {"buckets": []}
    return {"buckets": [{**bucket, "memory": {}} for bucket in state["buckets"]]}


def _without_exchange(mine: bool, saved: bool) -> list[str]:
    if saved:
        return ["residuals are dropped: one rank alone exchanges nothing"]
    return ["residuals start empty: the checkpoint was saved by one rank, which exchanges nothing"] if mine else []
