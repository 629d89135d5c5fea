"""Small classifier trained with Horovod and sparse gradients: horovodrun -np 2 python examples/minimal.py."""

import horovod.torch as hvd
import torch

import horovod_sparse as hvs

hvd.init()
torch.manual_seed(hvd.rank())  # different data on every rank
centers = torch.randn(10, 1000, generator=torch.Generator().manual_seed(0))  # one per class, same on all ranks

model = torch.nn.Sequential(torch.nn.Linear(1000, 100), torch.nn.ReLU(), torch.nn.Linear(100, 10))
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvs.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9),
    named_parameters=model.named_parameters(),
    compression=hvs.Compression.recommended(density=0.01, collective="topka"),
)
for step in range(1, 101):
    labels = torch.randint(10, (32,))
    inputs = centers[labels] + 4 * torch.randn(32, 1000)
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
    if step % 20 == 0 and hvd.rank() == 0:
        print(f"step {step}: loss {loss.item():.3f}, {optimizer.traffic.bytes_sent:,} bytes sent")
