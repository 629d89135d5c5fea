"""Stages of a bucket on an asynchronous device are timed there, on the stream that does the work."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from asynchronous import AsynchronousDevice, Clock
from laws import everywhere

from horovod_sparse import metrics
from horovod_sparse.config import parse
from horovod_sparse.engine import layout
from horovod_sparse.engine.bucket import Bucket, Settings
from horovod_sparse.engine.device import Device
from horovod_sparse.engine.layout import Member, plan
from horovod_sparse.engine.reading import Reading
from horovod_sparse.engine.worker import Worker
from horovod_sparse.rules import Conditions

MS = 1_000_000


class SideStream(Device):
    """The CPU with the timing of a device, whose side stream runs the work of buckets."""

    def __init__(self, device):
        self.device = device

    @contextmanager
    def work(self, after=()):
        with self.device.stream("beside"):
            for mark in after:
                self.device.follow(mark)
            yield
            self.device.launch(2 * MS)

    def stream(self):
        return self.device.current

    def mark(self, stream):
        return stream

    def follow(self):
        self.device.follow("beside")


@pytest.fixture
def device(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(metrics.device, "time", clock)
    device = AsynchronousDevice(clock)
    monkeypatch.setattr(layout, "device_of", lambda _: SideStream(device))
    metrics.clear()
    metrics.enable(device=device)
    yield device
    metrics.enable(False)
    metrics.clear()


@pytest.mark.mpi
def test_stages_start_when_the_gradients_are_ready_on_the_device(comm, transport, device):
    parameter = torch.zeros(2000)
    (one,) = plan([Member.of("weight", parameter, group=0)], bucket_bytes=1 << 20)
    worker = Worker(lambda _: Reading(Conditions(0.1, epoch=0)))
    worker.add([Bucket(one, Settings(parse("topka:density=0.01"), 1 / transport.size), transport)])
    device.synchronize()
    metrics.clear()
    waits = device.waits
    with metrics.span("backward"):
        device.launch(30 * MS)
    worker.put("weight", torch.ones(2000))
    with metrics.span("synchronize"):
        worker.wait_for_results()
    assert everywhere(comm, device.waits == waits), "a step waits for nothing but what it has to know"
    spans = {one.name: one for one in metrics.spans()}
    worker.finish()
    stages = [spans[name] for name in ("select", "agree", "exchange", "apply")]
    backward, synchronize = spans["backward"], spans["synchronize"]
    assert everywhere(comm, {one.thread for one in stages} == {"horovod_sparse"})
    assert everywhere(comm, all(one.start == backward.start + backward.duration for one in stages))
    assert everywhere(comm, (synchronize.start, synchronize.duration) == (stages[0].start, 2 * MS))
