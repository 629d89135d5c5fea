"""The optimizer with parameters on the device: in the emulation, tensors of the CPU count as device tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from devices import EmulatedDevice, emulated
from laws import everywhere
from torch import nn

from horovod_sparse import Compression, DistributedOptimizer
from horovod_sparse.engine import layout
from horovod_sparse.frontends import scaling
from horovod_sparse.frontends.horovod import gradients

pytestmark = pytest.mark.mpi


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    if not emulated():
        yield torch.device("cuda", 0)
        return
    pretended = EmulatedDevice()
    for module in (layout, gradients):
        monkeypatch.setattr(module, "device_of", lambda _: pretended)
    yield torch.device("cpu")


def train(device: torch.device, steps: int, scaler: Any = None, **settings: Any) -> tuple[nn.Module, Any]:
    """A few steps of a small network, whose ranks see different data."""
    import horovod.torch as hvd

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 5)).to(device)
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        named_parameters=model.named_parameters(),
        compression=Compression.oktopk(density=0.1, **settings),
        grad_scaler=scaler,
    )
    generator = torch.Generator().manual_seed(hvd.rank())
    for _ in range(steps):
        inputs = torch.randn(16, 30, generator=generator).to(device)
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.float16, enabled=scaler is not None):
            loss = model(inputs).square().mean()
        (loss if scaler is None else scaler.scale(loss)).backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step() if scaler is None else scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
    return model, optimizer


def values(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().cpu().flatten() for p in model.parameters()])


@pytest.mark.parametrize("memory", ["residual", "momentum"])
def test_training_is_the_same_as_on_the_host(
    hvd: Any, comm: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch, memory: str
) -> None:
    ours = values(train(device, 5, dense_below=0, memory=memory)[0])
    monkeypatch.undo()
    expected = values(train(torch.device("cpu"), 5, dense_below=0, memory=memory)[0])
    # A GPU's own forward and backward pass are rounded differently.
    assert everywhere(comm, torch.equal(ours, expected) if emulated() else torch.allclose(ours, expected, atol=0.01))


def test_mixed_precision_trains(hvd: Any, comm: Any, device: torch.device) -> None:
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**20)  # overflows in the first steps
    before = values(train(device, 0)[0])
    model, optimizer = train(device, 12, scaler)
    assert everywhere(comm, bool(torch.isfinite(values(model)).all()))
    assert everywhere(comm, scaler.get_scale() < 2.0**20 and not torch.equal(values(model), before))
    state = optimizer.compression_state_dict()
    residuals = [bucket["memory"]["residual"] for bucket in state["buckets"] if "memory" in bucket]
    assert everywhere(comm, all(bool(torch.isfinite(one).all()) for one in residuals))


def test_clipping_is_detected_on_the_stream_of_the_exchange(hvd: Any, comm: Any, device: torch.device) -> None:
    """The check must follow the script's own work on the gradients."""
    model, optimizer = train(device, 1, dense_below=0)
    buckets = optimizer._exchange.worker.buckets
    for p in model.parameters():
        p.grad.mul_(0.5)
    selected = scaling.by_bucket(optimizer._exchange.delivered_of)
    for bucket in buckets:
        with bucket.device.guarded() if emulated() else nullcontext():
            factor = scaling.factor_of(selected[bucket.layout.number], bucket.pipeline.gradient_unit)
        assert everywhere(comm, factor == pytest.approx(0.5))
        if emulated():
            bucket.device.calls.clear()
            with bucket.work():
                assert bucket.device.calls == {"stream": 1, "mark": 1, "work": 1, "wait": 1}
    assert everywhere(comm, bool(buckets) == (comm.Get_size() > 1))


@pytest.mark.parametrize("memory", ["residual", "momentum"])
def test_the_state_moves_between_devices(
    hvd: Any, comm: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch, memory: str
) -> None:
    """The state holds CPU tensors, which load on either device, and waits for the step that changes the velocity."""
    _, ours = train(device, 3, dense_below=0, memory=memory)
    assert everywhere(comm, len(ours.state_dict()["state"]) == 4)
    buckets = ours._exchange.worker.buckets
    calls = buckets[0].device.calls if emulated() and buckets else Counter[str]()
    calls.clear()
    state = ours.compression_state_dict()
    if emulated():
        assert everywhere(comm, calls["wait"] == len(buckets))
        monkeypatch.undo()
    _, other = train(torch.device("cpu"), 0, dense_below=0, memory=memory)
    other.load_compression_state_dict(state)
    assert everywhere(comm, str(other.compression_state_dict()) == str(state))
