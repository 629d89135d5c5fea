"""DDP under torchrun on a machine without MPI: training, faults that name the rank, restarts from a checkpoint."""

from __future__ import annotations

import json
import re
from pathlib import Path

import launch
import pytest
from processes import Mark

PROGRAM = Path(__file__).resolve().parents[1] / "programs" / "without_mpi.py"
SPEC = "oktopk:density=0.1,dense_below=0,bucket_bytes=1200,tau_threshold=2,tau_partition=2"


def run(fault, *arguments, ranks=3, restarts=0):
    """Train; return what torchrun gives, and the reports of the ranks that have come to the end, by rank."""
    mark, options = Mark(), ("--max-restarts", str(restarts))
    variables = mark.variables | (LIMITS if fault == "sleep@0" else {}) | (NEW_STORE if restarts else {})
    result = launch.python(str(PROGRAM), fault, SPEC, *arguments, ranks=ranks, torchrun=options, **variables)
    assert mark.gone(), result.stdout + result.stderr
    reports = [json.loads(line) for line in result.stdout.splitlines() if line.startswith('{"rank"')]
    return result, sorted(reports, key=lambda report: report["rank"])


@pytest.mark.timeout(120)
def test_training_under_torchrun_needs_neither_mpi4py_nor_horovod():
    result, reports = run("none", ranks=2)
    assert result.returncode == 0, result.stderr
    assert [(report["rank"], report["ranks"]) for report in reports] == [(0, 2), (1, 2)]
    assert reports[0]["digest"] == reports[1]["digest"]
    assert all(report["sent"] > 0 for report in reports)


CLOSED = r"^rank [02]: ends all ranks because of the RuntimeError above"
NAMED = r"RuntimeError: .*rank [02]: rank \d of 3 has closed its connection: it has left the program or died"
# In the list of failures: which of them torchrun notices first depends on the load.
KILLED = r"rank +: 1 \(local_rank: 1\)\s+exitcode +: -9 "
FAULTS = {
    "exit": [NAMED, CLOSED + r"; rank 1 of 3 has left the program"],
    "raise": [r"KeyError: 'the data set is gone'", r"^rank 1: ends all ranks because of the KeyError above"],
    "kill": [KILLED],  # by torchrun, which may end the others before they say that they lost the connection
    "sleep": [r"^rank [02]: has waited [45] s in .*: rank 1: missing, has not reached .*; ends all ranks after stall_"],
    "stop": [r"^rank [02]: has waited [45] s in .*: rank 1: missing, gives no answer .*; ends all ranks after stall_"],
    "sleep@0": [r"^rank [02]: has waited [34] s in creation of connections: .*rank 1: missing.*; ends all ranks after"],
    "kill@0": [KILLED],
}
# Otherwise torch's own process group finds addresses of the attempt before: pytorch#135712.
NEW_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
# Before the exchange exists, which has limits of its own.
LIMITS = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "3"}


@pytest.mark.full
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "fault", [pytest.param(fault, marks=() if fault == "sleep" else pytest.mark.nightly) for fault in FAULTS]
)
def test_a_rank_that_fails_is_named_and_ends_the_job(fault):
    result, reports = run(fault)
    assert result.returncode != 0
    assert not reports
    for expected in FAULTS[fault]:
        assert re.search(expected, result.stderr, re.MULTILINE), result.stderr


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_torchruns_restart_resumes_from_a_checkpoint_with_the_same_bits(tmp_path):
    _, undisturbed = run("none")
    result, reports = run("kill", str(tmp_path / "checkpoints"), restarts=1)
    assert result.returncode == 0, result.stderr
    assert [report["first"] for report in reports] == [4] * 3
    assert {report["digest"] for report in reports} == {undisturbed[0]["digest"]}


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_another_world_size_takes_the_residuals_over(tmp_path):
    assert run("raise", str(tmp_path / "checkpoints"))[0].returncode != 0
    result, reports = run("none", str(tmp_path / "checkpoints"), ranks=2)
    assert result.returncode == 0, result.stderr
    assert [(report["first"], report["ranks"]) for report in reports] == [(4, 2)] * 2
    assert len({report["digest"] for report in reports}) == 1
