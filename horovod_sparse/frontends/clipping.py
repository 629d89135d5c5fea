"""A warning about scripts that clip gradients after the exchange."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from horovod_sparse.engine.bucket import Bucket
from horovod_sparse.engine.pipeline.sparse import SparsePipeline
from horovod_sparse.frontends.base import FrontEnd
from horovod_sparse.frontends.members import job
from horovod_sparse.frontends.shards import shard_of
from horovod_sparse.kernels import copy_to_host

_LOG = logging.getLogger("horovod_sparse")
_INTERVAL = 50  # steps between two looks at a GPU, for which the host has to wait
_LESS = 0.98  # a gradient in 16 bits may be this much smaller than what was exchanged
_watches: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Watch] = weakref.WeakKeyDictionary()


def warn_of_clipping(optimizer: torch.optim.Optimizer, front_end: FrontEnd) -> None:
    """Warn once, on rank 0, if exchanged gradients are clipped before an optimizer's step.

    Dense gradients may be clipped. A selected entry is a sum over many steps, and clipping would drop a part of it for
    good. A factor that is constant, or changes by powers of two as a loss scale does, does not count as clipping.

    Args:
        optimizer: The optimizer. Other hooks that change gradients must be registered later.
        front_end: A front end that exchanges its gradients; held weakly.
    """
    if optimizer not in _watches:
        _watches[optimizer] = _Watch()
        optimizer.register_step_pre_hook(_watches[optimizer])
    _watches[optimizer].front_ends.add(front_end)


class _Watch:
    def __init__(self) -> None:
        self.front_ends: weakref.WeakSet[FrontEnd] = weakref.WeakSet()
        self._steps = 0
        self._before: float | None = None  # factor in an earlier step
        self._warned = False

    def __call__(self, optimizer: torch.optim.Optimizer, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if self._warned or closure is not None:  # whose gradients are not there yet
            return
        self._steps += 1
        for front_end in self.front_ends:
            places = front_end.selected()
            # Of this optimizer: another one's hooks may have changed the gradients of its parameters already.
            p = next((p for group in optimizer.param_groups for p in group["params"] if p in places), None)
            if p is not None and (not p.is_cuda or self._steps % _INTERVAL == 1):
                self._compare(_factor(front_end, places[p][0]) * _scale(optimizer))

    def _compare(self, factor: float) -> None:
        if not 0 < factor < _LESS:
            return
        before, self._before = self._before or factor, factor
        octaves = math.log2(factor / before)
        if abs(octaves - round(octaves)) > 0.01:
            self._warned = True
            if job().rank:
                return
            _LOG.warning(
                "rank 0: gradients are clipped after the exchange, by a factor of %.2g in this step. Their entries are "
                "sums over many steps, and what is clipped is lost. Stop clipping in the script (max_grad_norm=0 in "
                "a Trainer), and let the compression clip each step's gradient before the exchange "
                "(memory='momentum', max_norm=1.0)",
                factor,
            )


def _factor(front_end: FrontEnd, bucket: Bucket) -> float:
    """Return what an entry of a bucket was multiplied by after the exchange; 1 if that is not known."""
    pipeline = bucket.pipeline
    assert isinstance(pipeline, SparsePipeline)
    sent = pipeline.sent
    if sent is None or not len(sent):
        return 1.0
    indices, values = map(copy_to_host, sent.entries)
    place = int(abs(values).argmax())
    index, expected = int(indices[place]), float(values[place]) * pipeline.gradient_unit
    segment = next(one for one in bucket.layout.segments if index < one.start + one.size)
    p = next(p for p, (_, one) in front_end.selected().items() if one is segment)
    if p.grad is None or p.grad.is_sparse or not expected:
        return 1.0
    found = float(shard_of(p.grad).flatten()[index - segment.start])
    return found / expected


def _scale(optimizer: torch.optim.Optimizer) -> float:
    """Return the factor that undoes the loss scale on gradients that torch's kernel has yet to unscale."""
    scale = getattr(optimizer, "grad_scale", None)
    return 1.0 if scale is None else 1 / float(scale)
