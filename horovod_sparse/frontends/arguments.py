"""Facts of a training that must be the same on every rank, and the errors in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

import horovod_sparse
from horovod_sparse.config import Sparse
from horovod_sparse.control.report import limits
from horovod_sparse.engine.device import device_of
from horovod_sparse.frontends.momentum import has_momentum
from horovod_sparse.frontends.units import check_unit, unit_for
from horovod_sparse.transport.cuda_aware import cuda_aware


def common_facts(
    compression: Any,
    named: Iterable[tuple[str, torch.Tensor]],
    stall_timeout: float | None,
    stall_abort: float | None,
    residual_unit: str | None,
    optimizers: Sequence[torch.optim.Optimizer],
) -> dict[str, Any]:
    """Facts that every front end compares between ranks.

    Hyperparameters are left out: a user may set them on rank 0 alone and broadcast them afterwards.

    Raises:
        ValueError: A limit of the stall is no number of seconds, or the unit is none.
    """
    limits(stall_timeout, stall_abort)
    check_unit(residual_unit)
    return {
        "version of horovod_sparse": horovod_sparse.__version__,
        "compression": compression.facts() if isinstance(compression, Sparse) else repr(compression),
        "stall_timeout": stall_timeout,
        "stall_abort": stall_abort,
        "residual_unit": tuple(unit_for(optimizer, residual_unit) for optimizer in optimizers),
        "parameter": parameter_facts(named),
    }


def parameter_facts(named: Iterable[tuple[str, torch.Tensor]]) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    """Name, shape and precision of the parameters that learn, in an order that does not depend on the user's."""
    return tuple(sorted((name, tuple(p.shape), str(p.dtype)) for name, p in named if p.requires_grad))


def names_of(
    param_groups: Iterable[Mapping[str, Any]], named: Iterable[tuple[str, torch.Tensor]]
) -> dict[torch.Tensor, str]:
    """Names of all parameters of some param groups, in their order: the user's, or those that Horovod numbers by."""
    given = {p: name for name, p in named}
    groups = enumerate(param_groups)
    return {p: given.get(p, f"{number}.{i}") for number, group in groups for i, p in enumerate(group["params"])}


def check_sparse(compression: Sparse, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuses optimizers that a compression cannot serve.

    Raises:
        ValueError: An optimizer has momentum that the compression applies, too, or parameters on a device for which
            there are no kernels.
    """
    for optimizer in optimizers:
        if compression.replaces_momentum and not compression.takes_momentum_over and has_momentum(optimizer):
            raise ValueError(
                f"the compression applies momentum before the selection, but the optimizer {type(optimizer).__name__} "
                "has momentum, too: give the optimizer momentum=0 (betas=(0, ...)) and the momentum to the "
                "compression, as in momentum=0.9, or give the compression momentum=None, which takes the optimizer's"
            )
        check_devices({p.device for group in optimizer.param_groups for p in group["params"]})


def optimizers_in(given: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers in an argument that takes one, several in a list or tuple, or None.

    Raises:
        TypeError: Something in it is no optimizer, or a wrapper that takes no hooks, such as Accelerate's.
    """
    optimizers = [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"optimizer must be a torch.optim.Optimizer, or a list of them, not {optimizer!r:.200}: give the "
                "optimizer that steps the parameters of the model"
            )
        try:
            optimizer.register_step_post_hook(lambda *_: None).remove()
        except AttributeError as error:
            kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
            raise TypeError(
                f"the optimizer is a {kind}, which wraps an optimizer and takes no hooks itself: give the one inside, "
                "optimizer.optimizer"
            ) from error
    return optimizers


def _kind(part: Any) -> str | None:
    return "name" if isinstance(part, str) else "parameter" if isinstance(part, torch.Tensor) else None


def names_in(named_parameters: Any) -> dict[torch.Tensor, str]:
    """Return the names in pairs of name and parameter.

    Raises:
        TypeError: They are no such pairs.
        ValueError: A name is given twice.
    """
    pairs = list(named_parameters) if isinstance(named_parameters, Iterable) else [named_parameters]
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or list(map(_kind, pair)) != ["name", "parameter"]:
            raise TypeError(
                f"named_parameters must be pairs of name and parameter, not {pair!r:.200}: give "
                "model.named_parameters()"
            )
    names = [name for name, _ in pairs]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(
            f"named_parameters gives the name {twice[0]!r} more than once: give each parameter its own name"
        )
    return {p: name for name, p in pairs}


def require_own(
    optimizers: Sequence[torch.optim.Optimizer], of_model: Iterable[torch.Tensor], names: Mapping[torch.Tensor, str]
) -> None:
    """Refuse optimizers that do not step the parameters of a model.

    An optimizer may also step parameters of other models, and a model may have parameters that no optimizer steps. Both
    at once is a mistake.

    Args:
        optimizers: The optimizers.
        of_model: The parameters that the model exchanges.
        names: Names of parameters, as far as they are known.

    Raises:
        ValueError: An optimizer has no parameter of the model; or it has others, too, and some of the model are in no
            optimizer.
    """
    own = dict.fromkeys(of_model)
    stepped = {p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
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
                f"the optimizer {type(optimizer).__name__} is not the one of this DDP model: "
                + ", and ".join([f"its {numbered[foreign[0]]} {tuple(foreign[0].shape)} is not in the model", *others])
                + ": give SparseState the optimizers that were made from the parameters of this model"
            )


def require_plain(optimizer: Any) -> None:
    """ValueError where an optimizer exchanges something with other ranks already."""
    wrappers = {"_allreduce_delay": "DistributedOptimizer", "_rounds": "LocalOptimizer"}
    for attribute, wrapper in wrappers.items():
        if hasattr(optimizer, attribute):
            raise ValueError(
                f"this optimizer is wrapped by a {wrapper} already, and its gradients would be exchanged twice: give "
                "the plain one"
            )


def check_devices(devices: Iterable[torch.device]) -> None:
    """Makes sure that there are kernels for some devices, and a way to MPI.

    Raises:
        ValueError: One of them cannot be served.
    """
    try:
        for device in devices:
            device_of(device)
            if device.type != "cpu":
                cuda_aware()  # a wrong setting shows now, not in the first step
    except ImportError as error:
        raise ValueError(str(error)) from error
