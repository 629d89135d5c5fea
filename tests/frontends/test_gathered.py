"""Parameters gathered in 8 or 4 bits: the same bits on all ranks, exact shards, and training as with rounded ones."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from combinations import halved
from laws import everywhere
from sharding import full, shard, uneven, uneven_loss
from states import same
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint
from training import adamw, agree, loss_of, mlp, near, settings, sgd, train

import horovod_sparse as hvs
from horovod_sparse.frontends.shards import shard_of

pytestmark = pytest.mark.mpi

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SIZES = {8: 256, 4: 64}  # values of a block by their bits


def rounded_model(model, mesh, bits=8, **of_fsdp):
    model = shard(model, mesh, **of_fsdp)
    hvs.fsdp.rounded_all_gather(model, bits)
    return model


def units(model):
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def gathered(model, async_op=False):
    """Return what the forward pass sees of each parameter."""
    waiting = [unit.unshard(async_op=async_op) for unit in units(model)]
    for handle in waiting:
        if handle is not None:
            handle.wait()
    seen = [p.detach().clone() for p in model.parameters()]
    for unit in units(model):
        unit.reshard()
    return seen


def rounded(p, ranks, bits, dtype=torch.float32, dim=0):
    """Round a complete parameter as its owners do, in float64: a reference."""
    if ranks == 1 or p.ndim == 1:
        return p.to(dtype)
    most, chunks = 2 ** (bits - 1) - 1, []
    for chunk in p.to(dtype).split(-(-p.shape[dim] // ranks), dim):
        blocks = chunk.double().flatten().split(SIZES[bits])
        scales = [(block.abs().max() / most).bfloat16().double() for block in blocks]
        parts = [(block / scale).round() * scale for block, scale in zip(blocks, scales, strict=True)]
        chunks.append(torch.cat(parts).view(chunk.shape))
    return torch.cat(chunks, dim).to(dtype)


def reference(model, ranks, bits, dtype=torch.float32):
    return [rounded(p.detach(), ranks, bits, dtype) for p in model.parameters()]


def normed():
    """Return a model with a unit that has vectors only."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(12, 24), nn.LayerNorm(24), nn.Linear(24, 4))


@pytest.mark.parametrize(("dtype", "bits"), halved(DTYPES, SIZES))
def test_all_ranks_gather_the_same_bits(comm, shards, bits, dtype):
    """Those of the reference, rounded by half a step at most, after mixed precision; vectors and shards are exact."""
    for make in (mlp, uneven, normed):
        exact = make().to(torch.float64 if dtype == torch.float64 else torch.float32)
        policy = MixedPrecisionPolicy(param_dtype=dtype)
        model = rounded_model(copy.deepcopy(exact), shards, bits, mp_policy=policy)
        seen = gathered(model)
        assert agree(comm, seen)
        assert everywhere(comm, same(seen, reference(exact, comm.Get_size(), bits, dtype)))
        for p, one in zip(exact.parameters(), seen, strict=True):
            limit = 0.502 / (2 ** (bits - 1) - 1) * p.abs().max() + 0.01 * (dtype in (torch.bfloat16, torch.float16))
            assert everywhere(comm, bool((p - one).abs().max() <= limit))
            assert everywhere(comm, comm.Get_size() == 1 or p.ndim == 1 or not torch.equal(p.to(dtype), one))
        assert everywhere(comm, same(full(model), [p.detach() for p in exact.parameters()]))
        assert everywhere(comm, same(gathered(model, async_op=True), seen))


def test_parameters_that_the_format_represents_train_as_with_fsdp(comm, shards):
    """The first step has FSDP2's bits."""
    torch.manual_seed(7)
    exact = uneven()
    for p in exact.parameters():
        if p.ndim > 1:  # each block has a level of 127
            p.data = torch.randint(-126, 127, p.shape) / 1024
            p.data[:, :2] = 127 / 1024
    results = []
    for bits in (None, 8):
        model = shard(copy.deepcopy(exact), shards)
        if bits is not None:
            hvs.fsdp.rounded_all_gather(model, bits)
        loss = uneven_loss(model, comm.Get_rank(), 0)
        loss.backward()
        results.append([loss.detach(), *(p.grad.full_tensor() for p in model.parameters())])
    assert everywhere(comm, same(*results))


def expected(exact, ranks, bits, steps=range(4), optimizer=sgd, loss=loss_of, dim=0):
    """Return the parameters of a training in one process, whose passes see rounded parameters."""
    stepping = optimizer(exact)
    for step in steps:
        stepping.zero_grad()
        masters = [p.detach().clone() for p in exact.parameters()]
        with torch.no_grad():
            for p in exact.parameters():
                p.copy_(rounded(p.detach(), ranks, bits, dim=dim if p.ndim > 1 else 0))
        (sum(loss(exact, rank, step) for rank in range(ranks)) / ranks).backward()
        with torch.no_grad():
            for p, master in zip(exact.parameters(), masters, strict=True):
                p.copy_(master)
        stepping.step()
    return [p.detach() for p in exact.parameters()]


def tied():
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 4))
    model[2].weight = model[0].weight
    return model


class Checkpointed(nn.Module):
    """The layers of ``mlp`` with activation checkpointing."""

    def __init__(self):
        super().__init__()
        self.first, _, self.second, _, self.third = mlp()

    def forward(self, x):
        x = checkpoint(self.first, x, use_reentrant=False)
        return self.third(checkpoint(self.second, x.tanh(), use_reentrant=False).tanh())


def frozen():
    model = mlp()
    model[2].requires_grad_(False)
    return model


def columns(p):
    return Shard(1) if p.ndim > 1 and p.shape[1] % 12 == 0 else None


def narrow():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 12), nn.Tanh(), nn.Linear(12, 4))


# How models are made and sharded, where not as usual, and what is done to them before training.
SITUATIONS = {
    "usual": (mlp, {}, None),
    "unshards once": (mlp, {"reshard_after_forward": False}, None),
    "keeps part": (mlp, {"reshard_after_forward": 2}, None),
    "stays unsharded": (mlp, {}, lambda model: model.set_reshard_after_forward(False)),
    "waits late": (mlp, {}, lambda model: model._set_unshard_async_op(True)),
    "frozen": (frozen, {}, None),
    "activation checkpointing": (Checkpointed, {}, None),
    "offloaded": (mlp, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}, None),
    "by columns": (narrow, {"shard_placement_fn": columns}, None),
}


@pytest.mark.parametrize(("situation", "bits"), halved(SITUATIONS, SIZES))
def test_passes_see_rounded_parameters(comm, shards, situation, bits):
    """And the optimizer exact ones: the results are those of a training in one process."""
    ranks = comm.Get_size()
    make, of_fsdp, prepare = SITUATIONS[situation]
    if situation == "keeps part" and (ranks % 2 or ranks == 2):
        of_fsdp = {}  # FSDP needs a true divisor
    model = rounded_model(make(), shards, bits, **of_fsdp)
    if prepare is not None:
        prepare(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    train(optimizer, model, comm.Get_rank(), range(4))
    theirs = expected(make(), ranks, bits, optimizer=lambda one: sgd(one, momentum=0), dim=int(make is narrow))
    assert everywhere(comm, near(full(model), theirs, 1e-5))


def test_tied_weights(comm, shards):
    model = tied()
    fully_shard(model[4], mesh=shards)
    fully_shard(model, mesh=shards)
    hvs.fsdp.rounded_all_gather(model)
    train(sgd(model), model, comm.Get_rank(), range(4))
    assert everywhere(comm, near(full(model), expected(tied(), comm.Get_size(), 8), 1e-5))


@pytest.mark.full
def test_compiled_models(comm, shards):
    model = rounded_model(mlp(), shards)
    optimizer = sgd(model)
    train(optimizer, torch.compile(model, backend="eager"), comm.Get_rank(), range(4))
    assert everywhere(comm, near(full(model), expected(mlp(), comm.Get_size(), 8), 1e-5))


def test_evaluation_sees_rounded_parameters(comm, shards):
    model, exact = rounded_model(mlp(), shards, 4), mlp()
    with torch.no_grad():
        for p in exact.parameters():
            p.copy_(rounded(p, comm.Get_size(), 4))
        ours, theirs = (loss_of(one.eval(), 0, 0) for one in (model, exact))
    assert everywhere(comm, bool((ours - theirs).abs() < 1e-6))


def test_updates_below_a_rounding_step_accumulate(comm, shards):
    """A step changes hardly any level, 64 steps move all shards by their sum."""
    exact = nn.Sequential(nn.Linear(16, 16, bias=False))
    exact[0].weight.data = torch.linspace(-0.25, 0.25, 256).view(16, 16)
    exact[0].weight.data[:, 0] = 1.0  # the scale of each block, which no update changes
    model = rounded_model(copy.deepcopy(exact), shards, 4)
    x, seen = torch.ones(1, 16), gathered(model)[0]
    x[0, 0] = 0
    for step in range(64):
        for p in model.parameters():
            p.grad = None
        model(x).sum().backward()
        with torch.no_grad():
            for p in model.parameters():
                shard_of(p).sub_(shard_of(p.grad), alpha=2**-10)
        if step == 0 and comm.Get_size() > 1:
            assert everywhere(comm, bool((gathered(model)[0] == seen).float().mean() > 0.95))
    assert everywhere(comm, near([exact[0].weight - full(model)[0]], [x.expand(16, 16) * 64 / 2**10], 1e-5))


class Counting:
    """All-gather of a user that notes the bytes of this rank's messages."""

    def __init__(self, inner):
        self.inner, self.bytes = inner, []

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.bytes.append(input_tensor.numel() * input_tensor.itemsize)
        return self.inner(output_tensor, input_tensor, group, async_op)


@pytest.mark.parametrize("bits", [8, 4])
def test_bytes_of_a_step(comm, shards, bits):
    """Each parameter's shard is filled up to complete blocks, and sent twice; an all-gather of the user sends it."""
    ranks, model = comm.Get_size(), shard(mlp(), shards)
    counting = Counting(units(model)[1]._get_fsdp_state()._fsdp_param_group._all_gather_comm)
    for unit in units(model)[1:]:
        unit.set_custom_all_gather(counting)
    hvs.fsdp.rounded_all_gather(model, bits)
    loss_of(model, comm.Get_rank(), 0).backward()
    message = 0
    for p in mlp().parameters():
        elements = math.ceil(p.shape[0] / ranks) * (p.numel() // p.shape[0])
        blocks = math.ceil(elements / SIZES[bits])
        message += blocks * (2 + SIZES[bits] * bits // 8) if p.ndim > 1 else 4 * elements
    assert everywhere(comm, sum(counting.bytes) == (2 * message if ranks > 1 else 0))


@pytest.mark.parametrize("density", [1.0, 0.1])
def test_with_a_sparse_reduce_scatter(comm, shards, density):
    """At density 1, the results are those without one; below, two runs have the same bits."""
    results = []
    for sparse in (density < 1, True):
        model = rounded_model(uneven(), shards)
        optimizer = sgd(model)
        if sparse:
            compression = hvs.Compression.topka(**settings(density=density))
            hvs.fsdp.sparse_reduce_scatter(model, compression, optimizer)
        train(optimizer, model, comm.Get_rank(), range(4), uneven_loss)
        results.append(full(model))
    assert agree(comm, results[1])
    assert everywhere(comm, near(*results) if density == 1 else same(*results))


@pytest.mark.parametrize("sparse", [False, True])
def test_with_replicas(comm, mesh, sparse):
    """Over FSDP's own mesh of two dimensions, or with a sparse exchange between replicas."""
    model = rounded_model(mlp(), mesh["shard"] if sparse else mesh)
    optimizer = sgd(model)
    if sparse:
        everything = hvs.Compression.topka(**settings(density=1.0))
        hvs.fsdp.sparse_all_reduce(model, mesh.get_group("replicate"), everything, optimizer)
    train(optimizer, model, comm.Get_rank(), range(4))
    exact, ranks = mlp(), mesh["shard"].size()
    every = range(comm.Get_size())
    theirs = expected(exact, ranks, 8, loss=lambda one, rank, step: mean(one, every[rank::ranks], step))
    assert everywhere(comm, near(full(model), theirs, 1e-5))


def mean(model, ranks, step):
    return sum(loss_of(model, rank, step) for rank in ranks) / len(ranks)


def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(comm, shards):
    rank, results = comm.Get_rank(), []
    for resumed in (False, True):
        model = rounded_model(uneven(), shards, 4)
        optimizer = adamw(model)
        train(optimizer, model, rank, range(3), uneven_loss)
        if resumed:
            states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            model = rounded_model(uneven(), shards, 4)
            optimizer = adamw(model)
            model.load_state_dict(states[0])
            optimizer.load_state_dict(states[1])
        train(optimizer, model, rank, range(3, 6), uneven_loss)
        results.append(full(model))
    assert everywhere(comm, same(*results))


@pytest.mark.nightly
def test_training_ends_near_that_of_fsdp(comm, shards):
    losses = []
    for bits in (None, 8, 4):
        model = shard(mlp(), shards)
        if bits is not None:
            hvs.fsdp.rounded_all_gather(model, bits)
        optimizer = adamw(model)
        for _ in range(6):
            train(optimizer, model, 0, range(5))
        losses.append(float(sum(loss_of(model, 0, step) for step in range(5)).detach()))
    assert everywhere(comm, abs(losses[1] / losses[0] - 1) < 0.005)
    assert everywhere(comm, abs(losses[2] / losses[0] - 1) < 0.1)
    assert everywhere(comm, comm.Get_size() == 1 or len(set(losses)) == 3)


def test_parameters_that_are_not_finite_stay_in_their_block(comm, shards):
    model = rounded_model(nn.Sequential(nn.Linear(512, 6)), shards)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1 and comm.Get_rank() == 0:
                shard_of(p)[0, 0] = torch.inf
    weight = gathered(model)[0]
    assert everywhere(comm, not weight[0, 0].isfinite() and bool(weight[0, 256:].isfinite().all()))
    assert everywhere(comm, bool(weight[1:].isfinite().all()))


def test_blocks_of_zeros_and_of_tiny_numbers(comm, shards):
    model = rounded_model(nn.Sequential(nn.Linear(512, 6)), shards)
    with torch.no_grad():
        for p in model.parameters():
            shard_of(p).zero_()
            if p.ndim > 1:
                shard_of(p)[..., 256:] = 1.2e-38  # the scale has a single bit, and is too small
    weight = gathered(model)[0]
    assert everywhere(comm, bool((weight[:, :256] == 0).all() and (weight - weight[0]).abs().max() == 0))
    assert everywhere(comm, bool((weight[:, 256:] - 1.2e-38).abs().max() < 6e-40))


def test_the_bits_may_change(comm, shards):
    exact, model = mlp(), rounded_model(mlp(), shards)
    hvs.fsdp.rounded_all_gather(model, 4)
    assert everywhere(comm, same(gathered(model), reference(exact, comm.Get_size(), 4)))


def refused(comm, message, model, bits=8):
    with pytest.raises(ValueError, match=message):
        hvs.fsdp.rounded_all_gather(model, bits)
    comm.Barrier()


class Converted(torch.Tensor):
    """Tensor that FSDP gathers as its class says."""

    def fsdp_pre_all_gather(self, mesh):
        raise NotImplementedError


def test_what_is_not_supported_is_refused_by_name_on_every_rank(comm, shards, monkeypatch):
    rank, ranks = comm.Get_rank(), comm.Get_size()
    refused(comm, "no module of this Sequential is sharded", mlp())
    model = shard(mlp(), shards)
    refused(comm, f"rank {rank}: bits is 5, and rounded_all_gather supports 8 and 4", model, 5)
    if ranks > 1:
        refused(comm, "bits differs between ranks", model, 4 if rank else 8)
    several = mlp()
    several[2].to(torch.bfloat16).requires_grad_(False)
    fully_shard(several, mesh=shards)
    refused(comm, f"rank {rank}: .* gathered in torch.bfloat16 and torch.float32", several)
    with monkeypatch.context() as patched:
        patched.setattr("horovod_sparse.frontends.fsdp.gathering.shard_of", lambda p: Converted(shard_of(p)))
        refused(comm, f"rank {rank}: parameters of 0 are gathered by their class", model)
    monkeypatch.delattr("torch.distributed.fsdp.FSDPModule.set_custom_all_gather")
    refused(comm, r"needs FSDPModule.set_custom_all_gather of torch 2\.9", model)


def test_parameters_that_change_their_dtype_later(comm, shards):
    """All of them may; an error if they then differ."""
    model = rounded_model(mlp(), shards).to(torch.bfloat16)
    assert everywhere(
        comm, same(gathered(model), reference(mlp().to(torch.bfloat16), comm.Get_size(), 8, torch.bfloat16))
    )
    model = fully_shard(frozen(), mesh=shards)
    hvs.fsdp.rounded_all_gather(model)
    model[2].to(torch.bfloat16)
    if comm.Get_size() > 1:
        with pytest.raises(RuntimeError, match=f"rank {comm.Get_rank()}: FSDP gathers .* of torch.uint8"):
            gathered(model)
