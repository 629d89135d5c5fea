"""Training that continues after interruptions: torchrun --nproc-per-node 2 examples/restart.py --front-end ddp.

Start it again after a failure or a preemption, with the same or another number of ranks. `mpirun -np 2 python
examples/restart.py` starts it with any front end, torchrun with all but Horovod.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import horovod_sparse as hvs

SAMPLES, INPUTS, CLASSES = 4096, 256, 10


class Batches:
    """Endless batches of indices, in an order that does not depend on the number of ranks.

    Attributes:
        used: Number of samples that all ranks together have used.
    """

    def __init__(self, samples: int, size: int, rank: int, ranks: int) -> None:
        self._samples, self._size, self._rank, self._ranks = samples, size, rank, ranks
        self.used = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Yield the indices of this rank's next batch, int64 (size,)."""
        while True:
            own = self.used + self._rank * self._size + torch.arange(self._size)
            self.used += self._ranks * self._size
            epochs = (own // self._samples).tolist()
            orders = {epoch: self._order(epoch) for epoch in set(epochs)}
            yield torch.stack([orders[epoch][at % self._samples] for epoch, at in zip(epochs, own, strict=True)])

    def _order(self, epoch: int) -> torch.Tensor:
        return torch.randperm(self._samples, generator=torch.Generator().manual_seed(epoch))

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        return {"used": self.used}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position."""
        self.used = state["used"]


def connect(
    options: argparse.Namespace, model: nn.Module, plain: torch.optim.Optimizer, mesh: DeviceMesh | None
) -> tuple[Any, Any]:
    """Return the model to call and the optimizer to step with."""
    names, compression = list(model.named_parameters()), hvs.parse(options.compression)
    if options.front_end == "horovod":
        return model, hvs.DistributedOptimizer(plain, named_parameters=names, compression=compression)
    if options.front_end == "local":
        return model, hvs.LocalOptimizer(plain, names, local_steps=4, compression=compression)
    if options.front_end == "fsdp2" and options.shards is None:
        hvs.fsdp.sparse_reduce_scatter(model, compression, plain)
        return model, plain
    if mesh is not None:
        hvs.fsdp.sparse_all_reduce(model, mesh.get_group("replicate"), compression, plain)
        return model, plain
    replica = nn.parallel.DistributedDataParallel(model)
    replica.register_comm_hook(hvs.ddp.SparseState(compression, plain, names), hvs.ddp.sparse_hook)
    return replica, plain


def train(options: argparse.Namespace, rank: int, ranks: int) -> None:
    """Train on this rank."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":  # ranks may share a GPU
        torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.manual_seed(0)  # the same parameters and samples on all ranks
    labels = torch.randint(CLASSES, (SAMPLES,))
    samples = torch.randn(CLASSES, INPUTS)[labels] + 4 * torch.randn(SAMPLES, INPUTS)
    samples, labels = samples.to(device), labels.to(device)
    model = nn.Sequential(nn.Linear(INPUTS, options.width), nn.ReLU(), nn.Linear(options.width, CLASSES)).to(device)
    mesh = None
    if options.front_end == "fsdp2":
        shards = options.shards or ranks
        mesh = init_device_mesh(device, (ranks // shards, shards), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh["shard"])
    plain = torch.optim.SGD(model.parameters(), lr=0.01)
    replica, optimizer = connect(options, model, plain, mesh)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    batches = Batches(SAMPLES, options.batch_size, rank, ranks)

    training = hvs.checkpoint.Training(
        options.folder,
        local=options.local,
        every=int(options.every) if options.every.isdecimal() else options.every,
        run=f"{options.front_end}, {options.compression}, {options.width} wide",
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        data=batches,
    )
    for step, batch in zip(training.steps(options.steps), batches, strict=False):  # in this order
        optimizer.zero_grad()
        loss = cross_entropy(replica(samples[batch]), labels[batch])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step()
        if rank == 0 and (step + 1) % 20 == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}, {training.overhead:.2%} for saving", flush=True)


def main() -> None:
    """Join the ranks, and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--front-end", choices=["horovod", "ddp", "fsdp2", "local"], default="horovod")
    parser.add_argument("--folder", default="checkpoints", help="folder of the checkpoints (default: %(default)s)")
    parser.add_argument("--local", help="folder on a disk of each node for more frequent checkpoints")
    parser.add_argument("--every", default="1%", help="interval of the saves: 100, 600s or 1%% (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=32, help="samples per rank and step (default: %(default)s)")
    parser.add_argument("--width", type=int, default=64, help="width of the hidden layer (default: %(default)s)")
    parser.add_argument("--compression", default="topka:density=0.05")
    parser.add_argument("--shards", type=int, help="fsdp2: ranks that share a replica (default: fully sharded)")
    options = parser.parse_args()
    if options.front_end == "horovod":
        import horovod.torch as hvd

        hvd.init()
        train(options, hvd.rank(), hvd.size())
    else:
        hvs.ddp.init_process_group()
        ranks = distributed.get_world_size()
        if options.shards is not None and (options.shards < 1 or ranks % options.shards):
            parser.error(f"--shards {options.shards} does not divide the {ranks} ranks")
        train(options, distributed.get_rank(), ranks)
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
