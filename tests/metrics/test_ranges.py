"""Spans as ranges of torch's profiler and of NVTX."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import torch

from horovod_sparse import metrics
from horovod_sparse.metrics import ranges


@pytest.fixture(params=[False, True], ids=["", "recording"])
def recording(request):
    metrics.clear()
    metrics.enable(request.param)
    yield request.param
    metrics.enable(False)
    metrics.clear()


def test_spans_are_ranges_of_the_profiler_while_it_is_on(recording):
    with metrics.span("forward"):
        assert metrics.active() == recording
    with torch.profiler.profile() as profiler, metrics.span("select", bucket=3):
        torch.ones(10).sum()
        assert metrics.active()
    with metrics.span("apply"):
        pass
    names = [event.key for event in profiler.key_averages()]
    assert [name for name in names if name.startswith("hvs.")] == ["hvs.select"]
    assert [span.name for span in metrics.spans()] == (["forward", "select", "apply"] if recording else [])


def test_the_profiler_shows_other_threads_on_request(recording):
    def exchange():
        with metrics.span("exchange"):
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


def test_spans_are_nvtx_ranges_under_a_tool_with_cuda_initialized(recording, monkeypatch):
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
    with metrics.span("select"):
        pass
    monkeypatch.setattr(ranges, "_NVTX", True)
    with metrics.span("exchange"):
        pass
    with pytest.raises(KeyError), metrics.span("apply"):
        raise KeyError
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    with metrics.span("wait"):
        pass
    assert opened == ["hvs.exchange", "end", "hvs.apply", "end"]
