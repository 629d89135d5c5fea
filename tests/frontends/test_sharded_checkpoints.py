"""Checkpoints of fully sharded models with a sparse reduce-scatter."""

from __future__ import annotations

import pytest
import torch
from checkpointing import refusal
from front_ends import SHAPES, Model
from laws import everywhere
from scattered import gradients, held, scattered, sparse
from sharding import exchanged, first, full, shard, uneven, uneven_loss
from states import same
from training import near, sgd, train

import horovod_sparse as hvs
from horovod_sparse.checkpoint import Checkpoints
from horovod_sparse.frontends.shards import shard_of

pytestmark = pytest.mark.mpi


class Run:
    """Training on the first ranks."""

    def __init__(self, mesh, spec="topka", make=sgd):
        self.model = shard(uneven(), mesh)
        self.optimizer = make(self.model)
        compression = hvs.parse(f"{spec}{',' if ':' in spec else ':'}density=0.05,dense_below=50")
        self.exchange = scattered(self.model, compression, self.optimizer)
        self.states = {"model": self.model, "optimizer": self.optimizer, "exchange": self.exchange}

    def train(self, rank, steps):
        train(self.optimizer, self.model, rank, steps, uneven_loss)
        return self

    def bits(self):
        moments = [state["momentum_buffer"] for state in self.optimizer.state.values()]
        return [full(self.model), self.exchange.state_dict(), [shard_of(one) for one in moments]]


MOMENTUM = "topka:memory=momentum"
SPECS = ["topka", "oktopk", "topka:memory=conef,compressor=quantize", f"{MOMENTUM},fresh=0.4,limit=1.5"]


@pytest.mark.parametrize("spec", [*SPECS, "hierarchical:node_ranks=2"])
def test_a_resumed_run_is_bitwise_identical_to_an_uninterrupted_one(comm, shards, folder, spec):
    checkpoints, rank = Checkpoints(folder), comm.Get_rank()
    run = Run(shards, spec).train(rank, range(3))
    checkpoints.save(3, **run.states)
    run.train(rank, range(3, 6))
    resumed = Run(shards, spec)
    restored = checkpoints.load(**resumed.states)
    assert everywhere(comm, (restored.step, restored.notes) == (3, ()))
    assert everywhere(comm, same(resumed.train(rank, range(3, 6)).bits(), run.bits()))


def test_the_state_of_another_rank_is_refused(comm, shards):
    if comm.Get_size() == 1:
        return
    run, rank = Run(shards).train(comm.Get_rank(), range(2)), comm.Get_rank()
    states = comm.allgather(run.exchange.state_dict())
    with pytest.raises(ValueError, match=f"rank {rank}: the state is that of shard"):
        run.exchange.load_state_dict(states[rank - 1])


CALLS = ("sparse_reduce_scatter", "sparse_all_reduce")


class Either:
    """Model and optimizer, whose gradients one of the calls exchanges; all ranks hold the model in either case."""

    def __init__(self, call, shards, mesh):
        self.call, self.mesh = call, mesh
        self.model = shard(uneven(), shards if call == CALLS[0] else mesh["shard"])
        self.states = {"model": self.model, "optimizer": sgd(self.model)}

    def exchange(self):
        compression = hvs.parse("topka:density=0.05,dense_below=50")
        if self.call == CALLS[0]:
            return scattered(self.model, compression, self.states["optimizer"])
        return exchanged(self.model, self.mesh, compression, self.states["optimizer"])


@pytest.mark.parametrize("saver", CALLS)
def test_fully_sharded_models_and_replicas_do_not_load_each_others_exchange(comm, shards, mesh, folder, saver):
    """The error names both calls; parameters and moments alone are loaded."""
    if comm.Get_size() == 1:  # exchanges nothing
        return
    loader, checkpoints = CALLS[CALLS.index(saver) - 1], Checkpoints(folder)
    saved, loaded = Either(saver, shards, mesh), Either(loader, shards, mesh)
    exchange = saved.exchange()
    train(saved.states["optimizer"], saved.model, comm.Get_rank(), range(2), uneven_loss)
    checkpoints.save(2, **saved.states)
    assert everywhere(comm, checkpoints.load(**loaded.states).step == 2)
    assert everywhere(comm, same(full(loaded.model), full(saved.model)))
    other, expected = loaded.exchange(), f"was saved by {saver}, but this model uses {loader}: use {saver} again, or"
    message = refusal(comm, lambda: checkpoints.load(**loaded.states))
    assert everywhere(comm, expected in message and f"before {loader} is called" in message)
    for load in (other.load_state_dict, lambda state: other.merge([state])):
        with pytest.raises(ValueError, match=expected):
            load(exchange.state_dict())
        with pytest.raises(ValueError, match=f"not one that {loader} has saved"):
            load({"buckets": []})
    comm.Barrier()


def test_a_state_of_local_steps_is_refused_by_name(comm, shards, mesh):
    model = shard(uneven(), mesh["shard"])
    group, compression = mesh.get_group("replicate"), hvs.parse("topka:density=0.05")
    local = hvs.LocalOptimizer(sgd(model), model.named_parameters(), 2, compression, process_set=group)
    state, exchange = local.exchange.state_dict(), Run(shards).exchange
    for load in (exchange.load_state_dict, lambda state: exchange.merge([state])):
        with pytest.raises(ValueError, match="saved by LocalOptimizer, but this model uses sparse_reduce_scatter"):
            load(state)


@pytest.fixture(scope="module")
def meshes(group, comm):
    """Meshes of the first ranks by their number, with their groups."""
    from torch.distributed.device_mesh import DeviceMesh

    sizes = range(1, comm.Get_size() + 1)
    return {size: (DeviceMesh("cpu", torch.arange(size)), first(size)) for size in sizes}


def test_residuals_that_are_compressed_need_the_same_number_of_ranks(comm, meshes):
    ranks, rank = comm.Get_size(), comm.Get_rank()
    if ranks < 3:
        return
    spec = "topka:memory=conef,compressor=quantize"
    run = Run(meshes[ranks][0], spec).train(rank, range(2))
    states = comm.allgather(run.exchange.state_dict())
    if rank < ranks - 1:
        run = Run(meshes[ranks - 1][0], spec)
        with pytest.raises(ValueError, match=f"'conef' compresses its error.* from {ranks} to {ranks - 1} ranks"):
            run.exchange.merge(states)
        with pytest.raises(ValueError, match=r"the states of ranks \[0\] are missing"):
            run.exchange.merge(states[1:])
    comm.Barrier()


def stock(start, steps):
    """Parameters of momentum SGD without shards, by the number of ranks of each step."""
    parameters, velocity = dict(start), dict.fromkeys(start, 0.0)
    for number, ranks in enumerate(steps):
        for name in start:
            velocity[name] = 0.9 * velocity[name] + sum(gradients(rank, number)[name] for rank in range(ranks)) / ranks
            parameters[name] = parameters[name] - 0.1 * velocity[name]
    return parameters


def continued(rank, mesh, checkpoints, spec, steps):
    """Train some steps from the last checkpoint, save one; return parameters and residuals as updates by layer."""
    model = shard(Model(), mesh)
    optimizer = sgd(model)
    exchange = scattered(model, sparse(spec), optimizer)
    states = {"model": model, "optimizer": optimizer, "exchange": exchange}
    checkpoints.load(**states)
    for number in steps:
        optimizer.zero_grad()
        model(gradients(rank, number)).backward()
        optimizer.step()
    checkpoints.save(steps.stop, **states)
    return dict(zip(SHAPES, full(model), strict=True)), held(exchange)


@pytest.mark.parametrize("spec", [MOMENTUM, "hierarchical:node_ranks=2,memory=momentum"])
@pytest.mark.parametrize("step", [-1, 1], ids=["fewer", "more"])
def test_another_number_of_ranks_continues_the_momentum(comm, meshes, folder, step, spec):
    """What stock has added to the parameters is there, or in a residual, also of steps with other ranks."""
    ranks, rank = comm.Get_size(), comm.Get_rank()
    old, new = (ranks, max(ranks - 1, 1))[::-step]
    start = {name: p.detach() for name, p in zip(SHAPES, Model().parameters(), strict=True)}
    found = None
    for size, steps in ((old, range(4)), (new, range(4, 8))):
        mesh, group = meshes[size]
        if rank < size:
            found = continued(rank, mesh, Checkpoints(folder, process_set=group), spec, steps)
        comm.Barrier()
    everyones = comm.allgather(found)[:new]
    if min(old, new) > 1:  # one rank alone keeps no residual
        expected = stock(start, [old] * 4 + [new] * 4)
        owed = {name: 0.1 / new * sum(residuals[name] for _, residuals in everyones) for name in SHAPES}
        assert near([everyones[0][0][name] - owed[name] for name in SHAPES], expected.values(), 1e-3)
        assert any(float(one.abs().max()) > 0.01 for one in owed.values())
