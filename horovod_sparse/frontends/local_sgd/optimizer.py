"""LocalOptimizer: an optimizer whose ranks take several local steps between two sparse exchanges."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from horovod_sparse.config import Sparse
from horovod_sparse.control.lifecycle import process
from horovod_sparse.control.report import limits
from horovod_sparse.frontends.arguments import (
    agree_on,
    agree_on_last_group,
    check_devices,
    common_facts,
    names_of,
    require_plain,
    require_sparse,
)
from horovod_sparse.frontends.base import Exchanging
from horovod_sparse.frontends.eager import eager, weak_hook
from horovod_sparse.frontends.horovod.join import Use, let_join
from horovod_sparse.frontends.local_sgd.outer import DILOCO, OuterSGD
from horovod_sparse.frontends.local_sgd.rounds import Rounds, plain
from horovod_sparse.frontends.members import job, transport_of
from horovod_sparse.frontends.optimizers import overflowed, parameters_in
from horovod_sparse.frontends.wrapping import functions_of, warn_of_hidden, wrapped


class _Local(Exchanging, torch.optim.Optimizer):
    """Functions that differ from the wrapped optimizer's; they override its class in the same way as Horovod's."""

    local_steps: int
    _rounds: Rounds
    _use: Use
    # A GradScaler then always calls step() and passes on whether it found an overflow: skipped steps count, too.
    _step_supports_amp_scaling = True

    @eager
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a local step; the last one of a round also calls ``synchronize()``.

        Steps that a GradScaler skips on this rank count, too: all ranks synchronize after the same number of calls.

        Args:
            closure: The closure of the wrapped optimizer's ``step``.
        """
        self._use.note()
        self._rounds.begin()
        result = None
        if not overflowed(self):
            _unscale(self)
            result = plain(self).step(closure)
            self._rounds.stepped = True
        self._rounds.local_step += 1
        if self._rounds.local_step >= self.local_steps:
            self.synchronize()
        return result

    # Torch then calls step hooks only around the step of the user's class.
    step.hooked = True  # type: ignore[attr-defined]
    step.exchanges = True  # type: ignore[attr-defined]

    @eager
    def synchronize(self) -> None:
        """End the round now; all ranks then have the same parameters.

        A collective call: other ranks must call it, too, or complete their round. Call it before an evaluation, and at
        the end of training if the number of steps is not a multiple of ``local_steps``.
        """
        self._rounds.end()

    @property
    def local_step(self) -> int:
        """Number of steps of this rank in the current round; 0: all ranks have the same parameters."""
        return self._rounds.local_step

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as ``torch.optim.Optimizer.add_param_group``.

        A collective call: all ranks must add the same parameters, between two steps.

        Raises:
            ValueError: The parameters differ between ranks.
        """
        plain(self).add_param_group(param_group)
        names = names_of(self.param_groups)
        self._rounds.admit(agree_on_last_group(self.param_groups, names, self._rounds.exchange.transport))

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state on this rank, with the common parameters and the outer momentum.

        In the middle of a round, the local steps of other ranks are not included; ``hvs.checkpoint`` saves them, too.
        """
        return self._rounds.add_to(plain(self).state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that ``state_dict`` returned, here or on the plain optimizer."""
        plain(self).load_state_dict(state_dict)
        self._rounds.take_from(self.state)

    @property
    def exchange(self) -> Rounds:
        """The rounds with their residuals: this rank's part of a checkpoint."""
        return self._rounds

    def _join(self) -> Callable[[], None]:
        return self._rounds.join()


# By this __module__, Horovod's broadcast_optimizer_state knows that it must bypass step() to initialize the state.
_FUNCTIONS = {**functions_of(_Local), "__module__": "horovod.torch.optimizer"}


def LocalOptimizer(  # noqa: N802 - named as DistributedOptimizer is
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
    local_steps: int,
    compression: Sparse,
    outer: OuterSGD = DILOCO,
    process_set: Any = None,
    *,
    grad_scaler: torch.amp.GradScaler | None = None,
    stall_timeout: float | None = None,
    stall_abort: float | None = None,
) -> Any:
    """Wrap an optimizer so that ranks take local steps and exchange, sparse, how far their parameters have moved.

    A round starts from common parameters and consists of ``local_steps`` local steps. Then each rank sends the
    difference between the common parameters and its own through the pipeline of ``DistributedOptimizer``, with error
    feedback. The mean difference is the gradient of an outer optimizer's step on the common parameters, from which all
    ranks start the next round (DiLoCo, arXiv 2311.08105; SparseLoCo, arXiv 2508.15706).

    A collective call: all ranks of the process set take part. Needs MPI, but not Horovod. The state of the wrapped
    optimizer (momentum) and the buffers of the model (batch normalization) are not exchanged.

    Args:
        optimizer: The optimizer to wrap, of any class.
        named_parameters: Pairs of name and parameter, usually ``model.named_parameters()``; None: parameters are
            numbered.
        local_steps: Number of steps H of a round. 1, with ``OuterSGD(lr=1, momentum=0)`` and a wrapped SGD, is
            equivalent to ``DistributedOptimizer``.
        compression: A ``Sparse``, usually from ``hvs.Compression`` or ``hvs.parse``, that applies no momentum.
        outer: Settings of the outer step.
        process_set: The ranks that train together: a Horovod process set, a torch process group or an MPI
            communicator; None: all ranks.
        grad_scaler: The scaler of this rank's loss, saved with this rank's part of a checkpoint. Scalers of different
            ranks are independent.
        stall_timeout: Seconds before a stall is reported, as for ``DistributedOptimizer``; waiting for slower ranks at
            the end of a round counts.
        stall_abort: Seconds before a stall ends all ranks, as for ``DistributedOptimizer``.

    Returns:
        The optimizer, an instance of the wrapped optimizer's class. In addition to its methods it has ``synchronize``,
        ``local_step``, ``local_steps``, ``set_epoch``, ``statistics``, ``compression``, ``exchange`` and ``traffic``.

    Raises:
        ValueError: An argument is out of range, or differs between ranks.
        RuntimeError: MPI lacks ``MPI_THREAD_MULTIPLE``.
    """
    transport = transport_of(process_set)
    if transport is None:
        raise ValueError(f"rank {job().rank} is not part of {process_set}: create a LocalOptimizer on its ranks only")
    named = list(named_parameters or ())
    with process.communicating("LocalOptimizer()", transport):
        stall = (stall_timeout, stall_abort)
        agree_on(transport, lambda: _facts(optimizer, named, local_steps, compression, outer, stall))
    local = wrapped(optimizer, Exchanging, _FUNCTIONS)
    names = names_of(optimizer.param_groups, named)
    local.local_steps = local_steps
    local._use = Use()
    local._sparse = compression
    local._rounds = Rounds(local, names, compression, transport, outer, limits(stall_timeout, stall_abort), grad_scaler)
    local._exchange = local._rounds.exchange
    local.register_step_post_hook(weak_hook(local._rounds.note_begun))
    warn_of_hidden(optimizer, local)
    if "horovod.torch" in sys.modules and transport.size == job().size:
        let_join(local)
    return local


def _facts(
    optimizer: torch.optim.Optimizer,
    named: list[tuple[str, torch.Tensor]],
    local_steps: int,
    compression: Sparse,
    outer: OuterSGD,
    stall: tuple[float | None, float | None],
) -> dict[str, Any]:
    """Return the facts that must be the same on every rank; raise ValueError for an error in them."""
    _check(optimizer, named, local_steps, compression)
    names = [(name, p) for p, name in names_of(optimizer.param_groups, named).items()]
    return {
        **common_facts(compression, names, *stall, None, []),
        "frozen parameter": tuple(sorted(name for name, p in names if not p.requires_grad)),
        "local_steps": local_steps,
        "outer": repr(outer),
    }


def _check(
    optimizer: torch.optim.Optimizer, named: list[tuple[str, torch.Tensor]], local_steps: int, compression: Any
) -> None:
    require_plain(optimizer)
    if type(local_steps) is not int or local_steps < 1:
        raise ValueError(f"local_steps must be an integer of at least 1, not {local_steps!r}")
    require_sparse(compression, "pass hvs.Compression.dense()")
    if compression.replaces_momentum:
        raise ValueError(
            "the compression applies momentum, but the outer step has it already: use another memory, such as "
            "memory='residual', and set the momentum in outer=hvs.OuterSGD(momentum=0.9)"
        )
    names = names_of(optimizer.param_groups, named)
    if len(set(names.values())) < len(names):
        raise ValueError("named_parameters gives a name twice: give each parameter its own name")
    for p, name in names.items():
        if not (p.is_floating_point() or p.is_complex()):
            raise ValueError(
                f"{name} is {p.dtype}, but only real and complex parameters are exchanged: use another optimizer"
            )
        if hasattr(p, "to_local"):
            raise ValueError(
                f"{name} is a {type(p).__name__}, of which this rank holds a shard, but only complete parameters can "
                "take local steps: exchange gradients with hvs.fsdp.sparse_all_reduce, or do not shard the model"
            )
    check_devices({p.device for p in names})


def _unscale(optimizer: Any) -> None:
    """Unscale the gradients if a GradScaler has left that to step(), and the optimizer does not unscale by itself."""
    scale = getattr(optimizer, "grad_scale", None)
    if getattr(optimizer, "found_inf", None) is None or "_step_supports_amp_scaling" in vars(optimizer):  # fused
        return
    optimizer.found_inf = optimizer.grad_scale = None
    if scale is not None:
        inverse = scale.double().reciprocal().float()
        for gradient in [p.grad for p in parameters_in(optimizer) if p.grad is not None]:
            gradient.mul_(inverse.to(gradient.device))
