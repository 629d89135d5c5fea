"""An emulated cluster on this machine, and the measurements made on it. Linux; needs root and iproute2.

    python -m benchmarks.cluster up --nodes 8 --rate 1gbit
    python -m benchmarks.cluster run 8 -- python examples/train.py --compression topka:density=0.01
    python -m benchmarks.cluster rate 100mbit
    python -m benchmarks.cluster counters
    python -m benchmarks.cluster down

The nodes are network namespaces, joined by links of the given rate; Open MPI runs over TCP between them. The
measurements (collectives, bytes, overlap, peers) bring up a cluster of their own and take it down again. Start all of
this in the repository's root, with the environment's own python, also under sudo.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from benchmarks import command_line
from benchmarks.cluster import collectives, overlap, peers
from benchmarks.cluster.collectives import RING
from benchmarks.cluster.emulated import Cluster
from benchmarks.cluster.namespaces import take_down
from benchmarks.cluster.network import DATA_NETWORK


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    # What follows "--" is the program's own affair; argparse treats it differently from version to version.
    end = words.index("--") if words[:1] == ["run"] and "--" in words else len(words)
    options = build_parser().parse_args(words[:end])
    options.program = words[end + 1 :]
    # A cluster must also come down where this process is told to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        status: int | None = options.run(options)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (RuntimeError, ValueError, OSError) as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1
    return status or 0


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = command_line("cluster", __doc__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    add = commands.add_parser("up", help="bring the cluster up")
    add.add_argument("--nodes", type=int, default=8)
    add.add_argument("--rate", default="1gbit", help="of every link, such as 100mbit; none for no limit")
    add.set_defaults(run=lambda options: Cluster(options.nodes, options.rate).up())
    add = commands.add_parser("rate", help="change the rate of all links")
    add.add_argument("rate", metavar="RATE")
    add.set_defaults(run=lambda options: Cluster.running().set_rate(options.rate))
    add = commands.add_parser("down", help="end what runs on the nodes and remove them")
    add.set_defaults(run=lambda _: take_down())
    add = commands.add_parser("exec", help="run a command on one node")
    add.add_argument("node", type=int, metavar="NODE")
    add.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND")
    add.set_defaults(run=_execute)
    add = commands.add_parser("counters", help="show every node's bytes on the data network")
    add.set_defaults(run=_show_counters)
    add = commands.add_parser("run", help="run a program under mpirun", usage="%(prog)s RANKS [OPTIONS] -- PROGRAM ...")
    add.add_argument("ranks", type=int, metavar="RANKS")
    add.add_argument("options", nargs=argparse.REMAINDER, metavar="OPTIONS", help="mpirun's")
    add.set_defaults(run=_mpirun)
    add = commands.add_parser("bytes", help="compare the bytes that the collectives count with the kernel's")
    add.add_argument("--nodes", type=int, default=8)
    add.set_defaults(run=_compare_bytes)
    collectives.add_parser(commands)
    overlap.add_parser(commands)
    peers.add_parser(commands)
    return parser


def _execute(options: argparse.Namespace) -> int:
    if not options.command:
        raise ValueError("no command given: write it after the node, as in `exec 2 ss -tin`")
    return Cluster.running().execute(options.node, options.command, capture=False).returncode


def _mpirun(options: argparse.Namespace) -> int:
    if not options.program:
        raise ValueError("no program given: write it after --, as in `run 8 -- python train.py`")
    return Cluster.running().mpirun(options.ranks, options.program, options.options, capture=False).returncode


def _compare_bytes(options: argparse.Namespace) -> int:
    """Runs socket_bytes.py; a dense allreduce moves the bytes that are counted where it is a ring."""
    program = [sys.executable, "-m", "mpi4py", "-m", "benchmarks.cluster.socket_bytes", "--network", DATA_NETWORK]
    with Cluster(options.nodes) as cluster:
        return cluster.mpirun(options.nodes, program, RING, capture=False).returncode


def _show_counters(_: argparse.Namespace) -> int:
    print(f"{'':8}{'open connections, payload':>32}{'device, everything':>32}")
    print(f"{'node':8}{'sent':>16}{'received':>16}{'sent':>16}{'received':>16}")
    for node, one in Cluster.running().counters().items():
        print(f"{node:8}{one.sent:16,}{one.received:16,}{one.device_sent:16,}{one.device_received:16,}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
