"""The FSDP2 front end: dense HSDP's results at density 1, DDP's bits with one shard, and nothing lost."""

from __future__ import annotations

import gc
import time
import weakref

import pytest
import torch
from laws import everywhere
from sharding import exchanged, full, shard
from states import same
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from training import agree, loss_of, mlp, near, settings, sgd, train

import horovod_sparse as hvs
from horovod_sparse.frontends.shards import shard_of

pytestmark = pytest.mark.mpi

EVERYTHING = hvs.Compression.topka(**settings(density=1.0))
SPARSE = hvs.Compression.topka(**settings())


def mesh_of(comm, shards):
    return init_device_mesh("cpu", (comm.Get_size() // shards, shards), mesh_dim_names=("replicate", "shard"))


def trained(comm, mesh, compression=None, steps=4, make=mlp, optimizer=sgd, loss=loss_of, **of_fsdp):
    """Parameters after some steps of sparse exchange, or of torch's own HSDP without a compression."""
    model = shard(make(), mesh if compression is None else mesh["shard"], **of_fsdp)
    stepping = optimizer(model)
    exchange = None if compression is None else exchanged(model, mesh, compression, stepping)
    for step in range(steps):
        stepping.zero_grad()
        loss(model, comm.Get_rank(), step).backward()
        stepping.step()
    return full(model), exchange


OPTIMIZERS = {
    "SGD": sgd,
    "Nesterov": lambda model: sgd(model, nesterov=True, weight_decay=0.01),
    "Adam": lambda model: torch.optim.Adam(model.parameters(), 0.01, weight_decay=0.01),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), 0.01),
    "without momentum": lambda model: sgd(model, momentum=0, weight_decay=0.01),
}
POLICIES = {
    "bfloat16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
    "reduced in float32": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "float16": MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_mixed_precision(comm, mesh, policy):
    """Gradients are exchanged after FSDP has converted them to the dtype of the parameters."""

    def loss(model, rank, step):
        x = torch.randn(8, 12, generator=torch.Generator().manual_seed(1000 * rank + step))
        return model(x).float().square().mean()

    expected, _ = trained(comm, mesh, loss=loss, mp_policy=POLICIES[policy])
    ours, _ = trained(comm, mesh, EVERYTHING, loss=loss, mp_policy=POLICIES[policy])
    assert everywhere(comm, near(ours, expected, 1e-2))
    assert agree(comm, ours)
    sparse, _ = trained(comm, mesh, SPARSE, loss=loss, mp_policy=POLICIES[policy])
    assert agree(comm, sparse)


def single(spec):
    """One parameter in each bucket, so that what is selected does not depend on the order of the parameters."""
    return hvs.parse(f"{spec}{',' if ':' in spec else ':'}density=0.05,dense_below=0,bucket_bytes=4")


RECOMMENDED, OKTOPK = "recommended:wire=float32", "oktopk:tau_partition=2,tau_threshold=2"


@pytest.mark.parametrize(
    ("spec", "optimizer"),
    [
        *[(RECOMMENDED, optimizer) for optimizer in OPTIMIZERS],
        *[(spec, "SGD") for spec in ("topka", OKTOPK)],
        ("topka:memory=momentum,momentum=0.9", "without momentum"),
    ],
)
def test_with_one_shard_fsdp_is_bitwise_identical_to_ddp(comm, group, spec, optimizer):
    """Momentum and its buffers in the optimizer's state included, all of which are distributed tensors here."""
    make, mesh, model, rank = OPTIMIZERS[optimizer], mesh_of(comm, 1), mlp(), comm.Get_rank()
    expected = make(model)
    replica = DistributedDataParallel(model)
    state = hvs.ddp.SparseState(single(spec), expected, model.named_parameters())
    replica.register_comm_hook(state, hvs.ddp.sparse_hook)
    train(expected, replica, rank, range(6))
    sharded = shard(mlp(), mesh["shard"])
    optimizer = make(sharded)
    exchanged(sharded, mesh, single(spec), optimizer)
    train(optimizer, sharded, rank, range(6))
    assert everywhere(comm, same(full(sharded), [p.detach() for p in model.parameters()]))
    states = (one.state_dict()["state"].values() for one in (optimizer, expected))
    for ours, theirs in zip(*states, strict=True):
        assert everywhere(comm, same({key: shard_of(value) for key, value in ours.items()}, theirs))


def test_a_single_replica_clips_its_gradient_by_the_norm_over_its_shards(comm, group):
    mesh, most, rank = mesh_of(comm, comm.Get_size()), 0.05, comm.Get_rank()
    model, reference = mlp(), mlp()
    optimizer = sgd(shard(model, mesh["shard"]), momentum=0, lr=1)
    exchanged(model, mesh, hvs.Compression.dgc(**settings(density=1.0), momentum=0.0, max_norm=most), optimizer)
    train(optimizer, model, rank, [0])
    mine = torch.autograd.grad(loss_of(reference, rank, 0), list(reference.parameters()))
    mean = sum(comm.allgather(nn.utils.parameters_to_vector(mine))) / comm.Get_size()
    expected = nn.utils.parameters_to_vector(reference.parameters()).detach() - mean * most / mean.norm()
    assert everywhere(comm, near([nn.utils.parameters_to_vector(full(model))], [expected], 1e-5))
    assert everywhere(comm, most < mean.norm())


def test_a_model_of_several_outermost_fsdp_modules(comm, mesh):
    """Each reduces its last gradients in a callback of its own, at the end of the backward pass."""
    results = []
    for compression in (None, EVERYTHING):
        model = mlp()
        for layer in model[::2]:
            fully_shard(layer, mesh=mesh if compression is None else mesh["shard"])
        optimizer = sgd(model)
        exchange = None if compression is None else exchanged(model, mesh, compression, optimizer)
        train(optimizer, model, comm.Get_rank(), range(4))
        results.append(full(model))
    assert everywhere(comm, near(*results, 1e-4))
    assert agree(comm, results[1])
    if mesh["replicate"].size() > 1:
        assert everywhere(comm, exchange._exchange.worker.progress().position == (4, 0))  # one exchange in each step


def test_buckets_follow_the_fsdp_modules(comm, mesh):
    """Parameters of the outermost module come last: FSDP reduces their gradients at the end of the backward pass."""
    if mesh["replicate"].size() == 1:
        return
    model = nn.Linear(12, 12)  # with its own parameters
    model.blocks, model.last = nn.ModuleList(nn.Linear(12, 12) for _ in range(3)), nn.Linear(12, 4)
    shard(model, mesh["shard"], model.blocks)
    exchange = exchanged(model, mesh, hvs.parse("topka:dense_below=0,bucket_bytes=4"), None)
    names = [name for bucket in exchange.state_dict()["buckets"] for name in bucket["parameters"]]
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in names if " " not in name))
    assert everywhere(comm, layers == ["blocks.2", "blocks.1", "blocks.0", "last", ""])


def test_the_exchange_begins_during_the_backward_pass(comm, mesh):
    if mesh["replicate"].size() == 1:
        return
    model = shard(mlp(), mesh["shard"])
    optimizer = sgd(model)
    exchange = exchanged(model, mesh, single("topka"), optimizer)
    model[1].register_full_backward_hook(lambda *_: time.sleep(0.1))  # the first layer follows
    train(optimizer, model, comm.Get_rank(), range(3))
    statistics = exchange.statistics()
    assert everywhere(comm, statistics["bucket0/seconds_hidden"] > 0)


def test_uneven_and_empty_shards(comm, mesh):
    def make():
        torch.manual_seed(7)
        return nn.Sequential(nn.Linear(12, 25), nn.Tanh(), nn.Linear(25, 1))

    def loss(model, rank, step):
        return model(torch.full((2, 12), 0.1 * (rank + step + 1))).square().sum()

    expected, _ = trained(comm, mesh, make=make, loss=loss)
    for compression in (EVERYTHING, hvs.Compression.topka(density=1.0)):
        ours, _ = trained(comm, mesh, compression, make=make, loss=loss)
        assert everywhere(comm, near(ours, expected, 1e-4))
    sparse, _ = trained(comm, mesh, single("recommended"), make=make, loss=loss)
    assert agree(comm, sparse)


def test_recommended_without_a_density(comm, mesh):
    """Ranks with different shards may choose different densities."""
    ours, _ = trained(comm, mesh, hvs.Compression.recommended(dense_below=0), steps=12)
    assert agree(comm, ours)


@pytest.mark.full
def test_a_compiled_model(comm, mesh):
    results = []
    for compiled in (False, True):
        model = shard(mlp(), mesh["shard"])
        optimizer = sgd(model)
        exchange = exchanged(model, mesh, SPARSE, optimizer)
        train(optimizer, torch.compile(model, backend="eager") if compiled else model, comm.Get_rank())
        results.append([full(model), exchange.traffic.bytes_sent])
    assert everywhere(comm, near(results[0][0], results[1][0], 1e-5))
    assert everywhere(comm, results[0][1] == results[1][1])


def test_one_replica_exchanges_nothing(comm, group):
    mesh = mesh_of(comm, comm.Get_size())
    expected, _ = trained(comm, mesh)
    ours, exchange = trained(comm, mesh, hvs.Compression.recommended(0.01))
    assert everywhere(comm, same(ours, expected))
    assert everywhere(comm, exchange.traffic.bytes_sent == 0)


@pytest.mark.parametrize(("compression", "optimizer"), [(SPARSE, "SGD"), (single("recommended"), "AdamW")])
def test_a_resumed_run_is_bitwise_identical_to_an_uninterrupted_one(comm, mesh, tmp_path, compression, optimizer):
    """Model and optimizer with torch.distributed.checkpoint, the exchange with a file of each rank."""
    rank, path = comm.Get_rank(), comm.bcast(tmp_path)
    runs = []
    for _ in range(2):
        model = shard(mlp(), mesh["shard"])
        stepping = OPTIMIZERS[optimizer](model)
        runs.append((model, stepping, exchanged(model, mesh, compression, stepping)))
    (model, stepping, exchange), (resumed, other, resumed_exchange) = runs
    train(stepping, model, rank, range(3))
    states = dict(zip(("model", "optimizer"), get_state_dict(model, stepping), strict=True))
    dcp.save(states, checkpoint_id=path / "sharded")
    torch.save(exchange.state_dict(), path / f"exchange-{rank}.pt")
    states = dict(zip(("model", "optimizer"), get_state_dict(resumed, other), strict=True))
    dcp.load(states, checkpoint_id=path / "sharded")
    set_state_dict(resumed, other, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    resumed_exchange.load_state_dict(torch.load(path / f"exchange-{rank}.pt", weights_only=True))
    for one, steps in ((model, stepping), (resumed, other)):
        train(steps, one, rank, range(3, 6))
    assert everywhere(comm, same(full(resumed), full(model)))
    assert everywhere(comm, same(resumed_exchange.state_dict(), exchange.state_dict()))


def refused(comm, kind, message, model, mesh, compression=SPARSE, optimizer=None, **more):
    """Expects an error on every rank."""
    arguments = {"group": mesh.get_group("replicate"), "compression": compression, "optimizer": optimizer, **more}
    with pytest.raises(kind, match=message):
        hvs.fsdp.sparse_all_reduce(model, **arguments)
    comm.Barrier()


def test_bad_input_is_refused_on_every_rank(comm, mesh):
    rank, plain, model = comm.Get_rank(), mlp(), shard(mlp(), mesh["shard"])
    refused(comm, TypeError, "group must be a process group.*get_group", model, mesh, group=mesh["replicate"])
    refused(comm, ValueError, "stall_abort must be", model, mesh, stall_abort=-1)
    refused(comm, ValueError, f"rank {rank}: no module of this Sequential is sharded by FSDP2", plain, mesh)
    one = FullyShardedDataParallel(mlp(), process_group=mesh.get_group("shard"), device_id=torch.device("cpu"))
    refused(comm, ValueError, f"rank {rank}: .*FSDP1.*fully_shard", one, mesh)
    done = shard(mlp().requires_grad_(False), mesh["shard"])
    refused(comm, ValueError, f"rank {rank}: no parameter requires gradients", done, mesh)
    part = mlp()
    fully_shard(part[0], mesh=mesh["shard"])
    refused(comm, ValueError, f"rank {rank}: 2.weight is not sharded by FSDP2", part, mesh)
    none = f"rank {rank}: .*needs the optimizer: pass optimizer to sparse_all_reduce"
    refused(comm, ValueError, none, model, mesh, hvs.Compression.recommended(0.01))
    scaler = torch.amp.GradScaler("cpu")
    refused(comm, ValueError, f"rank {rank}: a grad_scaler needs exactly one", model, mesh, grad_scaler=scaler)
    if mesh["replicate"].size() > 1:
        native = shard(mlp(), mesh)
        refused(comm, ValueError, f"rank {rank}: 0.weight is replicated in FSDP's own mesh.*mesh=mesh", native, mesh)
    if mesh["shard"].size() > 1:
        group = mesh.get_group("shard")
        refused(comm, ValueError, f"rank {rank}: 0.weight is sharded over ranks", model, mesh, group=group)
    exchanged(model, mesh, SPARSE, sgd(model))
    before = f"rank {rank}: sparse_all_reduce was called for this model before"
    refused(comm, ValueError, before, model, mesh)
    with pytest.raises(ValueError, match=before):
        hvs.fsdp.sparse_reduce_scatter(model, SPARSE)


def fails(comm, message, backward):
    with pytest.raises((RuntimeError, ValueError), match=message):
        backward()
    comm.Barrier()


def test_gradients_that_cannot_be_exchanged_fail_in_the_backward_pass(comm, mesh):
    if mesh["replicate"].size() == 1:
        return
    rank = comm.Get_rank()
    torch.manual_seed(rank // mesh["shard"].size())
    model = shard(nn.Sequential(nn.Linear(12, 4)), mesh["shard"])
    exchanged(model, mesh, SPARSE, None)
    fails(comm, r"before the first step differs.*0\.(weight|bias)", lambda: loss_of(model, rank, 0).backward())

    def interrupt(*_):
        raise KeyError("interrupted")

    model = shard(mlp(), mesh["shard"])
    exchanged(model, mesh, SPARSE, None)
    loss_of(model, rank, 0).backward()
    handle = model[1].register_full_backward_hook(interrupt)
    with pytest.raises(KeyError, match="interrupted"):
        loss_of(model, rank, 1).backward()
    handle.remove()
    model.reset_iter_state()
    again = f"rank {rank}: the last backward pass failed after gradients of it were exchanged.*start again"
    fails(comm, again, lambda: loss_of(model, rank, 1).backward())


def half_frozen():
    model = mlp()
    model[0].bias.requires_grad_(False)
    return model


def test_after_the_error_about_a_frozen_parameter_training_goes_on(comm, mesh):
    """Bitwise equal to a run without the error: nothing was exchanged before it."""
    if mesh["replicate"].size() == 1:
        return
    rank, results = comm.Get_rank(), []
    for mistaken in (False, True):
        model = shard(half_frozen(), mesh["shard"])
        optimizer = sgd(model)
        exchange = exchanged(model, mesh, single("topka"), optimizer)
        train(optimizer, model, rank, [0])
        if mistaken:
            model[0].bias.requires_grad_(True)
            error = f"rank {rank}: the gradient of 0.bias is not exchanged"
            fails(comm, error, lambda: loss_of(model, rank, 1).backward())  # noqa: B023
            model[0].bias.requires_grad_(False)
        train(optimizer, model, rank, range(1, 4))
        results.append([full(model), exchange.state_dict()])
    assert everywhere(comm, same(*results))


def test_an_error_after_gradients_were_submitted_leaves_no_step_in_progress(comm, mesh):
    """Where only parts of the model run, no earlier moment is known; the next step is complete, or refused."""
    if mesh["replicate"].size() == 1:
        return
    rank, model = comm.Get_rank(), half_frozen()
    for layer in model[::2]:
        fully_shard(layer, mesh=mesh["shard"])
    worker = exchanged(model, mesh, single("topka"), None)._exchange.worker

    def in_parts(model, rank, step):
        return loss_of(nn.Sequential(*model), rank, step)

    train(sgd(model), model, rank, [0], in_parts)
    assert everywhere(comm, worker.progress().position == (1, 0))
    model[0].bias.requires_grad_(True)
    fails(comm, f"rank {rank}: the gradient of 0.bias", lambda: in_parts(model, rank, 1).backward())
    assert everywhere(comm, worker.interrupted or not worker.step.active)


def test_parameters_that_were_replaced_are_refused(comm, mesh):
    """The hooks are on the old ones. Loaded in place, or gathered for an evaluation, they are the same."""
    rank, model = comm.Get_rank(), shard(mlp(), mesh["shard"])
    optimizer = sgd(model)
    exchange = exchanged(model, mesh, SPARSE, optimizer)
    for _ in range(2):
        model.load_state_dict(model.state_dict())
        with torch.no_grad():
            loss_of(model, rank, 0)
        train(optimizer, model, rank, [0])
    model.load_state_dict(model.state_dict(), assign=True)
    with torch.no_grad():
        loss_of(model, rank, 0)
    if mesh["replicate"].size() > 1:
        sent = exchange.traffic.bytes_sent
        replaced = rf"rank {rank}: 0.weight was replaced .*load without assign=True"
        fails(comm, replaced, lambda: loss_of(model, rank, 0).backward())
        assert everywhere(comm, exchange.traffic.bytes_sent == sent)


def set_factor(model, mesh, factor=2.0):
    for module in (model[0], model[2], model[4], model):
        module.set_gradient_divide_factor(factor)
        # Gloo cannot multiply. With one shard, torch 2.13 would divide twice.
        module.set_force_sum_reduction_for_comms(mesh["shard"].size() > 1)


def test_a_divide_factor_is_refused_with_an_equivalent_remedy(comm, mesh):
    rank, message = comm.Get_rank(), r"set_gradient_divide_factor.* by shards \* replicas / factor"
    gradients = []
    for expected in (True, False):
        model = shard(mlp(), mesh if expected else mesh["shard"])
        if expected:
            set_factor(model, mesh)
        else:
            exchanged(model, mesh, EVERYTHING, None)
        (loss_of(model, rank, 0) * (1 if expected else comm.Get_size() / 2.0)).backward()
        gradients.append([p.grad.full_tensor() for p in model.parameters()])
    assert everywhere(comm, near(*gradients, 1e-5))
    if mesh["replicate"].size() > 1:
        set_factor(model, mesh)
        fails(comm, f"rank {rank}: {message}", lambda: loss_of(model, rank, 1))
    model = shard(mlp(), mesh["shard"])
    set_factor(model, mesh)
    refused(comm, ValueError, f"rank {rank}: {message}", model, mesh)


@pytest.mark.parametrize("replicas", ["", "one"])
def test_the_exchange_lives_as_long_as_the_model(comm, mesh, replicas):
    mesh = mesh_of(comm, comm.Get_size()) if replicas else mesh
    model = shard(mlp(), mesh["shard"])
    optimizer = sgd(model)
    exchange = weakref.ref(exchanged(model, mesh, SPARSE, optimizer))
    train(optimizer, model, comm.Get_rank())
    gc.collect()
    assert everywhere(comm, exchange() is not None)
    del model, optimizer
    gc.collect()
    assert everywhere(comm, exchange() is None)


def parallel(comm, mesh):
    """Return a model of which two layers are sharded over two tensor-parallel ranks, too, and the norm is not."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(12, 10), nn.LayerNorm(10), nn.Linear(10, 4))
    columns = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh["parallel"], {"0": columns, "2": columns})
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh["shard"])
    return fully_shard(model, mesh=mesh["shard"])


def test_tensor_parallel_ranks_do_not_diverge(comm, group):
    """Parameters that all of them hold are sent dense, as they would select different elements."""
    if comm.Get_size() % 2:
        return
    sizes = (comm.Get_size() // 2, 1, 2)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard", "parallel"))
    model = parallel(comm, mesh)
    same_elements = r"rank \d: 1\.weight has 1 shards on the 2 ranks of a replica.*dense_below above its 10 elements"
    refused(comm, ValueError, same_elements, model, mesh, single("topka"))
    optimizer = sgd(model)
    exchanged(model, mesh, hvs.parse("topka:density=0.05,dense_below=11"), optimizer)
    train(optimizer, model, comm.Get_rank() // 2, range(6))
    assert agree(comm, full(model))
