"""A bucket accepts gradients in any order and layout, and returns results in the parameters' layout."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from buckets import recording_buckets

from horovod_sparse.engine import layout
from horovod_sparse.engine.device import Device
from horovod_sparse.rules import Conditions


@pytest.fixture
def log():
    return []


def exchange(bucket, gradients, held=()):
    for key, gradient in gradients.items():
        bucket.put(key, gradient, hold=key in held)
    bucket.exchange(bucket.collected, lambda: Conditions(0.1))
    return list(gradients.values())


def test_held_parameters_are_written_but_not_read(monkeypatch, log):
    parameters = [torch.zeros(10), torch.zeros(10)]
    (bucket,), _ = recording_buckets(monkeypatch, log, parameters)
    results = exchange(bucket, {key: torch.ones(10) for key in ("1", "0")}, held={"1"})
    assert [result.tolist() for result in results] == [[0.5] * 10] * 2
    assert log == [(0, [0], 0.1)]


def test_a_gradient_of_another_precision_is_exchanged_in_the_buckets(monkeypatch, log):
    """The model may have changed after it was wrapped."""
    p = torch.zeros(10)
    (bucket,), _ = recording_buckets(monkeypatch, log, [p])
    gradient = torch.ones(10, dtype=torch.float64)
    version = gradient._version
    exchange(bucket, {"0": gradient})
    assert gradient.tolist() == [0.5] * 10
    assert gradient._version == version  # as for results that kernels write: only users count


def test_zero_gradients_are_held_on_request(monkeypatch, log):
    """The one nonzero element may be anywhere."""
    parameters = [torch.zeros(200) for _ in range(3)]
    for hold_zeros, taken in [(False, [0, 200, 400]), (True, [0, 400])]:
        (bucket,), _ = recording_buckets(monkeypatch, log, parameters, 4000, hold_zeros=hold_zeros)
        first, second, third = torch.zeros(3, 200)
        first[0] = third[199] = 1
        exchange(bucket, dict(zip("012", (first, second, third), strict=True)))
        assert log[-1][1] == taken


class Streams(Device):
    """A device with streams, on which work is counted."""

    def __init__(self):
        self.current, self.submitted, self.after = "a", Counter(), []

    def stream(self):
        return self.current

    def mark(self, stream):
        return stream, self.submitted[stream]

    def work(self, after=()):
        self.after.append(set(after))
        return nullcontext()


def test_one_mark_for_each_stream_when_the_bucket_starts(monkeypatch, log):
    """Work on a gradient begins after all that came before it on its own stream."""
    device = Streams()
    monkeypatch.setattr(layout, "device_of", lambda _: device)
    (bucket,), _ = recording_buckets(monkeypatch, log, [torch.zeros(2) for _ in range(5)])
    for key, device.current in zip("01234", "abaab", strict=True):
        device.submitted[device.current] += 1
        bucket.put(key, torch.ones(2), hold=False)
    bucket.mark_ready()
    device.current = "c"
    device.submitted["a"] += 1
    bucket.mark_ready()  # has been marked
    with bucket.work(bucket.collected), bucket.work():
        pass
    assert device.after[-2:] == [{("a", 3), ("b", 2)}, {("c", 0)}]
    assert len(bucket.collected.ready) == 2


@pytest.mark.parametrize(("complete", "hidden"), [(5, 0), (10, 0), (13, 3), (17, 7), (20, 7)])
def test_exchange_time_is_hidden_until_the_last_gradient_is_available(monkeypatch, complete, hidden):
    (bucket,), _ = recording_buckets(monkeypatch, [], [torch.zeros(3)])
    bucket.collected.began, bucket.collected.ended = 10, 17
    bucket.end_step(complete)
    assert (bucket.pipeline.counts.hidden, bucket.pipeline.counts.exposed) == (hidden, 7 - hidden)
