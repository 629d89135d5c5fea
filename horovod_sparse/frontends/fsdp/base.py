"""Common part of both exchanges of an FSDP2 model: its parameters, what they require of it, and states."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import distributed, nn
from torch.autograd import Variable
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from horovod_sparse.config import Sparse
from horovod_sparse.engine.layout import Member
from horovod_sparse.frontends.arguments import (
    check_devices,
    check_optimizers,
    common_facts,
    optimizers_in,
    require_own,
)
from horovod_sparse.frontends.base import ExchangingGradients
from horovod_sparse.frontends.eager import eager, in_compiled_backward, weak_hook
from horovod_sparse.frontends.exchange import GradientExchange
from horovod_sparse.frontends.fsdp.model import (
    FSDPUnit,
    before_backward,
    parameters_of,
    require_no_divide_factor,
    units_of,
)
from horovod_sparse.frontends.passes import BackwardPass
from horovod_sparse.frontends.registry import standalone
from horovod_sparse.kernels import copy_to_host

# Key of the counts of ranks that have a gradient, one for each parameter. They are exchanged like small parameters, on
# the host, as most steps do not read them. A count has a small value, so that it does not change a norm of gradients.
_USED, _COUNT = "ranks with a gradient", 2.0**-64

# How a script computes gradients without an exchange.
WITHOUT_EXCHANGE = "after model.set_requires_gradient_sync(False)"
# Exchanges by the modules of their models, which keep them alive.
_exchanges: weakref.WeakKeyDictionary[nn.Module, ModelExchange] = weakref.WeakKeyDictionary()


class Options(NamedTuple):
    """Arguments of the user's call, as for ``DistributedOptimizer``; ``stall`` is stall_timeout and stall_abort."""

    grad_scaler: torch.amp.GradScaler | None
    undoable: bool
    residual_unit: str | None
    stall: tuple[float | None, float | None]


class ModelExchange(ExchangingGradients):
    """Exchange of the gradients of one FSDP2 model.

    Attributes:
        call: The user's call that makes it, for messages.
        means: Arguments of ``require_no_divide_factor``: why a factor would not have its usual effect, and the ranks.
    """

    call: ClassVar[str]
    means: ClassVar[tuple[str, str]]

    _exchange: GradientExchange

    def __init__(
        self, compression: Sparse, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
    ) -> None:
        self._sparse = compression
        self.optimizers = optimizers_in(optimizer)
        self._parameters: dict[str, DTensor] = {}  # that are exchanged
        self._frozen: dict[str, torch.Tensor] = {}
        self._reduced: set[Any] = set()  # what FSDP has reduced in the backward pass in progress
        self._pass = BackwardPass()

    def exchanged_parameters(self) -> Iterable[torch.Tensor]:
        """Return the parameters whose gradients are exchanged, also on a single rank, which exchanges nothing."""
        return self._parameters.values()

    def _serve(self, model: nn.Module) -> None:
        """Let the model keep this exchange alive, checkpoints of the model find it, and backward passes call it."""
        _exchanges.update(dict.fromkeys(model.modules(), self))
        standalone.add(self)
        if self._exchange.ranks > 1:
            model.register_forward_hook(self._forwarded)
            before_backward(model, weak_hook(self._backward_begins))

    def _member_of_uses(self) -> Member:
        """Return the member for the counts of ranks that have a gradient."""
        return Member(_USED, len(self._parameters), torch.float32, torch.device("cpu"), -1, small=True)

    def _submit_uses(self, used: Container[str]) -> torch.Tensor:
        """Submit which parameters have a gradient here; the result is then not zero where any rank has one."""
        counts = [_COUNT * (name in used) for name in self._parameters]
        shares = torch.tensor(counts, dtype=torch.float32, device="cpu")
        self._exchange.worker.put(_USED, shares)
        return shares

    def _common_facts(self, model: nn.Module, options: Options) -> dict[str, Any]:
        """Take the model's parameters; return facts that must be the same on every rank, or raise ValueError."""
        self._parameters, self._frozen = parameters_of(model, self.call)
        before = next((_exchanges[module].call for module in model.modules() if module in _exchanges), None)
        if before is not None:
            raise ValueError(f"{before} was called for this model before: make one such call for each model")
        require_no_divide_factor(units_of(model), *self.means)
        check_devices({p.device for p in self._parameters.values()})
        remedy = f"pass optimizer to {self.call}"
        check_optimizers(self.compression, self.optimizers, options.grad_scaler, options.undoable, remedy)
        require_own(self.optimizers, self._parameters.values(), {p: name for name, p in self._parameters.items()})
        return common_facts(
            self.compression,
            self._parameters.items(),
            *options.stall,
            options.residual_unit,
            self.optimizers,
            options.undoable,
        )

    def _require_unchanged(self, model: nn.Module) -> None:
        """Raise RuntimeError if the backward pass would not average a gradient, or not exchange one."""
        self._require_frozen()
        self._exchange.require_groups()
        try:
            self._require_units(list(units_of(model)))
        except ValueError as error:
            raise RuntimeError(f"rank {distributed.get_rank()}: {error}") from error

    def _require_units(self, units: Iterable[FSDPUnit]) -> None:
        """Raise ValueError if FSDP's units do not allow the exchange any more."""
        require_no_divide_factor(units, *self.means)

    def _require_frozen(self) -> None:
        """Raise RuntimeError if a parameter is trained whose gradient is not exchanged."""
        trained = [name for name, p in self._frozen.items() if p.requires_grad]
        if trained:
            raise RuntimeError(
                f"rank {distributed.get_rank()}: the gradient of {trained[0]} is not exchanged, as the parameter was "
                f"frozen when {self.call} was called: call it while all parameters to be trained require gradients, "
                "and freeze some of them afterwards"
            )

    @eager
    def _forwarded(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Follow the backward pass from its first gradient on; the forward hook of the model."""
        del inputs
        if torch.is_grad_enabled():
            self._require_unchanged(module)
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(self._backward_begins)  # type: ignore[no-untyped-call]

    @eager
    def _backward_begins(self, gradient: torch.Tensor | None = None) -> None:
        """Queue the end of the step; called before FSDP changes any gradient, and again later in the pass.

        The first call is in the outermost backward pass: reentrant checkpointing runs others inside it.
        """
        del gradient
        if self._pass.in_progress:
            return
        require_eager_backward()
        self._require_completed()
        self._begin_pass()
        self._pass.begin(self._backward_ends)

    def _require_completed(self) -> None:
        """Raise RuntimeError if the last backward pass has exchanged gradients and then failed."""
        if self._reduced and not self._pass.in_progress:
            raise RuntimeError(
                f"rank {distributed.get_rank()}: the last backward pass failed after gradients of it were exchanged, "
                "which other ranks may have applied: end the program, and start again from a checkpoint"
            )

    def _begin_pass(self) -> None:
        """Prepare for a backward pass; may raise RuntimeError."""

    @eager
    def _backward_ends(self) -> None:
        """Queue the end of the step again, behind FSDP's callback, which reduces the last gradients."""
        Variable._execution_engine.queue_callback(self._complete_step)

    @eager
    @torch.no_grad()
    def _complete_step(self) -> None:
        """Complete the step, unless gradients were only accumulated."""
        try:
            if self._reduced:
                self._take_results()
        finally:
            self._reduced.clear()

    @abstractmethod
    def _take_results(self) -> None:
        """Wait for the results at the end of a backward pass, and let the gradients hold them."""

    def state_dict(self, copy: Callable[[Any], Any] = copy_to_host) -> dict[str, Any]:
        """Return a copy of everything that the exchange remembers on this rank; call it after ``optimizer.step()``.

        The state differs between ranks, and every rank must save its own.

        Args:
            copy: Copies an array to the host.

        Returns:
            Numbers, strings, lists, tuples and tensors only, so that ``torch.load(..., weights_only=True)`` can read
            it.

        Raises:
            RuntimeError: The last backward pass failed after gradients of it were exchanged.
        """
        self._require_completed()
        return {**self._place(), **self._exchange.state_dict(copy)}

    @abstractmethod
    def _place(self) -> Mapping[str, Any]:
        """Return the part of the model that a state of this rank belongs to."""


def require_eager_backward() -> None:
    """Raise RuntimeError in a compiled backward pass."""
    if in_compiled_backward():
        raise RuntimeError(
            f"rank {distributed.get_rank()}: FSDP2 does not reduce its gradients in a compiled backward pass: set "
            "torch._dynamo.config.compiled_autograd = False before torch.compile()"
        )


def reduced_twice(what: str) -> RuntimeError:
    """Return the error of gradients that FSDP has reduced before in the same backward pass."""
    return RuntimeError(
        f"rank {distributed.get_rank()}: FSDP reduced {what} more than once in a backward pass: a module that several "
        "activation checkpoints run needs use_reentrant=False"
    )
