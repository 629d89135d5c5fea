"""train.py, preempted within an epoch and started again, ends with the bits of an uninterrupted run."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from unittest.mock import Mock

import horovod.torch
import numpy as np
import pytest
import train
from checkpointing import reseed
from data import CIFAR10_RECORD, CIFAR10_TEST, CIFAR10_TRAIN, Batches
from laws import everywhere
from saving import Position

from horovod_sparse import metrics


@pytest.fixture
def shared(hvd, comm, tmp_path, monkeypatch):
    """A folder for all ranks, with a few images in the format of CIFAR-10, which are augmented."""
    folder = Path(comm.bcast(str(tmp_path)))
    if comm.Get_rank() == 0:
        random = np.random.default_rng(0)
        for name in (*CIFAR10_TRAIN, *CIFAR10_TEST):
            records = random.integers(0, 256, (8, CIFAR10_RECORD), np.uint8)
            records[:, 0] = random.integers(0, 10, 8)
            records.tofile(folder / name)
    comm.Barrier()
    monkeypatch.setattr(horovod.torch, "init", lambda: None)  # was done once for all tests
    yield folder
    metrics.enable(False)
    metrics.clear()


def run(monkeypatch, folder, output, *arguments):
    """One run of train.py in this process; gives its result, or None where it left early."""
    reseed(12345)
    common = ["train.py", "--data", f"cifar10:{folder}", "--epochs", "2", "--batch-size", "2", "--warmup-epochs", "1"]
    common += ["--compression", "oktopk:density=0.01,tau_threshold=3,indices=plain", "--output", str(folder / output)]
    monkeypatch.setattr(sys, "argv", [*common, *arguments])
    train.main()
    result = folder / output / "result.json"
    return json.loads(result.read_text()) if result.exists() else None


def curves(result):
    """Parts of a result that do not depend on the time a run took."""
    timed = ("samples_per_second", "ms_per_step")
    epochs = [{name: value for name, value in epoch.items() if name not in timed} for epoch in result["epochs"]]
    return result["parameters"], epochs, result["densities"]


@pytest.mark.mpi
@pytest.mark.parametrize(
    "settings",
    [(), pytest.param(("--local-steps", "3"), marks=pytest.mark.full)],
    ids=["", "in a round of local steps"],
)
def test_a_preempted_run_ends_as_an_uninterrupted_one(hvd, comm, shared, monkeypatch, capsys, settings):
    whole = comm.bcast(run(monkeypatch, shared, "whole", *settings))
    steps = whole["steps_per_epoch"]
    train_step, done = train.train_step, 0

    def counted(*arguments):
        nonlocal done
        done += 1
        if done == steps + 2 and comm.Get_rank() == comm.Get_size() - 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        return train_step(*arguments)

    saving = [*settings, "--checkpoint", str(shared / "checkpoints"), "--keep", "1"]
    with monkeypatch.context() as patched:
        patched.setattr(train, "train_step", counted)
        left = run(monkeypatch, shared, "resumed", *saving)
    printed = comm.bcast(capsys.readouterr().out)
    assert everywhere(comm, left is None)
    assert f"train.py: preempted at step {steps + 2}\n" in printed
    comm.Barrier()
    resumed = comm.bcast(run(monkeypatch, shared, "resumed", *saving))
    assert f"train.py: resuming from step {steps + 2}\n" in comm.bcast(capsys.readouterr().out)
    assert everywhere(comm, curves(resumed) == curves(whole))
    assert everywhere(
        comm, [path.name for path in (shared / "checkpoints").glob("step-*")] == [f"step-{2 * steps:08d}"]
    )
    finished = comm.bcast(run(monkeypatch, shared, "finished", *saving))
    assert everywhere(comm, curves(finished) == curves(whole))
    assert "resuming from step" in comm.bcast(capsys.readouterr().out)
    with pytest.raises(SystemExit) as left:
        run(monkeypatch, shared, "resumed", *saving, "--resume", "3")
    message = comm.bcast(left.value.code)
    assert f"holds no checkpoint of step 3; available: {2 * steps}" in message
    assert f"The checkpoint of step {2 * steps} is intact: load it with step={2 * steps} (--resume STEP)" in message


@pytest.mark.mpi
def test_a_failed_save_is_a_warning(hvd, comm, shared, monkeypatch, capsys):
    taken = shared / "taken"
    if comm.Get_rank() == 0:
        taken.mkdir()
    comm.Barrier()
    monkeypatch.setattr("horovod_sparse.checkpoint.folder.Folder.prepare", Mock(side_effect=OSError("full")))
    result = comm.bcast(run(monkeypatch, shared, "on", "--checkpoint", str(taken), "--checkpoint-every", "7"))
    assert "parameters" in result
    if comm.Get_rank() == 0:
        assert (
            "train.py: warning: step 7 could not be saved: rank 0: full; training continues" in capsys.readouterr().out
        )


def test_a_place_in_the_data_on_other_ranks() -> None:
    position = Position(step=33, epoch=2, batch=10, loss=5.0, images=64)
    assert position.resized(128, 20) == Position(33, 2, 5, 2.5, 0.0, 128)
    assert position.resized(32, 15) == Position(33, 2, 14, 7.0, 0.0, 32)
    assert Position(33, 2, images=64).resized(128, 20) == Position(33, 2, images=128)


def test_batches_can_begin_later() -> None:
    batches = Batches(range(10), 3, drop_last=True)
    assert list(batches) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    batches.start = 2
    assert list(batches) == [[6, 7, 8]]
    assert len(batches) == 3
