"""A warning about scripts that clip gradients after the exchange."""

from __future__ import annotations

import functools
import logging
import math
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from horovod_sparse.engine.delivered import Delivered
from horovod_sparse.frontends.confirmation import with_closure
from horovod_sparse.frontends.eager import eager
from horovod_sparse.frontends.members import job
from horovod_sparse.frontends.optimizers import parameters_in
from horovod_sparse.frontends.scaling import Buckets, by_bucket, factor_of

if TYPE_CHECKING:
    from horovod_sparse.frontends.exchange import GradientExchange

_LOG = logging.getLogger("horovod_sparse")
_INTERVAL = 50  # steps between two looks at a GPU, for which the host has to wait
_ROUNDING = {2: 0.02}  # that is no clipping, relative, by bytes of an element
_watches: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Watch] = weakref.WeakKeyDictionary()


def warn_of_clipping(optimizer: torch.optim.Optimizer, exchange: GradientExchange | None) -> None:
    """Warn once, on rank 0, if exchanged gradients are clipped before an optimizer's step.

    Dense gradients may be clipped. A selected entry is a sum over many steps, and clipping would drop a part of it for
    good. A constant factor does not count as clipping, nor a loss scale of a given ``grad_scaler``, which changes by
    powers of two.

    Args:
        optimizer: The optimizer. Other hooks that change gradients must be registered later.
        exchange: An exchange of its gradients, held weakly; None: it is not there yet.
    """
    if optimizer not in _watches:
        _watches[optimizer] = _Watch()
        optimizer.register_step_pre_hook(_watches[optimizer])
    if exchange is not None:
        _watches[optimizer].exchanges.add(exchange)


class _Watch:
    def __init__(self) -> None:
        self.exchanges: weakref.WeakSet[GradientExchange] = weakref.WeakSet()
        self._steps = 0
        # Factor of the last step, by the first parameter of a bucket.
        self._before: weakref.WeakKeyDictionary[Delivered, float] = weakref.WeakKeyDictionary()
        self._known: weakref.WeakKeyDictionary[GradientExchange, tuple[object, Buckets]] = weakref.WeakKeyDictionary()
        self._warned = False

    @eager
    def __call__(
        self, optimizer: torch.optim.Optimizer, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Any, Any] | None:
        look = functools.partial(self._look, optimizer)
        changed = with_closure(args, kwargs, look)  # a closure may clip, as Lightning's does
        if changed is None:
            look()
        return changed

    def _look(self, optimizer: torch.optim.Optimizer) -> None:
        self._steps += 1
        for exchange in () if self._warned else self.exchanges:
            for bucket in self._buckets(optimizer, exchange).values():
                p, delivered = next(iter(bucket.items()))
                if p.device.type != "cuda" or self._steps % _INTERVAL == 1:
                    factor = factor_of(bucket, delivered.unit)
                    if factor is not None:
                        rounding = _ROUNDING.get(p.element_size(), 1e-3)
                        self._compare(delivered, factor * _scale(optimizer), rounding, exchange)

    def _buckets(self, optimizer: torch.optim.Optimizer, exchange: GradientExchange) -> Buckets:
        """Return the optimizer's buckets. Another one's hooks may have changed the gradients in its own already."""
        selected = exchange.delivered_of
        if exchange not in self._known or self._known[exchange][0] is not selected:
            own = {p: selected[p] for p in parameters_in(optimizer) if p in selected}
            self._known[exchange] = selected, by_bucket(own)
        return self._known[exchange][1]

    def _compare(self, delivered: Delivered, factor: float, rounding: float, exchange: GradientExchange) -> None:
        if abs(factor - 1) <= rounding:
            factor = 1.0
        before = self._before.get(delivered, factor)
        self._before[delivered] = factor
        octaves = math.log2(factor / before)
        if not self._warned and abs(octaves - (round(octaves) if exchange.scaled else 0)) > rounding:
            self._warned = True
            if job().rank:
                return
            _LOG.warning(
                "rank 0: gradients are scaled after the exchange, by a factor that changes: %.3g after %.3g. Their "
                "entries are sums over many steps, to which the factor of one step does not belong. If the script "
                "divides by the number of tokens or samples, let it divide the loss instead, before backward(). If it "
                "scales the loss, pass its scaler as grad_scaler. If it clips, stop that (max_grad_norm=0 in a "
                "Trainer), and %s",
                factor,
                before,
                exchange.instead_of_clipping,
            )


def _scale(optimizer: torch.optim.Optimizer) -> float:
    """Return the factor that undoes the loss scale on gradients that torch's kernel has yet to unscale."""
    scale = getattr(optimizer, "grad_scale", None)
    return 1.0 if scale is None else 1 / float(scale)
