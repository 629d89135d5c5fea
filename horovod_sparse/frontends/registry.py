"""Exchanges and local steps in progress, which checkpoints look up by the model."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch

from horovod_sparse.frontends.base import ExchangingGradients

# Exchanges that are objects of their own, not part of an optimizer.
standalone: weakref.WeakSet[ExchangingGradients] = weakref.WeakSet()
# States of all LocalOptimizers.
local_states: weakref.WeakSet[Any] = weakref.WeakSet()


def made_by(optimizer: Any) -> Any:
    """Return the exchange that an optimizer has made, or an exchange itself; None for anything else."""
    return optimizer if hasattr(optimizer, "merge") else getattr(optimizer, "exchange", None)


def refuse_other_rounds(model: torch.nn.Module, exchange: Any) -> None:
    """Raise ValueError if another ``LocalOptimizer`` than the one to save has parameters of the model in a round."""
    for other in local_states:
        names = [] if other is exchange else other.apart_in(model)
        if names:
            raise ValueError(
                f"another LocalOptimizer has moved {names[0]} since its last exchange, and a checkpoint of the model "
                "would give rank 0's values to all ranks: call synchronize() of every LocalOptimizer before saving"
            )


def exchange_of(model: torch.nn.Module, optimizer: Any) -> Any:
    """Return what exchanges the gradients of a model, or what its optimizer exchanges; None if that is neither.

    Raises:
        ValueError: There are several, or one that does not know its parameters.
    """
    own = made_by(optimizer)
    if own is not None:
        return own
    found, unknown = _serving(model)
    if len(found) > 1 or (unknown and not found):
        gc.collect()  # one of them may be that of an earlier model
        found, unknown = _serving(model)
    if len(found) > 1:
        raise ValueError(
            f"{len(found)} exchanges serve the model, but a checkpoint holds the state of one: use one for all "
            "optimizers, such as SparseState(compression, [first, second], named_parameters), or pass exchange="
        )
    if unknown and not found:
        raise ValueError(
            "an unpickled SparseState does not know its model yet: set its named_parameters, or pass exchange= here"
        )
    return next(iter(found), None)


def _serving(model: torch.nn.Module) -> tuple[list[ExchangingGradients], list[ExchangingGradients]]:
    """Return the exchanges that have parameters of a model, and those that do not know theirs."""
    of_model = set(model.parameters())
    known = {one: set(one.exchanged_parameters()) for one in standalone}
    found = [one for one, parameters in known.items() if not parameters.isdisjoint(of_model)]
    return found, [one for one, parameters in known.items() if not parameters]
