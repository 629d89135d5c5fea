"""examples/restart.py continues with every front end, launcher and number of ranks."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import launch
import pytest
import torch

from horovod_sparse.checkpoint.folder import Folder

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = str(ROOT / "tests" / "programs" / "struck.py")
STEPS = 12

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]


def run(folder: Path, front_end: str, ranks: int, strike: str = "", steps: int = STEPS, server=None, more=()):
    """Run the example, with a rank that is killed; return its status and the trace of the last run."""
    torchrun = None if front_end == "horovod" else ()
    trace, order = folder.with_name("trace"), folder.with_name("strike")
    trace.write_text("")
    if strike:
        order.write_text(strike)
    arguments = ("--front-end", front_end, "--folder", str(folder), "--steps", str(steps), "--every", "2", *more)
    command = (PROGRAM, str(order), str(trace), "restart", *arguments)
    done = launch.python(*command, ranks=ranks, torchrun=torchrun, server=server, limit=200)
    assert not order.exists(), f"no rank came to the phase: {done.stderr}"
    return done, [line.split()[:3] for line in trace.read_text().splitlines()]


def parameters(folder: Path) -> dict[str, torch.Tensor]:
    """Return the parameters at the end; for FSDP2, the shards of all ranks."""
    newest = Folder(folder).checkpoints()[0]
    assert newest.step == STEPS
    place = folder / f"step-{STEPS:08d}"
    found = dict(torch.load(place / "shared.pt", weights_only=True)["model"])
    for path in place.glob("rank-*.pt"):
        shards = torch.load(path, weights_only=True)["shards"]
        found |= {f"{path.name} {name}": values for name, (_, values) in shards.items()}
    return found


STRIKES = ("first 1", "step 0", "restore 1", "save 0", "")


# Below, a rank with FSDP2 is killed after its first step.
@pytest.mark.parametrize(
    ("front_end", "strikes"),
    [
        ("fsdp2", STRIKES[1:]),
        *(pytest.param(one, STRIKES, marks=pytest.mark.nightly) for one in ("horovod", "ddp", "local")),
    ],
)
def test_a_killed_rank_leaves_no_trace(front_end, strikes, tmp_path, training_server):
    """Killed after a step, as a checkpoint is written and as it is read."""
    undisturbed, folder = tmp_path / "undisturbed" / "c", tmp_path / "disturbed" / "c"
    for one in (undisturbed, folder):
        one.parent.mkdir()
    done, _ = run(undisturbed, front_end, 2, server=training_server)
    assert done.returncode == 0, done.stderr
    starts = []
    for strike in strikes:
        done, trace = run(folder, front_end, 2, strike, server=training_server)
        assert (done.returncode == 0) == (not strike), done.stderr
        starts += [int(step) for kind, step, _ in trace if kind == "start"]
    assert starts[0] == 0
    assert starts == sorted(starts)
    before, after = parameters(undisturbed), parameters(folder)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before if not before[name].is_meta)


@pytest.mark.nightly
def test_replicas_of_shards_continue_with_the_same_grid(tmp_path, training_server):
    """Killed after the first step, a training of 2 replicas of 2 shards ends like one that was not."""
    shards = ("--shards", "2")
    undisturbed, folder = tmp_path / "undisturbed" / "c", tmp_path / "disturbed" / "c"
    for one, strikes in ((undisturbed, ("",)), (folder, ("first 3", ""))):
        one.parent.mkdir()
        for strike in strikes:
            done, _ = run(one, "fsdp2", 4, strike, server=training_server, more=shards)
            assert (done.returncode == 0) == (not strike), done.stderr
    before, after = parameters(undisturbed), parameters(folder)
    assert len({name.split()[0] for name in before if name.startswith("rank")}) == 2  # one replica
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before if not before[name].is_meta)


def test_shards_that_do_not_divide_the_ranks_are_refused(tmp_path, training_server):
    done, trace = run(tmp_path / "c", "fsdp2", 3, server=training_server, more=("--shards", "2"))
    assert done.returncode != 0
    assert "--shards 2 does not divide the 3 ranks" in done.stderr
    assert not trace


def loop(program: str) -> str:
    """Return the loop of docs/checkpoint.md around a program, without pauses."""
    text = (ROOT / "docs" / "checkpoint.md").read_text()
    (found,) = re.findall(r"tries=0\n.*?done\n", text, re.DOTALL)
    command, number = re.subn(r"mpirun -np \d+ python train.py", program, found)
    assert number == 1
    return command.replace("sleep 10", "sleep 0")


def test_the_loop_around_mpirun_starts_it_until_it_is_complete(tmp_path, training_server):
    order, trace, folder = tmp_path / "strike", tmp_path / "trace", tmp_path / "checkpoints"
    order.write_text("step 1")
    program = " ".join([*training_server.stub, PROGRAM, str(order), str(trace), "restart"])
    arguments = f"--folder {folder} --steps {STEPS} --every 2"
    command = loop(f"mpirun -np 2 {program} {arguments}")
    done = subprocess.run(
        ["bash", "-euc", command], env=launch.ENVIRONMENT, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    starts = [line.split()[1] for line in trace.read_text().splitlines() if line.startswith("start")]
    assert len(starts) == 2
    assert int(starts[1]) >= 4
    parameters(folder)


def test_the_loop_ends_after_ten_failures(tmp_path):
    command = loop(f"(echo >> {tmp_path}/tries; false)")
    done = subprocess.run(["bash", "-euc", command], capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 1
    assert (tmp_path / "tries").read_text() == "\n" * 10
