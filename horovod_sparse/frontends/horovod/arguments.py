"""Checks of DistributedOptimizer's arguments, and the stack level of its warnings."""

from __future__ import annotations

import sys
from typing import Any

import horovod.torch as hvd
import torch

from horovod_sparse.config import Sparse
from horovod_sparse.frontends.arguments import check_sparse, common_facts, names_of, require_plain, require_sparse

_LIBRARIES = ("horovod_sparse", "horovod", "torch")


def facts(
    optimizer: torch.optim.Optimizer,
    named: list[tuple[str, torch.Tensor]] | None,
    compression: Any,
    arguments: dict[str, Any],
) -> dict[str, Any]:
    """Return the facts that must be the same on every rank.

    Args:
        optimizer: The optimizer to wrap.
        named: Pairs of name and parameter from the user; None: parameters are numbered.
        compression: A ``Sparse`` or a Horovod compressor.
        arguments: Other arguments of ``DistributedOptimizer``, by name.

    Raises:
        ValueError: An argument is out of range or does not fit the others.
    """
    _check(optimizer, named, compression, arguments)
    groups = arguments["groups"]
    if isinstance(groups, list):
        groups = tuple(tuple(tuple(getattr(p, "shape", ())) for p in group) for group in groups)
    chosen = ("op", "backward_passes_per_step", "sparse_as_dense")
    return {
        **common_facts(
            compression,
            named or numbered(optimizer),
            arguments["stall_timeout"],
            arguments["stall_abort"],
            arguments["residual_unit"],
            [optimizer],
            arguments["undoable"],
        ),
        **{name: repr(arguments[name]) for name in chosen},
        "groups": groups,
    }


def numbered(optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
    """Return the parameters with the names that Horovod uses if the user gives none."""
    return [(f"allreduce.noname.{name}", p) for p, name in names_of(optimizer.param_groups).items()]


def _check(optimizer: Any, named: list[Any] | None, compression: Any, arguments: dict[str, Any]) -> None:
    op, factor = arguments["op"], arguments["gradient_predivide_factor"]
    passes = arguments["backward_passes_per_step"]
    require_plain(optimizer)
    if passes <= 0:
        raise ValueError(f"backward_passes_per_step must be > 0, not {passes}")
    if factor != 1.0 and op != hvd.Average:
        raise ValueError(f"gradient_predivide_factor {factor} is not supported with op != Average")
    if not all(isinstance(pair, tuple) for pair in named or ()):
        raise ValueError("named_parameters should be a sequence of tuples (name, parameter)")
    if isinstance(compression, Sparse):
        _check_sparse(optimizer, compression, op)
    elif not hasattr(compression, "compress"):
        require_sparse(compression, "one of hvd.Compression")


def _check_sparse(optimizer: torch.optim.Optimizer, compression: Sparse, op: Any) -> None:
    if op == hvd.Adasum:
        raise ValueError(
            "op=Adasum combines dense gradients and cannot be used with sparse ones: use op=Average or op=Sum, or "
            "compression=hvd.Compression.none"
        )
    if op not in (hvd.Average, hvd.Sum):
        raise ValueError(f"op {op!r} does not sum gradients: use hvd.Average or hvd.Sum")
    try:
        check_sparse(compression, [optimizer])
    except ValueError as error:
        raise ValueError(f"{error}; or use compression=hvd.Compression.none") from error


def user_level() -> int:
    """Return the ``stacklevel`` with which a warning of the caller names the user's line that called this package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
        level, frame = level + 1, frame.f_back
    return level
