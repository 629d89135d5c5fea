"""The DDP front end: DDP's results at density 1, the optimizer's bits, and nothing lost or duplicated."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from laws import everywhere
from states import same
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from training import (
    agree,
    averages,
    loss_of,
    mlp,
    near,
    settings,
    sgd,
    snapshot,
    train,
    wrap,
)

import horovod_sparse as hvs

pytestmark = pytest.mark.mpi

EVERYTHING = hvs.Compression.topka(**settings(density=1.0))
SPARSE = hvs.Compression.topka(**settings())
SPECS = ["topka", "oktopk:tau_partition=2,tau_threshold=2", "gtopk:memory=residual", "oktopk:wire=bfloat16"]


def parsed(spec):
    return hvs.parse(f"{spec}{',' if ':' in spec else ':'}density=0.05,dense_below=0,bucket_bytes=1200")


def replicate(model, compression=None, optimizer=None, state=None, **of_ddp):
    """Return DDP with small buckets, which it rebuilds after the first step."""
    replica = DistributedDataParallel(model, **{"bucket_cap_mb": 0.001, **of_ddp})
    if compression is None and state is None:
        return replica, None
    state = state or hvs.ddp.SparseState(compression, optimizer, model.named_parameters())
    replica.register_comm_hook(state, hvs.ddp.sparse_hook)
    return replica, state


def trained(comm, model, compression=None, steps=4, rates=(0.1,), **of_ddp):
    """The parameters after some steps, of which the last ones have the last learning rate."""
    optimizer = sgd(model, momentum=0)
    replica, state = replicate(model, compression, optimizer, **of_ddp)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rates[min(step, len(rates) - 1)]
        train(optimizer, replica, comm.Get_rank(), [step])
    return snapshot(model), state


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)], ids=str)
def test_at_density_1_gradients_may_be_views_of_ddps_buckets(group, comm, dtype, tolerance):
    options = {"gradient_as_bucket_view": True, "static_graph": True}
    expected, _ = trained(comm, mlp(dtype), **options)
    ours, _ = trained(comm, mlp(dtype), EVERYTHING, **options)
    assert everywhere(comm, near(ours, expected, tolerance))
    assert agree(comm, ours)


@pytest.mark.parametrize("spec", SPECS)
def test_ddp_is_bitwise_identical_to_the_optimizer(hvd, group, comm, spec):
    """Also after DDP has rebuilt its buckets, as residuals belong to parameters; learning rates vary."""
    model, rank, rates = mlp(), comm.Get_rank(), (0.1, 0.1, 0.1, 0.01)
    optimizer = wrap(model, parsed(spec))
    train(optimizer, model, rank, range(3))
    optimizer.param_groups[0]["lr"] = rates[-1]
    expected = train(optimizer, model, rank, range(3, 6))
    ours, state = trained(comm, mlp(), parsed(spec), steps=6, rates=rates)
    assert everywhere(comm, same(ours, expected))
    assert agree(comm, ours)
    if comm.Get_size() > 1:
        first, second = optimizer.compression_state_dict(), state.state_dict()
        for bucket, other in zip(first["buckets"], second["buckets"], strict=True):
            assert everywhere(comm, same({**bucket, "parameters": 0}, {**other, "parameters": 0}))


def test_without_an_optimizer_residuals_stay_gradients(group, comm):
    """So it is while the learning rate is constant, with any optimizer."""
    expected, _ = trained(comm, mlp(), SPARSE)
    model = mlp()
    optimizer = sgd(model, momentum=0)
    replica, state = replicate(model, SPARSE)
    assert everywhere(comm, same(train(optimizer, replica, comm.Get_rank(), range(4)), expected))
    assert everywhere(comm, all(bucket["unit"] == 1 / comm.Get_size() for bucket in state.state_dict()["buckets"]))


def test_a_group_added_to_one_optimizer_keeps_the_rates_of_the_others(group, comm):
    rank, results = comm.Get_rank(), []
    for added in (False, True):
        model = mlp()
        optimizers = [torch.optim.SGD(model[layer].parameters(), lr=rate) for layer, rate in ((0, 0.1), (2, 0.01))]
        replica = DistributedDataParallel(model)
        replica.register_comm_hook(hvs.ddp.SparseState(SPARSE, optimizers, named(model)), hvs.ddp.sparse_hook)
        for step in range(10):
            if added and step == 4:
                optimizers[0].add_param_group({"params": [nn.Parameter(torch.zeros(3))], "lr": 7.0})
            model.zero_grad()
            loss_of(replica, rank, step).backward()
            for optimizer in optimizers:
                optimizer.step()
        results.append(snapshot(model))
    assert everywhere(comm, same(*results))


def test_a_process_group_of_some_ranks(group, comm):
    ranks = comm.Get_size()
    chosen = list(range(ranks - 1, ranks)) if ranks < 3 else [1, 2]
    part, few = distributed.new_group(chosen), comm.Split(comm.Get_rank() in chosen)
    if comm.Get_rank() in chosen:
        model = mlp()
        optimizer = sgd(model)
        state = hvs.ddp.SparseState(EVERYTHING, optimizer, model.named_parameters(), process_group=part)
        replica = DistributedDataParallel(model, process_group=part)
        replica.register_comm_hook(state, hvs.ddp.sparse_hook)
        loss_of(replica, few.Get_rank(), 0).backward()
        assert near([p.grad for p in model.parameters()], averages(model, few, 0))
    comm.Barrier()


def named(model):
    return list(model.named_parameters(prefix="layers"))


def go_on(comm, model, state, optimizers, steps):
    replica, _ = replicate(model, state=state)
    for step in steps:
        replica.zero_grad()
        loss_of(replica, comm.Get_rank(), step).backward()
        for optimizer in optimizers:
            optimizer.step()


OPTIMIZERS = {
    "unknown": lambda model: [sgd(model, momentum=0)],
    "one": lambda model: [sgd(model, momentum=0)],
    "two": lambda model: [half(model, 1), half(model, 0)],
}


@pytest.mark.parametrize("compression", [SPARSE, parsed("oktopk:memory=momentum,momentum=0.9,tau_threshold=2")])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_pickled_state_continues_bitwise_identically(group, comm, kind, compression):
    """Pickled, and copied before it is used again."""
    if compression.replaces_momentum and kind == "unknown":
        return
    results = []
    for pickled in (False, True):
        model = mlp()
        optimizers = OPTIMIZERS[kind](model)
        state = hvs.ddp.SparseState(compression, None if kind == "unknown" else optimizers, named(model))
        go_on(comm, model, state, optimizers, range(3))
        if pickled:
            before, saved, old = state.state_dict(), snapshot(model), optimizers
            state = copy.deepcopy(pickle.loads(pickle.dumps(state)))  # noqa: S301 - our own
            model = mlp()
            optimizers = OPTIMIZERS[kind](model)
            for optimizer, other in zip(optimizers, old, strict=True):
                optimizer.load_state_dict(other.state_dict())
            for p, value in zip(model.parameters(), saved, strict=True):
                p.data.copy_(value)
            state.named_parameters = named(model)
            state.optimizer = None if kind == "unknown" else optimizers
            assert everywhere(comm, same(state.state_dict(), before))
        go_on(comm, model, state, optimizers, range(3, 6))
        results.append([snapshot(model), state.state_dict()])
    assert everywhere(comm, same(*results))
    names = [name for bucket in state.state_dict()["buckets"] for name in bucket["parameters"]]
    assert everywhere(comm, sorted(names) == (sorted(dict(named(model))) if comm.Get_size() > 1 else []))


def test_an_unpickled_state_must_be_connected_as_before(group, comm):
    if comm.Get_size() == 1:
        return

    rank, scaler = comm.Get_rank(), torch.amp.GradScaler("cpu", init_scale=1.0)

    def parts(model):
        return {"named_parameters": named(model), "optimizer": sgd(model, momentum=0), "grad_scaler": scaler}

    model = mlp()
    state = hvs.ddp.SparseState(SPARSE, **parts(model))
    for step in range(2):  # pickled before it is used, and afterwards
        state = pickle.loads(pickle.dumps(state))  # noqa: S301 - our own
        for missing in parts(model):
            message = f"rank {rank}: .*with {missing}.*: set state.{missing}"
            fails(comm, message, lambda state=state: replicate(mlp(), state=state)[0])
            setattr(state, missing, parts(model)[missing])
        replica, _ = replicate(model, state=state)
        loss_of(replica, rank, step).backward()
        for name in ("named_parameters", "grad_scaler"):
            with pytest.raises(ValueError, match=f"{name} must be set before the first backward pass"):
                setattr(state, name, [])


def test_names_are_pairs_with_different_names_that_ranks_share(group, comm):
    model = mlp()
    for wrong in (
        model,
        model.named_parameters,
        model.parameters(),
        dict(model.named_parameters()),
        [("a", 1)],
        ["ab"],
    ):
        with pytest.raises(TypeError, match=r"(?s)must be pairs of name and parameter, not .*: pass model.named_par"):
            hvs.ddp.SparseState(SPARSE, None, wrong)
    rank, last = comm.Get_rank(), comm.Get_size() - 1
    if last:
        for part, difference in (
            (slice(5), "5 items, rank 0 has 6"),
            (slice(None, None, -1), r"layers\.4\.bias, rank 0 has layers\.0\.weight"),
        ):
            model = mlp()
            state = hvs.ddp.SparseState(SPARSE, None, named(model)[part] if rank == last else named(model))
            message = f"rank {rank}: named_parameters differs between ranks: rank {last} has {difference}"
            fails(comm, message, lambda model=model, state=state: replicate(model, state=state)[0])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (0, "holds no parameters: pass model.named_parameters"),
        (5, r"lacks 1 of the parameters .* of shape \(4,\): pass the named_parameters"),
    ],
)
def test_a_model_with_parameters_that_have_no_name_is_refused(group, comm, given, message):
    if comm.Get_size() > 1 or not given:
        model = mlp()
        state = hvs.ddp.SparseState(SPARSE, None, named(model)[:given])
        fails(comm, f"rank {comm.Get_rank()}: named_parameters {message}", lambda: replicate(model, state=state)[0])


@pytest.mark.full
def test_a_compiled_model(hvd, group, comm):
    def with_the_optimizer(model):
        return train(wrap(model, SPARSE), model, comm.Get_rank())

    for run in (with_the_optimizer, lambda model: trained(comm, model, SPARSE, bucket_cap_mb=2)):
        models = [mlp(), mlp()]
        run(models[0])
        run(torch.compile(models[1], backend="eager"))
        assert everywhere(comm, near(*map(snapshot, models), 1e-5))


def fails(comm, message, make):
    """Expects an error on every rank, in the first backward pass."""
    replica = make()
    loss = loss_of(replica, comm.Get_rank(), 0)
    with pytest.raises((ValueError, RuntimeError), match=message):
        loss.backward()
    comm.Barrier()


def test_bad_input_is_refused_on_every_rank(group, comm):
    rank = comm.Get_rank()
    with pytest.raises(ValueError, match="stall_abort must be"):
        hvs.ddp.SparseState(SPARSE, None, (), stall_abort=-1)
    model = mlp()
    scaled = hvs.ddp.SparseState(SPARSE, None, named(model), grad_scaler=torch.amp.GradScaler("cpu"))
    fails(comm, f"rank {rank}: a grad_scaler .*set state.optimizer", lambda: replicate(model, state=scaled)[0])
    if comm.Get_size() > 1:
        model = mlp()
        shared = trained(comm, model, SPARSE)[1]
        fails(comm, f"rank {rank}: .* lacks 6 .*give each model its own", lambda: replicate(mlp(), state=shared)[0])
        model[0].requires_grad_(False)
        fails(comm, f"rank {rank}: the state has buckets for .*its own", lambda: replicate(model, state=shared)[0])


class Wrapper(torch.optim.Optimizer):
    """Wraps an optimizer as Accelerate does: without the attributes of the base class."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups


@pytest.mark.parametrize("wrong", ["sgd", mlp(), mlp().parameters(), [sgd(mlp()), "sgd"], torch.optim.SGD, {"a": 1}])
def test_objects_other_than_optimizers_are_refused(wrong):
    state = hvs.ddp.SparseState(SPARSE, None, ())
    for use in (lambda: hvs.ddp.SparseState(SPARSE, wrong, ()), lambda: setattr(state, "optimizer", wrong)):
        with pytest.raises(
            TypeError, match=r"(?s)optimizer must be a torch.optim.Optimizer, or a list of them, not .*: pa"
        ):
            use()
    assert state.optimizer is None
    assert state.optimizers == ()


@pytest.mark.parametrize("compression", [SPARSE, hvs.Compression.dgc()])
def test_a_wrapper_of_an_optimizer_is_refused_with_the_remedy(compression):
    inside = sgd(mlp(), momentum=0)
    with pytest.raises(
        TypeError, match=r"is a .*Wrapper, which wraps .*pass the wrapped optimizer, optimizer\.optimizer"
    ):
        hvs.ddp.SparseState(compression, [Wrapper(inside)], ())
    assert hvs.ddp.SparseState(compression, (inside,), ()).optimizers == (inside,)


def half(model, number, *more):
    return torch.optim.SGD([*list(model.parameters())[number::2], *more], lr=0.1)


@pytest.mark.parametrize("on", ["all ranks", "the last rank"])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda model, other: sgd(other, momentum=0),
            r"SGD is not the one .* its parameter 0 of group 0 \(24, 12\) is not in the",
        ),
        (lambda model, other: [sgd(model, momentum=0), sgd(other, momentum=0)], "its parameter 0 of group 0"),
        (
            lambda model, other: half(model, 1, *list(other.parameters())[::2]),
            r"parameter 3 of group 0 \(24, 12\) is not .*, and 0\.weight \(24, 12\) of the model is in none",
        ),
    ],
    ids=["none", "of two", "some"],
)
def test_an_optimizer_of_another_model_is_refused_on_all_ranks(group, comm, make, message, on):
    """Also if the shapes agree, and only the parameters themselves differ."""
    model, rank = mlp(), comm.Get_rank()
    wrong = on == "all ranks" or rank == comm.Get_size() - 1
    given = make(model, mlp() if wrong else model)
    state = hvs.ddp.SparseState(SPARSE, given, model.named_parameters())
    replica, _ = replicate(model, state=state)
    expected = f"^rank {rank}: .*{message}.*: pass" if wrong else f"^rank {rank}: "
    with pytest.raises((ValueError, RuntimeError), match=expected):
        loss_of(replica, rank, 0).backward()
    comm.Barrier()


def test_optimizers_may_share_models_and_leave_parameters_out(group, comm):
    """An optimizer of two models, two of one model, one of its head, and one that holds frozen parameters, too."""
    model, other = mlp(), mlp()
    frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
    for given in (
        torch.optim.SGD([*other.parameters(), *model.parameters()], lr=0.1),
        [half(model, 0), half(model, 1)],
        torch.optim.SGD(model[4].parameters(), lr=0.1),
        half(model, 0, frozen),
    ):
        replica, _ = replicate(model, SPARSE, given)
        for step in range(2):
            loss_of(replica, comm.Get_rank(), step).backward()
        assert agree(comm, [p.grad for p in model.parameters()])


def test_an_error_in_the_exchange_is_raised_by_backward_and_training_goes_on(group, comm):
    if comm.Get_size() == 1:
        return
    model, rank = mlp(), comm.Get_rank()
    optimizer = sgd(model, momentum=0)
    replica, state = replicate(model, hvs.Compression.topka(**settings(), schedule="accordion"), optimizer)
    loss = loss_of(replica, rank, 0)
    with pytest.raises(RuntimeError, match="set_epoch"):
        loss.backward()
    comm.Barrier()
    state.set_epoch(0)
    before = snapshot(model)
    train(optimizer, replica, rank, range(2))
    assert everywhere(comm, not same(snapshot(model), before))
    assert agree(comm, snapshot(model))


@pytest.mark.parametrize("compression", [EVERYTHING, SPARSE], ids=["everything", "sparse"])
def test_a_rank_may_run_out_of_inputs_while_it_accumulates(group, comm, compression):
    """Other ranks take one more step in DDP's ``join()``; the next epoch begins as usual."""
    rank, ours = comm.Get_rank(), []
    for spec in (None, compression):
        model = mlp()
        optimizer = sgd(model, momentum=0)
        replica, _ = replicate(model, spec, optimizer)
        for epoch in range(3):
            with replica.join():
                for step in range(3):
                    optimizer.zero_grad()
                    with replica.no_sync():
                        loss_of(replica, rank, 10 * epoch + step).backward()
                    if step == 2 and rank == 0:
                        break
                    loss_of(replica, rank, 10 * epoch + step + 5).backward()
                    optimizer.step()
        ours.append(snapshot(model))
    assert agree(comm, ours[1])
    assert everywhere(comm, compression is SPARSE or near(ours[1], ours[0], 1e-5))


def test_after_a_backward_pass_that_failed_torch_refuses_the_next_one(group, comm):
    """Gradients of it may be exchanged; residuals stay as they are."""

    def fail(*_):
        raise KeyError("of the script")

    model, rank = mlp(), comm.Get_rank()
    optimizer = sgd(model)
    replica, state = replicate(model, SPARSE, optimizer, bucket_cap_mb=0.0001)
    train(optimizer, replica, rank, range(3))
    handle = model[1].register_full_backward_hook(fail)
    with pytest.raises(KeyError, match="of the script"):
        loss_of(replica, rank, 3).backward()
    handle.remove()
    before = state.state_dict()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Expected to have finished reduction in the prior iteration"):
            loss_of(replica, rank, 4).backward()
    assert everywhere(comm, same(state.state_dict(), before))


def test_a_rank_may_run_out_of_inputs_after_a_backward_pass_that_failed(group, comm):
    """Before its first gradient, in a hook of the script: the pass is not in progress any more."""

    def fail(_):
        raise KeyError("of the script")

    model, rank = mlp(), comm.Get_rank()
    optimizer = sgd(model)
    replica, _ = replicate(model, SPARSE, optimizer)
    train(optimizer, replica, rank, range(2))
    handles = [p.register_hook(fail) for p in model[4].parameters()]
    optimizer.zero_grad()
    with pytest.raises(KeyError, match="of the script"):
        loss_of(replica, rank, 2).backward()
    for handle in handles:
        handle.remove()
    with replica.join():
        train(optimizer, replica, rank, range(3, 5 + 2 * rank))
    assert agree(comm, snapshot(model))
