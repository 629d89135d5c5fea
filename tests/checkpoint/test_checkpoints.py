"""A run resumed from a checkpoint is bitwise identical to an uninterrupted one; damaged checkpoints are refused."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from checkpointing import Training, refusal, reseed, sign
from laws import everywhere
from mpi4py import MPI
from states import same
from training import snapshot, wrap

import horovod_sparse as hvs
from horovod_sparse.checkpoint import CheckpointError, Checkpoints

pytestmark = pytest.mark.mpi

COMPRESSIONS = [
    "oktopk:density=0.05,tau_threshold=3,tau_partition=2",
    "randomk:density=0.05,memory=conef,compressor=quantize",
    "accordion:density=0.05,steps_per_epoch=2,interval=2",
    "topka:density=0.05,schedule=annealed,interval=2",
    pytest.param("gravac:density=0.2,window=2,cf_max=1e6", marks=pytest.mark.full),
    pytest.param("auto:density=0.1,sparsifier=stable,block=8,refresh=3", marks=pytest.mark.full),
    pytest.param("topka:density=0.05,memory=momentum,momentum=0.9", marks=pytest.mark.full),
    pytest.param("randomblock:density=0.05,memory=improved,version=2", marks=pytest.mark.full),
    pytest.param("hierarchical:density=0.05,node_ranks=2", marks=pytest.mark.full),
]


def names(comm, folder):
    comm.Barrier()
    there = sorted(path.name for path in folder.iterdir() if path.name != "lock")
    comm.Barrier()
    return there


def on_rank_0(comm, change):
    """Run a function on rank 0 while the others wait."""
    if comm.Get_rank() == 0:
        change()
    comm.Barrier()


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_resumed_run_is_bitwise_identical_to_an_uninterrupted_one(hvd, comm, folder, compression):
    settings = {"momentum": 0.0 if "momentum" in compression else 0.9, "amp": "oktopk" in compression}
    checkpoints, rank = Checkpoints(folder), comm.Get_rank()
    run = Training(compression, rank, **settings).train(4)
    checkpoints.save(4, **run.states, data={"losses": run.losses})
    run.train(3)
    resumed = Training(compression, rank, **settings)
    reseed(99)
    restored = checkpoints.load(**resumed.states)
    resumed.losses = restored.data["losses"]
    assert everywhere(comm, restored.step == 4 and restored.notes == ())
    assert everywhere(comm, same(run.bits(), resumed.train(3).bits()))


def test_horovods_own_optimizer_can_be_saved(hvd, comm, checkpoints):
    model = torch.nn.Linear(4, 3)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    dense = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    checkpoints.save(0, model=model, optimizer=dense)
    assert everywhere(comm, checkpoints.load(model=model, optimizer=dense).notes == ())
    sparse = hvs.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), compression=hvs.Compression.topka()
    )
    (note,) = checkpoints.load(model=model, optimizer=sparse).notes
    assert "residuals start empty: the checkpoint was saved with a dense exchange" in note


class Versioned(torch.nn.Linear):
    _version = 3

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *arguments):
        self.loaded = local_metadata.get("version")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *arguments)


@pytest.mark.parametrize("save", ["save", "async_save"])
def test_a_module_is_told_the_version_that_was_saved(hvd, comm, checkpoints, save):
    model = Versioned(4, 3)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    getattr(checkpoints, save)(0, model=model, optimizer=optimizer)
    checkpoints.wait()
    checkpoints.load(model=model, optimizer=optimizer)
    assert everywhere(comm, model.loaded == 3)


def test_loading_from_an_empty_folder_returns_nothing(comm, run, checkpoints):
    assert everywhere(comm, checkpoints.load(**run.states) is None)
    assert "holds no checkpoint of step 7; available: none" in refusal(
        comm, lambda: checkpoints.load(step=7, **run.states)
    )
    message = refusal(comm, lambda: checkpoints.load(digest="ab" * 32, **run.states))
    assert "holds nothing, not a checkpoint with digest" in message


def test_the_most_recently_saved_checkpoints_are_kept(comm, run, folder):
    checkpoints = Checkpoints(folder, keep=2)
    for step, value in ((5, "a"), (9, "b"), (9, "c"), (7, "d")):
        checkpoints.save(step, **run.states, data={"value": value, "rank": comm.Get_rank()})
    assert everywhere(comm, names(comm, folder) == ["step-00000007", "step-00000009"])
    newest, other = checkpoints.load(**run.states), checkpoints.load(step=9, **run.states)
    assert everywhere(comm, (newest.step, newest.data["value"], other.data["value"]) == (7, "d", "c"))
    assert everywhere(comm, newest.data["rank"] == comm.Get_rank())
    with pytest.raises(ValueError, match="keep must be at least 1 checkpoint, not 0"):
        Checkpoints(folder, keep=0)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def tamper(shard: Path, change: Callable[[dict], object]) -> None:
    torch.save(change(torch.load(shard, weights_only=True)), shard)
    sign(shard.parent)


def edit(path: Path, **changes) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


DAMAGE = {
    "shared.pt has 100 bytes, but": lambda last: os.truncate(last / "shared.pt", 100),
    "rank-00000.pt is not what was saved": lambda last: flip(last / "rank-00000.pt"),
    "rank-00000.pt is missing": lambda last: (last / "rank-00000.pt").unlink(),
    "it is damaged or of another save": lambda last: shutil.copy(last.with_name("step-00000003") / "shared.pt", last),
    "manifest.json is missing": lambda last: (last / "manifest.json").unlink(),
    "manifest.json is damaged": lambda last: os.truncate(last / "manifest.json", 50),
    "the digest does not match the content": lambda last: edit(last / "manifest.json", number=7),
    "the files are": lambda last: edit(last / "manifest.json", ranks=99),
    "version reads format 3": lambda last: edit(last / "manifest.json", format=1),
    "holds the manifest of step 3": lambda last: shutil.copy(last.with_name("step-00000003") / "manifest.json", last),
}


def test_a_damaged_checkpoint_is_named_and_an_intact_one_suggested(comm, run, checkpoints, folder):
    checkpoints.save(3, **run.states)
    run.train(1)
    checkpoints.save(4, **run.states)
    last = folder / "step-00000004"
    on_rank_0(comm, lambda: shutil.copytree(last, folder / "whole"))
    for message, damage in DAMAGE.items():
        on_rank_0(comm, lambda damage=damage: damage(last))
        refused = refusal(comm, lambda: checkpoints.load(**run.states))
        assert message in refused
        assert f"{last}" in refused
        assert "The checkpoint of step 3 is intact: load it with step=3" in refused
        on_rank_0(comm, lambda: (shutil.rmtree(last), shutil.copytree(folder / "whole", last)))
    assert everywhere(comm, checkpoints.load(**run.states).step == 4)
    assert everywhere(comm, checkpoints.load(step=3, **run.states).step == 3)


def test_a_checkpoint_whose_replacement_was_interrupted_is_loaded(comm, run, checkpoints, folder):
    checkpoints.save(3, **run.states)
    saved = snapshot(run.model)
    on_rank_0(comm, lambda: (folder / "step-00000003").rename(folder / "step-00000003.replaced"))
    run.train(1)
    assert everywhere(comm, checkpoints.load(**run.states).step == 3)
    assert everywhere(comm, same(snapshot(run.model), saved))


def test_a_file_that_cannot_be_read_on_one_rank_is_not_damaged(comm, run, checkpoints, folder, monkeypatch):
    checkpoints.save(3, **run.states)
    checkpoints.save(4, **run.states)
    last = comm.Get_size() - 1
    path, opened = folder / "step-00000004" / f"rank-{last:05d}.pt", os.open

    def failing(name, *arguments, **settings):
        if str(name) == str(path) and comm.Get_rank() == last:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(name))
        return opened(name, *arguments, **settings)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", failing)
        message = refusal(comm, lambda: checkpoints.load(**run.states))
        with pytest.raises(CheckpointError) as caught:
            checkpoints.load(**run.states)
    assert f"rank {last}: {path}: Stale file handle. It may be intact: start again when it can be read" in message
    assert everywhere(comm, (caught.value.damaged, caught.value.intact) == (False, None))
    assert everywhere(comm, checkpoints.load(**run.states).step == 4)


def test_a_digest_detects_a_checkpoint_that_was_changed_and_signed_again(comm, run, checkpoints, folder):
    digest = checkpoints.save(3, **run.states)
    assert len(set(comm.allgather(digest))) == 1
    run.train(1)
    assert checkpoints.save(4, **run.states) != digest
    restored = checkpoints.load(step=3, digest=digest, **run.states)
    assert everywhere(comm, restored.digest == digest)
    message = refusal(comm, lambda: checkpoints.load(digest=digest, **run.states))
    assert re.search(f"holds step 4 with digest .*, not a checkpoint with digest {digest}", message)
    shard = folder / "step-00000003" / "rank-00000.pt"
    on_rank_0(comm, lambda: tamper(shard, lambda content: {**content, "data": {"evil": 1}}))
    assert everywhere(comm, checkpoints.load(step=3, **run.states).digest != digest)
    message = refusal(comm, lambda: checkpoints.load(step=3, digest=digest, **run.states))
    assert f"not a checkpoint with digest {digest}" in message


def poison(shard):
    shard["compression"]["buckets"][0]["memory"]["residual"][2] = float("nan")
    return shard


def with_bucket(shard, **changes):
    first, *rest = shard["compression"]["buckets"]
    return {**shard, "compression": {"buckets": [{**first, **changes}, *rest]}}


DAMAGED_SHARDS = [
    ("does not hold compression, generators, buffers, data", lambda _: None),
    ("compression['buckets'][0]['memory']['residual'] holds values that are not finite", poison),
    ("['unit'] is inf, which is not finite", lambda shard: with_bucket(shard, unit=float("inf"))),
    ("has different buckets than rank-00000.pt", lambda shard: with_bucket(shard, parameters=["other"])),
    ("compression holds no buckets", lambda shard: {**shard, "compression": {}}),
    ("compression holds no buckets", lambda shard: {**shard, "compression": {"buckets": [7]}}),
]


def test_a_damaged_shard_of_one_rank_is_refused_on_all_ranks(comm, run, checkpoints, folder):
    if comm.Get_size() == 1:  # it exchanges nothing, and has no buckets
        return
    shard = folder / "step-00000003" / f"rank-{comm.Get_size() - 1:05d}.pt"
    for message, change in DAMAGED_SHARDS:
        checkpoints.save(3, **run.states)
        on_rank_0(comm, lambda change=change: tamper(shard, change))
        refused = refusal(comm, lambda: checkpoints.load(**run.states))
        assert message in refused
        assert shard.name in refused


def test_a_nonfinite_state_is_not_saved(comm, run, checkpoints, folder):
    checkpoints.save(1, **run.states)
    if comm.Get_size() == 1:
        return
    if comm.Get_rank() == 1:
        run.optimizer.exchange.worker.buckets[0].pipeline.rules.memory.state_dict()["residual"][5] = float("nan")
    message = refusal(comm, lambda: checkpoints.save(2, **run.states))
    assert "step 2 could not be saved: rank 1: compression['buckets'][0]['memory']['residual'] holds" in message
    assert everywhere(comm, names(comm, folder) == ["step-00000001"])


def test_a_second_job_is_refused_and_writes_nothing(comm, run, checkpoints, folder):
    """Every other rank plays a separate job."""
    checkpoints.save(1, **run.states)
    holder = comm.bcast(os.getpid())
    if comm.Get_rank() > 0:
        job = Checkpoints(folder, process_set=MPI.COMM_SELF)
        with pytest.raises(CheckpointError, match=rf"another job saves to .*\(process {holder} on .*wait until it has"):
            job.save(2, model=run.model, optimizer=torch.optim.SGD(run.model.parameters(), lr=0.1))
    assert everywhere(comm, names(comm, folder) == ["step-00000001"])
    assert everywhere(comm, checkpoints.load(**run.states).step == 1)
    checkpoints.save(2, **run.states)
    assert everywhere(comm, names(comm, folder) == ["step-00000001", "step-00000002"])


def test_a_checkpoint_of_another_configuration_is_refused(hvd, comm, run, checkpoints):
    checkpoints.save(1, **run.states)
    other = Training("topka:density=0.05,memory=none", comm.Get_rank())
    message = refusal(comm, lambda: checkpoints.load(**other.states))
    assert "saved with another compression, memory.of=residual (now none): load it" in message
    assert "intact" not in message
    model = torch.nn.Linear(3, 3)
    optimizer = wrap(model)
    message = refusal(comm, lambda: checkpoints.load(model=model, optimizer=optimizer))
    assert "step 1 cannot be loaded" in message


@pytest.mark.parametrize("save", [Checkpoints.save, Checkpoints.async_save])
def test_an_object_that_could_not_be_loaded_is_refused_on_saving(comm, run, checkpoints, folder, save):
    data = {"best": [1.0, {"at": object()}]} if comm.Get_rank() == comm.Get_size() - 1 else {}
    message = refusal(comm, lambda: save(checkpoints, 1, **run.states, data=data))
    assert f"step 1 could not be saved: rank {comm.Get_size() - 1}: data['best'][1]['at'] is of type " in message
    assert "without executing code" in message
    assert everywhere(comm, not folder.exists())


def test_saving_different_steps_on_different_ranks_is_an_error(comm, run, checkpoints):
    if comm.Get_size() > 1:
        message = refusal(comm, lambda: checkpoints.save(comm.Get_rank(), **run.states))
        assert "ranks save different steps: [0, 1" in message
    assert "step must be an integer of at least 0, not -1" in refusal(comm, lambda: checkpoints.save(-1, **run.states))
    step = np.int64(3) if comm.Get_rank() == comm.Get_size() - 1 else 3
    assert "step must be an integer of at least 0, not np.int64(3)" in refusal(
        comm, lambda: checkpoints.save(step, **run.states)
    )


def test_a_save_within_a_step_is_refused(comm, run, folder):
    if comm.Get_size() == 1:
        return
    run.model(torch.randn(8, 12)).square().mean().backward()
    message = refusal(comm, lambda: Checkpoints(folder).save(1, **run.states))
    run.optimizer.step()
    assert "between backward() and step()" in message


def limited(attempt):
    """Limit the size of files that this rank writes to 2 KB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        attempt()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("fault", ["file too large", "no space", "rename"])
def test_a_failed_save_fails_on_all_ranks_and_keeps_earlier_checkpoints(hvd, comm, folder, fault, monkeypatch):
    """The failure is on the last rank, or on rank 0 when it renames the checkpoint."""
    checkpoints, last = Checkpoints(folder), comm.Get_rank() == comm.Get_size() - 1
    reference = Training("topka:density=0.05", comm.Get_rank()).train(3)
    run = Training("topka:density=0.05", comm.Get_rank()).train(1)
    checkpoints.save(1, **run.states)
    run.train(1)

    def attempt():
        checkpoints.save(2, **run.states)

    no_space = Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with monkeypatch.context() as patched:
        if fault == "file too large" and last:
            message = refusal(comm, lambda: limited(attempt))
        else:
            if fault == "no space" and last:
                patched.setattr(os, "fsync", no_space)
            if fault == "rename":
                patched.setattr(Path, "rename", no_space)
            message = refusal(comm, attempt)
    assert "step 2 could not be saved: rank " in message
    assert os.strerror(errno.EFBIG if fault == "file too large" else errno.ENOSPC) in message
    where = f"/rank-{comm.Get_size() - 1:05d}.pt" if fault != "rename" else ""
    assert re.search(f"{folder}/step-00000002.partial-[0-9a-f]{{8}}{where}: ", message)
    assert everywhere(comm, names(comm, folder) == ["step-00000001"])
    assert everywhere(comm, same(run.train(1).bits(), reference.bits()))
    checkpoints.save(3, **run.states)
    assert everywhere(comm, names(comm, folder) == ["step-00000001", "step-00000003"])


def test_a_folder_that_is_a_file_is_named(comm, run, checkpoints, folder):
    on_rank_0(comm, lambda: folder.write_text("not a folder"))
    assert str(folder) in refusal(comm, lambda: checkpoints.save(1, **run.states))
    message = refusal(comm, lambda: checkpoints.load(**run.states))
    assert f"rank 0: {folder}: Not a directory. It may be intact: start again when it can be read" in message


def test_a_folder_not_shared_between_nodes_is_detected(comm, run, folder, tmp_path):
    rank = comm.Get_rank()
    if comm.Get_size() == 1:
        return
    own = Checkpoints(tmp_path / "own")
    message = refusal(comm, lambda: own.save(1, **run.states))
    assert "put the checkpoints on a file system that all nodes share" in message
    assert everywhere(comm, [path.name for path in (tmp_path / "own").iterdir()] == ["lock"] * (rank == 0))
    Checkpoints(folder).save(1, **run.states)
    split = Checkpoints(folder if rank == 0 else tmp_path)
    assert "all nodes must see the same folder" in refusal(comm, lambda: split.load(**run.states))


def test_a_process_set_saves_its_own_checkpoint(hvd, comm, folder):
    members = list(range(max(1, comm.Get_size() - 1)))
    ranks = hvd.add_process_set(members) if comm.Get_size() > 1 else hvd.global_process_set
    inside = comm.Get_rank() in members
    if inside:
        run = Training("topka:density=0.05", comm.Get_rank(), process_set=ranks).train(2)
        checkpoints = Checkpoints(folder, process_set=ranks)
        checkpoints.save(2, **run.states)
        assert checkpoints.load(**run.states).notes == ()
    else:
        with pytest.raises(ValueError, match="is not part of"):
            Checkpoints(folder, process_set=ranks)
    files = {"manifest.json", "shared.pt", *(f"rank-{rank:05d}.pt" for rank in members)}
    assert everywhere(comm, set(names(comm, folder / "step-00000002")) == files)
    if comm.Get_size() > 1:
        hvd.remove_process_set(ranks)
