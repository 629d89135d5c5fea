"""LocalOptimizer: an optimizer whose ranks meet only every so many steps, over the same sparse exchange."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from horovod_sparse.config import Sparse
from horovod_sparse.control.lifecycle import process
from horovod_sparse.control.report import limits
from horovod_sparse.frontends.arguments import check_devices, common_facts, names_of, parameter_facts, require_plain
from horovod_sparse.frontends.horovod.join import Use, let_join
from horovod_sparse.frontends.local_sgd.outer import DILOCO, OuterSGD
from horovod_sparse.frontends.local_sgd.rounds import Rounds, plain
from horovod_sparse.frontends.members import transport_of
from horovod_sparse.transport.agreement import agree
from horovod_sparse.transport.mpi import job
from horovod_sparse.transport.traffic import Traffic


class _Local(torch.optim.Optimizer):
    """Differences from the wrapped optimizer; laid over the functions of its class, as Horovod lays its own over."""

    local_steps: int
    _rounds: Rounds
    _use: Use
    # A GradScaler then calls step() in any case, and tells what it has found: a step that it skips counts, too.
    _step_supports_amp_scaling = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes a local step; the last one of a round is followed by ``synchronize()``.

        A step that a GradScaler skips on this rank counts: ranks meet after as many calls.

        Args:
            closure: As the wrapped optimizer takes it.
        """
        self._use.note()
        self._rounds.begin()
        result = None
        if not _overflowed(self):
            result = plain(self).step(closure)
            self._rounds.stepped = True
        self._rounds.local_step += 1
        if self._rounds.local_step >= self.local_steps:
            self.synchronize()
        return result

    # Torch calls step hooks around the step of the user's class, once.
    step.hooked = True  # type: ignore[attr-defined]

    def synchronize(self) -> None:
        """Ends the round now, after however many steps; all ranks have the same parameters then.

        A collective call: other ranks call it, too, or complete their round. To be called before an evaluation, and at
        the end of a training whose steps are no multiple of ``local_steps``.
        """
        self._rounds.end()

    @property
    def local_step(self) -> int:
        """Steps of this rank since the parameters were common; 0: they are."""
        return self._rounds.local_step

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, as ``torch.optim.Optimizer.add_param_group`` does.

        A collective call: all ranks add the same parameters, between two steps.

        Raises:
            ValueError: The parameters differ between ranks.
        """
        plain(self).add_param_group(param_group)
        names = names_of(self.param_groups, ())
        added = {p: names[p] for p in self.param_groups[-1]["params"]}
        try:
            transport = self._rounds.exchange.transport
            with process.communicating("add_param_group()", transport):
                agree(transport, {"parameter": parameter_facts((name, p) for p, name in added.items())})
        except ValueError:
            self.param_groups.pop()
            raise
        self._rounds.admit(added)

    def state_dict(self) -> dict[str, Any]:
        """State of the wrapped optimizer on this rank, with the common parameters and the outer momentum.

        In a round, what other ranks have done since it began is not in it; ``hvs.checkpoint`` saves that, too.
        """
        return self._rounds.add_to(plain(self).state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a state given by ``state_dict``, or by the plain optimizer."""
        plain(self).load_state_dict(state_dict)
        self._rounds.take_from(self.state)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy would exchange the same parameters: there is none."""
        raise TypeError(
            "a LocalOptimizer cannot be copied, as it exchanges with the other ranks: copy optimizer.state_dict(), or "
            "copy the plain optimizer before it is wrapped"
        )

    def set_epoch(self, epoch: int) -> None:
        """Tells the epoch that begins: needed by densities that depend on it.

        Args:
            epoch: From 0; the same on every rank.
        """
        self._rounds.epoch = epoch

    def statistics(self, *, norms: bool = False) -> dict[str, float]:
        """Numbers of what was exchanged since the last call, as ``DistributedOptimizer`` gives them.

        Args:
            norms: Take norms, of differences and residuals, at the end of the next round, for the call after it.
        """
        return self._rounds.exchange.worker.statistics(norms)

    @property
    def exchange(self) -> Rounds:
        """The rounds, and what this rank remembers of them: its own part of a checkpoint."""
        return self._rounds

    @property
    def compression(self) -> Sparse:
        """The configuration."""
        return self._rounds.compression

    @property
    def traffic(self) -> Traffic:
        """Payload this rank has sent and received so far."""
        return self._rounds.exchange.traffic

    def _join(self) -> Callable[[], None]:
        return self._rounds.join()


# Horovod's broadcast_optimizer_state knows by __module__ that it must reach past step() to begin a state.
_OVERRIDES = {name: value for name, value in vars(_Local).items() if name not in {"__dict__", "__weakref__", "__doc__"}}
_OVERRIDES["__module__"] = "horovod.torch.optimizer"


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
    """Wraps an optimizer so that ranks take steps of their own and exchange, sparse, how far they have come.

    Every ``local_steps`` steps, the difference between the last common parameters and this rank's goes through the same
    pipeline as gradients do elsewhere, with error feedback. Its mean is the gradient of an outer optimizer's step on
    the common parameters, from which all ranks go on (DiLoCo, arXiv 2311.08105; SparseLoCo, arXiv 2508.15706). A
    collective call: all ranks of the process set take part. Needs MPI, but not Horovod.

    State of the wrapped optimizer (momentum) and buffers of the model (batch normalization) stay each rank's own.

    Args:
        optimizer: The optimizer to wrap, of any class.
        named_parameters: Pairs of name and parameter, usually ``model.named_parameters()``; None: they are numbered.
        local_steps: Steps H of a round. 1 with ``OuterSGD(lr=1, momentum=0)`` and an inner SGD is what
            ``DistributedOptimizer`` does.
        compression: Usually from ``hvs.Compression`` or ``hvs.parse``; not one that applies momentum.
        outer: The outer step.
        process_set: The ranks that train together: a Horovod process set, a torch process group or an MPI
            communicator; None: all.
        grad_scaler: The scaler that multiplies this rank's loss. Each rank's goes its own way, and is saved with its
            part of a checkpoint.
        stall_timeout: Seconds, as for ``DistributedOptimizer``. Ranks that are slower than others are waited for.
        stall_abort: Seconds, as for ``DistributedOptimizer``.

    Returns:
        The optimizer, an instance of the wrapped optimizer's class. Beyond its methods it has ``synchronize``,
        ``local_step``, ``local_steps``, ``set_epoch``, ``statistics``, ``compression``, ``exchange`` and ``traffic``.

    Raises:
        ValueError: An argument is out of range, or differs between ranks.
        RuntimeError: MPI has no threads.
    """
    transport = transport_of(process_set)
    if transport is None:
        raise ValueError(f"rank {job().rank} is not part of {process_set}: make a LocalOptimizer on its ranks only")
    named = list(named_parameters or ())
    with process.communicating("LocalOptimizer()", transport):
        agree(transport, _facts(optimizer, named, local_steps, compression, outer, (stall_timeout, stall_abort)))
    kind = type(optimizer)
    local: Any = object.__new__(type(kind.__name__, (kind,), _OVERRIDES))
    # A scheduler that was made before has put a step of its own there.
    local.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    names = names_of(optimizer.param_groups, named)
    local.local_steps = local_steps
    local._use = Use()
    local._rounds = Rounds(local, names, compression, transport, outer, limits(stall_timeout, stall_abort), grad_scaler)
    local.register_step_post_hook(_beginning(weakref.ref(local._rounds)))
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
) -> dict[str, Any] | Exception:
    """Facts that must be the same on every rank, or the error in them on this one."""
    try:
        _check(optimizer, named, local_steps, compression)
        names = [(name, p) for p, name in names_of(optimizer.param_groups, named).items()]
        return {
            **common_facts(compression, names, *stall, None, []),
            "frozen parameter": tuple(sorted(name for name, p in names if not p.requires_grad)),
            "local_steps": local_steps,
            "outer": repr(outer),
        }
    except ValueError as error:
        return ValueError(f"rank {job().rank}: {error}")


def _check(
    optimizer: torch.optim.Optimizer, named: list[tuple[str, torch.Tensor]], local_steps: int, compression: Any
) -> None:
    require_plain(optimizer)
    if type(local_steps) is not int or local_steps < 1:
        raise ValueError(f"local_steps must be a whole number of at least 1, not {local_steps!r}")
    if not isinstance(compression, Sparse):
        raise ValueError(
            f"unknown compression {compression!r}: give hvs.Compression.topka(density=0.01) or the like, or "
            "hvs.Compression.dense()"
        )
    if compression.replaces_momentum:
        raise ValueError(
            "the compression applies momentum, which the outer step has: give another memory, such as "
            "memory='residual', and the momentum to outer=hvs.OuterSGD(momentum=0.9)"
        )
    names = names_of(optimizer.param_groups, named)
    if len(set(names.values())) < len(names):
        raise ValueError("named_parameters gives a name twice: give each parameter a name of its own")
    for p, name in names.items():
        if not p.is_floating_point():
            raise ValueError(f"{name} is of {p.dtype}, but real parameters alone are exchanged: give it to another one")
    check_devices({p.device for p in names})


def _beginning(rounds: weakref.ref[Rounds]) -> Callable[..., None]:
    """A hook after a step of the user's class, be it that with which Horovod begins a state."""

    def begin(*_: object) -> None:
        alive = rounds()
        if alive is not None:
            alive.begun = True

    return begin


def _overflowed(optimizer: Any) -> bool:
    """Tells if a GradScaler has found an overflow; where it has not, gradients are without its scale afterwards."""
    found, scale = (getattr(optimizer, name, None) for name in ("found_inf", "grad_scale"))
    if found is None:
        return False
    if found.item():
        return True
    if "_step_supports_amp_scaling" not in vars(optimizer):  # else it is fused, and takes the scale off itself
        optimizer.found_inf = optimizer.grad_scale = None
        if scale is not None:
            _unscale(optimizer, scale.double().reciprocal().float())
    return False


def _unscale(optimizer: torch.optim.Optimizer, inverse: torch.Tensor) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                p.grad.mul_(inverse.to(p.grad.device))
