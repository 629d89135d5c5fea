"""Bad input: a clear error on every rank, with value, rank and remedy, before training starts; never a hang."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from laws import everywhere
from states import same
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from training import agree, loss_of, mlp, settings, sgd, snapshot, train, wrap

import horovod_sparse
import horovod_sparse as hvs
from horovod_sparse.frontends import arguments
from horovod_sparse.transport.cuda_aware import cuda_aware

pytestmark = pytest.mark.mpi


def last(comm):
    return comm.Get_size() > 1 and comm.Get_rank() == comm.Get_size() - 1


def differs(comm, pattern):
    """Expects an error on every rank; with one rank there is nobody to differ from."""
    if comm.Get_size() == 1:
        return nullcontext()
    return pytest.raises(ValueError, match=rf"^rank {comm.Get_rank()}: {pattern}")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (lambda hvd, model: {"op": hvd.Adasum}, "RANK: op=Adasum .* use op=Average"),
        (lambda hvd, model: {"op": hvd.Max}, "RANK: op .* use hvd.Average or hvd.Sum"),
        (lambda hvd, model: {"backward_passes_per_step": 0}, "RANK: backward_passes_per_step must be > 0, not 0"),
        (lambda hvd, model: {"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "RANK: gradient_predivide_factor 2.0"),
        (lambda hvd, model: {"groups": -1}, "groups should be a non-negative integer"),
        (lambda hvd, model: {"groups": [["weight"]]}, "groups must consist of torch.Tensor"),
        (lambda hvd, model: {"groups": [[model[0].weight], [model[0].weight]]}, "only appear once"),
        (lambda hvd, model: {"stall_abort": -1}, "RANK: stall_abort must be a number of seconds.*not -1"),
        (lambda hvd, model: {"process_set": hvd.ProcessSet([0])}, r"RANK: .*hvd\.add_process_set"),
        (lambda hvd, model: {"named_parameters": model.parameters()}, r"sequence of tuples \(name, parameter\)"),
        (lambda hvd, model: {"named_parameters": [*model.named_parameters()][:1]}, "not named"),
        (
            lambda hvd, model: {
                "compression": hvs.Compression.dgc(),
                "optimizer": torch.optim.AdamW(model.parameters()),
            },
            "RANK: .*AdamW has momentum, too: set momentum=0",
        ),
    ],
)
def test_an_argument_out_of_range(hvd, comm, settings, message):
    model = mlp()
    given = settings(hvd, model)
    plain = given.pop("optimizer", None) or sgd(model, momentum=0)
    given = {"named_parameters": model.named_parameters(), "compression": hvs.Compression.topka(0.1), **given}
    with pytest.raises(ValueError, match=message.replace("RANK", f"rank {comm.Get_rank()}")):
        hvs.DistributedOptimizer(plain, **given)


@pytest.mark.parametrize(
    ("mine", "others", "message"),
    [
        ("randomblock:seed=1", "randomblock:seed=0", r".sparsifier.seed DIFFERS has 1, rank 0 has 0"),
        ("oktopk:tau_partition=3", "oktopk", r".collective.tau_partition DIFFERS has 3"),
        ("none", "topka", " DIFFERS has "),
    ],
)
def test_rules_that_differ_are_named_by_their_field(hvd, comm, mine, others, message):
    with differs(comm, "compression" + message.replace("DIFFERS", r"differs between ranks: rank \d")):
        wrap(mlp(), hvs.parse(mine if last(comm) else others))


def test_what_cannot_change_a_result_may_differ(hvd, comm):
    """The number of threads, and the order in which options are written."""
    specs = ("topka:density=0.1,threads=2,dense_below=0", "topka:dense_below=0,density=0.1")
    model = mlp()
    train(wrap(model, hvs.parse(specs[last(comm)])), model, comm.Get_rank(), [0])


def test_other_facts_that_differ(hvd, comm, monkeypatch):
    with differs(comm, r"stall_timeout differs between ranks: rank \d has 30, rank 0 has None"):
        wrap(mlp(), stall_timeout=30 if last(comm) else None)
    with differs(comm, r"parameter differs between ranks: .*float64"):
        wrap(nn.Linear(5, 4).to(torch.float64 if last(comm) else torch.float32))
    with differs(comm, "parameter differs between ranks"):
        wrap(nn.Linear(5, 4, bias=not last(comm)))
    expected = "backward_passes_per_step" if last(comm) else r"rank \d could not begin"
    with differs(comm, expected):
        wrap(mlp(), backward_passes_per_step=0 if last(comm) else 1)
    if last(comm):
        monkeypatch.setattr(horovod_sparse, "__version__", "0.0.1")
    with differs(comm, r"version of horovod_sparse differs between ranks: rank \d has 0.0.1, rank 0 has "):
        wrap(mlp())


def test_step_without_backward_is_refused_and_training_goes_on(hvd, comm):
    model, rank = mlp(), comm.Get_rank()
    optimizer = wrap(model, hvs.Compression.topka(**settings(dense_below=100)))
    if comm.Get_size() == 1:
        optimizer.step()  # nothing to exchange: as torch does
        return
    for step in range(2):
        before = snapshot(model)
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match=rf"rank {rank}: .*without backward\(\)"):
            optimizer.step()
        assert everywhere(comm, same(snapshot(model), before))
        assert everywhere(comm, not same(train(optimizer, model, rank, [step]), before))


def test_more_backward_passes_than_announced(hvd, comm):
    model = mlp()
    optimizer = wrap(model)
    loss_of(model, comm.Get_rank(), 0).backward()
    if comm.Get_size() > 1:
        with pytest.raises(AssertionError, match="backward_passes_per_step"):
            loss_of(model, comm.Get_rank(), 1).backward()
        with pytest.raises(RuntimeError, match=r"the gradients of 4\.bias were changed between backward\(\) and step"):
            optimizer.step()  # the second pass has added to one of them
    assert agree(comm, train(optimizer, model, comm.Get_rank(), [2]))


def test_devices_that_cannot_be_used(hvd, comm, monkeypatch):
    """One without kernels, and a wrong setting of MPI, which shows before training."""
    with pytest.raises(ValueError, match=rf"rank {comm.Get_rank()}: .*meta.*on the CPU and on CUDA"):
        wrap(nn.Linear(50, 50, device="meta"))
    monkeypatch.setenv("HOROVOD_SPARSE_CUDA_AWARE", "maybe")
    monkeypatch.setattr(arguments, "device_of", lambda device: None)
    cuda_aware.cache_clear()
    with pytest.raises(ValueError, match=rf"rank {comm.Get_rank()}: HOROVOD_SPARSE_CUDA_AWARE must be .* not 'maybe'"):
        wrap(nn.Linear(50, 50, device="meta"))


def test_the_optimizer_inside_a_wrapper_is_named_by_the_wrappers_attribute(comm):
    plain = torch.optim.SGD(mlp().parameters(), lr=0.1)
    averager = PeriodicModelAverager(period=4, process_group=object())
    with pytest.raises(TypeError, match=r"PostLocalSGDOptimizer, which wraps .*: pass the wrapped optimizer.*\.optim$"):
        arguments.optimizers_in(PostLocalSGDOptimizer(plain, averager))
