"""A training that is interrupted in any way continues like an undisturbed one, or is refused before its first step."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from checkpointing import Training as Script
from checkpointing import refusal
from laws import everywhere, same_bits
from torch import nn

from horovod_sparse.checkpoint import Checkpoints, Training, store, training
from horovod_sparse.checkpoint.folder import Folder

pytestmark = pytest.mark.mpi

TOTAL = 9


class Numbers:
    """Data with a position: yields 0, 1, 2 and so on, plus 100 times the rank."""

    def __init__(self, rank: int) -> None:
        self.rank, self.used = rank, 0

    def __iter__(self):
        while True:
            self.used += 1
            yield 100 * self.rank + self.used - 1

    def state_dict(self):
        return {"used": self.used, "rank": self.rank}

    def load_state_dict(self, state):
        assert state["rank"] == self.rank
        self.used = state["used"]


class Run:
    """The training of the other tests, of which only ``steps`` is left to this class."""

    Numbers = Numbers

    def __init__(self, folder, rank, every=2, run="", **more):
        self.script, self.numbers, self.rank = Script("topka:density=0.05", rank, amp=True), self.Numbers(rank), rank
        self.taken, self.read = [], []
        self.training = Training(folder, every=every, run=run, data=self.numbers, **self.script.states, **more)

    def steps(self, at=lambda step: None):
        """Train to the end, unless ``at``, which is called after each step, raises an error."""
        for step, number in zip(self.training.steps(TOTAL), self.numbers, strict=False):
            self.script.train(1)
            self.taken.append(step)
            self.read.append(number)
            at(step)
        return self

    @property
    def bits(self):
        return self.script.bits()[:-1]  # without the losses of this process alone


class CrashError(Exception):
    """End of a training between two steps."""


def crash(after):
    def at(step):
        if step == after:
            raise CrashError

    return at


BITS: list[torch.Tensor] = []


@pytest.fixture
def undisturbed(hvd, comm, folder):
    """Return the bits of a training without disturbances, which runs once."""
    if not BITS:
        run = Run(folder.with_name("undisturbed"), comm.Get_rank()).steps()
        assert everywhere(comm, run.taken == list(range(TOTAL)))
        BITS.extend(run.bits)
    return BITS


@pytest.mark.parametrize("after", [0, 3, 8], ids=["in the first step", "between two saves", "in the last step"])
def test_after_a_crash_the_bits_are_those_of_an_undisturbed_training(comm, folder, undisturbed, after):
    rank = comm.Get_rank()
    first = Run(folder, rank)
    with pytest.raises(CrashError):
        first.steps(crash(after))
    first.training._shared.checkpoints.wait()
    comm.Barrier()
    again = Run(folder, rank)
    assert everywhere(comm, again.training.step == after // 2 * 2)
    again.steps()
    assert everywhere(comm, again.read == [100 * rank + step for step in range(after // 2 * 2, TOTAL)])
    assert everywhere(comm, all(map(torch.equal, again.bits, undisturbed)))
    finished = Run(folder, rank).steps()
    assert everywhere(comm, finished.taken == [])
    assert everywhere(comm, all(map(torch.equal, finished.bits, undisturbed)))


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_notice_to_one_rank_saves_on_all_at_the_same_step(comm, folder, undisturbed, number):
    rank, last = comm.Get_rank(), comm.Get_size() - 1
    run = Run(folder, rank, every=1000)

    def at(step):
        if step == 4 and rank == last:
            os.kill(os.getpid(), number)

    with pytest.raises(SystemExit) as caught:
        run.steps(at)
    assert everywhere(comm, caught.value.code == training.PREEMPTED == 75)
    assert everywhere(comm, run.taken == list(range(5)))
    assert signal.getsignal(number) != signal.SIG_IGN
    again = Run(folder, rank)
    assert everywhere(comm, again.training.step == 5)
    assert everywhere(comm, all(map(torch.equal, again.steps().bits, undisturbed)))


def test_a_damaged_checkpoint_is_replaced_by_the_one_before(comm, folder, undisturbed, caplog):
    rank = comm.Get_rank()
    first = Run(folder, rank)
    with pytest.raises(CrashError):
        first.steps(crash(5))
    first.training._shared.checkpoints.wait()
    comm.Barrier()
    newest = Folder(folder).checkpoints()[0].step if rank == 0 else None
    newest = comm.bcast(newest)
    if rank == 0:
        path = folder / f"step-{newest:08d}" / f"rank-{comm.Get_size() - 1:05d}.pt"
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    comm.Barrier()
    again = Run(folder, rank)
    assert everywhere(comm, again.training.step == newest - 2)
    assert everywhere(comm, rank > 0 or f"The checkpoint of step {newest - 2} is intact" in caplog.text)
    assert everywhere(comm, all(map(torch.equal, again.steps().bits, undisturbed)))


def test_stop_on_one_rank_saves_after_the_step(comm, folder, undisturbed):
    rank, last = comm.Get_rank(), comm.Get_size() - 1
    run = Run(folder, rank, every=1000)
    run.steps(lambda step: run.training.stop() if step == 4 and rank == last else None)
    assert everywhere(comm, run.taken == list(range(5)))
    again = Run(folder, rank)
    assert everywhere(comm, again.training.step == 5)
    assert everywhere(comm, all(map(torch.equal, again.steps().bits, undisturbed)))


def test_a_loop_that_ends_before_the_last_step_warns(hvd, comm, folder, caplog):
    rank = comm.Get_rank()
    run = Run(folder, rank)
    for _ in zip(run.training.steps(TOTAL), range(3), strict=False):
        run.script.train(1)
    assert everywhere(comm, f"rank {rank} left the loop in step 3 of 9" in caplog.text)


# --- local folders ---


@pytest.fixture
def local(comm, folder):
    """Return a folder of this rank, as on a disk of its node."""
    path = folder.with_name(f"node-{comm.Get_rank()}")
    comm.Barrier()
    return path


def crashed(folder, rank, **more):
    """Train up to a crash in step 5; both folders then have the checkpoint of step 4."""
    run = Run(folder, rank, **more)
    with pytest.raises(CrashError):
        run.steps(crash(5))
    for place in run.training._places:
        place.checkpoints.wait()


def remove(folder, *steps):
    for step in steps:
        shutil.rmtree(folder / f"step-{step:08d}")


def damage(folder, step, rank):
    path = folder / f"step-{step:08d}" / f"rank-{rank:05d}.pt"
    path.write_bytes(path.read_bytes()[:-1] + b"?")


def test_the_local_checkpoint_is_loaded_if_the_shared_one_is_older(comm, folder, local, undisturbed):
    rank = comm.Get_rank()
    crashed(folder, rank, local=local)
    files = {path.name for path in (local / f"rank-{rank:05d}" / "step-00000004").iterdir()}
    assert everywhere(comm, files == {"manifest.json", f"rank-{rank:05d}.pt", *(["shared.pt"] if rank == 0 else [])})
    if rank == 0:
        remove(folder, 4)
    comm.Barrier()
    again = Run(folder, rank, local=local)
    assert everywhere(comm, again.training.step == 4)
    assert everywhere(comm, all(map(torch.equal, again.steps().bits, undisturbed)))


@pytest.mark.parametrize("what", ["lost", "damaged", "older"])
def test_local_files_that_do_not_fit_leave_the_choice_to_the_shared_folder(
    comm, folder, local, undisturbed, what, caplog
):
    rank, last = comm.Get_rank(), comm.Get_size() - 1
    crashed(folder, rank, local=local)
    own = local / f"rank-{rank:05d}"
    if what == "older":
        Run(folder, rank).steps()
    elif rank == last and what == "lost":
        shutil.rmtree(own)
    elif rank == last:
        damage(own, 4, rank)
    comm.Barrier()
    again = Run(folder, rank, local=local)
    assert everywhere(comm, again.training.step == (TOTAL if what == "older" else 4))
    warned = "continuing from the shared folder" in caplog.text
    assert everywhere(comm, warned == (rank == 0 and what == "damaged"))
    assert everywhere(comm, all(map(torch.equal, again.steps().bits, undisturbed)))


@pytest.mark.parametrize("others", [True, False], ids=["older ones are intact", "there is no other"])
def test_a_damaged_shared_checkpoint_is_replaced_by_the_newest_intact_one(comm, folder, local, undisturbed, others):
    """Among the shared and the local ones, of which those of steps 2 and 4 are left."""
    rank = comm.Get_rank()
    crashed(folder, rank, local=local, keep=9)
    Run(folder, rank, keep=9).steps()
    if rank == 0:
        damage(folder, TOTAL, 0)
        remove(folder, *(step for step in Folder(folder).steps() if step != TOTAL and (step > 2 or not others)))
    comm.Barrier()
    again = Run(folder, rank, local=local)
    assert everywhere(comm, again.training.step == 4)
    assert everywhere(comm, all(map(torch.equal, again.steps().bits, undisturbed)))


def test_a_shared_checkpoint_is_loaded_if_the_newest_shared_and_local_ones_are_damaged(
    comm, folder, local, undisturbed, caplog
):
    rank = comm.Get_rank()
    crashed(folder, rank, local=local, keep=9)
    Run(folder, rank, keep=9).steps()
    if rank == 0:
        damage(folder, TOTAL, 0)
        remove(folder, *(step for step in Folder(folder).steps() if 2 < step < TOTAL))
    damage(local / f"rank-{rank:05d}", 4, rank)
    comm.Barrier()
    again = Run(folder, rank, local=local)
    assert everywhere(comm, again.training.step == 2)
    assert everywhere(comm, rank > 0 or "continuing from the shared folder" in caplog.text)
    assert everywhere(comm, all(map(torch.equal, again.steps().bits, undisturbed)))


def test_a_local_disk_that_cannot_be_read_leaves_the_choice_to_the_shared_folder(
    comm, folder, local, undisturbed, monkeypatch, caplog
):
    rank, last, scanned = comm.Get_rank(), comm.Get_size() - 1, os.scandir
    crashed(folder, rank, local=local)

    def failing(path):
        if rank == last and Path(path) == local / f"rank-{rank:05d}":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scanned(path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", failing)
        again = Run(folder, rank, local=local)
    assert everywhere(comm, again.training.step == 4)
    assert everywhere(comm, rank > 0 or re.search(f"rank {last}: .*Permission denied.*shared folder", caplog.text))
    assert everywhere(comm, all(map(torch.equal, again.steps().bits, undisturbed)))


@pytest.mark.parametrize("wrong", ["a file", "not writable"])
def test_a_shared_folder_that_does_not_work_is_refused_and_costs_no_local_checkpoint(
    comm, folder, local, undisturbed, monkeypatch, wrong
):
    rank, other = comm.Get_rank(), folder.with_name("wrong")
    crashed(folder, rank, local=local)
    own = Folder(local / f"rank-{rank:05d}", local=True)
    before = own.steps()
    if wrong == "a file" and rank == 0:
        other.write_text("")
    comm.Barrier()
    with monkeypatch.context() as patched:
        if wrong == "not writable":
            prepare = Folder.prepare

            def refuse(folder):
                if folder.path == other:
                    raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(other))
                prepare(folder)

            patched.setattr(Folder, "prepare", refuse)
        message = refusal(comm, lambda: Run(other, rank, local=local))
    assert f"rank 0: {other}: " in message
    assert everywhere(comm, own.steps() == before)


def test_local_files_of_another_training_are_not_taken(comm, folder, local, undisturbed):
    rank = comm.Get_rank()
    crashed(folder, rank, local=local, run="first")
    other = folder.with_name("second")
    again = Run(other, rank, local=local, run="second")
    assert everywhere(comm, again.training.restored is None)
    assert everywhere(comm, all(map(torch.equal, again.steps().bits, undisturbed)))
    message = refusal(comm, lambda: Run(folder, rank, local=local, run="first"))
    assert "belongs to run 'second', but this is run 'first'" in message


def test_a_local_folder_on_some_ranks_only_is_refused(hvd, comm, folder, local):
    rank = comm.Get_rank()
    if comm.Get_size() == 1:
        return
    with pytest.raises(ValueError, match=rf"local= is given on ranks \[0\] of {comm.Get_size()} only"):
        Run(folder, rank, local=local if rank == 0 else None)


@pytest.mark.parametrize("place", ["shared", "local"])
def test_a_save_that_fails_does_not_stop_the_training(comm, folder, local, undisturbed, monkeypatch, caplog, place):
    rank = comm.Get_rank()
    run = Run(folder, rank, local=local if place == "local" else None)
    write, last = store.write, comm.Get_size() - 1

    def full(partial, name, content):
        if rank == last and (local in partial.parents or partial.name.startswith("step-00000004")):
            raise OSError("no space left")
        return write(partial, name, content)

    monkeypatch.setattr(store, "write", full)
    run.steps()
    assert everywhere(comm, rank > 0 or f"rank {last}: no space left" in caplog.text)
    assert everywhere(comm, all(map(torch.equal, run.bits, undisturbed)))
    assert everywhere(comm, Folder(folder).checkpoints()[0].step == TOTAL)


# --- refusals ---


def test_what_cannot_be_continued_is_refused_by_name(hvd, comm, folder):
    rank = comm.Get_rank()
    Run(folder, rank, run="seed 1")
    assert "belongs to run 'seed 1', but this is run 'seed 2'" in refusal(comm, lambda: Run(folder, rank, run="seed 2"))

    def other(compression="topka:density=0.05", model=None, **more):
        script = Script(compression, rank, amp=True)
        states = script.states | ({"model": model} if model else {}) | more
        return lambda: Training(folder, run="seed 1", **states)

    assert "Missing key(s) in state_dict" in refusal(comm, other(model=nn.Linear(2, 2)))
    assert "another compression" in refusal(comm, other("oktopk:density=0.05"))
    assert "holds no state of swa" in refusal(comm, other(swa=nn.Linear(1, 1)))


def test_a_second_exchange_is_refused(hvd, comm, folder):
    """Only its residuals of rank 0 would be saved."""
    states = Script("topka:density=0.05", comm.Get_rank()).states
    second = Script("topka:density=0.05", comm.Get_rank()).states["optimizer"]
    assert "second exchanges gradients" in refusal(comm, lambda: Training(folder, second=second, **states))


def test_a_checkpoint_without_an_identity_is_refused(hvd, comm, folder):
    script = Script("topka:density=0.05", comm.Get_rank())
    Checkpoints(folder).save(3, **script.states)
    assert "holds no state of run" in refusal(comm, lambda: Training(folder, **script.states))


def test_what_cannot_be_saved_is_refused_before_the_first_step(hvd, comm, folder):
    rank = comm.Get_rank()
    numbers = Numbers(rank)
    numbers.state_dict = lambda: {"used": object()}
    script = Script("topka:density=0.05", rank)
    message = refusal(comm, lambda: Training(folder, data=numbers, **script.states))
    assert "cannot be loaded again without executing code" in message


@pytest.mark.parametrize("method", ["state_dict", "load_state_dict"])
def test_data_that_fail_on_one_rank_fail_on_all(comm, folder, undisturbed, method, caplog):
    """At a regular save, training continues."""
    rank, last = comm.Get_rank(), comm.Get_size() - 1

    class Failing(Numbers):
        def __getattribute__(self, name):
            if name == method and self.rank == last and self.used != 1:
                raise RuntimeError("no position")
            return super().__getattribute__(name)

    class Fails(Run):
        Numbers = Failing

    first = Run(folder, rank)
    with pytest.raises(CrashError):
        first.steps(crash(3))
    first.training._shared.checkpoints.wait()
    comm.Barrier()
    if method == "load_state_dict":
        message = refusal(comm, lambda: Fails(folder, rank))
        assert f"step 2 cannot be loaded: rank {last}: no position" in message
    else:
        again = Fails(folder, rank)
        message = refusal(comm, again.steps)
        assert f"step {TOTAL} could not be saved: rank {last}: no position" in message
        assert everywhere(comm, rank > 0 or "no position; training continues" in caplog.text)
        assert everywhere(comm, all(map(torch.equal, again.bits, undisturbed)))


def test_rank_0_decides_when_all_ranks_save(hvd, comm, folder):
    rank = comm.Get_rank()
    run = Run(folder, rank, every=2 if rank == 0 else 1000).steps()
    assert everywhere(comm, {manifest.step for manifest in Folder(folder).checkpoints()} == {6, 8, 9})
    assert same_bits(comm, *(p.detach().numpy() for p in run.script.model.parameters()))


def test_torchruns_restarts_need_a_new_store(hvd, comm, folder, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    with pytest.raises(RuntimeError, match="start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        Run(folder, comm.Get_rank())
