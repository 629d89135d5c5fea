"""A training with local steps whose rank 1 has fewer batches than the others, and does not join.

local_steps.py [delay], under mpirun with Horovod or under torchrun.
"""

import os
import sys

import torch
from torch import distributed, nn

import horovod_sparse as hvs

if "TORCHELASTIC_RUN_ID" in os.environ:
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
else:
    import horovod.torch as hvd

    hvd.init()
    rank = hvd.rank()
torch.manual_seed(0)
model = nn.Linear(100, 100)
optimizer = hvs.LocalOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1),
    model.named_parameters(),
    4,
    hvs.Compression.topka(density=0.1),
    delay=int(sys.argv[1]) if sys.argv[1:] else 0,
)
for _ in range(6 if rank == 1 else 10):
    optimizer.zero_grad()
    model(torch.randn(4, 100)).square().mean().backward()
    optimizer.step()
print("trained")
