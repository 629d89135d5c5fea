"""Whatever happens to a training, no process is left, and it goes on from its newest checkpoint without any loss.

What "without any loss" means: it ends with the bits of an undisturbed run.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import launch
import pytest
from processes import Mark

PROGRAM = Path(__file__).parent / "programs" / "faulty.py"
RANKS = 2
EVERY = 3
# 22 steps an epoch; a bucket for each of the large layers, momentum on top of the exchange.
TRAINING = (
    *("--compression", "oktopk:density=0.05,bucket_bytes=100000", "--epochs", "2", "--warmup-epochs", "1"),
    *("--checkpoint-every", str(EVERY), "--keep", "2"),
)


class Training:
    """A training in one folder, which can be begun and continued."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoints = folder / "checkpoints"

    def run(self, fault: str = "none@0@0", *arguments: str) -> subprocess.CompletedProcess[str]:
        """Begins, or continues where the newest checkpoint is; leaves no process behind."""
        mark = Mark()
        places = ("--checkpoint", str(self.checkpoints), "--output", str(self.folder))
        result = launch.python(str(PROGRAM), fault, *TRAINING, *places, *arguments, ranks=RANKS, **mark.variables)
        assert mark.gone(), result.stdout + result.stderr
        return result

    @property
    def steps(self) -> list[int]:
        """Of the whole checkpoints."""
        return sorted(int(path.name.removeprefix("step-")) for path in self.checkpoints.glob("step-????????"))

    @property
    def parameters(self) -> str:
        """Digest of what the training ended with."""
        digest: str = json.loads((self.folder / "result.json").read_text())["parameters"]
        return digest


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Digest of the parameters that every training must end with."""
    training = Training(tmp_path_factory.mktemp("undisturbed"))
    result = training.run()
    assert result.returncode == 0, result.stderr
    assert training.steps == [42, 44]
    return training.parameters


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_rank_is_killed_at_every_stage_of_a_step_and_of_a_checkpoint(undisturbed: str, tmp_path: Path) -> None:
    """One training; each run goes on where the one before it was killed. The count is chosen so that it is in the
    step after a checkpoint, or in the checkpoint itself."""
    training = Training(tmp_path)
    reached = 0
    for fault in [
        "kill:forward@1@3",
        "kill:backward@0@3",
        "kill:select@1@8",
        "kill:agree@0@14",
        "kill:exchange@1@14",
        "kill:apply@0@16",
        "kill:update@1@3",
        "kill:fsync@1@1",
        "kill:rename@0@2",
    ]:
        result = training.run(fault)
        assert result.returncode != 0, fault
        assert reached == 0 or f"goes on from step {reached}" in result.stdout, fault
        assert training.steps[-1] > reached, fault
        reached = training.steps[-1]
        assert reached % EVERY == 0
    result = training.run()
    assert result.returncode == 0, result.stderr
    assert training.parameters == undisturbed
    assert not list(training.checkpoints.glob("*.partial")), "what was half written is cleaned up"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_disk_that_is_full_or_read_only_and_a_sigterm_while_saving_lose_nothing(
    undisturbed: str, tmp_path: Path
) -> None:
    training = Training(tmp_path)
    result = training.run("full@1@2,term:fsync@1@2")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("warning: ") == 2
    assert "rank 1: " in result.stdout
    assert "File too large" in result.stdout
    assert "preempted at step" in result.stdout
    (reached, *_), others = training.steps[::-1], training.steps[:-1]
    assert others or reached
    training.checkpoints.chmod(0o555)
    result = training.run("modes@0@0")
    assert result.returncode == 0, result.stderr
    assert "Permission denied" in result.stdout
    assert training.parameters == undisturbed
    assert training.steps[-1] == reached
