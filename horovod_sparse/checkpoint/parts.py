"""The two parts of a checkpoint: what is the same on all ranks, and what is each rank's own."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch import nn

from horovod_sparse.checkpoint.state import buffers, generators

# Settings that may change between two runs: the layout of the buckets, which some of them shape, is compared itself.
_FREE = ("density", "dense_below", "bucket_bytes")


def own_state(model: nn.Module, optimizer: Any, data: dict[str, Any]) -> dict[str, Any]:
    """This rank's own part."""
    sparse = hasattr(optimizer, "compression_state_dict")
    return {
        "compression": optimizer.compression_state_dict() if sparse else None,
        "generators": generators(),
        "buffers": buffers(model, model.state_dict()),
        "data": data,
    }


def shared_state(model: nn.Module, optimizer: Any, others: dict[str, Any]) -> dict[str, Any]:
    """What is the same on all ranks."""
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "compression": _configuration(optimizer),
        "others": {name: other.state_dict() for name, other in others.items()},
    }


def _configuration(optimizer: Any) -> dict[str, str] | None:
    """What must be the same for a state to mean the same; None for Horovod's own optimizer."""
    sparse = getattr(optimizer, "_sparse", None)
    if sparse is None:
        return None
    return {one.name: repr(getattr(sparse, one.name)) for one in fields(sparse) if one.name not in _FREE}


def compare(optimizer: Any, saved: dict[str, str] | None) -> list[str]:
    """Why the state of the exchange that was saved is of no use to this optimizer; nothing where it is.

    Args:
        optimizer: To load into.
        saved: Of the shared part, ``compression``.

    Raises:
        ValueError: Both are sparse, but not alike.
    """
    mine = _configuration(optimizer)
    if mine is None:
        return ["residuals are dropped: the exchange is dense now"] if saved is not None else []
    if saved is None:
        return ["residuals start empty: it was saved with a dense exchange"]
    if mine != saved:
        differences = ", ".join(
            f"{name}={saved[name]} (now {mine[name]})" for name in mine if mine[name] != saved[name]
        )
        raise ValueError(
            f"it was saved with another compression, {differences}: load it with the one it was saved with"
        )
    return []


def load_others(others: dict[str, Any], saved: dict[str, Any]) -> list[str]:
    """Loads schedulers and the like; gives which states were left out."""
    missing = [name for name in others if name not in saved]
    if missing:
        raise ValueError(
            f"it holds no state of {', '.join(missing)}, only of {', '.join(saved) or 'nothing else'}: load it "
            "with the names it was saved with"
        )
    for name, other in others.items():
        other.load_state_dict(saved[name])
    return [f"the state of {name} is left out" for name in saved if name not in others]
