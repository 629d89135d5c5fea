"""The runner of the MPI tests: a failing or hanging rank ends the run and is shown."""

import sys
import time

import pytest

import mpitest

HEAD = "import pytest\nfrom mpi4py import MPI\nworld = MPI.COMM_WORLD"


@pytest.fixture
def suite(tmp_path):
    """Writes a file with a test of these statements, apart from this project's settings; returns pytest's arguments."""

    def write(*statements):
        path = tmp_path / "test_suite.py"
        test = ["@pytest.mark.mpi", "def test_it():", *(f"    {statement}" for statement in statements)]
        path.write_text("\n".join([HEAD, *(test if statements else [])]))
        return ["-q", "--rootdir", str(tmp_path), "-c", "/dev/null", str(path)]

    return write


def test_ranks_that_pass(suite, capfd):
    assert mpitest.passes(3, suite("assert world.allreduce(1) == 3"), 60)
    output = capfd.readouterr().out
    assert output.count("1 passed") == 1  # rank 0 only
    assert "3 ranks: passed" in output


def test_a_failing_rank_ends_the_run_and_is_shown(suite, capfd):
    arguments = suite("assert world.rank != 1, 'rank one is broken'", "world.barrier()")
    start = time.monotonic()
    assert not mpitest.passes(3, arguments, 60)
    assert time.monotonic() - start < 40
    output = capfd.readouterr().out
    assert "the last lines of rank 1" in output
    assert "rank one is broken" in output
    assert "3 ranks: FAILED" in output


def test_a_run_without_tests_fails(suite, capfd):
    assert not mpitest.passes(2, suite(), 60)


def test_a_run_that_hangs_is_ended(suite, capfd):
    start = time.monotonic()
    assert not mpitest.passes(2, suite("world.recv(source=world.rank)"), 5)
    assert time.monotonic() - start < 30
    assert "ended at the limit of 5 s" in capfd.readouterr().out


def test_the_first_number_of_ranks_that_fails_ends_all(monkeypatch):
    tried = []
    monkeypatch.setattr(mpitest, "passes", lambda ranks, *_: tried.append(ranks) or ranks < 2)
    assert mpitest.main(["--ranks", "1", "2", "3", "--", "-m", "mpi"]) == 1
    assert tried == [1, 2]


def test_tests_have_a_long_horovod_cycle_and_timed_programs_do_not(monkeypatch):
    monkeypatch.delenv("HOROVOD_CYCLE_TIME", raising=False)
    look = [sys.executable, "-c", "import os, sys; sys.exit(os.environ.get('HOROVOD_CYCLE_TIME') != sys.argv[1])"]
    assert mpitest.launch([*look, "10"], 30) == ""
    assert "HOROVOD_CYCLE_TIME" not in mpitest.mpi_environment()
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "3")  # whoever sets it is asked
    assert mpitest.launch([*look, "3"], 30) == ""


def test_without_mpirun_the_error_names_the_remedy(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    assert mpitest.main(["--ranks", "2"]) == 1
    assert "make venv" in capsys.readouterr().err
