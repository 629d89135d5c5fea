"""The two parts of a checkpoint: state that is the same on all ranks, and state of each rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from horovod_sparse.checkpoint.state import buffers, generators
from horovod_sparse.frontends.registry import made_by, refuse_other_rounds

# Settings that may change between two runs. Some of them affect the bucket layout, which is compared separately.
_FREE = ("density", "dense_below", "bucket_bytes")


def own_state(
    model: nn.Module, exchange: Any, data: dict[str, Any], copy: Callable[[Any], Any] | None = None
) -> dict[str, Any]:
    """Return this rank's part of a checkpoint; ``copy``, if given, copies the arrays of the exchange to the host.

    Raises:
        ValueError: Parameters of the model are in a round of another ``LocalOptimizer``.
    """
    refuse_other_rounds(model, exchange)
    settings = {} if copy is None else {"copy": copy}
    return {
        "compression": None if exchange is None else exchange.state_dict(**settings),
        "generators": generators(model),
        "buffers": buffers(model, model.state_dict()),
        "data": data,
    }


def shared_state(model: nn.Module, optimizer: Any, exchange: Any, others: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a checkpoint that is the same on all ranks.

    Raises:
        ValueError: One of the others has a part on each rank.
    """
    for name, other in others.items():
        if made_by(other) is not None:
            raise ValueError(
                f"{name} exchanges gradients, and only the residuals of rank 0 would be saved: pass it as exchange=, "
                "and give each exchange Checkpoints of its own"
            )
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "compression": _configuration(exchange),
        "others": {name: other.state_dict() for name, other in others.items()},
    }


def _configuration(exchange: Any) -> dict[str, Any] | None:
    """Return the settings that a saved state depends on; None for a dense exchange."""
    if exchange is None:
        return None
    return {name: fact for name, fact in exchange.compression.facts().items() if name not in _FREE}


def compare(exchange: Any, saved: dict[str, Any] | None) -> list[str]:
    """Return notes on why a saved state cannot be loaded into the exchange; empty if it can. None stands for dense.

    Raises:
        ValueError: Both are sparse, with different settings.
    """
    mine = _configuration(exchange)
    if mine is None:
        return ["residuals are dropped: the exchange is dense now"] if saved is not None else []
    if saved is None:
        return ["residuals start empty: the checkpoint was saved with a dense exchange"]
    if mine != saved:
        differences = ", ".join(_differences("", saved, mine))
        raise ValueError(
            f"the checkpoint was saved with another compression, {differences}: load it with the one it was saved with"
        )
    return []


def _differences(name: str, saved: Any, mine: Any) -> list[str]:
    """Return the options that differ, with both values; of another rule, only its name."""
    if isinstance(saved, dict) and isinstance(mine, dict):
        if saved.get("of") != mine.get("of"):
            return [f"{name}.of={saved.get('of')} (now {mine.get('of')})"]
        if saved.keys() == mine.keys():
            return [text for key in mine for text in _differences(f"{name}.{key}".strip("."), saved[key], mine[key])]
    return [f"{name}={saved} (now {mine})"] if saved != mine else []


def load_others(others: dict[str, Any], saved: dict[str, Any]) -> list[str]:
    """Load the states of schedulers and other objects; return a note for each saved state that is left out."""
    missing = [name for name in others if name not in saved]
    if missing:
        raise ValueError(
            f"the checkpoint holds no state of {', '.join(missing)}, only of {', '.join(saved) or 'nothing else'}: "
            "load it with the names it was saved with"
        )
    for name, other in others.items():
        other.load_state_dict(saved[name])
    return [f"the state of {name} is left out" for name in saved if name not in others]
