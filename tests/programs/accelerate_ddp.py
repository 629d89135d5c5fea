"""Trains with Accelerate, whose DDP exchange is its own or sparse: start it with mpirun or torchrun."""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from accelerate import Accelerator
from small_task import data, in_process_group, network, options, register, report, trained
from torch.utils.data import DataLoader, DistributedSampler


def train(chosen: argparse.Namespace) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=chosen.accumulate)
    assert accelerator.num_processes == dist.get_world_size(), "Accelerator needs cpu=True on CPUs"
    net = network(chosen.lora)
    optimizer = torch.optim.SGD(trained(net), lr=0.02, momentum=0.9)
    model, optimizer = accelerator.prepare(net, optimizer)
    register(model, optimizer.optimizer, chosen)
    sampler = DistributedSampler(data(), seed=3)
    batches, steps = DataLoader(data(), batch_size=8, sampler=sampler), 0
    for epoch in range(chosen.epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in batches:
            with accelerator.accumulate(model):
                accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
                if accelerator.sync_gradients and chosen.clip:
                    accelerator.clip_grad_norm_(model.parameters(), chosen.clip)
                optimizer.step()
                optimizer.zero_grad()
                steps += accelerator.sync_gradients
    report(dist.get_rank(), net, steps)


if __name__ == "__main__":
    in_process_group(train, options(__doc__))
