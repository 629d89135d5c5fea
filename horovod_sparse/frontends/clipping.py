"""A warning about scripts that clip gradients after the exchange."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from horovod_sparse.engine.bucket import Bucket
from horovod_sparse.engine.layout import Segment
from horovod_sparse.engine.pipeline.sparse import SparsePipeline
from horovod_sparse.frontends.eager import eager
from horovod_sparse.frontends.members import job
from horovod_sparse.frontends.shards import shard_of
from horovod_sparse.kernels import copy_to_host

if TYPE_CHECKING:
    from horovod_sparse.frontends.exchange import GradientExchange

_Buckets: TypeAlias = dict[Bucket, dict[str, torch.Tensor]]  # and their parameters by key
_Places: TypeAlias = tuple[Mapping[torch.Tensor, tuple[Bucket, Segment]], _Buckets]

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
        self._before: weakref.WeakKeyDictionary[Bucket, float] = weakref.WeakKeyDictionary()  # factor of the last step
        self._places: weakref.WeakKeyDictionary[GradientExchange, _Places] = weakref.WeakKeyDictionary()
        self._warned = False

    @eager
    def __call__(
        self, optimizer: torch.optim.Optimizer, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Any, Any] | None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if self._warned or closure is None:
            self._look(optimizer)
            return None

        def looking() -> Any:
            loss = closure()  # which may clip, as Lightning's does
            self._look(optimizer)
            return loss

        return args[:1], {**kwargs, "closure": looking}

    def _look(self, optimizer: torch.optim.Optimizer) -> None:
        self._steps += 1
        for exchange in self.exchanges:
            for bucket, parameters in self._buckets(optimizer, exchange).items():
                if not self._warned and (bucket.layout.torch_device.type != "cuda" or self._steps % _INTERVAL == 1):
                    factor = factor_of(bucket, parameters, _pipeline(bucket).gradient_unit)
                    if factor is not None:
                        bytes_ = next(iter(parameters.values())).element_size()
                        rounding = _ROUNDING.get(bytes_, 1e-3)
                        self._compare(bucket, factor * _scale(optimizer), rounding, exchange.scaled)

    def _buckets(self, optimizer: torch.optim.Optimizer, exchange: GradientExchange) -> _Buckets:
        """Return the optimizer's buckets. Another one's hooks may have changed the gradients in its own already."""
        selected = exchange.selected()
        if exchange not in self._places or self._places[exchange][0] is not selected:
            buckets: _Buckets = {}
            for p in (p for group in optimizer.param_groups for p in group["params"] if p in selected):
                bucket, segment = selected[p]
                buckets.setdefault(bucket, {})[segment.key] = p
            self._places[exchange] = selected, buckets
        return self._places[exchange][1]

    def _compare(self, bucket: Bucket, factor: float, rounding: float, scaled: bool) -> None:
        if abs(factor - 1) <= rounding:
            factor = 1.0
        before = self._before.get(bucket, factor)
        self._before[bucket] = factor
        octaves = math.log2(factor / before)
        if abs(octaves - (round(octaves) if scaled else 0)) > rounding:
            self._warned = True
            if job().rank:
                return
            _LOG.warning(
                "rank 0: gradients are scaled after the exchange, by a factor that changes: %.3g after %.3g. Their "
                "entries are sums over many steps, to which the factor of one step does not belong. If the script "
                "divides by the number of tokens or samples, let it divide the loss instead, before backward(). If it "
                "scales the loss, pass its scaler as grad_scaler. If it clips, stop that (max_grad_norm=0 in a "
                "Trainer), and let the compression clip each rank's gradient before the exchange: memory='momentum' "
                "with max_norm, see Clipping in docs/ddp.md",
                factor,
                before,
            )


def factor_of(bucket: Bucket, parameters: Mapping[str, torch.Tensor], unit: float) -> float | None:
    """Return what an entry of a bucket was multiplied by after the exchange, in a unit of the sum that was delivered.

    None if that is not known.
    """
    sent = _pipeline(bucket).sent
    if sent is None or not len(sent):
        return None
    with bucket.work():
        indices, values = map(copy_to_host, sent.entries)
        place = int(abs(values).argmax())
        index, expected = int(indices[place]), float(values[place]) * unit
        segment = next(one for one in bucket.layout.segments if index < one.start + one.size)
        gradient = parameters[segment.key].grad if segment.key in parameters else None
        if gradient is None or gradient.is_sparse or not expected:
            return None
        factor = float(shard_of(gradient).flatten()[index - segment.start]) / expected
        return factor if 0 < factor < math.inf else None


def _pipeline(bucket: Bucket) -> SparsePipeline:
    assert isinstance(bucket.pipeline, SparsePipeline)
    return bucket.pipeline


def _scale(optimizer: torch.optim.Optimizer) -> float:
    """Return the factor that undoes the loss scale on gradients that torch's kernel has yet to unscale."""
    scale = getattr(optimizer, "grad_scale", None)
    return 1.0 if scale is None else 1 / float(scale)
