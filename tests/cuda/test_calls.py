"""Host time of a step with many parameters, as the number of calls into torch and CuPy; the emulation counts them."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from devices import EmulatedDevice
from torch.utils._python_dispatch import TorchDispatchMode

from horovod_sparse.config import parse
from horovod_sparse.engine import layout
from horovod_sparse.engine.bucket import Bucket, Settings
from horovod_sparse.engine.layout import Member, plan
from horovod_sparse.engine.reading import Reading
from horovod_sparse.engine.worker import Worker
from horovod_sparse.rules import Conditions

pytestmark = pytest.mark.mpi

PARAMETERS = 150


class Operations(TorchDispatchMode):
    """Counts torch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = Counter[str]()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[str(operation)] += 1
        return operation(*args, **kwargs or {})


def at_once(function: Any) -> Future[Any]:
    """Run a job of the worker thread on this thread, whose operations are counted."""
    future = Future[Any]()
    future.set_result(function())
    return future


@pytest.mark.parametrize("hold_zeros", [False, True])
def test_calls_do_not_grow_with_the_number_of_parameters(
    transport: Any, monkeypatch: pytest.MonkeyPatch, hold_zeros: bool
) -> None:
    """One array and one query of the current stream per parameter; DDP sets ``hold_zeros``."""
    device = EmulatedDevice()
    monkeypatch.setattr(layout, "device_of", lambda _: device)
    gradients = [torch.ones(40, 40) if i % 2 else torch.ones(40) for i in range(PARAMETERS)]
    layouts = plan([Member.of(str(i), one, group=0) for i, one in enumerate(gradients)], bucket_bytes=64_000)
    settings = Settings(parse("topka:density=0.02,dense_below=0"), 1 / transport.size, hold_zeros=hold_zeros)
    worker = Worker(lambda _: Reading(Conditions(0.1, epoch=0)))
    worker.add([Bucket(one, settings, transport) for one in layouts])
    monkeypatch.setattr(worker._thread, "submit", at_once)
    for _ in range(2):
        device.calls.clear()
        with Operations() as operations:
            for bucket in worker.buckets:
                for key in bucket.layout.keys:
                    worker.put(key, gradients[int(key)])
            worker.wait_for_results()
            worker.finish()
    buckets = len(worker.buckets)
    assert 5 < buckets < 20
    assert device.calls.pop("array_of") == device.calls.pop("stream") == PARAMETERS
    per_bucket = {"work": 1, "mark": 1, "wait": 1, **({"nonzero": 1} if hold_zeros else {})}
    assert device.calls == {"follow": 2, **{call: count * buckets for call, count in per_bucket.items()}}
    zero_checks = {"aten._foreach_norm.Scalar": buckets, "aten.stack.default": buckets} if hold_zeros else {}
    assert operations.count == zero_checks
