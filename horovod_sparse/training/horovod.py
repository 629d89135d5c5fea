"""Horovod's own arguments, its join(), and the line of the program that a warning is about."""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch import mpi_ops

from horovod_sparse.compression import Sparse
from horovod_sparse.training.arguments import check_sparse, common_facts

_LIBRARIES = ("horovod_sparse", "horovod", "torch")
_joining: weakref.WeakSet[Any] = weakref.WeakSet()


def facts(
    optimizer: torch.optim.Optimizer,
    named: list[tuple[str, torch.Tensor]] | None,
    compression: Any,
    arguments: dict[str, Any],
) -> dict[str, Any] | Exception:
    """Facts that must be the same on every rank, or the error in them on this one.

    Args:
        optimizer: To be wrapped.
        named: The user's names of its parameters.
        compression: ``Sparse``, or one of Horovod's.
        arguments: Those of ``DistributedOptimizer`` besides.
    """
    try:
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
            ),
            **{name: repr(arguments[name]) for name in chosen},
            "groups": groups,
        }
    except Exception as error:
        return type(error)(f"rank {hvd.rank()}: {error}") if type(error) in (ValueError, RuntimeError) else error


def numbered(optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
    """The parameters by the names that Horovod gives them where the user gives none."""
    groups = enumerate(optimizer.param_groups)
    return [(f"allreduce.noname.{i}.{j}", p) for i, group in groups for j, p in enumerate(group["params"])]


def _check(optimizer: Any, named: list[Any] | None, compression: Any, arguments: dict[str, Any]) -> None:
    op, factor = arguments["op"], arguments["gradient_predivide_factor"]
    passes = arguments["backward_passes_per_step"]
    if hasattr(optimizer, "_allreduce_delay"):
        raise ValueError(
            "this optimizer is wrapped by a DistributedOptimizer already, and its gradients would be exchanged twice: "
            "wrap the plain one"
        )
    if passes <= 0:
        raise ValueError(f"backward_passes_per_step must be > 0, not {passes}")
    if factor != 1.0 and op != hvd.Average:
        raise ValueError(f"gradient_predivide_factor {factor} is not supported with op != Average")
    if not all(isinstance(pair, tuple) for pair in named or ()):
        raise ValueError("named_parameters should be a sequence of tuples (name, parameter)")
    if isinstance(compression, Sparse):
        _check_sparse(optimizer, compression, op)
    elif not hasattr(compression, "compress"):
        raise ValueError(
            f"unknown compression {compression!r}: give hvs.Compression.topka(density=0.01) or the like, "
            "hvs.parse('topka:density=0.01'), or one of hvd.Compression"
        )


def _check_sparse(optimizer: torch.optim.Optimizer, compression: Sparse, op: Any) -> None:
    if op == hvd.Adasum:
        raise ValueError(
            "op=Adasum combines whole gradients and cannot go with sparse ones: use op=Average or op=Sum, or "
            "compression=hvd.Compression.none"
        )
    if op not in (hvd.Average, hvd.Sum):
        raise ValueError(f"op {op!r} does not sum gradients: use hvd.Average or hvd.Sum")
    try:
        check_sparse(compression, [optimizer])
    except ValueError as error:
        raise ValueError(f"{error}; or use compression=hvd.Compression.none") from error


class Use:
    """When an optimizer was made and has exchanged last, in the order of the program; all ranks make the same ones.

    One that nobody uses any more may be gone on another rank and still be here: to take part for it would be to wait
    for ever. In use are those that have exchanged since the newest optimizer was made, and the new ones.
    """

    _events = itertools.count(1)
    _newest = 0  # when any of them was made last
    _last = 0  # when any of them has exchanged last

    def __init__(self) -> None:
        self._made = Use._newest = next(Use._events)
        self._exchanged = 0

    def note(self) -> None:
        """It exchanges a step."""
        self._exchanged = Use._last = next(Use._events)

    def __bool__(self) -> bool:
        """Tells if it is in use."""
        return self._exchanged > Use._newest or (not self._exchanged and self._made > Use._last)


def let_join(optimizer: Any) -> None:
    """Lets the exchange of an optimizer go on, with nothing to give, while this rank waits in ``hvd.join()``.

    Python's ``join`` may have been imported under any name; what it calls has one place.
    """
    _joining.add(optimizer)
    _replace_join()


@functools.cache
def _replace_join() -> None:
    library = mpi_ops.mpi_lib
    join_of_horovod = library.horovod_torch_join

    def join(*arguments: Any) -> Any:
        for optimizer in list(_joining):
            if optimizer._use:
                optimizer._stand_in()
        return join_of_horovod(*arguments)

    library.horovod_torch_join = join


def user_level() -> int:
    """The stacklevel of a warning of the caller that names the line of the program which called this package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
        level, frame = level + 1, frame.f_back
    return level
