"""The emulated cluster: its command line, and where this process may make network namespaces, the cluster itself."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from processes import Mark
from stubs import forbid_namespaces

from benchmarks.cluster import emulated
from benchmarks.cluster.__main__ import main
from benchmarks.cluster.emulated import Cluster
from benchmarks.cluster.namespaces import named, shares

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
MESSAGE = 2_500_000  # bytes; a fifth of a second at 100 Mbit/s

# Two ranks: their hosts and the seconds that the fastest of three messages takes.
SEND = f"""
import time
import numpy as np
from mpi4py import MPI
comm = MPI.COMM_WORLD
message, times = np.zeros({MESSAGE}, np.uint8), []
for _ in range(3):
    comm.Barrier()
    begin = time.perf_counter()
    if comm.rank == 0:
        comm.Send(message, 1)
        comm.Recv(message[:1], 1)
    else:
        comm.Recv(message, 0)
        comm.Send(message[:1], 0)
    times.append(time.perf_counter() - begin)
hosts = comm.gather(MPI.Get_processor_name())
if comm.rank == 0:
    print(*hosts, min(times))
"""

AFFINITY = """
import json, os
from mpi4py import MPI
cores = MPI.COMM_WORLD.gather(sorted(os.sched_getaffinity(0)))
if cores:
    print(json.dumps(cores))
"""


@pytest.fixture(scope="session")
def possible():
    """Skips where this process can make no cluster."""
    if reason := emulated.obstacle():
        pytest.skip(f"no emulated cluster here: {reason}")


needs_namespaces = pytest.mark.usefixtures("possible")


@pytest.fixture(scope="module")
def pair(possible):
    with Cluster(2, "100mbit") as two:
        yield two


def popen(two: Cluster, number: int, program: str) -> subprocess.Popen[bytes]:
    """Python on a node, joined by pipes."""
    line = two._namespaces.enter(named(two.nodes[number], [sys.executable, "-c", program], two.environment))
    return subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def send(two: Cluster) -> tuple[list[str], float]:
    *hosts, seconds = two.python(2, ["-c", SEND]).split()
    return hosts, float(seconds)


@pytest.fixture
def forbidding(tmp_path, monkeypatch):
    """A machine whose kernel makes no namespaces."""
    forbid_namespaces(tmp_path)
    path = emulated._search_path()
    monkeypatch.setattr(emulated, "_search_path", lambda: f"{tmp_path}{os.pathsep}{path}")


@pytest.mark.parametrize("user", [0, 1000])
def test_without_namespaces_the_remedy_is_printed(user, forbidding, monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert main(["run", "2", "--", "true"]) == 1
    error = capsys.readouterr().err
    assert f"no namespaces for user {user} (unshare: Operation not permitted" in error
    assert "sysctl user.max_user_namespaces" in error
    assert emulated.obstacle() in error


def test_a_missing_program_is_named(monkeypatch, capsys):
    monkeypatch.setattr(emulated.shutil, "which", lambda program, path: None if program == "tc" else program)
    assert main(["run", "1", "--", "true"]) == 1
    assert "tc not found: install iproute2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "65", "--", "true"], "65 nodes: choose 1 to 64"),
        (["run", "2", "--rate", "fast", "--", "true"], "'fast' is not a rate"),
        (["run", "2"], "no program given"),
        (["collectives", "--ranks", "9"], "9 ranks on 8 nodes: give --nodes 9"),
        (["collectives", "--algorithms", "best"], "unknown algorithm 'best'; known are: dense, topka"),
        (["accuracy", "--contenders", "dense", "best"], "unknown exchange 'best'; known are: dense, fp16"),
    ],
)
def test_bad_input_is_refused_before_anything_is_made(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("nodes", "cores", "expected"),
    [(1, [0, 1], "0,1"), (2, [0, 1, 2, 5, 6], "0,2,6 1,5"), (4, [0, 1], "0 1 0 1"), (3, [7], "7 7 7")],
)
def test_nodes_share_the_cores(nodes, cores, expected):
    assert shares(nodes, cores) == expected


@needs_namespaces
def test_ranks_are_bound_to_the_cores_of_their_node(pair):
    found = json.loads(pair.python(2, ["-c", AFFINITY]))
    expected = [
        [int(core) for core in cores.split(",")] for cores in shares(2, sorted(os.sched_getaffinity(0))).split()
    ]
    assert found == expected


@needs_namespaces
def test_arguments_after_the_dashes_go_to_mpirun(capfd):
    program = ["python", "-c", "import os, sys; print(os.environ['A'], sys.argv[1:])", "a b", "--", "$c"]
    assert main(["run", "1", "--rate", "none", "--counters", "--", "-x", "A=1", *program]) == 0
    output = capfd.readouterr().out
    assert "1 ['a b', '--', '$c']" in output
    assert "node0" in output


@pytest.mark.full
@needs_namespaces
def test_ranks_run_on_separate_nodes_with_a_limited_rate(pair):
    hosts, seconds = send(pair)
    assert hosts == pair.nodes
    assert seconds > 0.95 * MESSAGE * 8 / 100e6
    pair.set_rate("none")
    _, unlimited = send(pair)
    pair.set_rate("100mbit")
    assert unlimited < seconds / 3
    assert send(pair)[1] > 0.95 * MESSAGE * 8 / 100e6


@needs_namespaces
def test_the_devices_counters_show_what_was_sent(pair):
    before = pair.counters()
    send(pair)
    after = pair.counters()
    sent, received = (
        getattr(after[node], field) - getattr(before[node], field)
        for node, field in ((pair.nodes[0], "device_sent"), (pair.nodes[1], "device_received"))
    )
    assert sent == pytest.approx(received, rel=0.001)  # the last packets
    assert 3 * MESSAGE < sent < 1.1 * 3 * MESSAGE  # headers


@needs_namespaces
def test_commands_run_on_their_node(pair):
    assert pair.execute(1, ["hostname"]).stdout == "node1\n"
    assert pair.execute(1, ["pwd"]).stdout == f"{Path.cwd()}\n"
    assert "10.77.0.2/25" in pair.execute(1, ["ip", "address", "show", "eth0"]).stdout
    with pytest.raises(ValueError, match="there is no node 2: choose 0 to 1"):
        pair.execute(2, ["true"])


@needs_namespaces
def test_connections_use_the_same_congestion_control_everywhere(pair):
    listen = "import socket; s = socket.create_server(('', 5000)); print(flush=True); one = s.accept(); input()"
    connect = "import socket; one = socket.create_connection(('10.77.0.1', 5000)); print(flush=True); input()"
    with popen(pair, 0, listen) as server:
        server.stdout.readline()
        with popen(pair, 1, connect) as client:
            client.stdout.readline()
            reports = [pair.execute(number, ["ss", "-tinH"]).stdout for number in (0, 1)]
            client.communicate(b"\n")
            server.communicate(b"\n")
    assert all(" cubic " in report for report in reports), reports


@needs_namespaces
def test_a_timeout_ends_the_program_on_every_node(pair):
    mark = Mark()
    with pytest.raises(subprocess.TimeoutExpired):
        pair.mpirun(2, ["env", *map("=".join, mark.variables.items()), "sleep", "1000"], timeout=2)
    assert mark.gone()
    assert pair.execute(0, ["true"]).returncode == 0


@needs_namespaces
@pytest.mark.parametrize(
    "end", [*(pytest.param(end, marks=pytest.mark.full) for end in (signal.SIGINT, signal.SIGTERM)), signal.SIGKILL]
)
def test_nothing_is_left_however_the_command_ends(end):
    mark = Mark()
    command = [sys.executable, "-m", "benchmarks.cluster", "run", "2", "--rate", "none", "--", "sleep", "1000"]
    # A test that runs in the background of a shell would hand on that Ctrl-C is ignored.
    heeding = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    environment = {**os.environ, **mark.variables}
    with subprocess.Popen(command, cwd=ROOT, env=environment, preexec_fn=heeding) as process:
        deadline = time.monotonic() + 60
        while len(mark.ranks()) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert len(mark.ranks()) == 2
        process.send_signal(end)
        process.wait(10)
    assert mark.gone()
    # Its file system for temporary files has gone with it.
    assert not list(Path(tempfile.gettempdir()).glob("ompi.node*"))


@needs_namespaces
def test_a_failed_construction_leaves_no_process(monkeypatch):
    def fail(*_: object) -> None:
        raise RuntimeError("half way")

    mark = Mark()
    for name, value in mark.variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(Cluster, "set_rate", fail)
    with pytest.raises(RuntimeError, match="half way"):
        Cluster(2).__enter__()
    assert not mark.processes()


@pytest.mark.full
@needs_namespaces
def test_collectives_count_the_bytes_that_the_kernel_counts(monkeypatch, capfd):
    monkeypatch.setattr(Cluster.__init__, "__defaults__", (2, "none", *Cluster.__init__.__defaults__[2:]))
    monkeypatch.chdir(ROOT)
    assert main(["bytes", "--nodes", "2"]) == 0
    assert "off by more" not in capfd.readouterr().out


@pytest.mark.nightly
@pytest.mark.timeout(400)  # three trainings
@needs_namespaces
def test_the_other_measurements_run_on_a_separate_cluster(monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(Cluster.__init__, "__defaults__", (2, "none", *Cluster.__init__.__defaults__[2:]))
    monkeypatch.chdir(ROOT)
    small = ["--nodes", "2", "--ranks", "2", "--rates", "none", "--parameters", "100K", "--iters", "2"]
    assert main(["collectives", *small, "--output", str(tmp_path), "--plot"]) == 0
    cells = json.loads((tmp_path / "collectives.json").read_text())["cells"]
    assert [len(cell["rows"]) for cell in cells] == [5, 5, 5]
    assert (tmp_path / "collectives.png").exists()
    capfd.readouterr()
    assert main(["peers", "--nodes", "2", "--rates", "none", "--parameters", "90K", "--steps", "1"]) == 0
    rows = capfd.readouterr().out.splitlines()[-7:]
    assert all(float(row.split()[4]) > 0 for row in rows)  # megabytes
    contenders = ["alone", "topka:density=0.1 / 2", "topka:density=0.1 / 2 / 2 / 1"]
    short = ["--nodes", "2", "--rates", "none", "--steps", "4", "--turns", "1"]
    assert main(["steps", *short, "--contenders", *contenders]) == 0
    rows = [re.split("  +", row) for row in capfd.readouterr().out.splitlines()[-3:]]
    assert [row[0] for row in rows] == contenders
    assert all(float(row[-1]) > 0 for row in rows[1:])
    training = ["--nodes", "2", "--rate", "none", "--model", "cnn", "--batch-size", "64", "--output", str(tmp_path)]
    assert main(["overlap", *training]) == 0
    assert len(json.loads((tmp_path / "overlap.json").read_text())["rows"]) == 3


# Arguments and variables of torchrun on node {0}: a rendezvous by c10d, and the variables that a PyTorchJob's pods get.
RENDEZVOUS = {
    "c10d": (["--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=node0:29500"], []),
    "pod": ([], ["PET_NNODES=2", "PET_NPROC_PER_NODE=2", "PET_NODE_RANK={0}", "PET_MASTER_ADDR=node0"]),
}


@needs_namespaces
@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("rendezvous", ["pod", "c10d"])
def test_torchrun_trains_sparse_over_several_hosts_with_equal_bits(rendezvous):
    arguments, variables = RENDEZVOUS[rendezvous]
    program = [str(ROOT / "tests/programs/several_hosts.py"), "--compression", "topka:density=0.1,dense_below=0"]
    limit = ["timeout", "200", "env", "GLOO_SOCKET_IFNAME=eth0"]
    with Cluster(2) as cluster, ThreadPoolExecutor(2) as pool:
        commands = [[*limit, *variables, TORCHRUN, *arguments, *program] for _ in cluster.nodes]
        commands = [[word.replace("{0}", str(number)) for word in words] for number, words in enumerate(commands)]
        done = list(pool.map(cluster.execute, range(2), commands))
    assert [one.returncode for one in done] == [0, 0], done[0].stderr + done[1].stderr
    lines = [line for one in done for line in one.stdout.splitlines()]
    hosts = {line.split()[2] for line in lines if line.startswith("host ")}
    reports = [json.loads(line) for line in lines if line.startswith('{"rank"')]
    assert hosts == {"node0", "node1"}
    assert sorted(report["rank"] for report in reports) == [0, 1, 2, 3]
    assert len({report["digest"] for report in reports}) == 1
