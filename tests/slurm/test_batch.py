"""Every script of slurm/, submitted with small settings to a SLURM that the tests start."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from cluster import REPOSITORY, Cluster, wait_until
from processes import Mark

SMALL = {"EPOCHS": "1", "OMP_NUM_THREADS": "1"}
NODES = ("--partition=either", "--nodes=2", "--ntasks-per-node=1")
# The two nodes share a host name, so that Open MPI would look for shared memory between them. Not its own transport for
# TCP: Open MPI 4.1.8 can crash in MPI_Finalize with it (docs/troubleshooting.md).
TCP = {
    "OMPI_MCA_btl": "self",
    "OMPI_MCA_osc": "^ucx",
    "OMPI_MCA_pml": "ucx",
    "OMPI_MCA_pml_ucx_devices": "any",
    "OMPI_MCA_pml_ucx_tls": "any",
    "UCX_NET_DEVICES": "lo",
    "UCX_TLS": "self,tcp",
}
DDP = "python examples/train.py --frontend ddp --compression topka:density=0.01 --epochs 1 --warmup-epochs 0"

# The signal lets the SLURM be ended; the other method would leave it running.
pytestmark = [pytest.mark.full, pytest.mark.timeout(200, method="signal")]


def completed(cluster: Cluster, job: str, log: Path, limit: float = 150) -> str:
    """Waits for a job to complete and returns its log; fails with it where the job failed."""
    state = cluster.wait_for(job, limit=limit)
    text = log.read_text() if log.exists() else ""
    assert state == "COMPLETED", f"{state}: {cluster.show(job)}\n{text}"
    return text


def test_bench_verifies_the_allreduces_on_two_nodes(cluster: Cluster, tmp_path: Path) -> None:
    log, output = tmp_path / "log", tmp_path / "bench"
    job = cluster.submit(
        "bench.sbatch",
        log,
        *NODES,
        **TCP,
        OUTPUT=str(output),
        ARGUMENTS="-b 64K -e 64K -n 2 -w 1 --algorithms topka,oktopk,dense",
    )
    text = completed(cluster, job, log)
    assert "2 ranks" in text
    assert len(json.loads((output / "bench.json").read_text())["rows"]) == 3
    assert (output / "bench.png").stat().st_size > 0


def test_the_mpi_tests_run_on_the_cluster(cluster: Cluster, tmp_path: Path) -> None:
    log, logs = tmp_path / "log", tmp_path / "ranks"
    job = cluster.submit("test.sbatch", log, TESTS="tests/collectives/test_gtopk.py", LOGS=str(logs))
    assert " passed" in completed(cluster, job, log)
    assert (logs / "rank 1.txt").exists()


def test_failing_tests_fail_the_job(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.submit("test.sbatch", tmp_path / "log", TESTS="tests/nothing.py", LOGS=str(tmp_path / "ranks"))
    assert cluster.wait_for(job, limit=60) == "FAILED"


def test_a_training_runs_on_two_nodes(cluster: Cluster, tmp_path: Path) -> None:
    log, output = tmp_path / "log", tmp_path / "run"
    job = cluster.submit("train.sbatch", log, *NODES, **TCP, OUTPUT=str(output), **SMALL)
    completed(cluster, job, log)
    assert cluster.show(job)["NumNodes"] == "2"
    assert json.loads((output / "result.json").read_text())["ranks"] == 2


def test_srun_alone_starts_ddp_on_two_nodes(cluster: Cluster, tmp_path: Path) -> None:
    """No torchrun, no addresses and no ports."""
    log, command = tmp_path / "log", f"srun --mpi=pmix {DDP} --output {tmp_path}"
    job = cluster.submit(f"--wrap={command}", log, *NODES, **TCP, **SMALL)
    completed(cluster, job, log)
    assert cluster.show(job)["NumNodes"] == "2"
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["ranks"] == 2
    assert "horovod" not in result["versions"]
    assert result["epochs"][-1]["bytes_per_step"] < 0.2 * 4 * result["parameter_count"]


def test_ranks_not_started_by_mpi_fail(cluster: Cluster, tmp_path: Path) -> None:
    """Open MPI 4 says so itself; with an MPI that lets each of them begin alone, ``init_process_group`` does."""
    log, command = tmp_path / "log", f"srun --mpi=none {DDP} --output {tmp_path}"
    job = cluster.submit(f"--wrap={command}", log, *NODES, **TCP, **SMALL)
    assert cluster.wait_for(job, limit=150) == "FAILED"
    text = log.read_text()
    assert "SLURM's PMIx support" in text or "SLURM_STEP_NUM_TASKS=2 says that several processes were started" in text
    assert not (tmp_path / "result.json").exists()


def test_a_cancelled_job_leaves_no_ranks(cluster: Cluster, tmp_path: Path) -> None:
    mark = Mark()
    variables = {**SMALL, "OUTPUT": str(tmp_path / "run"), "EPOCHS": "1000", **mark.variables}
    job = cluster.submit("train.sbatch", tmp_path / "log", **variables)
    wait_until(lambda: (tmp_path / "run" / "checkpoints").exists(), 90, "the first checkpoint")
    assert len(mark.processes()) >= 2
    cluster.run("scancel", job)
    assert cluster.wait_for(job, limit=30) == "CANCELLED"
    assert mark.gone(30)
    assert cluster.show(job)["Restarts"] == "0"


def test_a_rank_that_fails_fails_the_job(cluster: Cluster, tmp_path: Path) -> None:
    log = tmp_path / "log"
    job = cluster.submit("train.sbatch", log, DATA="nothing", OUTPUT=str(tmp_path / "run"), **SMALL)
    assert cluster.wait_for(job, limit=90) == "FAILED"
    assert "unknown data 'nothing'" in log.read_text()
    assert cluster.show(job)["Restarts"] == "0"


def test_a_sweep_trains_with_each_compression(cluster: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    job = cluster.submit(
        "sweep.sbatch",
        tmp_path / "log-%a",
        "--array=0-2",
        FOLDER=str(folder),
        COMPRESSIONS="none topka:density=0.01",
        **SMALL,
    )
    for task in ("0", "1"):
        completed(cluster, f"{job}_{task}", tmp_path / f"log-{task}")
    assert cluster.wait_for(f"{job}_2", limit=60) == "FAILED"
    assert "has 2 entries, none for task 2: sbatch --array=0-1" in (tmp_path / "log-2").read_text()
    results = {path.parent.name: json.loads(path.read_text()) for path in folder.glob("*/result.json")}
    assert {name: one["configuration"]["compression"] for name, one in results.items()} == {
        "0-none": "none",
        "1-topka": "topka:density=0.01",
    }


CONFIGURATIONS = {
    "dense": "none",
    "sorted": "topka:density=0.001,sparsifier=sorttopk",
    "ours": "topka:density=0.001",
    "randomk": "randomk:density=0.001,memory=none",
}


@pytest.mark.timeout(400, method="signal")
@pytest.mark.parametrize(
    ("front_end", "names"),
    [
        ("horovod", ("dense", "sorted", "randomk")),
        pytest.param("ddp", ("dense", "ours"), marks=pytest.mark.nightly),
    ],
)
def test_the_published_setup_writes_its_figure_and_table(
    front_end: str, names: tuple[str, ...], cluster: Cluster, tmp_path: Path
) -> None:
    """The whole job of Yoon and Oh, with a small network on digits, on the CPU."""
    compressions = {name: CONFIGURATIONS[name] for name in names}
    log, output = tmp_path / "log", tmp_path / "yoon"
    job = cluster.submit(
        "yoon2022.sbatch",
        log,
        *("--constraint=a100", "--ntasks-per-node=2"),
        DATA="digits",
        MODEL="cnn",
        DEVICE="cpu",
        FRONTEND=front_end,
        COMPRESSIONS=" ".join(f"{name}={spec}" for name, spec in compressions.items()),
        LINKS="pcie",
        OUTPUT=str(output),
        **{**SMALL, "EPOCHS": "2"},
    )
    text = completed(cluster, job, log, limit=380)
    assert all(name in text for name in (f"pcie-{names[-1]}", "accuracy", "samples/s", "report.html"))
    runs = json.loads((output / "report.json").read_text())["runs"]
    assert {name: run["about"]["compression"] for name, run in runs.items()} == {
        f"pcie-{name}": compression for name, compression in compressions.items()
    }
    for name, run in runs.items():
        parts = run["ms_per_step"]
        assert (parts["select"] is None) == (name == "pcie-dense"), parts
        program = [parts[part] for part in ("forward", "backward", "wait", "update")]
        assert all(ms > 0 for ms in program), parts
        assert sum(program) <= parts["whole step"], "what overlaps does not add up"
        assert run["samples/s"] > 0
    page = (output / "report.html").read_text()
    assert all(f"<td>{text}</td>" in page for name, spec in compressions.items() for text in (f"pcie-{name}", spec))
    assert (output / "report.png").read_bytes().startswith(b"\x89PNG")


def test_scripts_find_the_repository_from_another_folder(cluster: Cluster, tmp_path: Path) -> None:
    """Scripts are found from the folder they are submitted in, or from REPOSITORY."""
    log = tmp_path / "log"
    job = cluster.submit("sweep.sbatch", log, "--array=7", f"--chdir={tmp_path}", REPOSITORY=str(REPOSITORY))
    assert cluster.wait_for(f"{job}_7", limit=30) == "FAILED"
    assert "none for task 7" in log.read_text()


def test_shellcheck_reports_nothing() -> None:
    paths = [path for pattern in ("slurm/*.s*", "tools/*.sh", "tests/slurm/*.sh") for path in REPOSITORY.glob(pattern)]
    command = ["shellcheck", "--external-sources", *paths]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
