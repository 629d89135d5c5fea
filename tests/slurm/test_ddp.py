"""A script for DistributedDataParallel, started by srun alone: no torchrun, no addresses and no ports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cluster import Cluster

NODES = ("--partition=either", "--nodes=2", "--ntasks-per-node=1")
TRAINING = "python examples/train.py --frontend ddp --compression topka:density=0.01 --epochs 1 --warmup-epochs 0"

# The signal lets the SLURM be ended; the other method would leave it running.
pytestmark = pytest.mark.timeout(200, method="signal")


def submit(cluster: Cluster, log: Path, command: str) -> str:
    """Submits one line; returns the job's number."""
    options = ("--parsable", f"--output={log}", *NODES, f"--wrap={command}")
    # The two nodes share a host name, so that Open MPI would look for shared memory between them.
    return cluster.run("sbatch", *options, OMPI_MCA_btl="self,tcp", OMP_NUM_THREADS="1").strip()


def test_srun_starts_it_on_two_nodes(cluster: Cluster, tmp_path: Path) -> None:
    log = tmp_path / "log"
    job = submit(cluster, log, f"srun --mpi=pmix {TRAINING} --output {tmp_path}")
    assert cluster.wait_for(job, limit=150) == "COMPLETED", log.read_text()
    assert cluster.show(job)["NumNodes"] == "2"
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["ranks"] == 2
    assert "horovod" not in result["versions"]
    assert result["epochs"][-1]["bytes_per_step"] < 0.2 * 4 * result["parameter_count"]


def test_ranks_that_mpi_does_not_know_of_fail(cluster: Cluster, tmp_path: Path) -> None:
    """Open MPI 4 says so itself; with an MPI that lets each of them begin alone, ``init_process_group`` does."""
    log = tmp_path / "log"
    job = submit(cluster, log, f"srun --mpi=none {TRAINING} --output {tmp_path}")
    assert cluster.wait_for(job, limit=150) == "FAILED"
    text = log.read_text()
    assert "SLURM's PMIx support" in text or "SLURM_STEP_NUM_TASKS=2 says that several processes were started" in text
    assert not (tmp_path / "result.json").exists()
