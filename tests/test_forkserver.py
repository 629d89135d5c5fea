"""A forked rank behaves like any other rank: MPI, streams, exit status and signals are those of its stub."""

from __future__ import annotations

import os
import signal
import subprocess

import launch
import pytest
from forkserver import ForkServer
from processes import Mark

PROGRAM = """
import os, signal, sys, time
from mpi4py import MPI
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))
rank, ranks = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
total = MPI.COMM_WORLD.allreduce(rank)
# One write: without buffering, print writes the end of a line separately.
line = f"{os.getcwd()} {rank} of {ranks}, {total}, {sys.argv[1:]}, {os.environ['GIVEN']}"
print(line + os.linesep, end="", flush=True)
if "wait" in sys.argv:
    while True:
        time.sleep(0.01)
if "fail" in sys.argv:
    os._exit(7)
"""


@pytest.fixture
def job(tmp_path):
    """Provide a function that starts the program on three ranks, with an argument."""
    (tmp_path / "program.py").write_text(PROGRAM)
    mark = Mark()
    with ForkServer(tmp_path, ["mpi4py.MPI"], {**launch.ENVIRONMENT, **mark.variables}) as server:

        def start(argument):
            environment = {**launch.ENVIRONMENT, "GIVEN": "given"}
            command = ["mpirun", "-n", "3", *server.stub, str(tmp_path / "program.py"), argument]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            return server, subprocess.Popen(command, env=environment, cwd=tmp_path, **pipes)

        yield start
    assert mark.gone()


@pytest.mark.parametrize(("argument", "status"), [("pass", 0), ("fail", 7)])
def test_ranks_meet_and_end_with_their_status(job, tmp_path, argument, status):
    _, process = job(argument)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == status
    expected = {f"{tmp_path} {rank} of 3, 3, ['{argument}'], given" for rank in range(3)}
    assert argument == "fail" or set(output.splitlines()) == expected


@pytest.mark.parametrize(
    ("strike", "passes"),
    [
        (lambda server, process: os.kill(server.ranks[1], signal.SIGKILL), False),
        (lambda server, process: process.send_signal(signal.SIGUSR1), True),  # mpirun forwards it to all ranks
        (lambda server, process: process.kill(), False),  # the stubs notice
        (lambda server, process: server.__exit__(), False),
    ],
    ids=["a rank is killed", "a signal is passed on", "mpirun is killed", "the server ends"],
)
def test_no_rank_outlives_its_job_or_the_server(job, strike, passes):
    server, process = job("wait")
    for _ in range(3):
        process.stdout.readline()
    assert len(server.ranks) == 3
    strike(server, process)
    process.communicate(timeout=60)
    assert (process.returncode == 0) == passes
    assert server.forget() == []
    assert server.ranks == {}


def test_the_server_ends_though_a_forked_process_holds_its_pipe(tmp_path):
    with ForkServer(tmp_path, []):
        child = os.fork()
        if child == 0:
            signal.pause()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
