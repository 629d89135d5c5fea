"""Bad input: a clear error on every rank, with value, rank and remedy, before training starts; never a hang."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from laws import everywhere
from torch import nn
from training import loss_of, mlp, own_gradients, snapshot

import horovod_sparse
import horovod_sparse as hvs
from horovod_sparse.cudaaware import cuda_aware

pytestmark = pytest.mark.mpi


def wrap(model, compression=None, named=True, **arguments):
    return hvs.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters() if named else None,
        compression=compression or hvs.Compression.topka(0.1, dense_below=0),
        **arguments,
    )


def differs(comm, pattern):
    """Expects an error on every rank; with one rank there is nobody to differ from."""
    if comm.Get_size() == 1:
        return nullcontext()
    return pytest.raises(ValueError, match=rf"^rank {comm.Get_rank()}: {pattern}")


def last(comm):
    return comm.Get_size() > 1 and comm.Get_rank() == comm.Get_size() - 1


def test_adasum(hvd, comm):
    with pytest.raises(ValueError, match=rf"rank {comm.Get_rank()}: op=Adasum .* use op=Average"):
        wrap(mlp(), op=hvd.Adasum)


def test_an_op_that_does_not_sum(hvd, comm):
    with pytest.raises(ValueError, match=rf"rank {comm.Get_rank()}: op .* use hvd.Average or hvd.Sum"):
        wrap(mlp(), op=hvd.Max)


def test_something_that_is_no_compression(hvd, comm):
    with pytest.raises(ValueError, match=rf"rank {comm.Get_rank()}: unknown compression 'topka'.*hvs.parse"):
        wrap(mlp(), compression="topka")


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    ],
    ids=["SGD", "AdamW"],
)
def test_momentum_in_the_optimizer_beside_momentum_correction(hvd, comm, optimizer):
    model = mlp()
    pattern = rf"rank {comm.Get_rank()}: memory 'momentum' .* has momentum, too: give the optimizer momentum=0"
    with pytest.raises(ValueError, match=pattern):
        hvs.DistributedOptimizer(optimizer(model.parameters()), compression=hvs.Compression.dgc(dense_below=0))
    hvs.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), compression=hvs.Compression.dgc())


def test_seeds_that_differ(hvd, comm):
    """Random positions that every rank is said to share."""
    with differs(comm, r"compression differs between ranks: rank \d+ has .*seed.*, rank 0 has .*give every rank the"):
        wrap(mlp(), hvs.Compression.randomblock(0.1, seed=int(last(comm)), dense_below=0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backward_passes_per_step": 0}, "backward_passes_per_step must be > 0, not 0"),
        ({"gradient_predivide_factor": 2.0, "op": 1}, "gradient_predivide_factor 2.0"),
        ({"groups": -1}, "groups should be a non-negative integer"),
        ({"groups": [["weight"]]}, "groups must consist of torch.Tensor"),
    ],
)
def test_arguments_out_of_range(hvd, comm, arguments, message):
    if "op" in arguments:
        arguments = {**arguments, "op": hvd.Sum}
    with pytest.raises(ValueError, match=message):
        wrap(mlp(), **arguments)


def test_a_parameter_in_two_groups(hvd, comm):
    model = mlp()
    with pytest.raises(ValueError, match="only appear once"):
        wrap(model, groups=[[model[0].weight], [model[0].weight]])


def test_names_used_twice(hvd, comm):
    model = mlp()
    named = [("one", p) for p in model.parameters()]
    with pytest.raises(ValueError, match="unique"):
        hvs.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), named, compression=hvs.Compression.topka(0.1)
        )


def test_parameters_that_come_without_names(hvd, comm):
    model = mlp()
    with pytest.raises(ValueError, match=r"sequence of tuples \(name, parameter\)"):
        hvs.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.parameters(), compression=hvs.Compression.topka(0.1)
        )


def test_parameters_without_a_name(hvd, comm):
    model = mlp()
    with pytest.raises(ValueError, match="not named"):
        hvs.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            list(model.named_parameters())[:1],
            compression=hvs.Compression.topka(0.1),
        )


def test_configurations_that_differ(hvd, comm):
    density = 0.2 if last(comm) else 0.1
    with differs(comm, r"compression differs between ranks: rank \d has .*density=0.2.* rank 0 has .*density=0.1"):
        wrap(mlp(), compression=hvs.Compression.topka(density))


def test_sparse_on_some_ranks_only(hvd, comm):
    compression = hvd.Compression.none if last(comm) else hvs.Compression.topka(0.1)
    with differs(comm, "compression differs between ranks"):
        wrap(mlp(), compression=compression)


def test_versions_that_differ(hvd, comm, monkeypatch):
    if last(comm):
        monkeypatch.setattr(horovod_sparse, "__version__", "0.0.1")
    with differs(comm, r"version of horovod_sparse differs between ranks: rank \d has 0.0.1, rank 0 has "):
        wrap(mlp())


def test_stall_timeouts_that_differ_or_are_none(hvd, comm):
    with differs(comm, r"stall_timeout differs between ranks: rank \d has 30, rank 0 has None"):
        wrap(mlp(), stall_timeout=30 if last(comm) else None)
    with pytest.raises(ValueError, match=rf"rank {comm.Get_rank()}: stall_abort must be a number of seconds.*not -1"):
        wrap(mlp(), stall_abort=-1)


def test_shapes_that_differ(hvd, comm):
    with differs(comm, r"parameter differs between ranks: rank \d has \('weight', \(4, 6\)"):
        wrap(nn.Linear(6 if last(comm) else 5, 4))


def test_precisions_that_differ(hvd, comm):
    with differs(comm, r"parameter differs between ranks: .*float64"):
        wrap(nn.Linear(5, 4).to(torch.float64 if last(comm) else torch.float32))


def test_numbers_of_parameters_that_differ(hvd, comm):
    with differs(comm, "parameter differs between ranks"):
        wrap(nn.Linear(5, 4, bias=not last(comm)))


def test_an_error_on_one_rank_reaches_all(hvd, comm):
    passes = 0 if last(comm) else 1
    expected = "backward_passes_per_step" if last(comm) else r"rank \d could not set up its optimizer"
    with differs(comm, expected):
        wrap(mlp(), backward_passes_per_step=passes)


def test_parameters_named_in_another_order_on_every_rank_still_meet(hvd, comm):
    model = mlp()
    parameters = list(model.named_parameters())
    parameters = parameters[:: 1 if comm.Get_rank() % 2 else -1]
    optimizer = hvs.DistributedOptimizer(
        torch.optim.SGD([p for _, p in parameters], lr=0.1),
        parameters,
        compression=hvs.Compression.topka(1.0, dense_below=0, bucket_bytes=1200),
    )
    local = [gradient.numpy() for gradient in own_gradients(model, comm.Get_rank(), 0)]
    loss_of(model, comm.Get_rank(), 0).backward()
    optimizer.synchronize()
    for p, gradient in zip(model.parameters(), local, strict=True):
        expected = torch.from_numpy(comm.allreduce(gradient) / comm.Get_size())
        assert everywhere(comm, torch.allclose(p.grad, expected, atol=1e-7))


def test_horovod_without_mpi(hvd, comm, monkeypatch):
    monkeypatch.setattr(hvd, "mpi_built", lambda: False)
    with pytest.raises(RuntimeError, match=rf"rank {comm.Get_rank()}: .*built without MPI.*HOROVOD_WITH_MPI=1"):
        wrap(mlp())


def test_horovod_over_gloo(hvd, comm, monkeypatch):
    monkeypatch.setattr(hvd, "mpi_enabled", lambda: False)
    with pytest.raises(RuntimeError, match=r"Gloo.*horovodrun --mpi"):
        wrap(mlp())


def test_mpi_without_threads(hvd, comm, monkeypatch):
    monkeypatch.setattr(hvd, "mpi_threads_supported", lambda: False)
    with pytest.raises(RuntimeError, match="MPI_THREAD_MULTIPLE"):
        wrap(mlp())


def test_a_process_set_that_was_not_added(hvd, comm):
    with pytest.raises(ValueError, match=r"hvd\.add_process_set"):
        wrap(mlp(), process_set=hvd.ProcessSet([0]))


def test_step_without_backward_is_refused_and_training_goes_on(hvd, comm):
    if comm.Get_size() == 1:
        wrap(mlp()).step()  # nothing to exchange: as torch does
        return
    model = mlp()
    optimizer = wrap(model, hvs.Compression.topka(0.1, dense_below=100, bucket_bytes=1200))
    for step in range(2):
        before = snapshot(model)
        with pytest.raises(RuntimeError, match=rf"rank {comm.Get_rank()}: .*without backward\(\)"):
            optimizer.step()
        assert everywhere(comm, all(map(torch.equal, before, snapshot(model))))
        optimizer.zero_grad()
        loss_of(model, comm.Get_rank(), step).backward()
        optimizer.step()
        assert everywhere(comm, not all(map(torch.equal, before, snapshot(model))))


def test_more_backward_passes_than_announced(hvd, comm):
    model = mlp()
    optimizer = wrap(model)
    loss_of(model, comm.Get_rank(), 0).backward()
    if comm.Get_size() > 1:
        with pytest.raises(AssertionError, match="backward_passes_per_step"):
            loss_of(model, comm.Get_rank(), 1).backward()
    optimizer.step()


def test_parameters_on_another_device(hvd, comm):
    with pytest.raises(ValueError, match=rf"rank {comm.Get_rank()}: .*meta.*on the CPU and on CUDA"):
        wrap(nn.Linear(50, 50, device="meta"))


def test_a_wrong_setting_of_mpi_shows_before_training(hvd, comm, monkeypatch):
    monkeypatch.setenv("HOROVOD_SPARSE_CUDA_AWARE", "maybe")
    monkeypatch.setattr("horovod_sparse.agreement.device_of", lambda device: None)
    cuda_aware.cache_clear()
    with pytest.raises(ValueError, match=rf"rank {comm.Get_rank()}: HOROVOD_SPARSE_CUDA_AWARE must be .* not 'maybe'"):
        wrap(nn.Linear(50, 50, device="meta"))
