"""Ok-Topk on the gradients of a real training run: the digits CNN of the examples."""

from __future__ import annotations

import pytest
import torch
from data import load
from laws import everywhere, same_bits
from models import build
from torch.nn import functional

import horovod_sparse as hvs

pytestmark = [pytest.mark.mpi, pytest.mark.full]

STEPS, SETTLED = 150, 50  # BERT's thresholds are found anew in step 128


class Recorded:
    """Lets an exchange happen and notes the k, this rank's entries and those of the total."""

    def __init__(self, collective):
        self.steps = []
        self._allreduce = collective.allreduce
        collective.allreduce = self

    def __call__(self, vector, k):
        exchange = self._allreduce(vector, k)
        self.steps.append((k, len(vector), len(exchange.total)))
        return exchange


@pytest.mark.parametrize("published", [None, "bert"])
def test_the_number_of_entries_stays_inside_its_band(hvd, comm, published):
    data, rank = load("digits"), comm.Get_rank()
    torch.manual_seed(0)
    model = build("cnn", data.channels, data.side, data.classes)
    optimizer = hvs.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        named_parameters=model.named_parameters(),
        compression=hvs.Compression.oktopk(density=0.02, published=published),
    )
    recorded = [
        Recorded(bucket.pipeline.collective) for bucket in optimizer._exchange.worker.buckets if not bucket.layout.dense
    ]
    shuffled = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(1 + rank))
    losses = []
    for step in range(STEPS):
        images, labels = data.train[shuffled[torch.arange(32) + 32 * step % (len(data.train) - 32)]]
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    low, high = (4 / 5, 5 / 4) if published else (2 / 3, 4 / 3)
    for one in recorded:
        settled = one.steps[SETTLED:]
        inside = [low * k <= total <= high * k for k, _, total in settled]
        assert everywhere(comm, all(inside)), settled
        assert everywhere(comm, all(mine <= 4 / 3 * 5 / 4 * k for k, mine, _ in one.steps))
    assert everywhere(comm, sum(losses[-20:]) < 0.2 * sum(losses[:20]))
    assert all(same_bits(comm, p.detach().numpy()) for p in model.parameters())
