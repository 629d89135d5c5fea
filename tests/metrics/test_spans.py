"""Spans, their totals, and the Chrome trace; also of an asynchronous device."""

from __future__ import annotations

import json
import random
import threading
import time

import pytest
from asynchronous import AsynchronousDevice, Clock

from horovod_sparse import metrics
from horovod_sparse.metrics import device as device_module


@pytest.fixture(autouse=True)
def _recording():
    metrics.clear()
    metrics.enable()
    yield
    metrics.enable(False)
    metrics.clear()


def test_a_span_has_a_length_and_details_and_a_mark_only_details():
    with metrics.span("select", bucket=3):
        time.sleep(0.01)
    metrics.mark("density", density=0.5)
    span, mark = metrics.spans()
    assert (span.name, span.details, mark.name, mark.details) == ("select", {"bucket": 3}, "density", {"density": 0.5})
    assert (span.duration >= 10_000_000, mark.duration) == (True, 0)
    assert abs(span.start / 1e9 - time.time()) < 60
    assert span.start + span.duration <= mark.start


def test_recording_can_be_off_and_includes_blocks_that_raise():
    metrics.enable(False)
    metrics.mark("density")
    with metrics.span("select"):
        pass
    assert metrics.spans() == ()
    metrics.enable()
    with pytest.raises(KeyError), metrics.span("select"):
        raise KeyError
    assert len(metrics.spans()) == 1


def test_totals_add_up_over_buckets_and_threads():
    def work():
        for bucket in range(3):
            with metrics.span("exchange", bucket=bucket):
                time.sleep(0.002)

    thread = threading.Thread(target=work, name="other")
    thread.start()
    work()
    thread.join()
    assert metrics.totals()["exchange"] == pytest.approx(sum(one.duration for one in metrics.spans()) / 1e9)
    assert len({one.thread for one in metrics.spans()}) == 2


def test_the_file_is_a_chrome_trace(tmp_path):
    with metrics.span("backward"), metrics.span("select", bucket=0):
        pass
    metrics.export(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    complete = {event["name"]: event for event in events if event["ph"] == "X"}
    assert set(complete) == {"backward", "select"}
    inner, outer = complete["select"], complete["backward"]
    assert inner["args"] == {"bucket": 0}
    assert outer["ts"] <= inner["ts"]
    assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} == {"rank 0", "MainThread"}
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]  # nothing is left beside it


def test_an_export_that_fails_leaves_the_old_file(tmp_path):
    metrics.export(tmp_path / "trace.json")
    before = (tmp_path / "trace.json").read_bytes()
    with metrics.span("select", bucket=object()):
        pass
    with pytest.raises(TypeError):
        metrics.export(tmp_path / "trace.json")
    assert (tmp_path / "trace.json").read_bytes() == before


MS = 1_000_000


@pytest.fixture
def device(monkeypatch):
    """Provide a device with a separate clock that spans are recorded on."""
    clock = Clock()
    monkeypatch.setattr(device_module, "time", clock)
    launching = AsynchronousDevice(clock)
    metrics.enable(device=launching)
    yield launching
    metrics.enable(False)


def lengths():
    return [(one.name, one.duration) for one in metrics.spans()]


def test_a_device_span_lasts_as_long_as_the_launched_work_without_waiting(device):
    waits, before = device.waits, device.clock.now
    with metrics.span("forward"):
        device.launch(20 * MS)
        device.clock.work(1 * MS)
    with metrics.span("backward"):
        device.launch(40 * MS)
    assert (device.waits, device.clock.now - before) == (waits, 1 * MS)
    assert lengths() == [("forward", 20 * MS), ("backward", 40 * MS)]
    forward, backward = metrics.spans()
    assert backward.start == forward.start + forward.duration


def test_a_device_span_includes_waiting_for_the_host(device):
    """A message: the host waits for what it sends, and the device for what arrives."""
    with metrics.span("select"):
        device.launch(3 * MS)
    with metrics.span("exchange"):
        device.synchronize()
        device.clock.work(10 * MS)
        device.launch(2 * MS)
    assert lengths() == [("select", 3 * MS), ("exchange", 12 * MS)]


def test_a_wait_outside_of_spans_does_not_shorten_the_span_of_the_work(device):
    """``loss.item()`` behind the block waits for forward: the time is forward's and not lost."""
    with metrics.span("forward"):
        device.launch(30 * MS)
    device.synchronize()
    with metrics.span("backward"):
        device.launch(50 * MS)
    assert lengths() == [("forward", 30 * MS), ("backward", 50 * MS)]


def test_every_thread_is_timed_on_its_own_stream(device):
    def exchange():
        with device.stream("beside"), metrics.span("select"):
            device.launch(5 * MS)

    with metrics.span("backward"):
        device.launch(40 * MS)
        worker = threading.Thread(target=exchange, name="worker")
        worker.start()
        worker.join()
    with metrics.span("synchronize"):
        device.follow("beside")
    assert lengths() == [("select", 5 * MS), ("backward", 40 * MS), ("synchronize", 0)]
    select, backward, _ = metrics.spans()
    assert (select.start, select.thread, backward.thread) == (backward.start, "worker", "MainThread")


def test_device_spans_are_on_the_hosts_time_axis(device):
    offset = metrics._epoch
    for _ in range(300):  # hours of work, read now and then
        device.clock.work(40_000 * MS)
        begin = device.clock.now
        with metrics.span("step"):
            device.launch(7 * MS)
        metrics.mark("density", density=0.5)
        step, mark = metrics.spans()
        assert (step.start - offset, step.duration) == (pytest.approx(begin, abs=3000), 7 * MS)
        assert (mark.start - offset, mark.duration) == (pytest.approx(begin + 7 * MS, abs=3000), 0)
        metrics.clear()


def test_hundreds_of_steps_are_timed_without_waiting_and_with_few_events(device, monkeypatch):
    monkeypatch.setattr(device_module, "_MOST_LAUNCHED", 50)
    numbers = random.Random(0)
    launched, waits, most = [], device.waits, 0
    for step in range(500):
        for name in ("forward", "backward"):
            launched.append((name, numbers.randrange(1, 9) * MS))
            with metrics.span(name, step=step):
                device.launch(launched[-1][1])
        device.clock.work(8 * MS)  # the host is behind in some steps, and ahead of the device in others
        most = max(most, device.events)
    assert device.waits == waits
    assert most < 300
    assert lengths() == launched
    assert metrics.totals()["forward"] == pytest.approx(sum(ns for name, ns in launched if name == "forward") / 1e9)


def test_clearing_drops_unfinished_device_spans(device):
    with metrics.span("forward"):
        device.launch(20 * MS)
    metrics.clear()
    assert metrics.spans() == ()
    with metrics.span("backward"):
        device.launch(20 * MS)
    metrics.enable()
    with metrics.span("host"):
        device.launch(20 * MS)
    backward, host = metrics.spans()
    assert (backward.name, backward.duration) == ("backward", 20 * MS)
    assert host.duration < 20 * MS


@pytest.mark.mpi
def test_rank_0_writes_the_spans_of_all_ranks(comm, tmp_path):
    with metrics.span("select"):
        pass
    path = comm.bcast(tmp_path) / "trace.json"
    metrics.export(path, comm)
    comm.Barrier()
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["pid"] for event in events if event["ph"] == "X"} == set(range(comm.Get_size()))
