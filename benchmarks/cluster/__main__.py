"""Emulated cluster on this machine, and the benchmarks that run on it. Linux only; needs iproute2.

    python -m benchmarks.cluster run 4 --rate 100mbit -- python examples/train.py --compression topka:density=0.01

The nodes are network namespaces, joined by links of the given rate. Open MPI runs over TCP between them. Root is not
needed where users may create user namespaces. Every command creates a separate cluster and removes it at the end. Run
it from the repository root, with the environment's python, also under sudo.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from benchmarks import command_line
from benchmarks.cluster import accuracy, collectives, decisions, overlap, peers, sharded, steps
from benchmarks.cluster.collectives import RING
from benchmarks.cluster.emulated import Cluster
from benchmarks.cluster.network import DATA_NETWORK
from horovod_sparse.cli.units import at_least


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    # What follows "--" belongs to the program. How argparse treats it depends on the Python version.
    end = words.index("--") if words[:1] == ["run"] and "--" in words else len(words)
    options = build_parser().parse_args(words[:end])
    options.program = words[end + 1 :]
    try:
        status: int | None = options.run(options)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (RuntimeError, ValueError, OSError) as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1
    return status or 0


def build_parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    parser = command_line("cluster", __doc__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    add = commands.add_parser(
        "run", help="run a program under mpirun", usage="%(prog)s RANKS [OPTIONS] -- [OPTIONS OF MPIRUN] PROGRAM ..."
    )
    add.add_argument("ranks", type=at_least(1), metavar="RANKS", help="number of ranks, one on each node")
    add.add_argument("--rate", default="1gbit", help="rate of every link, such as 100mbit; none: no limit")
    add.add_argument("--counters", action="store_true", help="print each node's bytes on the data network afterwards")
    add.set_defaults(run=_mpirun)
    add = commands.add_parser("bytes", help="compare the byte counts of the collectives with the Linux kernel's")
    add.add_argument("--nodes", type=at_least(1), default=8, help="number of nodes, one rank on each")
    add.set_defaults(run=_compare_bytes)
    collectives.add_parser(commands)
    overlap.add_parser(commands)
    accuracy.add_parser(commands)
    peers.add_parser(commands)
    sharded.add_parser(commands)
    steps.add_parser(commands)
    decisions.add_parser(commands)
    return parser


def _mpirun(options: argparse.Namespace) -> int:
    if not options.program:
        raise ValueError("no program given: write it after --, as in `run 8 -- python train.py`")
    with Cluster(options.ranks, options.rate) as cluster:
        status = cluster.mpirun(options.ranks, options.program, capture=False).returncode
        if options.counters:
            _show_counters(cluster)
    return status


def _compare_bytes(options: argparse.Namespace) -> int:
    """Run socket_bytes.py. The dense allreduce must be a ring, as its bytes are counted for a ring."""
    program = [sys.executable, "-m", "mpi4py", "-m", "benchmarks.cluster.socket_bytes", "--network", DATA_NETWORK]
    with Cluster(options.nodes) as cluster:
        return cluster.mpirun(options.nodes, program, RING, capture=False).returncode


def _show_counters(cluster: Cluster) -> None:
    print(f"{'node':8}{'bytes sent':>16}{'received':>16}   headers, acknowledgements and retransmissions included")
    for node, counters in cluster.counters().items():
        print(f"{node:8}{counters.device_sent:16,}{counters.device_received:16,}")


if __name__ == "__main__":
    sys.exit(main())
