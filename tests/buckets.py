"""Buckets whose pipeline records its calls."""

from __future__ import annotations

from horovod_sparse.config import parse
from horovod_sparse.engine import bucket
from horovod_sparse.engine.bucket import Bucket, Settings
from horovod_sparse.engine.layout import Member, plan
from horovod_sparse.metrics.counts import Counts
from horovod_sparse.transport.traffic import Traffic


class Recorder:
    """Fake pipeline that records its runs, and fails or waits on request."""

    def __init__(self, log, number, factor):
        self.log, self.number, self.factor = log, number, factor
        self.traffic = Traffic(10, 1)
        self.stage = "exchange"
        self.counts = Counts()
        self.error = None
        self.gate = None

    def run(self, gradients, outputs, conditions, resumes):
        if self.gate:
            assert self.gate.wait(10)
        self.log.append((self.number, [start for start, _ in gradients], conditions.learning_rate))
        if self.error:
            raise self.error
        for _, output in outputs:
            output *= self.factor

    def forget(self):
        pass

    def undo(self):
        self.log.append((self.number, "undone"))

    def state_dict(self):
        return {}


def recording_buckets(monkeypatch, log, parameters, bucket_bytes=80, small=False, factor=0.5, hold_zeros=False):
    """Return buckets of parameters that are named by their indices, and the arguments of their pipelines."""
    made = []

    def pipeline(sparse, size, like, transport, *, number, factor, undoable, shared, layers, scatters, adaptive):
        assert not scatters
        assert not adaptive
        made.append((sparse, size, like.dtype, layers))
        return Recorder(log, number, factor)

    monkeypatch.setattr(bucket, "pipeline_for", pipeline)
    members = [Member.of(str(i), p, group=0, least=10**9 if small else 0) for i, p in enumerate(parameters)]
    shared = Settings(parse("topka"), factor, undoable=True, hold_zeros=hold_zeros)
    buckets = [Bucket(layout, shared, None) for layout in plan(members, bucket_bytes)]
    return buckets, made
