"""Local steps of models that FSDP2 shards: each rank exchanges with those that hold the same shard."""

from __future__ import annotations

import pytest
import torch
from laws import everywhere
from sharding import first, full, grid, grids, masses, shard, uneven, uneven_loss
from states import same
from training import MEAN, agree, batch, mlp, near, settings, snapshot, train

import horovod_sparse as hvs
from horovod_sparse.checkpoint import Checkpoints
from horovod_sparse.frontends.shards import shard_of

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("group")]

EVERYTHING = hvs.Compression.topka(**settings(density=1.0))
SPARSE = hvs.Compression.topka(**settings())
every_stream = pytest.mark.parametrize(
    "stream",
    [
        pytest.param({}, id="round", marks=pytest.mark.full),
        pytest.param({"fragments": 2, "delay": 1}, id="streamed"),
        pytest.param({"delay": 2, "alpha": 0.5}, id="mixed", marks=pytest.mark.full),
    ],
)


def meshes(comm):
    """Return the grids that use all ranks, with two replicas or more; each rank has a part of each."""
    ranks = comm.Get_size()
    return [(replicas, shards) for replicas, shards in grids(ranks) if replicas * shards == ranks and replicas > 1]


def sharded(mesh, compression=SPARSE, dtype=torch.float32, **arguments):
    model = shard(uneven().to(dtype), mesh["shard"])
    optimizer = hvs.LocalOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.02),
        model.named_parameters(),
        4,
        compression,
        **{"process_set": mesh.get_group("replicate"), "outer": hvs.OuterSGD(), **arguments},
    )
    return model, optimizer


@every_stream
def test_shards_take_the_steps_of_complete_replicas(comm, stream):
    """At density 1: of local steps of one rank for each replica, whose batches are those of the replica's shards."""
    rank = comm.Get_rank()
    for replicas, shards in meshes(comm):
        mesh = grid(replicas, shards)
        model, optimizer = sharded(mesh, EVERYTHING, **stream)
        theirs = uneven()
        leaders = [torch.distributed.new_group([s + shards * r for r in range(replicas)]) for s in range(shards)]
        plain = hvs.LocalOptimizer(
            torch.optim.AdamW(theirs.parameters(), lr=0.02),
            theirs.named_parameters(),
            4,
            EVERYTHING,
            hvs.OuterSGD(),
            leaders[rank % shards],
            **stream,
        )

        def mean_loss(one, _, step, shards=shards):
            ranks = range(rank // shards * shards, rank // shards * shards + shards)
            return sum(uneven_loss(one, other, step) for other in ranks) / shards

        train(optimizer, model, rank, range(9), uneven_loss)
        train(plain, theirs, rank, range(9), mean_loss)
        assert everywhere(comm, near(full(model), snapshot(theirs), 1e-4))
        optimizer.synchronize()
        assert agree(comm, full(model))


@every_stream
def test_nothing_is_lost_and_replicas_agree(comm, stream):
    """The law of each element: with the mean outside, moved + residual is what plain replicas have moved."""
    rank = comm.Get_rank()
    for replicas, shards in meshes(comm):
        mesh = grid(replicas, shards)
        model, optimizer = sharded(mesh, SPARSE, outer=MEAN, **stream)
        start = full(model)
        moved = [torch.zeros_like(p, dtype=torch.float64) for p in start]
        for step in range(24):
            train_recording(optimizer, model, rank, step, moved)
        optimizer.synchronize()
        assert agree(comm, full(model))
        states = comm.allgather(optimizer.exchange.state_dict())
        residuals = masses(states)
        for name, p, one, begin in zip(dict(model.named_parameters()), full(model), moved, start, strict=True):
            given = sum(comm.allgather(one)) / (replicas * shards)  # every rank of a replica has recorded all of it
            held = residuals[name] / replicas
            assert everywhere(comm, near([(begin - p).double() + held], [given], 1e-4))


def train_recording(optimizer, model, rank, step, moved):
    """Take a step, and add what the wrapped optimizer has moved: a hook sees parameters before the exchange."""
    before = full(model)
    hook = optimizer.register_step_post_hook(
        lambda *_: [one.add_(b - p) for one, b, p in zip(moved, before, full(model), strict=True)]
    )
    train(optimizer, model, rank, [step], uneven_loss)
    hook.remove()


@every_stream
def test_checkpoints_resume_in_a_round_with_the_same_bits(comm, folder, stream):
    rank = comm.Get_rank()
    for number, (replicas, shards) in enumerate(meshes(comm)):
        mesh, place = grid(replicas, shards), folder / str(number)
        model, optimizer = sharded(mesh, **stream)
        train(optimizer, model, rank, range(5), uneven_loss)
        Checkpoints(place).save(5, model=model, optimizer=optimizer)
        train(optimizer, model, rank, range(5, 14), uneven_loss)
        fresh, resumed = sharded(mesh, **stream)
        Checkpoints(place).load(model=fresh, optimizer=resumed)
        train(resumed, fresh, rank, range(5, 14), uneven_loss)
        assert everywhere(comm, same(full(fresh), full(model)))


@every_stream
def test_other_numbers_of_shards_and_replicas_take_over_parameters_and_residuals(comm, folder, stream):
    rank, ranks = comm.Get_rank(), comm.Get_size()
    if ranks < 3:
        return
    replicas, shards = (2, 2) if ranks == 4 else (ranks, 1)
    mesh = grid(replicas, shards)
    model, optimizer = sharded(mesh, **stream)
    train(optimizer, model, rank, range(9), uneven_loss)
    Checkpoints(folder).save(9, model=model, optimizer=optimizer)
    before = masses(comm.allgather(optimizer.exchange.state_dict()))
    for new in ((2, 1), (ranks, 1)):
        if new == (replicas, shards):
            continue
        size, group = new[0] * new[1], first(new[0] * new[1])
        other = grid(*new)
        if rank >= size:
            comm.allgather(None)
            continue
        fresh, resumed = sharded(other, **stream)
        Checkpoints(folder, process_set=group).load(model=fresh, optimizer=resumed)
        states = [one for one in comm.allgather(resumed.exchange.state_dict()) if one is not None]
        after = masses(states)
        assert before.keys() == after.keys()
        assert all(near([before[name]], [after[name]], 1e-5) for name in before)
        train(resumed, fresh, rank, range(9, 14), uneven_loss)
        resumed.synchronize()
    comm.Barrier()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_scaler_skips_steps_of_shards(comm, dtype):
    rank = comm.Get_rank()
    for replicas, shards in meshes(comm):
        model, optimizer = sharded(grid(replicas, shards), EVERYTHING, dtype, delay=1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(8):
            optimizer.zero_grad()
            inputs, targets = batch(rank, step, dtype)
            scaler.scale((model(inputs) - targets[:, :1]).float().square().mean()).backward()
            if step == 2 + rank // shards and rank % shards == 0:  # FSDP2 spreads it over the shards of the replica
                shard_of(model[0].weight.grad).fill_(float("inf"))
            scaler.step(optimizer)
            scaler.update()
        assert everywhere(comm, scaler.get_scale() == 512.0)
        optimizer.synchronize()
        assert agree(comm, full(model))
        assert everywhere(comm, all(p.isfinite().all() for p in full(model)))


def test_shards_without_replicas_are_refused_by_name(comm):
    rank, ranks = comm.Get_rank(), comm.Get_size()
    if ranks == 1:
        return
    model = shard(mlp(), grid(1, ranks)["shard"])
    with pytest.raises(
        ValueError, match=rf"rank {rank}: 0\.weight is sharded .* \[0, 1.*mesh\.get_group\('replicate'\)"
    ):
        hvs.LocalOptimizer(torch.optim.SGD(model.parameters()), model.named_parameters(), 4, SPARSE)
