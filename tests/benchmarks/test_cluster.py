"""The emulated cluster: its command line, and where this process may make network namespaces, the cluster itself."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cluster import emulated, namespaces
from benchmarks.cluster.__main__ import main
from benchmarks.cluster.emulated import Cluster
from benchmarks.cluster.namespaces import enter

NAME = "hvstest"  # beside the cluster of a user
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


def obstacle() -> str:
    """Reason why no cluster can be made here, or nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not all(map(shutil.which, ("ip", "tc", "ss"))):
        return "iproute2 is not installed"
    probe = subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True, text=True, check=False)
    return probe.stderr.strip()


needs_namespaces = pytest.mark.skipif(bool(obstacle()), reason=f"no emulated cluster here: {obstacle()}")


@pytest.fixture(scope="module")
def pair():
    with Cluster(2, "100mbit", NAME) as two:
        yield two


def send(two: Cluster) -> tuple[list[str], float]:
    *hosts, seconds = two.python(2, ["-c", SEND]).split()
    return hosts, float(seconds)


def processes_on(node: str) -> list[str]:
    return namespaces.run(["ip", "netns", "pids", node]).split()


def test_without_root_the_remedy_is_told(monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for arguments in (["up"], ["down"], ["rate", "1gbit"], ["counters"], ["run", "2", "--", "true"]):
        assert main(arguments) == 1
        assert "need root: run this with `sudo" in capsys.readouterr().err


def test_a_missing_program_is_named(monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(emulated.shutil, "which", lambda program, path: None if program == "tc" else program)
    assert main(["up"]) == 1
    assert "tc not found: install iproute2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["up", "--nodes", "0"], "0 nodes: choose 1 to 64"),
        (["up", "--nodes", "65"], "65 nodes: choose 1 to 64"),
        (["up", "--rate", "fast"], "'fast' is not a rate"),
        (["run", "2", "python"], "no program given"),
        (["exec", "0"], "no command given"),
        (["collectives", "--ranks", "9"], "9 ranks on 8 nodes: give --nodes 9"),
        (["collectives", "--algorithms", "best"], "unknown algorithm 'best'; known are: dense, topka"),
    ],
)
def test_bad_input_is_refused_before_anything_is_made(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 1
    assert message in capsys.readouterr().err


def test_options_before_the_dashes_are_mpiruns(monkeypatch):
    seen = {}
    monkeypatch.setattr(Cluster, "running", classmethod(lambda cls: cls(4)))
    monkeypatch.setattr(emulated.subprocess, "run", lambda command, **settings: seen.update(settings, command=command))
    with pytest.raises(AttributeError):  # nothing ran that could have a status
        main(["run", "3", "--mca", "btl", "tcp", "-x", "A=1", "--", "python", "-c", "a -- b", "--", "c"])
    own, program = ["--mca", "btl", "tcp", "-x", "A=1"], ["python", "-c", "a -- b", "--", "c"]
    assert seen["command"] == enter("hvs0", ["mpirun", "-np", "3", "-H", "hvs0,hvs1,hvs2", *own, *program])
    assert seen["env"]["OMPI_MCA_btl_tcp_if_include"] == "10.77.0.0/25"
    assert seen["env"]["PATH"].startswith(str(Path(sys.executable).parent))


@pytest.mark.full
@needs_namespaces
def test_ranks_run_on_nodes_of_their_own_and_the_rate_limits_them(pair):
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
    assert pair.execute(1, ["hostname"]).stdout == f"{NAME}1\n"
    assert "10.77.0.2/25" in pair.execute(1, ["ip", "address", "show", "eth0"]).stdout
    with pytest.raises(ValueError, match="there is no node 2: choose 0 to 1"):
        pair.execute(2, ["true"])


@needs_namespaces
def test_connections_use_the_same_congestion_control_everywhere(pair):
    listen = "import socket; s = socket.create_server(('', 5000)); print(flush=True); one = s.accept(); input()"
    connect = "import socket; one = socket.create_connection(('10.77.0.1', 5000)); print(flush=True); input()"
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(enter(pair.nodes[0], [sys.executable, "-c", listen]), **pipes) as server:
        server.stdout.readline()
        with subprocess.Popen(enter(pair.nodes[1], [sys.executable, "-c", connect]), **pipes) as client:
            client.stdout.readline()
            reports = [pair.execute(number, ["ss", "-tinH"]).stdout for number in (0, 1)]
            client.communicate(b"\n")
            server.communicate(b"\n")
    assert all(" cubic " in report for report in reports), reports


@pytest.mark.full
@needs_namespaces
def test_what_takes_too_long_is_ended_on_every_node(pair):
    with pytest.raises(subprocess.TimeoutExpired):
        pair.mpirun(2, ["sleep", "1000"], timeout=3)
    deadline = time.monotonic() + 10
    while (left := [one for node in pair.nodes for one in processes_on(node)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


@needs_namespaces
def test_a_second_cluster_of_the_name_is_refused_and_leaves_the_first(pair):
    with pytest.raises(RuntimeError, match="a cluster is up already"):
        Cluster(2, name=NAME).up()
    assert pair.execute(0, ["true"]).returncode == 0


@needs_namespaces
def test_down_ends_everything_leaves_nothing_and_may_be_repeated():
    name = f"{NAME}x"
    with Cluster(1, "none", name) as one, subprocess.Popen(enter(one.nodes[0], ["sleep", "1000"])) as process:
        while not processes_on(one.nodes[0]):
            time.sleep(0.01)
        namespaces.take_down(name)
        assert process.wait(10) == -9
        assert namespaces.existing(name) == []
        assert not Path("/etc/netns", one.nodes[0]).exists()
        namespaces.take_down(name)


@needs_namespaces
def test_what_fails_half_way_leaves_nothing(monkeypatch):
    def fail(*_: object) -> None:
        raise RuntimeError("half way")

    monkeypatch.setattr(Cluster, "set_rate", fail)
    with pytest.raises(RuntimeError, match="half way"):
        Cluster(2, name=f"{NAME}y").up()
    assert namespaces.existing(f"{NAME}y") == []


@pytest.mark.full
@pytest.mark.timeout(400)  # three trainings
@needs_namespaces
def test_the_measurements_run_on_a_cluster_of_their_own(monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(Cluster.__init__, "__defaults__", (2, "none", f"{NAME}z"))
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    assert main(["bytes", "--nodes", "2"]) == 0
    assert "off by more" not in capfd.readouterr().out
    small = ["--nodes", "2", "--ranks", "2", "--rates", "none", "--parameters", "100K", "--iters", "2"]
    assert main(["collectives", *small, "--output", str(tmp_path), "--plot"]) == 0
    cells = json.loads((tmp_path / "collectives.json").read_text())["cells"]
    assert [len(cell["rows"]) for cell in cells] == [5, 5, 5]
    assert (tmp_path / "collectives.png").exists()
    assert main(["peers", "--nodes", "2", "--rates", "none", "--parameters", "90K", "--rounds", "1"]) == 0
    rows = [row.split() for row in capfd.readouterr().out.splitlines()]
    sent = {row[0]: float(row[3]) for row in rows if len(row) == 5 and row[0] != "min"}
    assert len(sent) == 6
    assert all(megabytes > 0 for megabytes in sent.values())
    training = ["--nodes", "2", "--rate", "none", "--model", "cnn", "--batch-size", "64", "--output", str(tmp_path)]
    assert main(["overlap", *training]) == 0
    assert len(json.loads((tmp_path / "overlap.json").read_text())["rows"]) == 3
