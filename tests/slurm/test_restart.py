"""restart.sbatch continues after preemptions and failures, each task of an array by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cluster import REPOSITORY, Cluster, wait_until

from horovod_sparse.checkpoint.folder import Folder

STEPS = 300
ARGUMENTS = f"--front-end ddp --steps {STEPS} --every 20 --batch-size 256"
LIMIT = 200

# The signal lets the SLURM be ended; the other method would leave it running.
pytestmark = [pytest.mark.full, pytest.mark.timeout(400, method="signal")]


def submit(cluster: Cluster, tmp_path: Path, *options: str, **variables: str) -> str:
    """Submit the script with a folder in which each task of an array has its own."""
    settings = {"ARGUMENTS": ARGUMENTS, "OMP_NUM_THREADS": "1", "FOLDER": str(tmp_path / "run"), **variables}
    return cluster.submit("restart.sbatch", tmp_path / "log", *options, **settings)


def at_first_save(folder: Path) -> None:
    wait_until(lambda: any(step > 0 for step in Folder(folder).steps()), 120, f"a checkpoint in {folder}")


def parameters(folder: Path) -> dict[str, torch.Tensor]:
    """Return the parameters after the last step."""
    assert Folder(folder).checkpoints()[0].step == STEPS
    parameters: dict[str, torch.Tensor] = torch.load(folder / f"step-{STEPS:08d}" / "shared.pt", weights_only=True)[
        "model"
    ]
    return parameters


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    folder = tmp_path_factory.mktemp("undisturbed")
    job = submit(cluster, folder)
    assert cluster.wait_for(job, limit=LIMIT) == "COMPLETED", (folder / "log").read_text()
    return parameters(folder / "run")


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_preempted_job_is_requeued_and_continues(
    cluster: Cluster, undisturbed: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    job = submit(cluster, tmp_path)
    at_first_save(tmp_path / "run")
    cluster.run("scancel", "--batch", "--signal=USR1", job)
    assert cluster.wait_for(job, limit=LIMIT) == "COMPLETED", (tmp_path / "log").read_text()
    assert cluster.show(job)["Restarts"] == "1"
    assert "preempted at step" in (tmp_path / "log").read_text()
    assert_equal(parameters(tmp_path / "run"), undisturbed)


def test_a_rank_that_is_killed_is_started_again_in_the_same_job(
    cluster: Cluster, undisturbed: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    strike, trace = tmp_path / "strike", tmp_path / "trace"
    strike.write_text("step 1")
    program = f"python {REPOSITORY}/tests/programs/struck.py {strike} {trace} restart"
    job = submit(cluster, tmp_path, PROGRAM=program)
    assert cluster.wait_for(job, limit=LIMIT) == "COMPLETED", (tmp_path / "log").read_text()
    assert cluster.show(job)["Restarts"] == "0"
    assert not strike.exists()
    assert (tmp_path / "log").read_text().count("starting the training again (1 of 3)") == 1
    assert_equal(parameters(tmp_path / "run"), undisturbed)


def test_a_cancelled_job_is_not_requeued(cluster: Cluster, tmp_path: Path) -> None:
    """Its ranks end with the status of a preemption."""
    job = submit(cluster, tmp_path, ARGUMENTS="--front-end ddp --steps 1000000 --every 20")
    at_first_save(tmp_path / "run")
    cluster.run("scancel", job)
    assert cluster.wait_for(job, limit=60) == "CANCELLED"
    assert cluster.show(job)["Restarts"] == "0"
    assert "requeuing" not in (tmp_path / "log").read_text()


def test_a_program_that_always_fails_is_given_up(cluster: Cluster, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path, PROGRAM="false", RETRIES="2")
    assert cluster.wait_for(job, limit=60) == "FAILED"
    text = (tmp_path / "log").read_text()
    assert [text.count(f"({number} of 2)") for number in (1, 2, 3)] == [1, 1, 0]


@pytest.mark.nightly
def test_tasks_of_an_array_continue_separately(
    cluster: Cluster, undisturbed: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    array = submit(cluster, tmp_path, "--array=0-1")
    folders = [tmp_path / "run" / task for task in ("0", "1")]
    for one in folders:
        at_first_save(one)
    cluster.run("scancel", "--batch", "--signal=USR1", f"{array}_1")
    tasks = [f"{array}_0", f"{array}_1"]
    assert [cluster.wait_for(task, limit=LIMIT) for task in tasks] == ["COMPLETED"] * 2
    assert [cluster.show(task)["Restarts"] for task in tasks] == ["0", "1"]
    for one in folders:
        assert_equal(parameters(one), undisturbed)
