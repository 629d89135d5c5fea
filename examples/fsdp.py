"""Small GPT sharded by FSDP2, with sparse gradients: mpirun -np 4 python examples/fsdp.py [--fully-sharded]."""

import argparse
import inspect
import os

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import horovod_sparse as hvs

WIDTH, HEADS, LAYERS, LENGTH = 128, 4, 4, 64


class Block(nn.Module):
    """Transformer block as in GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the activations of the next block, batch x length x width."""
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.attention_norm(x)).chunk(3, -1)
        )
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        output: torch.Tensor = x + self.mlp(self.norm(x))
        return output


class GPT(nn.Module):
    """Language model of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next bytes, batch x length x 256."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def main() -> None:
    """Join the ranks, and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=2, help="ranks that share a replica, such as those of a node")
    parser.add_argument("--fully-sharded", action="store_true", help="one replica, over all ranks")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--compression", default="recommended:density=0.01")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()

    hvs.ddp.init_process_group()
    if options.fully_sharded:
        options.shards = torch.distributed.get_world_size()
    if torch.distributed.get_world_size() % options.shards:
        parser.error(f"--shards {options.shards} does not divide the {torch.distributed.get_world_size()} ranks")
    train(options)
    # After the model: over Gloo, torch may deadlock if a model outlives its process group.
    torch.distributed.destroy_process_group()


def train(options: argparse.Namespace) -> None:
    """Train on the source of a module of Python's standard library."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if options.device == "cuda":  # ranks may share a GPU
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    grid = ranks // options.shards, options.shards
    mesh = init_device_mesh(options.device, grid, mesh_dim_names=("replicate", "shard"))

    torch.manual_seed(0)  # replicas start with the same parameters
    model = GPT().to(options.device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    compression = hvs.parse(options.compression)
    exchange: hvs.fsdp.ShardedExchange | hvs.fsdp.ReplicaExchange
    if options.fully_sharded:
        exchange = hvs.fsdp.sparse_reduce_scatter(model, compression, optimizer)
    else:
        exchange = hvs.fsdp.sparse_all_reduce(model, mesh.get_group("replicate"), compression, optimizer)

    text = torch.tensor(list(inspect.getsource(argparse).encode()))
    torch.manual_seed(rank)  # different data on every rank
    for step in range(1, options.steps + 1):
        starts = torch.randint(len(text) - LENGTH, (8, 1))
        sample = text[starts + torch.arange(LENGTH + 1)].to(options.device)
        optimizer.zero_grad()
        loss = cross_entropy(model(sample[:, :-1]).flatten(0, 1), sample[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        if step % 20 == 0 and rank == 0:
            print(f"step {step}: loss {loss.item():.3f}, {exchange.traffic.bytes_sent:,} bytes sent")


if __name__ == "__main__":
    main()
