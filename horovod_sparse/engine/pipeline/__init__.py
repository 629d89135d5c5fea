"""Pipeline of one bucket, from gradients to the averaged gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from horovod_sparse.config import Sparse
from horovod_sparse.engine.pipeline.base import Pipeline
from horovod_sparse.engine.pipeline.dense import DensePipeline
from horovod_sparse.engine.pipeline.sparse import SparsePipeline
from horovod_sparse.rules import BucketContext, Mode
from horovod_sparse.transport.agreement import agree
from horovod_sparse.transport.base import Transport
from horovod_sparse.transport.cores import choose_waiting, own_cores

__all__ = ["Pipeline", "pipeline_for"]


def pipeline_for(
    sparse: Sparse,
    size: int,
    like: Any,
    transport: Transport,
    *,
    number: int = 0,
    factor: float = 1.0,
    undoable: bool = False,
    shared: dict[type[Any], Any] | None = None,
    layers: Sequence[int] = (0,),
    scatters: bool = False,
    adaptive: bool = False,
) -> Pipeline:
    """Return the pipeline of one bucket.

    A collective call, which fails on all ranks where it fails on one.

    Args:
        sparse: The configuration, the same on every rank.
        size: Number of elements n of the bucket.
        like: Array with the dtype (float32 or float64) and on the device of the bucket.
        transport: The ranks that take part; the pipeline counts its traffic on a private channel.
        number: Number of the bucket, for traces and messages.
        factor: Factor on the totals; 1/P averages.
        undoable: Whether ``undo`` may be called: the state before every step is kept, which doubles the memory.
        shared: State that the rules of all buckets of a model share; None: the bucket is the only one.
        layers: First positions of the parameters in the bucket, ascending from 0.
        scatters: Whether each rank gets only its part of the total, as in ``BucketContext``.
        adaptive: Whether the optimizer is adaptive, as in ``BucketContext``.

    Raises:
        ValueError: An option does not fit a bucket of this size, or another rank failed.
        Exception: This rank failed, for lack of memory for example.
    """
    agreement, consensus = transport.channel(), transport.channel()
    context = BucketContext(
        size,
        like[:0],
        number,
        transport.rank,
        transport.size,
        consensus.allreduce,
        {} if shared is None else shared,
        undoable=undoable,
        threads=own_cores(transport),
        layers=layers,
        scatters=scatters,
        adaptive=adaptive,
    )
    choose_waiting(transport, on_device=not isinstance(like, np.ndarray))
    transport = transport.channel()
    if sparse.mode is Mode.ALL and sparse.memory.keeps_nothing:
        return DensePipeline(context, transport, factor)
    made: SparsePipeline | Exception
    try:
        made = SparsePipeline(sparse, context, transport, agreement, consensus, factor)
    except Exception as error:
        made = error
    agree(transport, made if isinstance(made, Exception) else {})
    assert not isinstance(made, Exception)
    return made
