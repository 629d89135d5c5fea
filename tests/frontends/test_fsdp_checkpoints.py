"""Checkpoints of sharded models: bitwise identical with the same shards, and nothing lost with others."""

from __future__ import annotations

import pytest
import torch
from checkpointing import refusal
from combinations import halved
from laws import everywhere
from sharding import exchanged, first, full, grid, grids, masses, shard, uneven, uneven_loss
from states import same
from torch.distributed.fsdp import CPUOffloadPolicy
from training import mlp, near, sgd, train

import horovod_sparse as hvs
from horovod_sparse.checkpoint import Checkpoints
from horovod_sparse.frontends.shards import shard_of

pytestmark = pytest.mark.mpi

SPECS = {
    "topka": "topka:density=0.05,dense_below=0,bucket_bytes=400",
    "recommended": "recommended:density=0.05,collective=topka,wire=float32,dense_below=0,bucket_bytes=400",
    "small parameters": "recommended:density=0.05,collective=topka,wire=float32,dense_below=100",
    "oktopk": "oktopk:density=0.05,tau_partition=2,tau_threshold=2,dense_below=0",
}
OPTIMIZERS = {"SGD": sgd, "AdamW": lambda model: torch.optim.AdamW(model.parameters(), 0.01)}


class Run:
    """Training on the first ranks, in a grid of replicas and shards."""

    def __init__(self, mesh, spec="topka", optimizer="SGD", make=uneven, **of_fsdp):
        self.model = shard(make(), mesh["shard"], **of_fsdp)
        self.optimizer = OPTIMIZERS[optimizer](self.model)
        self.exchange = exchanged(self.model, mesh, hvs.parse(SPECS.get(spec, spec)), self.optimizer)
        self.states = {"model": self.model, "optimizer": self.optimizer, "exchange": self.exchange}

    def train(self, rank, steps):
        train(self.optimizer, self.model, rank, steps, uneven_loss)
        return self

    def moments(self):
        """The optimizer's state, complete."""
        states = self.optimizer.state_dict()["state"].values()
        return [
            value.full_tensor() if hasattr(value, "full_tensor") else value
            for state in states
            for value in state.values()
        ]

    def bits(self):
        return [full(self.model), self.exchange.state_dict(), [shard_of(one) for one in self.moments()]]


def most(comm):
    """Return the grid of all ranks that has as many replicas and shards as possible."""
    ranks = comm.Get_size()
    return (ranks // 2, 2) if ranks % 2 == 0 and ranks > 2 else (ranks, 1)


@pytest.fixture(scope="module")
def meshes(group, comm):
    """Every grid that fits, with the group of its ranks."""
    sizes = grids(comm.Get_size())
    return {size: (grid(*size), first(size[0] * size[1])) for size in sizes}


@pytest.mark.parametrize(
    ("spec", "optimizer", "call"), halved(["oktopk", "recommended"], OPTIMIZERS, ["save", "async_save"])
)
def test_a_resumed_run_is_bitwise_identical_to_an_uninterrupted_one(comm, meshes, folder, spec, optimizer, call):
    checkpoints, rank = Checkpoints(folder), comm.Get_rank()
    run = Run(meshes[most(comm)][0], spec, optimizer).train(rank, range(3))
    getattr(checkpoints, call)(3, **run.states, data={"batch": rank})
    run.train(rank, range(3, 6))
    resumed = Run(meshes[most(comm)][0], spec, optimizer)
    restored = checkpoints.load(**resumed.states)
    assert everywhere(comm, (restored.step, restored.data, restored.notes) == (3, {"batch": rank}, ()))
    assert everywhere(comm, same(resumed.train(rank, range(3, 6)).bits(), run.bits()))


def loaded(comm, meshes, folder, size, load=None, **settings):
    """Parameters, moments and states of the exchange after loading, on a grid of the first ranks, and the notes."""
    mesh, ranks = meshes[size]
    result, run, notes = (None, None), None, ()
    if comm.Get_rank() < size[0] * size[1]:
        run = Run(mesh, **settings)
        checkpoints = Checkpoints(folder, process_set=ranks)
        if load is None:
            run.train(comm.Get_rank(), range(3))
            checkpoints.save(3, **run.states)
        else:
            notes = load(checkpoints, run)
        result = ([full(run.model), run.moments()], run.exchange.state_dict())
    results = comm.allgather(result)
    return results[0][0], [state for _, state in results if state is not None], run, notes


def load_all(checkpoints, run):
    return checkpoints.load(**run.states).notes


def merge_files(folder):
    """Without Checkpoints: what the page of FSDP2 shows."""

    def load(checkpoints, run):
        restored = checkpoints.load(model=run.model, optimizer=run.optimizer)
        assert restored.step == 3
        files = sorted(folder.glob("exchange-*.pt"))
        state, notes = run.exchange.merge(torch.load(file, weights_only=True, mmap=True) for file in files)
        run.exchange.load_state_dict(state)
        return tuple(notes)

    return load


def near_masses(ours, theirs, names=("residual",)):
    for name in names:
        one, other = masses(ours, name), masses(theirs, name)
        if one.keys() != other.keys() or not near(one.values(), other.values(), 1e-6):
            return False
        assert name != "residual" or any(total.abs().sum() > 0 for total in other.values())
    return True


def check_transition(comm, meshes, folder, spec, old, new, by_files=False):
    """Parameters and moments are equal, and each element's residuals and velocities have the same sums."""
    settings = {"spec": spec, "optimizer": "AdamW" if spec == "small parameters" else "SGD"}
    before, states, _, _ = loaded(comm, meshes, folder, old, **settings)
    if by_files and comm.Get_rank() < len(states):
        torch.save(states[comm.Get_rank()], folder / f"exchange-{comm.Get_rank()}.pt")
    comm.Barrier()
    load = merge_files(folder) if by_files else load_all
    after, resumed, run, notes = loaded(comm, meshes, folder, new, load, **settings)
    assert everywhere(comm, same(after[0], before[0])), (old, new)
    if "recommended" not in SPECS[spec]:  # otherwise those that are shown are this rank's velocities
        assert everywhere(comm, same(after[1], before[1])), (old, new)
    if 1 in (old[0], new[0]):
        said = "residuals start empty" if old[0] == 1 else "residuals are dropped"
        expected = old[0] != new[0] and run is not None
        assert everywhere(comm, any(said in note for note in notes) == expected), (old, new, notes)
    else:
        names = ("residual", "velocity") if "recommended" in SPECS[spec] else ("residual",)
        assert everywhere(comm, near_masses(resumed, states, names)), (old, new)
    assert everywhere(comm, old != new or (same(resumed, states) and notes == ()))
    if run is not None:
        run.train(comm.Get_rank(), range(3, 6))
    final = comm.allgather(None if run is None else full(run.model))
    assert everywhere(comm, all(same(one, final[0]) for one in final if one is not None)), (old, new)


@pytest.mark.parametrize(
    "spec",
    ["topka", "recommended", *(pytest.param(spec, marks=pytest.mark.full) for spec in ("small parameters", "oktopk"))],
)
def test_training_continues_with_any_other_grid_of_replicas_and_shards(comm, meshes, folder, spec):
    others = [size for size in meshes if size != most(comm)] or [most(comm)]
    pairs = [(most(comm), one) for one in others] + [(one, most(comm)) for one in others]
    for number, (old, new) in enumerate(pairs if spec == "recommended" else pairs[::3]):
        check_transition(comm, meshes, folder / str(number), spec, old, new)


def test_files_of_all_ranks_can_be_merged_without_checkpoints(comm, meshes, folder):
    others = [size for size in meshes if size[0] > 1] or [(1, 1)]
    for new in dict.fromkeys([most(comm), others[0]]):
        check_transition(comm, meshes, folder / str(new[0]), "recommended", most(comm), new, by_files=True)


def test_each_shard_is_saved_once_and_all_of_it_without_code(comm, meshes, folder):
    (replicas, shards), rank = most(comm), comm.Get_rank()
    run = Run(meshes[replicas, shards][0], optimizer="AdamW").train(rank, range(1))
    Checkpoints(folder).save(1, **run.states)
    saved = [
        torch.load(folder / f"step-00000001/rank-{one:05d}.pt", weights_only=True) for one in range(comm.Get_size())
    ]
    names = ("0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias")
    paths = {("model", name) for name in names}
    paths |= {("optimizer", "state", index, name) for index in range(6) for name in ("exp_avg", "exp_avg_sq")}
    written = [set(one["shards"]) for one in saved]
    assert everywhere(comm, written == [paths] * shards + [set()] * (len(saved) - shards))
    shared = torch.load(folder / "step-00000001/shared.pt", weights_only=True)
    assert everywhere(comm, all(shared["model"][name].is_meta for name in names))


@pytest.mark.parametrize("direction", ["shards", "no shards"])
def test_complete_models_and_sharded_ones_load_each_other(comm, meshes, folder, direction):
    """Parameters and moments of a training that exchanges dense gradients, such as on a single node."""
    mesh, checkpoints = meshes[most(comm)][0], Checkpoints(folder)

    def make(sharded, batch):
        model = uneven()
        if sharded:
            shard(model, mesh["shard"])
        optimizer = OPTIMIZERS["AdamW"](model)
        train(optimizer, model, batch, range(2), uneven_loss)  # the same data on every rank
        return model, optimizer

    (model, optimizer), (other, another) = (
        make(sharded == direction, of) for of, sharded in enumerate(("no shards", "shards"))
    )
    checkpoints.save(1, model=model, optimizer=optimizer)
    assert everywhere(comm, checkpoints.load(model=other, optimizer=another).notes == ())

    def complete(state):
        return {key: value.full_tensor() if hasattr(value, "full_tensor") else value for key, value in state.items()}

    assert everywhere(comm, same(complete(other.state_dict()), complete(model.state_dict())))
    states = zip(optimizer.state_dict()["state"].values(), another.state_dict()["state"].values(), strict=True)
    assert everywhere(comm, all(same(complete(ours), complete(expected)) for expected, ours in states))


class Failing:
    """Object whose state cannot be saved on one rank."""

    def state_dict(self):
        raise OSError("no space left")


def test_a_failed_save_keeps_the_earlier_checkpoint(comm, meshes, folder):
    rank, checkpoints = comm.Get_rank(), Checkpoints(folder)
    run = Run(meshes[most(comm)][0]).train(rank, range(1))
    checkpoints.save(1, **run.states)
    before = full(run.model)
    run.train(rank, range(1, 2))
    message = refusal(comm, lambda: checkpoints.save(2, **run.states, broken=Failing()))
    assert everywhere(comm, "step 2 could not be saved: rank 0: no space left" in message)
    refused = refusal(comm, lambda: checkpoints.save(2, **run.states, data={"mean": next(run.model.parameters())}))
    assert everywhere(comm, "data['mean'] is a DTensor" in refused)
    assert everywhere(comm, checkpoints.load(**run.states).step == 1)
    assert everywhere(comm, same(full(run.model), before))


def test_checkpoints_of_other_models_are_refused_on_every_rank(comm, meshes, folder):
    (replicas, shards), rank = most(comm), comm.Get_rank()
    mesh, checkpoints = meshes[replicas, shards][0], Checkpoints(folder)
    compressed = "randomk:density=0.05,memory=conef,compressor=quantize,dense_below=0"
    run = Run(mesh, compressed).train(rank, range(2))
    checkpoints.save(1, **run.states)
    if shards > 1:  # the same ranks with one shard
        other = Run(meshes[replicas * shards, 1][0], compressed)
        message = refusal(comm, lambda: checkpoints.load(**other.states))
        assert everywhere(comm, "in a compressed form" in message and "the number of shards" in message)
    dense = shard(mlp(), mesh["shard"])
    message = refusal(comm, lambda: checkpoints.load(model=dense, optimizer=sgd(dense)))
    assert everywhere(comm, "model.0.weight has shape (63, 12) in the state, but (24, 12) here" in message)
    if replicas > 1:
        message = refusal(comm, lambda: checkpoints.load(**Run(mesh, compressed, make=mlp).states))
        assert everywhere(comm, "none of ['0.bias'" in message and "of the same model" in message)
        states = comm.allgather(run.exchange.state_dict())
        with pytest.raises(
            ValueError, match=rf"rank {rank}: the state is that of replica .* states of all ranks to merge"
        ):
            run.exchange.load_state_dict(states[(rank + shards) % len(states)])
        with pytest.raises(ValueError, match=r"states of replicas \[\d.*\] are missing: pass those of all ranks"):
            run.exchange.merge([])
        others = [state for number, state in enumerate(states) if number != rank]
        with pytest.raises(ValueError, match=r"pass (those|the states) of all ranks"):
            run.exchange.merge(others)
        with pytest.raises(ValueError, match=r"saved by \[\d, 7\] replicas: pass those of one save"):
            run.exchange.merge([*others, {**states[rank], "replicas": 7}])
    comm.Barrier()
    plain, layer = Checkpoints(folder.parent / "plain"), uneven()
    plain.save(1, model=layer, optimizer=sgd(layer))
    notes = plain.load(**Run(mesh).states).notes
    assert everywhere(comm, any("residuals start empty" in note for note in notes))


def test_offloaded_parameters(comm, meshes, folder):
    """FSDP keeps shards on the host, where they are exchanged and saved."""
    rank, checkpoints, policy = comm.Get_rank(), Checkpoints(folder), CPUOffloadPolicy(pin_memory=False)
    mesh = meshes[most(comm)][0]
    run, plain = Run(mesh, "recommended", offload_policy=policy), Run(mesh, "recommended")
    for one in (run, plain):
        one.train(rank, range(3))
    checkpoints.save(3, **run.states)
    assert everywhere(comm, same(run.bits(), plain.bits()))
    resumed = Run(mesh, "recommended", offload_policy=policy)
    checkpoints.load(**resumed.states)
    assert everywhere(comm, same(resumed.train(rank, range(3, 5)).bits(), plain.train(rank, range(3, 5)).bits()))
