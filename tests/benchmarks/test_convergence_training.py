"""One run of the convergence benchmark, on every rank."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import horovod.torch
import pytest
import torch
from mpi4py import MPI

from benchmarks.convergence.exchanges import POWERSGD_START
from benchmarks.convergence.runs import Job, Run
from benchmarks.convergence.tasks import TASKS, Windows
from benchmarks.convergence.training import batches, measure, train
from benchmarks.convergence.worker import simulated
from horovod_sparse.transport.mpi import MPITransport

pytestmark = [pytest.mark.mpi, pytest.mark.slow]

DIGITS = TASKS["digits"]
SAMPLES = DIGITS.load(Path())
PARAMETERS = 151_306


@pytest.fixture(autouse=True)
def _process_group(hvd):
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def outcome(spec, steps=3, task=DIGITS, **settings):
    return train(task, SAMPLES, job(spec, steps, **settings), transport())


def job(spec, steps, **settings):
    return Job("digits", Run("run", "group", spec, **settings), seed=0, steps=steps, ranks=transport().size)


def transport():
    return MPITransport(MPI.COMM_WORLD)


@pytest.mark.parametrize(
    ("spec", "optimizer"),
    [
        ("recommended:collective=topka,density=0.01", "momentum"),
        pytest.param("oktopk:density=0.02,wire=bfloat16", "adam", marks=pytest.mark.full),
        pytest.param("stable:density=0.1", "sgd", marks=pytest.mark.full),
    ],
)
def test_a_simulation_on_threads_ends_with_the_same_bits(spec, optimizer):
    record = outcome(spec, steps=20, optimizer=optimizer)
    ours = simulated(job(spec, 20, optimizer=optimizer), SAMPLES) if transport().rank == 0 else record
    names = ("digest", "final", "bytes_sent", "entries_sent", "residual_bytes")
    same = [ours[name] == record[name] for name in names]
    assert MPI.COMM_WORLD.bcast(same) == [True] * len(names)


def test_an_epoch_gives_every_sample_to_one_rank_at_most():
    ranks, count, batch = horovod.torch.size(), 50, 3
    per_epoch = count // (batch * ranks)
    order = batches(count, batch, 1, transport())
    for _ in range(2):
        mine = [next(order) for _ in range(per_epoch)]
        everyone = [sample for rank in MPI.COMM_WORLD.allgather(mine) for one in rank for sample in one]
        assert len(everyone) == len(set(everyone)) == per_epoch * batch * ranks
        assert set(everyone) <= set(range(count))


def test_the_order_depends_on_the_seed_and_changes_every_epoch():
    one, same, other = (batches(48, 48 // horovod.torch.size(), seed, transport()) for seed in (0, 0, 1))
    first = next(one)
    assert first == next(same) != next(other)
    assert first != next(one)


@pytest.mark.parametrize(
    ("optimizer", "memory"), [pytest.param("sgd", "residual", marks=pytest.mark.nightly), ("momentum", "momentum")]
)
def test_gradients_without_delayed_updates_equal_those_of_dense_training(optimizer, memory):
    """At every learning rate: only delayed updates separate the parameters from those of dense training."""
    spec, ranks = f"topka:density=0.02,memory={memory}", horovod.torch.size()
    dense, ahead, behind = (
        [point["train_loss"] for point in outcome(one, steps=30, optimizer=optimizer, ahead=whose)["curve"]]
        for one, whose in (("none", ""), (spec, "mean"), (spec, "own"))
    )
    assert ahead == pytest.approx(dense, rel=1e-4)
    assert (behind == pytest.approx(dense, rel=1e-4)) == (ranks == 1)


@pytest.mark.full
@pytest.mark.parametrize(("spec", "width"), [("none", 4), ("fp16", 2)])
def test_horovods_own_exchange_is_charged_as_a_ring(spec, width):
    record, ranks = outcome(spec), horovod.torch.size()
    assert record["entries_sent"] == 3 * PARAMETERS
    assert record["bytes_sent"] == pytest.approx(3 * 2 * (ranks - 1) / ranks * width * PARAMETERS)
    assert record["residual_bytes"] == 0


@pytest.mark.full
def test_powersgd_is_charged_for_what_its_hook_sums():
    steps = POWERSGD_START + 2
    record = outcome("powersgd:rank=2", steps=steps)
    sizes = [tuple(parameter.flatten(1).shape) for parameter in DIGITS.build().parameters() if parameter.dim() > 1]
    small = sum(parameter.numel() for parameter in DIGITS.build().parameters() if parameter.dim() == 1)
    factors = sum(2 * (n + m) if 2 * 2 * (n + m) < n * m else n * m for n, m in sizes)
    assert record["entries_sent"] == POWERSGD_START * PARAMETERS + 2 * (small + factors)
    assert record["residual_bytes"] > 4 * sum(n * m for n, m in sizes if 2 * 2 * (n + m) < n * m)


@pytest.mark.full
def test_our_own_dense_exchange_trains_the_same_model():
    one, other = outcome("none"), outcome("dense")
    assert [point["value"] for point in one["curve"]] == [point["value"] for point in other["curve"]]
    if horovod.torch.size() > 1:
        assert other["bytes_sent"] == pytest.approx(one["bytes_sent"], rel=1e-4)
        assert other["entries_sent"] == one["entries_sent"]


@pytest.mark.full
def test_error_feedback_keeps_one_number_per_parameter():
    kept = 4 * PARAMETERS if horovod.torch.size() > 1 else 0
    assert outcome("topka:density=0.01")["residual_bytes"] == kept
    assert outcome("topka:density=0.01,memory=none")["residual_bytes"] == 0


def test_nothing_is_too_small_to_be_compressed():
    record = outcome("topka:density=0.01")
    if horovod.torch.size() > 1:
        assert record["entries_sent"] == pytest.approx(3 * 0.01 * PARAMETERS, rel=0.01)


def test_local_steps_send_once_a_round_and_the_last_one_may_be_shorter():
    record, every = (outcome("topka:density=0.01,indices=plain", local_steps=steps) for steps in (2, 1))
    assert 3 * record["entries_sent"] == 2 * every["entries_sent"]
    assert 3 * record["bytes_sent"] == 2 * every["bytes_sent"]
    assert record["local_steps"] == 2


@pytest.mark.parametrize("optimizer", [pytest.param("adam", marks=pytest.mark.nightly), "muon"])
def test_ranks_end_with_the_same_parameters_after_streamed_local_steps(optimizer):
    run = Run("run", "group", "dense", optimizer, local_steps=4, fragments=2, delay=1)
    task = TASKS["transformer"]
    record = train(task, task.load(Path()), Job("transformer", run, 0, 9, transport().size), transport())
    assert (record["fragments"], record["delay"]) == (2, 1)
    assert MPI.COMM_WORLD.allgather(record["digest"]) == [record["digest"]] * MPI.COMM_WORLD.Get_size()


@pytest.mark.full
def test_the_curve_ends_with_the_last_step_and_all_ranks_have_it():
    record = outcome("topka:density=0.01", steps=23)
    assert [point["step"] for point in record["curve"]] == [4, 8, 12, 16, 20, 23]
    assert record["final"] == record["curve"][-1]["value"]
    assert record["bytes_sent"] == record["curve"][-1]["bytes_sent"]
    assert all(point.pop("seconds") > 0 for point in record["curve"])  # of every rank by its own clock
    assert all(record["curve"] == other for other in MPI.COMM_WORLD.allgather(record["curve"]))


def test_a_run_that_diverges_is_a_result():
    record = outcome("topka:density=0.01", steps=30, task=dataclasses.replace(DIGITS, lr=1e20))
    assert record["final"] is None
    assert len(record["curve"]) < 5
    assert all(point["step"] < 30 for point in record["curve"])
    assert len(set(MPI.COMM_WORLD.allgather(len(record["curve"])))) == 1


class Silent:
    def traffic(self, steps):
        return 0.0, 0.0


def test_every_test_sample_counts_once():
    class Counting(torch.nn.Module):
        def forward(self, images):
            return torch.nn.functional.one_hot(torch.zeros(len(images), dtype=torch.int64), 10).float()

    point = measure("accuracy", Counting(), Silent(), SAMPLES[1], horovod.torch.rank(), 1, transport())
    zeros = int((SAMPLES[1].labels == 0).sum())
    assert point["value"] == zeros / len(SAMPLES[1])
    assert point["train_loss"] == (horovod.torch.size() - 1) / 2


def test_perplexity_is_that_of_the_mean_loss():
    class Uniform(torch.nn.Module):
        def forward(self, words):
            return torch.zeros(*words.shape, 10)

    test = Windows(torch.zeros(5 * 4 + 1), length=4, stride=4)
    assert measure("perplexity", Uniform(), Silent(), test, 0.0, 1, transport())["value"] == pytest.approx(10)
