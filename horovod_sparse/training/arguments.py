"""Facts of an optimizer that must be the same on every rank, and the errors in them."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch

import horovod_sparse
from horovod_sparse.compression import Sparse
from horovod_sparse.mpi.cudaaware import cuda_aware
from horovod_sparse.training.device import device_of
from horovod_sparse.watchdog.report import limits


def facts(
    optimizer: torch.optim.Optimizer,
    named: list[tuple[str, torch.Tensor]] | None,
    compression: Any,
    arguments: dict[str, Any],
) -> dict[str, Any] | Exception:
    """Facts that must be the same on every rank, or the error in them on this one.

    Hyperparameters are left out: a user may set them on rank 0 alone and broadcast them afterwards.
    """
    try:
        _validate(optimizer, compression, arguments)
        _check_stall(arguments)
        if not all(isinstance(pair, tuple) for pair in named or ()):
            raise ValueError("named_parameters should be a sequence of tuples (name, parameter)")
        groups = arguments["groups"]
        if isinstance(groups, list):
            groups = tuple(tuple(tuple(getattr(p, "shape", ())) for p in group) for group in groups)
        return {
            "version of horovod_sparse": horovod_sparse.__version__,
            "compression": compression.facts() if isinstance(compression, Sparse) else repr(compression),
            "op": repr(arguments["op"]),
            "backward_passes_per_step": arguments["backward_passes_per_step"],
            "sparse_as_dense": arguments["sparse_as_dense"],
            "stall_timeout": arguments["stall_timeout"],
            "stall_abort": arguments["stall_abort"],
            "groups": groups,
            "parameter": tuple(_describe(optimizer, named)),
        }
    except Exception as error:
        return error


def _describe(
    optimizer: torch.optim.Optimizer, named: list[tuple[str, torch.Tensor]] | None
) -> list[tuple[str, tuple[int, ...], str]]:
    """Name, shape and precision of the parameters that learn, in an order that does not depend on the user's."""
    if named is None:
        groups = enumerate(optimizer.param_groups)
        named = [(f"{i}.{j}", p) for i, group in groups for j, p in enumerate(group["params"])]
    return sorted((name, tuple(p.shape), str(p.dtype)) for name, p in named if p.requires_grad)


def _validate(optimizer: torch.optim.Optimizer, compression: Any, arguments: dict[str, Any]) -> None:
    rank, op, factor = hvd.rank(), arguments["op"], arguments["gradient_predivide_factor"]
    passes = arguments["backward_passes_per_step"]
    if passes <= 0:
        raise ValueError(f"rank {rank}: backward_passes_per_step must be > 0, not {passes}")
    if factor != 1.0 and op != hvd.Average:
        raise ValueError(f"rank {rank}: gradient_predivide_factor {factor} is not supported with op != Average")
    if not isinstance(compression, Sparse):
        if not hasattr(compression, "compress"):
            raise ValueError(
                f"rank {rank}: unknown compression {compression!r}: give hvs.Compression.topka(density=0.01) or the "
                "like, hvs.parse('topka:density=0.01'), or one of hvd.Compression"
            )
    elif op == hvd.Adasum:
        raise ValueError(
            f"rank {rank}: op=Adasum combines whole gradients and cannot go with sparse ones: use op=Average or "
            "op=Sum, or compression=hvd.Compression.none"
        )
    elif op not in (hvd.Average, hvd.Sum):
        raise ValueError(f"rank {rank}: op {op!r} does not sum gradients: use hvd.Average or hvd.Sum")
    elif compression.replaces_momentum and _has_momentum(optimizer):
        raise ValueError(
            f"rank {rank}: the compression applies momentum before the selection, but the optimizer "
            f"{type(optimizer).__name__} has momentum, too: give the optimizer momentum=0 (betas=(0, ...)) and the "
            "momentum to the compression, as in momentum=0.9"
        )
    else:
        _check_devices(optimizer)


def _check_stall(arguments: dict[str, Any]) -> None:
    try:
        limits(arguments["stall_timeout"], arguments["stall_abort"])
    except ValueError as error:
        raise ValueError(f"rank {hvd.rank()}: {error}") from error


def _check_devices(optimizer: torch.optim.Optimizer) -> None:
    """There are kernels for every parameter's device, and a way to MPI."""
    try:
        for device in {p.device for group in optimizer.param_groups for p in group["params"]}:
            device_of(device)
            if device.type != "cpu":
                cuda_aware()  # a wrong setting shows now, not in the first step
    except (ImportError, ValueError) as error:
        raise ValueError(f"rank {hvd.rank()}: {error}; or use compression=hvd.Compression.none") from error


def _has_momentum(optimizer: torch.optim.Optimizer) -> bool:
    return any(group.get("momentum") or group.get("betas", (0,))[0] for group in optimizer.param_groups)
