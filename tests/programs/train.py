"""A training run that goes wrong on rank 1 in its fourth step, at the stage named on the command line."""

import sys

import horovod.torch as hvd
import torch
from torch import nn

import horovod_sparse as hvs

hvd.init()
stage = sys.argv[1]
model = nn.Sequential(nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 100))
optimizer = hvs.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1),
    named_parameters=model.named_parameters(),
    compression=hvs.Compression.topka(density=0.1, bucket_bytes=40_000),
)


def fail_at(place: str, step: int) -> None:
    if place == stage and step == 3 and hvd.rank() == 1:
        raise KeyError("the data set is gone")
    if stage == f"exit in {place}" and step == 3 and hvd.rank() == 1:
        sys.exit(3)


if stage == "exchange" and hvd.rank() == 1:

    def fail(vector, k):
        raise KeyError("the data set is gone")

    optimizer._exchange.worker.buckets[0].pipeline.rules.collective.allreduce = fail

for step in range(19 if stage == "fewer steps" and hvd.rank() == 1 else 20):
    optimizer.zero_grad()
    loss = model(torch.randn(4, 100)).square().mean()
    fail_at("forward", step)
    loss.backward()
    fail_at("backward", step)
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()
print("trained")
