"""run_python: a subprocess that may crash, hang, and start MPI."""

from __future__ import annotations

import os
import signal
import time

import pytest
from processes import Mark

from horovod_sparse.transport.subprocess_python import run_python


def test_a_subprocess_returns_status_and_output():
    assert run_python(["-c", "print(1, flush=True); import sys; sys.exit('two')"], 60) == (1, "1\ntwo\n")
    assert run_python(["-c", "import os; os.kill(os.getpid(), 9)"], 60) == (-signal.SIGKILL, "")


def test_a_subprocess_runs_in_an_empty_temporary_folder():
    status, output = run_python(["-c", "import os; print(os.listdir()); print(os.getcwd())"], 60)
    content, folder = output.splitlines()
    assert (status, content) == (0, "[]")
    assert not os.path.exists(folder)  # noqa: PTH110 - as printed


def test_a_subprocess_and_its_children_end_at_the_time_limit(monkeypatch):
    mark = Mark()
    for name, value in mark.variables.items():
        monkeypatch.setenv(name, value)
    hang = "import subprocess, time; subprocess.Popen(['sleep', '60']); print('up', flush=True); time.sleep(60)"
    begin = time.monotonic()
    assert run_python(["-c", hang], 1) == (None, "up\n")
    assert time.monotonic() - begin < 20
    monkeypatch.undo()
    assert mark.gone()


@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID", "ORTE_X"])
def test_a_subprocess_does_not_pose_as_the_rank_that_started_it(monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    monkeypatch.setenv("OMPI_MCA_btl", "self")  # a setting of the user's
    program = f"import os; print({variable!r} in os.environ, os.environ['OMPI_MCA_btl'])"
    assert run_python(["-c", program], 60) == (0, "False self\n")
