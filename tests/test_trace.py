"""Spans, their totals, and the file that Perfetto opens."""

from __future__ import annotations

import json
import threading
import time

import pytest

from horovod_sparse import trace


@pytest.fixture(autouse=True)
def _recording():
    trace.clear()
    trace.enable()
    yield
    trace.enable(False)
    trace.clear()


def test_a_span_has_a_length_and_details_and_a_mark_has_details_alone():
    with trace.span("select", bucket=3):
        time.sleep(0.01)
    trace.mark("density", density=0.5)
    span, mark = trace.spans()
    assert (span.name, span.details, mark.name, mark.details) == ("select", {"bucket": 3}, "density", {"density": 0.5})
    assert (span.duration >= 10_000_000, mark.duration) == (True, 0)
    assert abs(span.start / 1e9 - time.time()) < 60
    assert span.start + span.duration <= mark.start


def test_nothing_is_recorded_when_off_and_a_span_also_when_its_block_raises():
    trace.enable(False)
    trace.mark("density")
    with trace.span("select"):
        pass
    assert trace.spans() == ()
    trace.enable()
    with pytest.raises(KeyError), trace.span("select"):
        raise KeyError
    assert len(trace.spans()) == 1


def test_totals_add_up_over_buckets_and_threads():
    def work():
        for bucket in range(3):
            with trace.span("exchange", bucket=bucket):
                time.sleep(0.002)

    thread = threading.Thread(target=work, name="other")
    thread.start()
    work()
    thread.join()
    assert trace.totals()["exchange"] == pytest.approx(sum(one.duration for one in trace.spans()) / 1e9)
    assert len({one.thread for one in trace.spans()}) == 2


def test_the_file_is_a_chrome_trace(tmp_path):
    with trace.span("backward"), trace.span("select", bucket=0):
        pass
    trace.export(tmp_path / "trace.json")
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
    trace.export(tmp_path / "trace.json")
    before = (tmp_path / "trace.json").read_bytes()
    with trace.span("select", bucket=object()):
        pass
    with pytest.raises(TypeError):
        trace.export(tmp_path / "trace.json")
    assert (tmp_path / "trace.json").read_bytes() == before


@pytest.mark.mpi
def test_rank_0_writes_the_spans_of_all_ranks(comm, tmp_path):
    with trace.span("select"):
        pass
    path = comm.bcast(tmp_path) / "trace.json"
    trace.export(path, comm)
    comm.Barrier()
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["pid"] for event in events if event["ph"] == "X"} == set(range(comm.Get_size()))
