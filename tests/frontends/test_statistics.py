"""``statistics()`` of both front ends: the counters' own numbers, told once, and no effect on the training."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
from front_ends import start
from laws import everywhere
from torch import nn
from training import Given, loss_of, mlp, settings, sgd, train, wrap

import horovod_sparse as hvs

pytestmark = [pytest.mark.mpi, pytest.mark.slow]  # one rank alone exchanges nothing, and has no statistics


def total(statistics):
    return {key.removeprefix("total/"): value for key, value in statistics.items() if key.startswith("total/")}


either = pytest.mark.parametrize("front_end", ["Horovod", "DDP"])


def begin(front_end, compression):
    return start(front_end, mlp(), lambda parameters: torch.optim.SGD(parameters, lr=0.1), compression)


@either
@pytest.mark.parametrize("spec", ["topka", "oktopk:tau_threshold=4", "auto"])
def test_sums_are_those_of_the_counters_and_reported_once(hvd, group, comm, front_end, spec):
    given = ",".join(f"{name}={value}" for name, value in settings().items())
    one = begin(front_end, hvs.parse(f"{spec}{',' if ':' in spec else ':'}{given}"))
    rank, sent, received = comm.Get_rank(), 0, 0
    for steps in (range(6), range(6, 9)):
        train(one.optimizer, one.model, rank, steps)
        numbers = one.exchange.statistics()
        here = total(numbers)
        buckets = {key.partition("/")[0] for key in numbers} - {"total"}
        assert everywhere(comm, len(buckets) > 1)
        assert everywhere(comm, here["steps"] == len(steps))
        for bucket in buckets:
            by_algorithm = [numbers[key] for key in numbers if key.startswith(f"{bucket}/steps_")]
            assert everywhere(comm, sum(by_algorithm) == numbers[f"{bucket}/steps"] == len(steps))
        sent, received = sent + here["bytes_sent"], received + here["bytes_received"]
        assert everywhere(
            comm, (sent, received) == (one.exchange.traffic.bytes_sent, one.exchange.traffic.bytes_received)
        )
        assert everywhere(comm, all(value >= 0 for value in numbers.values()))
        assert everywhere(comm, json.loads(json.dumps(numbers)) == numbers)
    assert everywhere(comm, one.exchange.statistics() == {})


def test_entries_and_densities_are_those_of_the_step(comm, hvd):
    model = Given()
    optimizer = wrap(model, hvs.Compression.topka(density=0.1, dense_below=100, bucket_bytes=10**6))
    train(optimizer, model, comm.Get_rank(), range(4), Given.loss)
    numbers = optimizer.statistics()
    sparse, dense = ("bucket0", "bucket1") if numbers["bucket0/density"] < 1 else ("bucket1", "bucket0")
    expected = {"density": 0.1, "density_asked": 0.1, "entries": 4 * 30, "steps_topka": 4, "steps_nonfinite": 0}
    assert everywhere(
        comm, expected.items() <= {key.removeprefix(f"{sparse}/"): numbers[key] for key in numbers}.items()
    )
    assert everywhere(comm, numbers[f"{dense}/density"] == 1 and numbers[f"{dense}/steps_dense"] == 4)
    assert everywhere(comm, 4 * 30 <= numbers[f"{sparse}/result_entries"] <= 4 * 30 * comm.Get_size())
    share = 2 * (comm.Get_size() - 1) / comm.Get_size()
    ratio = numbers[f"{sparse}/bytes_sent"] / (4 * share * 4 * 300) if share else None
    assert everywhere(comm, numbers.get(f"{sparse}/ratio_to_dense") == ratio)


@either
def test_norms_are_taken_in_the_step_after_the_call_and_change_no_bit(hvd, group, comm, front_end):
    rank = comm.Get_rank()
    compression = hvs.Compression.topka(**settings(dense_below=50))
    plain, watched = begin(front_end, compression), begin(front_end, compression)
    for step in range(5):
        same = zip(
            train(plain.optimizer, plain.model, rank, [step]),
            train(watched.optimizer, watched.model, rank, [step]),
            strict=True,
        )
        assert everywhere(comm, all(torch.equal(one, other) for one, other in same))
        numbers = watched.exchange.statistics(norms=step != 3)
        measured = total(numbers).keys() & {"gradient_norm", "residual_norm", "gain"}
        assert everywhere(comm, len(measured) == (3 if step in (1, 2, 3) else 0))


@pytest.mark.parametrize("collective", ["topka", "gtopk"])
def test_norms_are_those_of_gradient_and_residual(comm, hvd, collective):
    """With exact sums; what gTopk returns is held back, too."""
    model = Given()
    compression = hvs.Sparse.of(0.1, collective=collective, dense_below=0, bucket_bytes=10**6)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = wrap(model, compression, sgd(model, momentum=0, lr=1.0), grad_scaler=scaler)
    for step in range(4):
        optimizer.zero_grad()
        before = residual(optimizer)
        scaler.scale(model.loss(comm.Get_rank(), step)).backward()
        scaler.step(optimizer)
        scaler.update()
        numbers = optimizer.statistics(norms=True)
    names = optimizer.compression_state_dict()["buckets"][0]["parameters"]
    gradients = dict(zip(["first", "second"], model.gradients(comm.Get_rank(), 3), strict=True))
    gradient = np.concatenate([gradients[name].numpy().ravel() for name in names]).astype(np.float64)
    acc, held = np.square(before / 4 + gradient).sum(), np.square(residual(optimizer) / 4).sum()
    largest = np.sort(np.square(before / 4 + gradient))[-38:].sum()
    assert everywhere(comm, numbers["total/gradient_norm"] == pytest.approx(np.linalg.norm(gradient)))
    assert everywhere(comm, numbers["total/residual_norm"] == pytest.approx(held**0.5))
    assert everywhere(comm, numbers["total/gain"] == pytest.approx(largest / acc))


def residual(optimizer):
    (bucket,) = optimizer.compression_state_dict()["buckets"]
    return bucket["memory"]["residual"].double().numpy()


def test_a_step_whose_gradients_are_not_finite_is_counted_and_not_measured(comm, hvd):
    model = mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = wrap(model, grad_scaler=scaler)

    def step(poison):
        optimizer.zero_grad()
        loss = loss_of(model, comm.Get_rank(), 0)
        scaler.scale(loss * (float("nan") if poison else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        return optimizer.statistics

    step(poison=False)(norms=True)
    numbers = step(poison=comm.Get_rank() == 0)(norms=True)
    buckets = {key.partition("/")[0] for key in numbers} - {"total"}
    assert everywhere(comm, numbers["total/steps_nonfinite"] == len(buckets))
    assert everywhere(comm, numbers["total/density"] == 1)
    assert everywhere(comm, "total/gradient_norm" not in numbers)
    assert everywhere(comm, np.isfinite(step(poison=False)()["total/gradient_norm"]))


@either
def test_exchange_time_is_hidden_until_the_last_gradient_is_available(hvd, group, comm, front_end):
    """The times add up to that of the stages, and what little lies between these."""
    one = begin(front_end, hvs.Compression.topka(**settings()))
    train(one.optimizer, one.model, comm.Get_rank(), range(5))
    here = total(one.exchange.statistics())
    stages = sum(here.get(f"seconds_{stage}", 0) for stage in ("select", "agree", "exchange", "apply"))
    assert everywhere(comm, stages <= here["seconds_hidden"] + here["seconds_exposed"])


def test_a_copied_model_has_separate_statistics(comm, hvd):
    model = mlp()
    other = copy.deepcopy(model)
    optimizer, another = wrap(model), wrap(other)
    train(optimizer, model, comm.Get_rank(), range(2))
    assert everywhere(comm, another.statistics() == {})
    assert everywhere(comm, optimizer.statistics()["total/steps"] == 2)


def test_embeddings_of_horovod_are_not_counted(comm, hvd):
    """Their gradients, which are sparse tensors, travel by Horovod."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(10, 12, sparse=True), nn.Linear(12, 8))
    optimizer = wrap(model, hvs.Compression.topka(density=0.5, dense_below=0), torch.optim.SGD(model.parameters(), 0.1))
    train(optimizer, model, comm.Get_rank(), range(2), lambda model, *_: model(torch.tensor([1, 2])).sum())
    numbers = optimizer.statistics()
    assert everywhere(comm, numbers["total/bytes_sent"] == optimizer.traffic.bytes_sent)
