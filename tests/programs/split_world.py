"""Two Horovod worlds in one MPI job: even and odd ranks, each counted backwards; prints what each rank learned."""

import horovod.torch as hvd
import torch
from mpi4py import MPI

import horovod_sparse as hvs

world = MPI.COMM_WORLD
hvd.init(comm=world.Split(world.Get_rank() % 2, -world.Get_rank()))
model = torch.nn.Linear(10, 10)
torch.nn.init.zeros_(model.weight)
optimizer = hvs.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=1.0),
    named_parameters=model.named_parameters(),
    compression=hvs.Compression.topka(1.0, dense_below=0),
)
(model.weight * float(world.Get_rank())).sum().backward()
optimizer.step()
print(f"[{world.Get_rank()} of 4 is {hvd.rank()} of {hvd.size()} and moved by {model.weight[0, 0].item():g}]\n", end="")
