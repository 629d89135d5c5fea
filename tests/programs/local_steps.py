"""A training with local steps whose rank 1 has fewer batches than the others, and does not join."""

import horovod.torch as hvd
import torch
from torch import nn

import horovod_sparse as hvs

hvd.init()
torch.manual_seed(0)
model = nn.Linear(100, 100)
optimizer = hvs.LocalOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), 4, hvs.Compression.topka(density=0.1)
)
for _ in range(6 if hvd.rank() == 1 else 8):
    optimizer.zero_grad()
    model(torch.randn(4, 100)).square().mean().backward()
    optimizer.step()
print("trained")
