"""Horovod's timeline beside our optimizer."""

from __future__ import annotations

import json

import launch
import pytest

TRAINING = """
import os, time
import horovod.torch as hvd, torch
import horovod_sparse as hvs
hvd.init()
model = torch.nn.Linear(100, 100)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvs.DistributedOptimizer(optimizer, model.named_parameters(), hvs.Compression.topka(density=0.1))
for step in range(3):
    optimizer.zero_grad()
    model(torch.ones(4, 100)).square().mean().backward()
    optimizer.step()
assert optimizer.statistics()["total/steps"] == 3
hvd.allreduce(torch.ones(3), name="of_the_script")
while "of_the_script" not in open(os.environ["HOROVOD_TIMELINE"]).read():
    time.sleep(0.1)  # a thread writes it, which shutdown() does not wait for
hvd.barrier()
hvd.shutdown()
"""


@pytest.mark.full
def test_it_has_the_operations_that_horovod_does(tmp_path):
    path = tmp_path / "timeline.json"
    run = launch.python("-c", TRAINING, ranks=2, HOROVOD_TIMELINE=str(path))
    assert run.returncode == 0, run.stderr
    tracks = {event.get("args", {}).get("name") for event in json.loads(path.read_text())}
    assert "allreduce.of_the_script" in tracks
    assert {"broadcast.weight", "broadcast.bias"} <= tracks
