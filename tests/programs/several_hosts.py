"""Trains with DDP and reports the host, for torchrun on several hosts."""

from __future__ import annotations

import argparse
import socket
import sys

import torch
import torch.distributed as dist
from small_task import data, in_process_group, network, options, register, report
from torch.nn.parallel import DistributedDataParallel


def train(chosen: argparse.Namespace) -> None:
    net, steps = network(), 0
    replica = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    register(replica, optimizer, chosen)
    inputs, targets = (part[dist.get_rank() :: dist.get_world_size()] for part in data().tensors)
    for _ in range(5 * chosen.epochs):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(replica(inputs), targets).backward()
        optimizer.step()
        steps += 1
    sys.stdout.write(f"\nhost {dist.get_rank()} {socket.gethostname()}\n")
    report(dist.get_rank(), net, steps)


if __name__ == "__main__":
    in_process_group(train, options(__doc__))
