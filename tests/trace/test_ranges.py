"""Spans as ranges of torch's profiler and of NVTX, while these are on."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import torch

from horovod_sparse import trace
from horovod_sparse.trace import ranges


@pytest.fixture(params=[False, True], ids=["", "recording"])
def recording(request):
    trace.clear()
    trace.enable(request.param)
    yield request.param
    trace.enable(False)
    trace.clear()


def test_spans_are_ranges_of_the_profiler_while_it_is_on(recording):
    with trace.span("forward"):
        assert trace.active() == recording
    with torch.profiler.profile() as profiler, trace.span("select", bucket=3):
        torch.ones(10).sum()
        assert trace.active()
    with trace.span("apply"):
        pass
    names = [event.key for event in profiler.key_averages()]
    assert [name for name in names if name.startswith("hvs.")] == ["hvs.select"]
    assert [span.name for span in trace.spans()] == (["forward", "select", "apply"] if recording else [])


def test_the_profiler_shows_other_threads_where_it_is_told_to(recording):
    def exchange():
        with trace.span("exchange"):
            pass

    def profiled(**options):
        config = torch._C._profiler._ExperimentalConfig(**options)
        with torch.profiler.profile(experimental_config=config) as profiler:
            thread = threading.Thread(target=exchange)
            thread.start()
            thread.join()
        return [event.key for event in profiler.key_averages() if event.key.startswith("hvs.")]

    assert profiled(profile_all_threads=True) == ["hvs.exchange"]
    assert profiled() == []


def test_spans_are_nvtx_ranges_where_a_tool_listens_and_cuda_is_in_use(recording, monkeypatch):
    opened = []

    @contextmanager
    def nvtx(name):
        opened.append(name)
        try:
            yield
        finally:
            opened.append("end")

    monkeypatch.setattr(torch.cuda.nvtx, "range", nvtx)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with trace.span("select"):
        pass
    monkeypatch.setattr(ranges, "_NVTX", True)
    with trace.span("exchange"):
        pass
    with pytest.raises(KeyError), trace.span("apply"):
        raise KeyError
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    with trace.span("wait"):
        pass
    assert opened == ["hvs.exchange", "end", "hvs.apply", "end"]
