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
from horovod_sparse.frontends.local_sgd.outer import MEAN, OuterSGD
from horovod_sparse.frontends.local_sgd.rounds import Rounds
from horovod_sparse.frontends.local_sgd.schedule import Schedule
from horovod_sparse.frontends.local_sgd.state import LocalState, plain
from horovod_sparse.frontends.members import job, transport_of
from horovod_sparse.frontends.optimizers import overflowed, parameters_in
from horovod_sparse.frontends.shards import require_same_selection, shard_facts, shard_of
from horovod_sparse.frontends.wrapping import functions_of, warn_of_hidden, wrapped
from horovod_sparse.transport.base import Transport


class _Local(Exchanging, torch.optim.Optimizer):
    """Functions that differ from the wrapped optimizer's, and override its class in the same way as Horovod's.

    It has no instances: ``wrapped`` copies its functions, and its base classes are for type checkers.
    """

    local_steps: int
    _exchange: Rounds
    _local_state: LocalState
    _use: Use
    # A GradScaler then always calls step() and passes on whether it found an overflow: skipped steps count, too.
    _step_supports_amp_scaling = True

    @eager
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a local step, and exchange or apply what is due after it.

        Steps that a GradScaler skips on this rank count, too: all ranks exchange after the same number of calls.

        Args:
            closure: The closure of the wrapped optimizer's ``step``.
        """
        self._use.note()
        self._local_state.begin()
        self._exchange.before_step()
        result = None
        if not overflowed(self):
            _unscale(self)
            for fragment in self._exchange.fragments:
                fragment.stepped = True  # before a step that may fail after it has moved parameters
            result = plain(self).step(closure)
        self._local_state.local_step = self._exchange.advance(self._local_state.local_step + 1, self.local_steps)
        return result

    # Torch then calls step hooks only around the step of the user's class.
    step.hooked = True  # type: ignore[attr-defined]
    # To find the user's step, ``optimizers`` looks behind functions with this mark.
    step.of_front_end = True  # type: ignore[attr-defined]

    @eager
    def synchronize(self) -> None:
        """Exchange all fragments now, and end the round; all ranks then have the same parameters.

        A collective call: other ranks must call it, too. Without fragments, delay and alpha, they may also complete
        their round. Call it before an evaluation, and at the end of training unless the parameters are the same then.
        """
        self._local_state.begin()
        self._exchange.end(self._local_state.begun)
        self._local_state.local_step = 0

    @property
    def local_step(self) -> int:
        """Number of steps of this rank in the current round.

        If it is 0, all ranks have the same parameters; with fragments, delay or alpha, only after ``synchronize()``.
        """
        return self._local_state.local_step

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as ``torch.optim.Optimizer.add_param_group``.

        A collective call: all ranks must add the same parameters, between two steps.

        Raises:
            ValueError: The parameters differ between ranks.
        """
        plain(self).add_param_group(param_group)
        names = names_of(self.param_groups)
        transport = self._exchange.fragments[0].exchange.transport
        self._exchange.admit(agree_on_last_group(self.param_groups, names, transport))
        self._local_state.copy_local_step()

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state on this rank, with the common parameters and the outer momentum.

        In the middle of a round, the local steps of other ranks are not included; ``hvs.checkpoint`` saves them, too.
        """
        return self._local_state.add_to(plain(self).state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that ``state_dict`` returned, here or on the plain optimizer."""
        plain(self).load_state_dict(state_dict)
        self._local_state.take_from(self.state)

    @property
    def exchange(self) -> LocalState:
        """The state of the rounds with their residuals: this rank's part of a checkpoint."""
        return self._local_state

    def _join(self) -> Callable[[], None]:
        self._local_state.begin()
        wait = self._exchange.join(self._local_state.begun)

        def ended() -> None:
            wait()
            self._local_state.local_step = 0

        return ended


# By this __module__, Horovod's broadcast_optimizer_state knows that it must bypass step() to initialize the state.
_FUNCTIONS = {**functions_of(_Local), "__module__": "horovod.torch.optimizer"}


def LocalOptimizer(  # noqa: N802 - named as DistributedOptimizer is
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
    local_steps: int,
    compression: Sparse,
    outer: OuterSGD = MEAN,
    process_set: Any = None,
    *,
    fragments: int = 1,
    delay: int = 0,
    alpha: float = 1.0,
    grad_scaler: torch.amp.GradScaler | None = None,
    stall_timeout: float | None = None,
    stall_abort: float | None = None,
) -> Any:
    """Wrap an optimizer so that ranks take local steps and exchange, sparse, how far their parameters have moved.

    A round starts from common parameters and consists of ``local_steps`` local steps. Then each rank sends the
    difference between the common parameters and its own through the pipeline of ``DistributedOptimizer``, with error
    feedback. The mean difference is the gradient of an outer optimizer's step on the common parameters, from which all
    ranks start the next round (DiLoCo, arXiv 2311.08105; SparseLoCo, arXiv 2508.15706).

    With ``fragments`` and ``delay``, parts of the model are exchanged in turn, during local steps (Streaming DiLoCo,
    arXiv 2501.18512).

    A collective call: all ranks of the process set take part, over MPI or, under torchrun, over torch.distributed. The
    state of the wrapped optimizer (momentum) and the buffers of the model (batch normalization) are not exchanged.

    Args:
        optimizer: The optimizer to wrap, of any class.
        named_parameters: Pairs of name and parameter, usually ``model.named_parameters()``; None: parameters are
            numbered.
        local_steps: Number of steps H of a round. 1, with a wrapped SGD and the default ``outer``, is
            equivalent to ``DistributedOptimizer``.
        compression: A ``Sparse``, usually from ``hvs.Compression`` or ``hvs.parse``, that applies no momentum.
        outer: Settings of the outer step; by default it takes the mean. With ``hvs.Compression.dense()``,
            ``hvs.OuterSGD()`` is DiLoCo's.
        process_set: The ranks that train together: a Horovod process set, a torch process group or an MPI
            communicator; None: all ranks. Of a model that FSDP2 shards: ``mesh.get_group("replicate")``.
        fragments: Number F of parts of the model. Part f is exchanged after (f + 1) H / F steps of a round.
        delay: Number of local steps that a rank takes during the exchange of a part, which is then applied; below H.
        alpha: Share of the common parameters in those from which a rank continues after an exchange.
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
        RuntimeError: Horovod, MPI or torch lacks a required feature; the message names the remedy.
    """
    transport = transport_of(process_set)
    if transport is None:
        raise ValueError(f"rank {job().rank} is not part of {process_set}: create a LocalOptimizer on its ranks only")
    named, schedule = list(named_parameters or ()), Schedule(fragments, delay, alpha)
    with process.communicating("LocalOptimizer()", transport):
        stall = (stall_timeout, stall_abort)
        settings = (local_steps, compression, outer, schedule, transport)
        agree_on(transport, lambda: _facts(optimizer, named, settings, stall))
        transports = [transport, *filter(None, (transport_of(process_set) for _ in range(1, fragments)))]
        # Fragments may be in flight together, and FSDP uses NCCL during an exchange with a delay.
        of_fsdp = any(shard_of(p) is not p for p in parameters_in(optimizer))
        for one in transports[not of_fsdp :]:
            one.avoid_nccl()
    local = wrapped(optimizer, Exchanging, _FUNCTIONS)
    names = names_of(optimizer.param_groups, named)
    local.local_steps = local_steps
    local._use = Use()
    local._sparse = compression
    rounds = Rounds(names, compression, transports, outer, schedule, limits(stall_timeout, stall_abort))
    local._exchange, local._local_state = rounds, LocalState(local, rounds, outer.momentum > 0, grad_scaler)
    local.register_step_post_hook(weak_hook(local._local_state.note_state))
    warn_of_hidden(optimizer, local)
    if "horovod.torch" in sys.modules and transport.size == job().size:
        let_join(local)
    return local


def _facts(
    optimizer: torch.optim.Optimizer,
    named: list[tuple[str, torch.Tensor]],
    settings: tuple[int, Any, OuterSGD, Schedule, Transport],
    stall: tuple[float | None, float | None],
) -> dict[str, Any]:
    """Return the facts that must be the same on every rank; raise ValueError for an error in them."""
    local_steps, compression, outer, schedule, transport = settings
    require_plain(optimizer)
    if type(local_steps) is not int or local_steps < 1:
        raise ValueError(f"local_steps must be an integer of at least 1, not {local_steps!r}")
    schedule.check(local_steps)
    require_sparse(compression, "pass hvs.Compression.dense()")
    if compression.replaces_momentum:
        raise ValueError(
            "the compression applies momentum to gradients, but local steps exchange updates: the wrapped optimizer "
            "and the outer step have their own momentum. Use another memory, such as memory='residual'"
        )
    names = {name: p for p, name in names_of(optimizer.param_groups, named).items()}
    return {
        **common_facts(compression, names.items(), *stall, None, []),
        "frozen parameter": tuple(sorted(name for name, p in names.items() if not p.requires_grad)),
        "local_steps": local_steps,
        "outer": repr(outer),
        "schedule": repr(schedule),
        "shard": _check(optimizer, named, transport, compression.dense_below),
    }


def _check(
    optimizer: torch.optim.Optimizer, named: list[tuple[str, torch.Tensor]], transport: Transport, dense_below: int
) -> Any:
    """Check the parameters; return how they are sharded."""
    names = names_of(optimizer.param_groups, named)
    if len(set(names.values())) < len(names):
        raise ValueError("named_parameters gives a name twice: give each parameter its own name")
    for p, name in names.items():
        if not (p.is_floating_point() or p.is_complex()):
            raise ValueError(
                f"{name} is {p.dtype}, but only real and complex parameters are exchanged: use another optimizer"
            )
    check_devices({p.device for p in names})
    sharded: dict[str, Any] = {name: p for p, name in names.items() if hasattr(p, "to_local")}
    for name, p in sharded.items():
        ours = set(transport.members) & set(p.device_mesh.mesh.flatten().tolist())
        if len(ours) > 1:
            raise ValueError(
                f"{name} is sharded or replicated by FSDP over ranks {sorted(ours)}, which are in the process set, "
                "too: shard the model over one dimension of a mesh, mesh=mesh['shard'], and pass "
                "process_set=mesh.get_group('replicate'), whose ranks hold the same shard"
            )
    require_same_selection(sharded, dense_below)
    return shard_facts(sharded)


def _unscale(optimizer: Any) -> None:
    """Unscale the gradients if a GradScaler has left that to step(); fused optimizers then do not."""
    scale = getattr(optimizer, "grad_scale", None)
    if getattr(optimizer, "found_inf", None) is None:
        return
    optimizer.found_inf = optimizer.grad_scale = None
    if scale is not None:
        inverse = scale.double().reciprocal().float()
        for gradient in [shard_of(p.grad) for p in parameters_in(optimizer) if p.grad is not None]:
            gradient.mul_(inverse.to(gradient.device))
