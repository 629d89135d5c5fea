"""Checks of the arguments that front ends share, and facts that must be the same on every rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

import horovod_sparse
from horovod_sparse.config import Sparse
from horovod_sparse.control.lifecycle import process
from horovod_sparse.control.report import limits
from horovod_sparse.engine.device import device_of
from horovod_sparse.frontends.members import job
from horovod_sparse.frontends.optimizers import has_momentum, parameters_in
from horovod_sparse.frontends.units import check_unit, unit_for
from horovod_sparse.transport.agreement import agree
from horovod_sparse.transport.base import Transport
from horovod_sparse.transport.cuda_aware import cuda_aware


def agree_on(transport: Transport, facts: Callable[[], dict[str, Any]]) -> None:
    """Raise an error on all ranks if their facts differ, or if one of them finds an error in its arguments.

    A collective call.

    Args:
        transport: The ranks.
        facts: Returns the facts of this rank by their names, or raises the error.
    """
    mine: dict[str, Any] | Exception
    try:
        mine = facts()
    except Exception as error:
        mine = type(error)(f"rank {job().rank}: {error}") if type(error) in (ValueError, RuntimeError) else error
    agree(transport, mine)


def agree_on_last_group(
    param_groups: list[dict[str, Any]], names: Mapping[torch.Tensor, str], transport: Transport
) -> dict[torch.Tensor, str]:
    """Return the names of the parameters of the last param group, or drop it and raise ValueError if ranks differ."""
    added = {p: names[p] for p in param_groups[-1]["params"]}
    try:
        with process.communicating("add_param_group()", transport):
            agree(transport, {"parameter": parameter_facts((name, p) for p, name in added.items())})
    except ValueError:
        param_groups.pop()
        raise
    return added


def require_sparse(compression: Any, dense: str) -> None:
    """Raise ValueError unless a compression is a configuration of this package.

    Args:
        compression: The user's argument.
        dense: What to use instead for a dense exchange, for the message.
    """
    if not isinstance(compression, Sparse):
        raise ValueError(
            f"unknown compression {compression!r}: pass hvs.Compression.topka(density=0.01), "
            f"hvs.parse('topka:density=0.01') or similar; for a dense exchange {dense}"
        )


def common_facts(
    compression: Any,
    named: Iterable[tuple[str, torch.Tensor]],
    stall_timeout: float | None,
    stall_abort: float | None,
    residual_unit: str | None,
    optimizers: Sequence[torch.optim.Optimizer],
    undoable: bool = False,
) -> dict[str, Any]:
    """Return the facts that every front end compares between ranks.

    Hyperparameters are left out: a script may set them on rank 0 alone and broadcast them afterwards.

    Raises:
        ValueError: A stall limit is not a number of seconds, or the residual unit is unknown.
    """
    limits(stall_timeout, stall_abort)
    check_unit(residual_unit)
    return {
        "version of horovod_sparse": horovod_sparse.__version__,
        "compression": compression.facts() if isinstance(compression, Sparse) else repr(compression),
        "stall_timeout": stall_timeout,
        "stall_abort": stall_abort,
        "undoable": undoable,
        "residual_unit": tuple(unit_for(optimizer, residual_unit) for optimizer in optimizers),
        "parameter": parameter_facts(named),
    }


def parameter_facts(named: Iterable[tuple[str, torch.Tensor]]) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    """Return name, shape and dtype of all trainable parameters, sorted."""
    return tuple(sorted((name, tuple(p.shape), str(p.dtype)) for name, p in named if p.requires_grad))


def names_of(
    param_groups: Iterable[Mapping[str, Any]], named: Iterable[tuple[str, torch.Tensor]] = ()
) -> dict[torch.Tensor, str]:
    """Return the name of each parameter of some param groups, in order: the user's, or "group.index"."""
    given = {p: name for name, p in named}
    groups = enumerate(param_groups)
    return {p: given.get(p, f"{number}.{i}") for number, group in groups for i, p in enumerate(group["params"])}


def check_sparse(compression: Sparse, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Check that a compression supports the optimizers.

    Raises:
        ValueError: An optimizer has momentum although the compression applies its own, or has parameters on a device
            without kernels.
    """
    for optimizer in optimizers:
        if compression.replaces_momentum and not compression.takes_momentum_over and has_momentum(optimizer):
            raise ValueError(
                f"the compression applies momentum before the selection, but the optimizer {type(optimizer).__name__} "
                "has momentum, too: set momentum=0 (betas=(0, ...)) in the optimizer and the momentum in the "
                "compression, as in momentum=0.9, or set momentum=None in the compression, which uses the optimizer's"
            )
        check_devices({p.device for p in parameters_in(optimizer)})


def check_optimizers(
    compression: Sparse,
    optimizers: Sequence[torch.optim.Optimizer],
    grad_scaler: torch.amp.GradScaler | None,
    undoable: bool,
    remedy: str,
) -> None:
    """Check the optimizers that a front end takes instead of wrapping one.

    Args:
        compression: The configuration.
        optimizers: The optimizers.
        grad_scaler: The scaler of the loss, if any.
        undoable: Whether exchanged gradients may be dropped.
        remedy: How to pass an optimizer, for the message.

    Raises:
        ValueError: As in ``check_sparse``; an optimizer exchanges gradients itself; or an optimizer is missing.
    """
    check_sparse(compression, optimizers)
    for optimizer in optimizers:
        require_plain(optimizer)
    if compression.replaces_momentum and not optimizers:
        raise ValueError(f"the compression applies momentum, for which it needs the optimizer: {remedy}")
    if undoable and not optimizers:
        raise ValueError(f"undoable=True needs the optimizer, which shows whether gradients were applied: {remedy}")
    if grad_scaler is not None and grad_scaler.is_enabled() and len(optimizers) != 1:
        raise ValueError(
            f"a grad_scaler needs exactly one optimizer, which shows whether a step was skipped, not "
            f"{len(optimizers)}: {remedy}"
        )


def optimizers_in(given: Any) -> tuple[torch.optim.Optimizer, ...]:
    """Return the optimizers in an argument that takes one, several in a list or tuple, or None.

    Raises:
        TypeError: An item is not an optimizer, or is a wrapper without step hooks, such as Accelerate's.
    """
    optimizers = () if given is None else tuple(given) if isinstance(given, (list, tuple)) else (given,)
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"optimizer must be a torch.optim.Optimizer, or a list of them, not {optimizer!r:.200}: pass the "
                "optimizer that updates the model's parameters"
            )
        try:
            optimizer.register_step_post_hook(lambda *_: None).remove()
        except AttributeError as error:
            kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
            wrapped = (name for name, value in vars(optimizer).items() if isinstance(value, torch.optim.Optimizer))
            raise TypeError(
                f"the optimizer is a {kind}, which wraps an optimizer and has no step hooks: pass the wrapped "
                f"optimizer, optimizer.{next(wrapped, 'optimizer')}"
            ) from error
    return optimizers


def _kind(part: Any) -> str | None:
    return "name" if isinstance(part, str) else "parameter" if isinstance(part, torch.Tensor) else None


def names_in(named_parameters: Any) -> dict[torch.Tensor, str]:
    """Return the names in pairs of name and parameter.

    Raises:
        TypeError: The argument does not hold such pairs.
        ValueError: A name occurs twice.
    """
    pairs = list(named_parameters) if isinstance(named_parameters, Iterable) else [named_parameters]
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or list(map(_kind, pair)) != ["name", "parameter"]:
            raise TypeError(
                f"named_parameters must be pairs of name and parameter, not {pair!r:.200}: pass "
                "model.named_parameters()"
            )
    names = [name for name, _ in pairs]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(
            f"named_parameters holds the name {twice[0]!r} more than once: give each parameter its own name"
        )
    return {p: name for name, p in pairs}


def require_own(
    optimizers: Sequence[torch.optim.Optimizer], of_model: Iterable[torch.Tensor], names: Mapping[torch.Tensor, str]
) -> None:
    """Check that optimizers update the parameters of a model.

    An optimizer may also update parameters of other models, and a model may have parameters that no optimizer updates.
    Both at once is a mistake.

    Args:
        optimizers: The optimizers.
        of_model: The parameters that the model exchanges.
        names: Names of parameters, as far as they are known.

    Raises:
        ValueError: An optimizer has no parameter of the model; or it has parameters of other models, while some of the
            model's parameters are in no optimizer.
    """
    own = dict.fromkeys(of_model)
    stepped = {p for optimizer in optimizers for p in parameters_in(optimizer)}
    missing = [p for p in own if p not in stepped]
    for optimizer in optimizers:
        numbered = {
            p: f"parameter {i} of group {number}"
            for number, group in enumerate(optimizer.param_groups)
            for i, p in enumerate(group["params"])
            if p.requires_grad
        }
        foreign = [p for p in numbered if p not in own]
        if foreign and (missing or len(foreign) == len(numbered)):
            others = [f"{names.get(p, 'a parameter')} {tuple(p.shape)} of the model is in none" for p in missing[:1]]
            raise ValueError(
                f"the optimizer {type(optimizer).__name__} is not the one of this model: "
                + ", and ".join([f"its {numbered[foreign[0]]} {tuple(foreign[0].shape)} is not in the model", *others])
                + ": pass the optimizers that were created with the parameters of this model"
            )


def require_plain(optimizer: Any) -> None:
    """Raise ValueError if an optimizer already exchanges gradients or parameters with other ranks."""
    wrappers = {"_allreduce_delay": "DistributedOptimizer", "_local_state": "LocalOptimizer"}
    for attribute, wrapper in wrappers.items():
        if hasattr(optimizer, attribute):
            raise ValueError(
                f"this optimizer is wrapped by a {wrapper} already, and its gradients would be exchanged twice: pass "
                "the plain one"
            )


def check_devices(devices: Iterable[torch.device]) -> None:
    """Check that there are kernels for all devices, and that the setting for CUDA-aware MPI is valid.

    Raises:
        ValueError: A device is not supported, or the setting is invalid.
    """
    try:
        for device in devices:
            device_of(device)
            if device.type != "cpu":
                cuda_aware()  # raises for an invalid setting now instead of in the first step
    except ImportError as error:
        raise ValueError(str(error)) from error
