"""Classes, param groups, momentum and weight decay of torch's optimizers."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from horovod_sparse.rules import Momentum

MUON: Any = getattr(torch.optim, "Muon", None)  # since torch 2.9
_TORCH = str(Path(torch.__file__).parent)
_MOMENTUM = (SGD, MUON, Adam, AdamW)
_classes: weakref.WeakKeyDictionary[Optimizer, type[Optimizer] | None] = weakref.WeakKeyDictionary()


def parameters_in(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Iterate over the parameters of an optimizer, in the order of its param groups."""
    return (p for group in optimizer.param_groups for p in group["params"])


def overflowed(optimizer: Optimizer) -> bool:
    """Return whether a GradScaler has found an overflow and left it to the optimizer's step to do nothing."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found.item())


def is_gathered(optimizer: Optimizer, gradient: torch.Tensor | None) -> bool:
    """Return whether a gradient is a sparse tensor (embeddings) that the front end does not exchange as a dense one."""
    return gradient is not None and gradient.is_sparse and not getattr(optimizer, "sparse_as_dense", False)


def torch_class(optimizer: Optimizer) -> type[Optimizer] | None:
    """Return the class of torch whose steps an optimizer takes; None if it has its own step.

    A subclass that overrides ``step`` may do anything with the gradients, also around a call of its base class.
    Wrappers of torch, such as a scheduler's around the step of an instance, change nothing. Decided once for each
    optimizer: wrappers that are added later call the step hooks as before.
    """
    if optimizer not in _classes:
        _classes[optimizer] = _torch_class(optimizer)
    return _classes[optimizer]


def _torch_class(optimizer: Optimizer) -> type[Optimizer] | None:
    kind = type(optimizer)
    base = next((cls for cls in kind.__mro__ if cls in _BEHAVIORS), None)
    if base is None or replaces_step(optimizer) or _behavior(kind) != _BEHAVIORS[base]:
        return None
    return base


def replaces_step(optimizer: Optimizer) -> bool:
    """Return whether the instance has a step in place of its class's, other than torch's wrappers around that."""
    step = vars(optimizer).get("step")
    return step is not None and _unwrapped(step) is not _unwrapped(type(optimizer).step)


def _behavior(kind: type[Optimizer]) -> tuple[Any, Any]:
    """Return the functions with which a class takes a step, below the front ends of this package."""
    steps = (vars(cls)["step"] for cls in kind.__mro__ if "step" in vars(cls))
    step = next(step for step in steps if not getattr(step, "of_front_end", False))
    return _unwrapped(step), _unwrapped(getattr(kind, "_init_group", None))


def _unwrapped(step: Any) -> Any:
    """Return the function inside of torch's wrappers: of profiler, scheduler and compiler, as a method or not."""
    while True:
        step = getattr(step, "__func__", step)
        code = getattr(step, "__code__", None)
        if code is None or not code.co_filename.startswith(_TORCH) or not hasattr(step, "__wrapped__"):
            return step
        step = step.__wrapped__


_CLASSES = (cls for cls in vars(torch.optim).values() if isinstance(cls, type) and cls is not Optimizer)
_BEHAVIORS = {cls: _behavior(cls) for cls in _CLASSES}  # now, as a script may replace them


def momentum_of(optimizer: Optimizer, group: Mapping[str, Any]) -> Momentum:
    """Return the momentum of a param group that a memory can apply before the selection; none if it is not known.

    This is the momentum of SGD and Muon and the first moment of Adam and AdamW. The momentum of other optimizers is not
    known to be linear in the gradients.
    """
    if not is_known(optimizer):
        return Momentum()
    adam = is_adam(optimizer)
    factor = float(group["betas"][0] if adam else group["momentum"])
    begun = factor != 0 and any(buffer_name(optimizer) in optimizer.state.get(p, {}) for p in group["params"])
    if torch_class(optimizer) is not SGD:
        return Momentum(factor, not adam and bool(group["nesterov"]), 1 - factor, averages=True, begun=begun)
    share = 1 - float(group["dampening"])
    # With a dampening of 1 the optimizer ignores all gradients but the first.
    return Momentum(factor, bool(group["nesterov"]), share, begun=begun) if share else Momentum()


def buffer_name(optimizer: Optimizer) -> str:
    """Return the key of the momentum in the optimizer's state of a parameter."""
    return "exp_avg" if is_adam(optimizer) else "momentum_buffer"


def is_known(optimizer: Optimizer) -> bool:
    """Return whether ``momentum_of`` knows the momentum of an optimizer."""
    cls = torch_class(optimizer)
    return cls is not None and cls in _MOMENTUM


def is_adam(optimizer: Optimizer) -> bool:
    """Return whether an optimizer takes the steps of Adam or AdamW."""
    return torch_class(optimizer) in (Adam, AdamW)


def is_adaptive(optimizer: Optimizer) -> bool:
    """Return whether an optimizer scales each entry by its own history: every optimizer but SGD and Muon."""
    cls = torch_class(optimizer)
    return cls is None or cls not in (SGD, MUON)


def has_momentum(optimizer: Optimizer) -> bool:
    """Return whether an optimizer applies momentum."""
    return any(map(applies_momentum, optimizer.param_groups))


def applies_momentum(group: Mapping[str, Any]) -> bool:
    """Return whether the settings of a param group include momentum."""
    return bool(group.get("momentum") or group.get("betas", (0,))[0])


def coupled_decay(optimizer: Optimizer, group: Mapping[str, Any]) -> float:
    """Return the weight decay that SGD and Adam add to the gradient; negative where ``p.grad`` points uphill."""
    if torch_class(optimizer) not in (SGD, Adam) or group.get("decoupled_weight_decay"):
        return 0.0
    return float(-group["weight_decay"] if group.get("maximize") else group["weight_decay"])


def group_numbers(optimizers: Sequence[Optimizer]) -> dict[torch.Tensor, int]:
    """Return the number of each parameter's param group, which stays the same when an optimizer gets more groups."""
    return {
        p: index * len(optimizers) + position
        for position, optimizer in enumerate(optimizers)
        for index, group in enumerate(optimizer.param_groups)
        for p in group["params"]
    }


def optimizer_of(group: int, optimizers: int) -> tuple[int, int]:
    """Return the position of the optimizer that a number of ``group_numbers`` stands for, and the index of its group.

    Args:
        group: The number.
        optimizers: Number of optimizers.
    """
    index, position = divmod(group, optimizers)
    return position, index
