"""After any fault, no process is left, and training resumes from the newest checkpoint without loss.

"Without loss" means that it ends with the bits of an undisturbed run.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import launch
import pytest
from forkserver import ForkServer
from processes import Mark

PROGRAM = Path(__file__).parent / "programs" / "faulty.py"
RANKS = 2
EVERY = 2
STEPS = 22
# Three buckets, reused thresholds, momentum, and a decreasing learning rate.
TRAINING = (
    *("--compression", "oktopk:density=0.05,bucket_bytes=100000,dense_below=0"),
    *("--epochs", "1", "--warmup-epochs", "0"),
    *("--checkpoint-every", str(EVERY), "--keep", "2"),
)
# All in the third step of a run or in its second checkpoint, when one checkpoint is complete.
KILLS = (
    "kill:exchange@1@8",
    "kill:fsync@1@1",
    "kill:forward@1@2",
    "kill:backward@0@2",
    "kill:select@1@8",
    "kill:apply@0@7",
    "kill:update@1@2",
    "kill:rename@0@2",
)

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]


class Training:
    """Training in a folder, which can be started and resumed."""

    def __init__(self, folder: Path, server: ForkServer) -> None:
        self.folder, self.server = folder, server
        self.checkpoints = folder / "checkpoints"

    def run(self, fault: str = "none@0@0", *arguments: str) -> subprocess.CompletedProcess[str]:
        """Start, or resume from the newest checkpoint; assert that no process is left."""
        mark = Mark()
        places = ("--checkpoint", str(self.checkpoints), "--output", str(self.folder))
        # setpriv, which drops root's rights, starts a new Python.
        server = None if fault.startswith("modes") else self.server
        command = (str(PROGRAM), fault, *TRAINING, *places, *arguments)
        result = launch.python(*command, ranks=RANKS, server=server, **mark.variables)
        assert mark.gone(), result.stdout + result.stderr
        assert self.server.forget() == [], result.stdout + result.stderr
        return result

    @property
    def steps(self) -> list[int]:
        """Steps of the complete checkpoints."""
        return sorted(int(path.name.removeprefix("step-")) for path in self.checkpoints.glob("step-????????"))

    def ends_as(self, expected: str, result: subprocess.CompletedProcess[str]) -> bool:
        """Return whether the training has ended with these parameters."""
        assert result.returncode == 0, result.stdout + result.stderr
        content = json.loads((self.folder / "result.json").read_text())
        return bool(content["parameters"] == expected)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, training_server: ForkServer) -> str:
    """Digest of the parameters that every training must end with."""
    training = Training(tmp_path_factory.mktemp("undisturbed"), training_server)
    result = training.run()
    assert result.returncode == 0, result.stdout + result.stderr
    assert training.steps == [STEPS - EVERY, STEPS]
    digest: str = json.loads((training.folder / "result.json").read_text())["parameters"]
    return digest


@pytest.fixture
def training(tmp_path: Path, training_server: ForkServer) -> Training:
    return Training(tmp_path, training_server)


def assert_killed(training: Training, fault: str, reached: int, *arguments: str) -> None:
    """Assert that a fault kills the run after one more checkpoint is complete."""
    result = training.run(fault, *arguments)
    assert result.returncode != 0, fault
    assert training.steps[-1] == reached, fault
    assert reached == EVERY or f"resuming from step {reached - EVERY}\n" in result.stdout, fault


def test_kills_at_every_stage_and_a_preemption_do_not_change_the_result(undisturbed: str, training: Training) -> None:
    for number, fault in enumerate(KILLS, start=1):
        assert_killed(training, fault, EVERY * number)
    result = training.run("term:fsync@0@4")
    assert result.returncode == 0, result.stdout + result.stderr
    preempted = EVERY * len(KILLS) + 3
    assert f"preempted at step {preempted}\n" in result.stdout
    assert training.steps == [preempted - 1, preempted]
    assert training.ends_as(undisturbed, training.run())
    assert not list(training.checkpoints.glob("*.*")), "partial files were not cleaned up"


@pytest.mark.nightly
def test_a_run_with_ddp_resumes_after_kills_and_with_the_other_front_end(undisturbed: str, training: Training) -> None:
    """The final bits are those of the undisturbed training with Horovod."""
    ddp = ("--frontend", "ddp")
    assert_killed(training, "kill:exchange@1@8", EVERY, *ddp)
    assert_killed(training, "kill:fsync@1@1", 2 * EVERY, *ddp)
    assert_killed(training, "kill:update@1@2", 3 * EVERY)
    result = training.run("term:fsync@0@4", *ddp)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "preempted at step 9" in result.stdout
    assert training.steps == [8, 9]
    assert training.ends_as(undisturbed, training.run("none@0@0", *ddp))


def test_a_full_disk_and_a_read_only_folder_lose_nothing(undisturbed: str, training: Training) -> None:
    result = training.run("full@1@2,term:fsync@0@4")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("train.py: warning: step") == 2
    assert re.search(r"warning: step 2 could not be saved: rank 1: .*rank-00001.pt: File too large", result.stdout)
    assert training.steps == [6, 7]
    training.checkpoints.chmod(0o555)
    result = training.run("modes@0@0", "--resume", "6")
    assert training.ends_as(undisturbed, result)
    assert "Permission denied" in result.stdout
    assert training.steps == [6, 7]
