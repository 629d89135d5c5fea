"""The sparse reduce-scatter of fully sharded models: FSDP2's results at density 1, and nothing lost below it."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from front_ends import SHAPES, Model
from laws import everywhere
from sharding import first, full, shard, uneven, uneven_loss
from states import same
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from training import agree, loss_of, mlp, near, settings, sgd, train

import horovod_sparse as hvs
from horovod_sparse.checkpoint import Checkpoints
from horovod_sparse.frontends.fsdp import scattering
from horovod_sparse.frontends.shards import shard_of

pytestmark = pytest.mark.mpi

EVERYTHING = hvs.Compression.topka(**settings(density=1.0))
SPARSE = hvs.Compression.topka(**settings())


@pytest.fixture(scope="module")
def shards(group, comm):
    """A mesh of all ranks, each of which holds a shard."""
    from torch.distributed.tensor import debug

    debug._clear_sharding_prop_cache()  # has meshes that are equal, but of a process group that is gone
    return init_device_mesh("cpu", (comm.Get_size(),))


def scattered(model, compression, optimizer=None, **more):
    return hvs.fsdp.sparse_reduce_scatter(model, compression, optimizer, **more)


def trained(comm, mesh, compression=None, steps=4, make=mlp, optimizer=sgd, loss=loss_of, **of_fsdp):
    """Parameters after some steps of sparse exchange, or of torch's own FSDP2 without a compression."""
    model = shard(make(), mesh, **of_fsdp)
    stepping = optimizer(model)
    exchange = None if compression is None else scattered(model, compression, stepping)
    train(stepping, model, comm.Get_rank(), range(steps), loss)
    return full(model), exchange


OPTIMIZERS = {
    "SGD": lambda model: sgd(model, weight_decay=0.01),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), 0.01),
}


FULL = pytest.mark.full


@pytest.mark.parametrize("dense_below", [0, 50, pytest.param(10000, marks=FULL)])
@pytest.mark.parametrize("optimizer", ["SGD", pytest.param("AdamW", marks=FULL)])
@pytest.mark.parametrize(("make", "loss"), [(mlp, loss_of), (uneven, uneven_loss)], ids=["even", "uneven"])
def test_density_1_equals_fsdp(comm, shards, make, loss, optimizer, dense_below):
    compression = hvs.Compression.topka(density=1.0, dense_below=dense_below)
    how = {"make": make, "optimizer": OPTIMIZERS[optimizer], "loss": loss}
    expected, _ = trained(comm, shards, **how)
    ours, _ = trained(comm, shards, compression, **how)
    assert everywhere(comm, near(ours, expected))
    assert agree(comm, ours)


def gradients(rank, step, shapes=SHAPES):
    """Gradients that are eighths of small integers, whose sums are exact."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return {name: torch.randint(-64, 64, shape, generator=generator) / 8 for name, shape in shapes.items()}


def held(exchange, shapes=SHAPES):
    """Residual of this rank by parameter."""
    state = exchange.state_dict()
    found = {name: torch.zeros(shape) for name, shape in shapes.items()}
    for bucket in state["buckets"]:
        for name, (place, width) in state["layout"].get(bucket["parameters"][0], {}).items():
            target = found[name.partition(".")[0]]
            rows = bucket["memory"]["residual"].view(state["shards"], -1)[:, place : place + width]
            target.copy_(rows.flatten()[: target.numel()].view(target.shape))
    return found


def summed(comm, tensors):
    return {name: torch.from_numpy(comm.allreduce(tensor.numpy())) for name, tensor in tensors.items()}


class Given:
    """Training with prescribed gradients; notes what is neither in a gradient nor in a residual."""

    def __init__(self, comm, mesh, spec, optimizer=None, **more):
        self.comm, self.ranks = comm, comm.Get_size()
        self.model = shard(Model(), mesh)
        self.optimizer = None if optimizer is None else optimizer(self.model)
        self.exchange = scattered(self.model, sparse(spec), self.optimizer, **more)
        self.owed = {name: torch.zeros(shape) for name, shape in SHAPES.items()}

    def backward(self, step, used=tuple(SHAPES), add=False):
        """Compute gradients of the used layers."""
        mine = {name: one for name, one in gradients(self.comm.Get_rank(), step).items() if name in used}
        self.model(mine).backward()
        for name, total in summed(self.comm, mine).items():
            self.owed[name] += total

    def collect(self):
        """Subtract the gradients from what is owed, and clear them."""
        for name in SHAPES:
            gradient = getattr(self.model, name).weight.grad
            if gradient is not None:
                self.owed[name] -= self.ranks * gradient.full_tensor()
        self.model.zero_grad()

    def conserved(self):
        """Return whether the residuals are what is owed; a collective call."""
        residuals = summed(self.comm, held(self.exchange)) if self.ranks > 1 else self.owed
        return everywhere(self.comm, near(residuals.values(), self.owed.values(), 1e-3))


def sparse(spec):
    density = "" if spec.startswith("gravac") else "density=0.05,"
    return hvs.parse(f"{spec}{',' if ':' in spec else ':'}{density}dense_below=100")


def some(comm, tensors):
    """Return whether tensors are not zero, unless there is a single rank."""
    return everywhere(comm, comm.Get_size() == 1 or any(float(one.abs().max()) > 1 for one in tensors.values()))


QUICK = ["topka", "randomblock", "topka:wire=log4"]
RULES = [*QUICK, "oktopk", "gaussiank", "randomk", "stable", "topka:wire=float16"]


def check_conservation(comm, shards, spec, steps):
    training = Given(comm, shards, spec)
    for step in range(steps):
        training.backward(step)
        training.collect()
        if step % 20 == 9:
            assert training.conserved()
    return training


@pytest.mark.parametrize("spec", [spec if spec in QUICK else pytest.param(spec, marks=FULL) for spec in RULES])
def test_gradients_are_in_shards_or_residuals(comm, shards, spec):
    training = check_conservation(comm, shards, spec, 20)
    assert training.conserved()
    assert some(comm, training.owed)


SCHEDULES = [
    "topka:schedule=measured,trial=2,trial_steps=10",
    "topka:schedule=accordion,interval=2,steps_per_epoch=2",
    "topka:schedule=warmup,steps_per_epoch=2",
    "gravac:cf_min=20,window=1,cf_max=100",
    "topka:dense_steps=3",
]


@pytest.mark.full
@pytest.mark.parametrize("spec", SCHEDULES)
def test_schedules(comm, shards, spec):
    """Also where everything is sent in some steps."""
    assert check_conservation(comm, shards, spec, 20).conserved()


@pytest.mark.nightly
@pytest.mark.parametrize("spec", RULES)
def test_gradients_are_in_shards_or_residuals_over_500_steps(comm, shards, spec):
    assert check_conservation(comm, shards, spec, 500).conserved()


def test_an_owner_keeps_nothing_of_its_own_shard(comm, shards):
    training, rank = Given(comm, shards, "topka"), comm.Get_rank()
    if training.ranks == 1:
        return
    for step in range(3):
        training.backward(step)
    state = training.exchange.state_dict()
    rows = [bucket["memory"]["residual"].view(training.ranks, -1) for bucket in state["buckets"] if "memory" in bucket]
    others = [number for number in range(training.ranks) if number != rank]
    assert everywhere(comm, rows and all(not row[rank].any() and row[others].any() for row in rows))


def test_passes_without_synchronization_are_sent_with_the_next(comm, shards):
    training = Given(comm, shards, "topka")
    for step in range(6):
        training.model.set_requires_gradient_sync(step % 3 == 2)
        training.backward(step)
        assert step % 3 == 2 or training.exchange._exchange.worker.progress().position[0] == step // 3
        if step % 3 == 2:
            training.collect()
    assert training.conserved()
    assert some(comm, training.owed)


@pytest.mark.parametrize("optimizer", [None, sgd], ids=["no optimizer", "optimizer"])
def test_passes_before_a_step_may_all_be_exchanged(comm, shards, optimizer):
    training = Given(comm, shards, "topka", optimizer)
    for step in range(6):
        training.backward(step)
        if step % 3 == 2:
            if optimizer is not None:
                training.optimizer.step()
            training.collect()
    assert training.conserved()
    assert some(comm, training.owed)


def test_residuals_of_unused_parameters_are_neither_sent_nor_changed(comm, shards):
    """Of complete units, and of parameters in a unit that is used otherwise: FSDP then leaves them out."""
    for whole in (True, False):
        training = Given(comm, shards, "topka")
        if not whole:
            training.model = fully_shard(Model(), mesh=shards)
            training.exchange = scattered(training.model, hvs.parse("topka:density=0.05,dense_below=0"))
        for step in range(4):
            training.backward(step)
            training.collect()
        before = held(training.exchange)
        training.backward(4, used=("first", "second"))
        assert everywhere(comm, training.model.third.weight.grad is None)
        training.collect()
        assert everywhere(comm, training.ranks == 1 or same(held(training.exchange)["third"], before["third"]))
        training.backward(5, used=("third",))
        training.collect()
        training.backward(6)
        training.collect()
        assert training.conserved()
        assert some(comm, training.owed)


def test_frozen_parameters(comm, shards):
    training, rank = Given(comm, shards, "topka"), comm.Get_rank()
    training.backward(0)
    training.collect()
    before, third = held(training.exchange), training.model.third.weight
    third.requires_grad_(False)
    training.owed["third"] -= sum(gradients(one, 1)["third"] for one in range(training.ranks))
    training.backward(1)
    assert everywhere(comm, third.grad is None)
    training.collect()
    assert everywhere(comm, training.ranks == 1 or same(held(training.exchange)["third"], before["third"]))
    third.requires_grad_(True)
    training.backward(2)
    training.collect()
    assert training.conserved()
    model = shard(Model(), shards)
    model.third.weight.requires_grad_(False)
    scattered(model, SPARSE)
    model(gradients(rank, 0)).backward()
    model.third.weight.requires_grad_(True)
    if training.ranks > 1:
        with pytest.raises(RuntimeError, match=f"rank {rank}: the gradient of third.weight is not exchanged"):
            model(gradients(rank, 0)).backward()


def tied():
    model = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 4))
    torch.manual_seed(7)
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    model[2].weight = model[0].weight
    return model


def test_tied_weights(comm, shards):
    results = []
    for compression in (None, EVERYTHING):
        model = tied()
        fully_shard(model[4], mesh=shards)
        fully_shard(model, mesh=shards)
        optimizer = sgd(model)
        if compression is not None:
            scattered(model, compression, optimizer)
        train(optimizer, model, comm.Get_rank(), range(4))
        results.append(full(model))
    assert everywhere(comm, near(*results))


def test_clipping_by_the_norm_of_all_shards(comm, shards):
    results = []
    for compression in (None, EVERYTHING):
        model = shard(mlp(), shards)
        optimizer = sgd(model)
        if compression is not None:
            scattered(model, compression, optimizer)
        norms = []
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, comm.Get_rank(), step).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor())
            optimizer.step()
        results.append([*full(model), *norms])
    assert everywhere(comm, near(*results))


def test_several_outermost_modules(comm, shards):
    results = []
    for compression in (None, EVERYTHING):
        model = mlp()
        for layer in model[::2]:
            fully_shard(layer, mesh=shards)
        optimizer = sgd(model)
        exchange = None if compression is None else scattered(model, compression, optimizer)
        train(optimizer, model, comm.Get_rank(), range(4))
        results.append(full(model))
    assert everywhere(comm, near(*results))
    assert everywhere(comm, comm.Get_size() == 1 or exchange._exchange.worker.progress().position == (4, 0))


def test_param_groups_of_one_unit(comm, shards):
    """Each has a learning rate that its residuals follow."""
    results = []
    for compression in (None, EVERYTHING, SPARSE):
        model = shard(mlp(), shards)
        weights, biases = ([p for p in model.parameters() if (p.ndim > 1) == weight] for weight in (True, False))
        groups = [{"params": weights, "lr": 0.1}, {"params": biases, "lr": 0.05}]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        exchange = None if compression is None else scattered(model, compression, optimizer)
        train(optimizer, model, comm.Get_rank(), range(4))
        results.append(full(model))
    assert everywhere(comm, near(*results[:2]))
    assert everywhere(comm, comm.Get_size() == 1 or len(exchange._exchange.worker.buckets) == 6)


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_residuals_follow_the_learning_rate_as_updates_with_sgd_only(comm, shards, optimizer):
    """Of a falling rate; all updates are in the parameters or in a residual."""
    make = {"SGD": lambda model: sgd(model, momentum=0), "AdamW": lambda model: torch.optim.AdamW(model.parameters())}
    training = Given(comm, shards, "topka", make[optimizer])
    start, given, rates = full(training.model), dict.fromkeys(SHAPES, 0.0), [0.1, 0.1, 0.02, 0.001]
    for step, rate in enumerate(rates):
        training.optimizer.param_groups[0]["lr"] = rate
        training.backward(step)
        training.optimizer.step()
        for name, total in summed(comm, gradients(comm.Get_rank(), step)).items():
            given[name] = given[name] + rate * total / training.ranks
        training.collect()
    if training.ranks == 1:
        return
    residuals = summed(comm, held(training.exchange))
    if optimizer == "AdamW":
        assert training.conserved()
        return
    for name, before, after in zip(SHAPES, start, full(training.model), strict=True):
        owed = rates[-1] / training.ranks * residuals[name]
        assert everywhere(comm, near([before - after + owed], [given[name]], 1e-4))
    assert some(comm, residuals)


POLICIES = {
    "bfloat16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
    "reduced in float32": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_mixed_precision(comm, shards, policy):
    def loss(model, rank, step):
        x = torch.randn(8, 12, generator=torch.Generator().manual_seed(1000 * rank + step))
        return model(x).float().square().mean()

    expected, _ = trained(comm, shards, loss=loss, mp_policy=POLICIES[policy])
    ours, _ = trained(comm, shards, EVERYTHING, loss=loss, mp_policy=POLICIES[policy])
    assert everywhere(comm, near(ours, expected, 1e-2 if policy == "bfloat16" else 1e-6))
    trained(comm, shards, SPARSE, loss=loss, mp_policy=POLICIES[policy])


MEMORIES = [
    "topka:memory=none",
    "topka:memory=conef,compressor=quantize",
    "topka:memory=partial,compressor=quantize",
    "topka:memory=improved,compressor=quantize",
    "conef:saving=0.5",
]


@pytest.mark.parametrize("spec", MEMORIES)
def test_memories(comm, shards, spec):
    """At a density of a half, training follows dense training, and two runs have the same bits."""
    compression = hvs.parse(f"{spec},density=0.5,dense_below=0")
    how = {"steps": 30, "optimizer": lambda model: sgd(model, momentum=0)}
    expected, _ = trained(comm, shards, **how)
    runs = [trained(comm, shards, compression, **how)[0] for _ in range(2)]
    assert everywhere(comm, same(*runs))
    ours, theirs = map(nn.utils.parameters_to_vector, (runs[0], expected))
    distance = float((ours - theirs).norm() / theirs.norm())
    assert everywhere(comm, distance < 0.3), distance
    assert everywhere(comm, comm.Get_size() == 1 or distance > 0)


def step_of(training, number, scaler=None, bad=None):
    """Run a step; some rank's gradient of a layer may be infinite."""
    training.optimizer.zero_grad()
    mine = gradients(training.comm.Get_rank(), number)
    if bad is not None and training.comm.Get_rank() == training.ranks - 1:
        mine[bad][-1] = torch.inf
    loss = training.model(mine)
    (loss if scaler is None else scaler.scale(loss)).backward()
    if scaler is None:
        training.optimizer.step()
    else:
        scaler.step(training.optimizer)
        scaler.update()


@pytest.mark.parametrize("bad", ["first", "third"])
def test_a_step_that_a_grad_scaler_skips_leaves_no_trace(comm, shards, bad):
    results = []
    for disturbed in (True, False):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        training = Given(comm, shards, "topka", sgd, grad_scaler=scaler)
        for number in range(5):
            if disturbed or number != 3:
                step_of(training, number, scaler, bad if number == 3 else None)
            else:
                scaler.update(4.0)
        results.append([full(training.model), training.exchange.state_dict()])
        assert everywhere(comm, scaler.get_scale() == 4.0)
    assert everywhere(comm, same(*results))


@pytest.mark.parametrize("steps", [0, 4], ids=["first step", "fifth step"])
def test_gradients_that_are_not_finite_reach_their_owner_and_no_residual(comm, shards, steps):
    """The others of the unit are in a shard or in a residual."""
    training, rank = Given(comm, shards, "topka"), comm.Get_rank()
    for number in range(steps):
        training.backward(number)
        training.collect()
    mine = gradients(rank, steps)
    for name, total in summed(comm, mine).items():
        training.owed[name] += total
    if rank == training.ranks - 1:
        mine["third"][-1] = torch.inf
    training.model(mine).backward()
    third = training.model.third.weight.grad.full_tensor()
    assert everywhere(comm, bool(third[-1].isinf().all() and third[:-1].isfinite().all()))
    training.collect()
    residuals = summed(comm, held(training.exchange))
    residuals["third"], training.owed["third"] = residuals["third"][:-1], training.owed["third"][:-1]
    if training.ranks > 1:
        assert everywhere(comm, near(residuals.values(), training.owed.values(), 1e-3))


def test_cleared_gradients(comm, shards):
    """They raise an error, or are undone: the next step is that of a run without them."""
    training, rank = Given(comm, shards, "topka", sgd), comm.Get_rank()
    training.backward(0)
    training.optimizer.zero_grad()
    if training.ranks > 1:
        with pytest.raises(RuntimeError, match=f"rank {rank}: gradients were exchanged by backward.* and cleared"):
            training.backward(1)
    comm.Barrier()
    results = []
    for dropped in (True, False):
        training = Given(comm, shards, "topka", sgd, undoable=True)
        step_of(training, 0)
        if dropped:
            training.optimizer.zero_grad()
            training.backward(1)
        step_of(training, 2)
        results.append([full(training.model), training.exchange.state_dict()])
    assert everywhere(comm, same(*results))
    training.backward(3)
    if training.ranks > 1:
        with pytest.raises(RuntimeError, match=f"rank {rank}: gradients are added to exchanged ones"):
            training.backward(4)


def test_the_exchange_begins_during_the_backward_pass(comm, shards):
    """And frees the gradients of a unit: those of two more at most are in memory."""
    model = nn.Sequential(*(nn.Linear(12, 12) for _ in range(8)))
    shard(model, shards)
    exchange = scattered(model, hvs.parse("topka:density=0.05,dense_below=0"))
    started, inputs, alive = [], [], []
    model[0].register_full_backward_pre_hook(lambda *_: started.append(exchange._exchange.worker.started()[1]))
    begin = scattering.Unit.__call__

    def noted(unit, output_tensor, input_tensor, *more, **named):
        begin(unit, output_tensor, input_tensor, *more, **named)
        inputs.append(weakref.ref(input_tensor))
        gc.collect()
        alive.append(sum(one() is not None for one in inputs))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(scattering.Unit, "__call__", noted)
        model(torch.ones(8, 12, requires_grad=True)).sum().backward()
    if comm.Get_size() > 1:
        assert everywhere(comm, started[0] >= 6 and len(alive) == 8 and max(alive) <= 3)


def refused(comm, message, model, compression=SPARSE, optimizer=None, **more):
    with pytest.raises(ValueError, match=message):
        scattered(model, compression, optimizer, **more)
    comm.Barrier()


def test_what_is_not_supported_is_refused_by_name_on_every_rank(comm, shards, monkeypatch):
    rank, ranks = comm.Get_rank(), comm.Get_size()
    model = shard(mlp(), shards)
    refused(comm, "no module of this Sequential is sharded", mlp())
    refused(comm, "density in a preset|use fully_shard alone", model, hvs.Compression.dense())
    refused(comm, f"rank {rank}: .*momentum before the selection", model, hvs.Compression.recommended(0.01))
    for name in ("micro", "exdyna", "deft", "artopk"):
        refused(comm, f"rank {rank}: sparsifier '{name}' does not work", model, hvs.parse(name))
    grid = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("replicate", "shard"))
    refused(comm, "one mesh of one dimension", shard(mlp(), grid))
    half = MixedPrecisionPolicy(param_dtype=torch.float16)
    refused(comm, "reduced in torch.float16", shard(mlp(), shards, mp_policy=half))
    refused(comm, "reduced in torch.float64", shard(mlp(torch.float64), shards))
    refused(comm, "CPUOffloadPolicy", shard(mlp(), shards, offload_policy=CPUOffloadPolicy(pin_memory=False)))
    refused(
        comm,
        f"rank {rank}: undoable=True needs the optimizer.*pass optimizer to sparse_reduce_scatter",
        model,
        undoable=True,
    )
    divided = shard(mlp(), shards)
    divided[0].set_gradient_divide_factor(3.0)
    refused(comm, f"rank {rank}: set_gradient_divide_factor", divided)
    scattered(model, SPARSE)
    refused(comm, f"rank {rank}: sparse_reduce_scatter was called for this model before", model)
    if ranks > 1:
        other = SPARSE if rank else hvs.Compression.topka(**settings(density=0.1))
        refused(comm, "density", shard(mlp(), shards), other)
    monkeypatch.delattr("torch.distributed.fsdp.FSDPModule.set_custom_reduce_scatter")
    refused(comm, r"needs FSDPModule.set_custom_reduce_scatter of torch 2\.9", shard(mlp(), shards))


def test_the_exchange_lives_as_long_as_the_model(comm, shards):
    model = shard(mlp(), shards)
    optimizer = sgd(model)
    exchange = weakref.ref(scattered(model, SPARSE, optimizer))
    train(optimizer, model, comm.Get_rank())
    gc.collect()
    assert everywhere(comm, exchange() is not None)
    del model, optimizer
    gc.collect()
    assert everywhere(comm, exchange() is None)


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


@pytest.fixture
def folder(group, comm, tmp_path):
    """One folder for all ranks."""
    return Path(comm.bcast(str(tmp_path))) / "checkpoints"


@pytest.mark.parametrize("spec", ["topka", "oktopk", "topka:memory=conef,compressor=quantize"])
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


def whole(states, model):
    """Residuals of all ranks by parameter, summed."""
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    found = {}
    for state in states:
        for bucket in state["buckets"]:
            for name, (place, width) in state["layout"].get(bucket["parameters"][0], {}).items():
                rows = bucket["memory"]["residual"].view(state["shards"], -1)[:, place : place + width]
                found[name] = found.get(name, 0) + rows.flatten()[: sizes[name]]
    return found


@pytest.fixture(scope="module")
def meshes(group, comm):
    """Meshes of the first ranks by their number, with their groups."""
    from torch.distributed.device_mesh import DeviceMesh

    sizes = range(1, comm.Get_size() + 1)
    return {size: (DeviceMesh("cpu", torch.arange(size)), first(size)) for size in sizes}


@pytest.mark.parametrize("step", [-1, 1], ids=["fewer", "more"])
def test_another_number_of_ranks_takes_the_residuals_over(comm, meshes, folder, step):
    ranks, rank = comm.Get_size(), comm.Get_rank()
    old, new = (ranks, max(ranks - 1, 1))[::-step]
    results = []
    for size, load in ((old, False), (new, True)):
        mesh, group = meshes[size]
        result = None
        if rank < size:
            run = Run(mesh)
            checkpoints = Checkpoints(folder, process_set=group)
            if load:
                checkpoints.load(**run.states)
            else:
                run.train(rank, range(4))
                checkpoints.save(4, **run.states)
            result = full(run.model), run.exchange.state_dict()
        results.append([one for one in comm.allgather(result) if one is not None])
    (before, after), model = results, uneven()
    assert everywhere(comm, same(after[0][0], before[0][0]))
    if min(old, new) > 1:
        theirs, ours = (whole([state for _, state in one], model) for one in results)
        assert everywhere(comm, ours.keys() == theirs.keys() and near(ours.values(), theirs.values()))
        assert everywhere(comm, any(bool(one.any()) for one in ours.values()))
    if rank < new:
        run.train(rank, range(4, 6))


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
