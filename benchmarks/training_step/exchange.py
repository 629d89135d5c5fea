"""Contenders, and the exchange of a model's gradients by the worker and the buckets that the DDP hook uses."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

from horovod_sparse.config import Sparse, parse
from horovod_sparse.engine.bucket import Bucket, Settings
from horovod_sparse.engine.layout import Member, bucket_bytes_for, plan
from horovod_sparse.engine.reading import Reading
from horovod_sparse.engine.worker import Worker
from horovod_sparse.rules import Conditions
from horovod_sparse.transport.base import Transport

MOMENTUM, LEARNING_RATE = 0.9, 0.01
# Contenders by name; None: no exchange. Random-k has no error feedback, as in the code of Yoon and Oh.
CONTENDERS = {
    "alone": None,
    "dense": "dense",
    "sorted": "topka:density={density},sparsifier=sorttopk",
    "randomk": "randomk:density={density},memory=none",
    "ours": "topka:density={density}",
    "recommended": f"recommended:density={{density}},momentum={MOMENTUM}",
}


def configuration_of(contender: str, density: float) -> Sparse | None:
    """Return the configuration of a contender, or of a configuration in text form; None: no exchange.

    Raises:
        ValueError: It is neither, or a compression of Horovod.
    """
    text = CONTENDERS.get(contender, contender)
    if text is None:
        return None
    if text in ("none", "fp16"):
        raise ValueError(f"{text} is a compression of Horovod, which this benchmark does not use: dense is ours")
    if "sorttopk" in text:
        import examples.sorted_topk  # noqa: F401 - registers it
    sparse: Sparse = parse(text.format(density=density))
    return sparse


class ModelExchange:
    """Exchange of a model's gradients. With one rank, everything but the messages still runs.

    Args:
        sparse: The configuration.
        model: The model.
        transport: The ranks.
        overlap: Whether buckets are exchanged during the backward pass.
    """

    def __init__(self, sparse: Sparse, model: nn.Module, transport: Transport, overlap: bool) -> None:
        self._keys: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        members = [Member.of(name, one, group=0, least=sparse.dense_below) for one, name in self._keys.items()]
        limit = sparse.bucket_bytes or bucket_bytes_for(members, sparse.mode)
        settings = Settings(sparse, 1 / transport.size, hold_zeros=True)
        shared: dict[type[Any], Any] = {}
        self._worker = Worker(lambda _: Reading(Conditions(LEARNING_RATE, epoch=0)))
        self._worker.add([Bucket(layout, settings, transport, shared) for layout in plan(members[::-1], limit)])
        self._overlap = overlap
        self._hooks: list[Any] = []
        if overlap:
            self._hooks = [cast(Any, one).register_post_accumulate_grad_hook(self._put) for one in self._keys]

    def _put(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._worker.put(self._keys[parameter], parameter.grad)

    def complete(self) -> None:
        """Exchange what has not been exchanged during the backward pass; gradients are averages then."""
        if not self._overlap:
            for parameter in reversed(self._keys):
                self._put(parameter)
        self._worker.wait_for_results()

    def finish(self) -> None:
        """End the step, after the optimizer's."""
        self._worker.finish()

    @property
    def bytes_sent(self) -> float:
        """Payload that this rank has sent so far."""
        return sum(bucket.pipeline.traffic.bytes_sent for bucket in self._worker.buckets)

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()
