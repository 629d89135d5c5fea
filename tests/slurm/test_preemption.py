"""A run that is preempted, moved or warned ends bitwise equal to an uninterrupted one."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path

import pytest
from cluster import SECOND, Cluster, wait_until
from processes import Mark

# Long enough for something to happen after the first checkpoint.
TRAINING = {
    "COMPRESSION": "oktopk:density=0.01",
    "EPOCHS": "24",
    "CHECKPOINT_EVERY": "20",
    "OMP_NUM_THREADS": "1",
}
# A start, a requeue and a second start, on a busy machine.
LIMIT = 200

# The signal lets the SLURM be ended; the other method would leave it running.
pytestmark = [pytest.mark.full, pytest.mark.timeout(400, method="signal")]


def parameters(output: Path) -> str:
    """Hash of the parameters that a run ended with."""
    return str(json.loads((output / "result.json").read_text())["parameters"])


def at_first_checkpoint(output: Path) -> None:
    """Wait until a run has a checkpoint."""
    folder = output / "checkpoints"
    wait_until(lambda: any(folder.glob("step-????????")), 120, f"a checkpoint in {folder}")


def stopped_at(log: Path) -> list[int]:
    """The steps at which the ranks have saved and left."""
    return [int(step) for step in re.findall(r"preempted at step (\d+)", log.read_text())]


def ranks(mark: Mark) -> list[int]:
    """Return the processes that run Python by now."""
    found = []
    for pid in mark.processes():
        with suppress(OSError):  # it has ended
            if Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[1:2] == [b"examples/train.py"]:
                found.append(pid)
    return found


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the hash of the final parameters of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("undisturbed")
    job = cluster.submit("train.sbatch", folder / "log", OUTPUT=str(folder), **TRAINING)
    state = cluster.wait_for(job, limit=LIMIT)
    assert (state, cluster.show(job)["Restarts"]) == ("COMPLETED", "0"), (folder / "log").read_text()
    return parameters(folder)


def assert_continued(cluster: Cluster, job: str, log: Path, output: Path, expected: str) -> None:
    """Wait for a job that was requeued once; assert that it ended like the undisturbed one."""
    state = cluster.wait_for(job, limit=LIMIT)
    assert (state, cluster.show(job)["Restarts"]) == ("COMPLETED", "1"), log.read_text()
    assert parameters(output) == expected


# The second is what clusters without preempt_send_user_signal do: SIGTERM to the script.
@pytest.mark.parametrize("signal", ["B:USR1@120", pytest.param("TERM@120", marks=pytest.mark.nightly)])
def test_a_job_of_higher_priority_preempts_the_training(
    cluster: Cluster, undisturbed: str, tmp_path: Path, signal: str
) -> None:
    log = tmp_path / "log"
    job = cluster.submit("train.sbatch", log, f"--signal={signal}", OUTPUT=str(tmp_path), **TRAINING)
    at_first_checkpoint(tmp_path)
    urgent = cluster.submit("--wrap=true", tmp_path / "high", "--partition=high", "--exclusive")
    assert cluster.wait_for(urgent, limit=60) == "COMPLETED"
    assert_continued(cluster, job, log, tmp_path, undisturbed)
    assert len(stopped_at(log)) == 1
    assert "requeuing" in log.read_text()


@pytest.mark.parametrize("launcher", [pytest.param("horovodrun", marks=pytest.mark.nightly), "mpirun"])
def test_the_signal_reaches_the_ranks_through_other_launchers(
    cluster: Cluster, undisturbed: str, tmp_path: Path, launcher: str
) -> None:
    log = tmp_path / "log"
    job = cluster.submit("horovodrun.sbatch", log, LAUNCHER=launcher, OUTPUT=str(tmp_path), **TRAINING)
    at_first_checkpoint(tmp_path)
    cluster.run("scancel", "--batch", "--signal=USR1", job)
    assert_continued(cluster, job, log, tmp_path, undisturbed)
    assert len(stopped_at(log)) == 1


def test_a_signal_before_python_handles_it_is_not_lost(cluster: Cluster, tmp_path: Path) -> None:
    log = tmp_path / "log"
    mark = Mark()
    job = cluster.submit("train.sbatch", log, OUTPUT=str(tmp_path), **TRAINING, **mark.variables)
    wait_until(lambda: len(ranks(mark)) == 2, 60, "the ranks' processes")
    cluster.run("scancel", "--batch", "--signal=USR1", job)
    wait_until(lambda: cluster.show(job)["Restarts"] == "1", LIMIT, f"job {job} to be requeued")
    assert len(stopped_at(log)) == 1
    cluster.run("scancel", job)


def test_the_time_limit_is_announced(cluster: Cluster, tmp_path: Path) -> None:
    """SLURM sends the signal up to a minute early, so here it comes within the first seconds."""
    log = tmp_path / "log"
    options = ("--time=1", "--signal=B:USR1@10")
    job = cluster.submit("train.sbatch", log, *options, OUTPUT=str(tmp_path), **{**TRAINING, "EPOCHS": "1000"})
    wait_until(lambda: cluster.show(job)["Restarts"] == "1", LIMIT, f"job {job} to be requeued")
    assert len(stopped_at(log)) == 1
    cluster.run("scancel", job)


@pytest.mark.nightly
def test_a_node_that_goes_down(cluster: Cluster, undisturbed: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    mark = Mark()
    job = cluster.submit("train.sbatch", log, "--partition=either", OUTPUT=str(tmp_path), **TRAINING, **mark.variables)
    at_first_checkpoint(tmp_path)
    assert cluster.show(job)["NodeList"] == SECOND
    cluster.crash_node(SECOND, mark)
    try:
        assert_continued(cluster, job, log, tmp_path, undisturbed)
        assert cluster.show(job)["NodeList"] == cluster.first
    finally:
        cluster.start_node(SECOND)
    assert stopped_at(log) == [], "it had no time to say so"


@pytest.mark.nightly
def test_a_single_task_of_an_array_is_preempted(cluster: Cluster, tmp_path: Path) -> None:
    """Including the task whose job ID is that of the array."""
    variables = {**TRAINING, "COMPRESSIONS": "oktopk:density=0.01 topka:density=0.01", "FOLDER": str(tmp_path)}
    array = cluster.submit("sweep.sbatch", tmp_path / "log-%a", "--array=0-1", **variables)
    for run in ("0-oktopk", "1-topka"):
        at_first_checkpoint(tmp_path / run)
    tasks = [f"{array}_0", f"{array}_1"]
    (namesake,) = [task for task in tasks if cluster.show(task)["JobId"] == array]
    cluster.run("scancel", "--batch", "--signal=USR1", namesake)
    assert [cluster.wait_for(task, limit=LIMIT) for task in tasks] == ["COMPLETED"] * 2
    restarts = {task: cluster.show(task)["Restarts"] for task in tasks}
    assert restarts == {task: "1" if task == namesake else "0" for task in tasks}
