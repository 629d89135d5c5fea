"""Short soak test: training that is killed, stopped and preempted ends like an undisturbed one."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import launch
import pytest
from processes import Mark

PROGRAM = str(Path(__file__).parent / "soak.py")

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]


def test_twenty_disturbances_leave_no_trace():
    result = launch.python(PROGRAM, "--kills", "20", "--seed", "1", limit=590)
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"20 disturbances .*: final parameters equal", result.stdout)


def test_ending_the_soak_test_ends_all_its_processes(tmp_path):
    mark = Mark()
    environment = {**launch.ENVIRONMENT, **mark.variables, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, PROGRAM], env=environment, stdout=subprocess.PIPE) as process:
        while len(mark.ranks()) < 3:  # stubs of the ranks
            assert process.poll() is None
            time.sleep(0.1)
        process.terminate()
        assert process.wait(60) == 143
    assert mark.gone()
