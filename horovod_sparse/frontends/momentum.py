"""Momentum of torch's optimizers when a compression applies it before the selection.

The memory applies momentum to gradients that are sent sparse, and the optimizer's step must not apply it again. Small
parameters, which are sent dense, and the weight decay still need it: a step hook applies it there.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW

from horovod_sparse.config import Sparse
from horovod_sparse.engine.bucket import Bucket
from horovod_sparse.engine.clipping import clip
from horovod_sparse.frontends.base import FrontEnd
from horovod_sparse.rules import Momentum
from horovod_sparse.transport.mpi import job

_LOG = logging.getLogger("horovod_sparse")
_BUFFER = "momentum_buffer"  # name in the state of torch's SGD, which leaves it unchanged without momentum


class StepMomentum:
    """Step hooks that apply momentum to gradients and weight decay that the memory does not cover.

    u = m u + (g + decay p). The hooks add the velocity u of earlier steps to the gradient. The step itself applies no
    momentum and adds decay * p; together this is momentum SGD. u includes the gradient g only if the parameter is sent
    dense or there is a single rank. Otherwise the memory applies the momentum of g, and u is that of the weight decay
    alone, as in the authors' DGCSGD.

    u is the same on every rank, in the unit of gradients, and part of the optimizer's state, so that broadcasts and
    checkpoints include it. A skipped step does not call the hooks.

    Momentum that is taken over is removed from ``param_groups`` only during the step. Adam keeps its first moment: the
    hooks change its gradients so that the step arrives at the memory's result.

    Attributes:
        options: Options of the momentum, as in ``MomentumCorrection``.
        front_ends: Front ends that exchange gradients of the optimizer; empty if this rank takes part in none.
    """

    options: Any

    def __init__(self) -> None:
        self.front_ends: weakref.WeakSet[FrontEnd] = weakref.WeakSet()
        # Optimizers initialize the state of a parameter in their first step if it is empty.
        self._new: dict[torch.Tensor, torch.Tensor] = {}
        self._taken: list[tuple[dict[str, Any], dict[str, Any]]] = []  # groups, and their settings outside the step

    def before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Add momentum before an optimizer's step, or after each evaluation of its closure."""
        self._restore()  # in case the last step failed
        if self.options.own is not None and has_momentum(optimizer):
            raise RuntimeError(
                f"the compression applies momentum, but {type(optimizer).__name__} has been given momentum, too, "
                "since construction: by a scheduler (pass cycle_momentum=False to OneCycleLR), or by a loaded state"
            )
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._apply(optimizer)
            return None

        def with_momentum() -> Any:
            self._restore()  # an optimizer may evaluate it more than once
            loss = closure()
            self._apply(optimizer)
            return loss

        return args[:1], {**kwargs, "closure": with_momentum}

    def after(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Restore the settings after an optimizer's step, and store new buffers in its state."""
        self._restore()
        for p, buffer in self._new.items():
            optimizer.state[p][_BUFFER] = buffer
        self._new.clear()

    def _restore(self) -> None:
        for group, settings in self._taken:
            group.update(settings)
        self._taken.clear()

    @torch.no_grad()
    def _apply(self, optimizer: torch.optim.Optimizer) -> None:
        overflow, scale = (getattr(optimizer, name, None) for name in ("found_inf", "grad_scale"))
        if overflow is not None and overflow.item():
            return
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if scale is not None:  # a GradScaler that lets torch's kernel unscale
            for gradient in gradients:
                gradient.div_(scale)
        if self._alone and self.options.max_norm is not None:  # with more ranks the worker has clipped them
            clip(gradients, lambda norm: self.options.clip(norm, 1))
        if self.options.own is not None or not self._alone:  # else nothing is selected, and the optimizer's is right
            for group in optimizer.param_groups:
                self._apply_to(optimizer, group)
        if scale is not None:
            for gradient in gradients:
                gradient.mul_(scale)

    @property
    def _alone(self) -> bool:
        return all(front_end.exchange_ranks == 1 for front_end in self.front_ends)

    def _apply_to(self, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        momentum = self.options.own or momentum_of(optimizer, group)
        if not momentum.factor:
            return
        decay, moment = coupled_decay(optimizer, group), self.options.own is None and "betas" in group
        for p in group["params"]:
            if p.grad is None or not p.requires_grad:
                continue
            buckets = self._selecting(optimizer, p)
            if not moment:
                # Only SGD applies momentum to the weight decay.
                of_gradient = decay if isinstance(optimizer, torch.optim.SGD) else 0.0
                self._add(optimizer, p, momentum, of_gradient, dense=not buckets)
            elif buckets:
                sent_dense = all(bucket.pipeline.sent_dense for bucket in buckets)
                enter_first_moment(optimizer.state.get(p, {}), p, group, decay, sent_dense)
        if self.options.own is None and "momentum" in group:
            self._taken.append((group, {name: group[name] for name in ("momentum", "nesterov")}))
            group.update(momentum=0.0, nesterov=False)

    def _selecting(self, optimizer: torch.optim.Optimizer, p: torch.Tensor) -> list[Bucket]:
        """Return the buckets in which a gradient is selected from; none where it is sent dense."""
        # Horovod gathers sparse gradients (embeddings), unless they were converted to dense ones.
        if p.grad is not None and p.grad.is_sparse and not getattr(optimizer, "sparse_as_dense", False):
            return []
        buckets = [front_end.bucket_of(p) for front_end in self.front_ends]
        return [bucket for bucket in buckets if bucket is not None and not bucket.layout.dense]

    def _add(
        self, optimizer: torch.optim.Optimizer, p: torch.Tensor, momentum: Momentum, decay: float, dense: bool
    ) -> None:
        gradient, m, share = p.grad, momentum.factor, momentum.share
        assert gradient is not None
        buffer = optimizer.state.get(p, {}).get(_BUFFER, self._new.get(p))
        if buffer is None:
            if not (dense or decay or (self.options.own is None and isinstance(optimizer, torch.optim.SGD))):
                return
            buffer, share = torch.zeros_like(gradient), momentum.first
            self._new[p] = buffer
        buffer.mul_(m)
        if momentum.nesterov:  # without dampening
            if dense:
                buffer.add_(gradient)
            if decay:
                buffer.add_(p, alpha=decay)
            gradient.add_(buffer, alpha=m)
            return
        if dense and share != 1:
            gradient.mul_(share)
        gradient.add_(buffer)
        if dense:
            buffer.copy_(gradient)
        if decay:
            buffer.add_(p, alpha=share * decay)
            if share != 1:
                gradient.add_(p, alpha=(share - 1) * decay)  # the step adds the full decay


_applied: weakref.WeakKeyDictionary[torch.optim.Optimizer, StepMomentum] = weakref.WeakKeyDictionary()


def apply_momentum(optimizer: torch.optim.Optimizer, sparse: Sparse, front_end: FrontEnd | None) -> None:
    """Register step hooks that apply the compression's momentum where no memory applies it.

    Args:
        optimizer: An optimizer without momentum, unless the compression takes it over. An optimizer of another class
            than ``SGD``, ``Adam`` and ``AdamW`` keeps its momentum, and rank 0 logs a warning.
        sparse: The configuration; nothing is done if it applies no momentum.
        front_end: The front end that exchanges the gradients, held weakly; None: this rank takes part in none. An
            optimizer of several models has several.
    """
    if sparse.momentum is None:
        return
    if optimizer not in _applied:
        _applied[optimizer] = momentum = StepMomentum()
        optimizer.register_step_pre_hook(momentum.before)
        optimizer.register_step_post_hook(momentum.after)
        if sparse.takes_momentum_over:
            _report(optimizer, sparse.momentum.fresh)
    _applied[optimizer].options = sparse.momentum
    if front_end is not None:
        _applied[optimizer].front_ends.add(front_end)


def _report(optimizer: torch.optim.Optimizer, fresh: float | None) -> None:
    """Log what happens to an optimizer's momentum unless it stays as it is."""
    if job().rank or not has_momentum(optimizer):
        return
    if not is_known(optimizer):
        _LOG.warning(
            "rank 0: momentum of %s is applied after the selection, as the compression can only take over that of SGD, "
            "Adam and AdamW: use one of these, or memory='residual'",
            type(optimizer).__name__,
        )
    elif fresh is not None:
        _LOG.info(
            "rank 0: in sparse steps, momentum m of %s has the form %g u + %g / (1 - m) g, where u is the velocity and "
            "g the gradient: fresh=None keeps its own form",
            *(type(optimizer).__name__, 1 - fresh, fresh),
        )


def momentum_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Momentum:
    """Return the momentum of a param group that a compression can take over.

    This is the momentum of SGD and the first moment of Adam and AdamW. The momentum of other optimizers is not known to
    be linear in the gradients.
    """
    if isinstance(optimizer, SGD):
        return Momentum(float(group["momentum"]), bool(group["nesterov"]), 1 - float(group["dampening"]))
    if isinstance(optimizer, (Adam, AdamW)):
        beta = float(group["betas"][0])
        return Momentum(beta, share=1 - beta, first=1 - beta)
    return Momentum()


def is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``momentum_of`` knows the momentum of an optimizer."""
    return isinstance(optimizer, (SGD, Adam, AdamW))


def has_momentum(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer applies momentum."""
    return any(group.get("momentum") or group.get("betas", (0,))[0] for group in optimizer.param_groups)


def coupled_decay(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> float:
    """Return the weight decay that SGD and Adam add to the gradient; negative where ``p.grad`` points uphill."""
    coupled = isinstance(optimizer, (SGD, Adam)) and not isinstance(optimizer, AdamW)
    if not coupled or group.get("decoupled_weight_decay"):
        return 0.0
    return float(-group["weight_decay"] if group.get("maximize") else group["weight_decay"])


def enter_first_moment(
    state: Mapping[str, Any], p: torch.Tensor, group: Mapping[str, Any], decay: float, sent_dense: bool
) -> None:
    """Make Adam's step use ``p.grad``, which includes momentum already, as its first moment.

    The step adds decay * p to the gradient and computes b * exp_avg + (1 - b) * gradient, which must become
    p.grad + decay * p. If everything was sent, the gradient that solves this is the mean gradient, so that the second
    moment is exact, too. Otherwise it would be a difference of two totals with other entries in each step: the first
    moment is set instead, and the second moment is computed from it.

    Args:
        state: Adam's state of the parameter; without ``exp_avg``, the first moment is 0.
        p: The parameter.
        group: Param group of the parameter.
        decay: Weight decay from ``coupled_decay``. Momentum does not apply to it: parameters hardly change meanwhile.
        sent_dense: Whether everything was sent in this step.
    """
    gradient, first, beta = p.grad, state.get("exp_avg"), float(group["betas"][0])
    uphill = -1 if group.get("maximize") else 1
    assert gradient is not None
    if decay:  # each of these is a pass over the parameter
        gradient.add_(p, alpha=decay)
    if first is not None and not sent_dense:
        torch.mul(gradient, uphill, out=first)
    else:
        if first is not None:
            gradient.sub_(first, alpha=uphill * beta)
        gradient.div_(1 - beta)
    if decay:
        gradient.sub_(p, alpha=decay)
