"""Small classifier trained with DistributedDataParallel: torchrun --nproc-per-node 2 examples/ddp.py."""

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import horovod_sparse as hvs


def train() -> None:
    """Train on this rank."""
    rank = distributed.get_rank()
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", rank % gpus) if gpus else torch.device("cpu")
    torch.manual_seed(rank)  # different data on every rank
    centers = torch.randn(10, 1000, generator=torch.Generator().manual_seed(0))  # one per class, same on all ranks

    model = nn.Sequential(nn.Linear(1000, 100), nn.ReLU(), nn.Linear(100, 10)).to(device)
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    compression = hvs.Compression.recommended(density=0.01, collective="topka")
    state = hvs.ddp.SparseState(compression, optimizer, model.named_parameters())
    replica.register_comm_hook(state, hvs.ddp.sparse_hook)
    for step in range(1, 101):
        labels = torch.randint(10, (32,))
        inputs = centers[labels] + 4 * torch.randn(32, 1000)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(replica(inputs.to(device)), labels.to(device))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % 20 == 0 and rank == 0:
            print(f"step {step}: loss {loss.item():.3f}, {state.traffic.bytes_sent:,} bytes sent")


hvs.ddp.init_process_group()
train()
# After the model: over Gloo, torch may deadlock if a model outlives its process group.
distributed.destroy_process_group()
