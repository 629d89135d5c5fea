"""Shards of FSDP2 that are offloaded to the host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from horovod_sparse.frontends.fsdp.exchange import ReplicaExchange


@pytest.mark.parametrize(("mesh", "expected"), [("cuda", ["waited", "weight"]), ("cpu", ["weight"])])
def test_a_shard_is_submitted_when_it_is_on_the_host(
    monkeypatch: pytest.MonkeyPatch, mesh: str, expected: list[str]
) -> None:
    """FSDP copies it to pinned memory without waiting, on the stream that is current when it calls the hook."""
    events: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: events.append("waited"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    exchange: Any = SimpleNamespace(_reduced=set(), _submit=lambda name, _: events.append(name))
    p: Any = SimpleNamespace(grad=torch.ones(3), device_mesh=SimpleNamespace(device_type=mesh))
    ReplicaExchange._submit_reduced(exchange, "weight", p)
    assert events == expected
