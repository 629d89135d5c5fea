"""Compares the bytes that our collectives count with those that the kernel counts on this node's connections.

    python -m benchmarks.cluster bytes

runs this on every node of an emulated cluster, one rank on each; Open MPI must go through TCP, on the network given.
The kernel's counters are those that `ss -tin` shows as bytes_acked and bytes_received: payload, without headers and
repetitions. They hold Open MPI's own headers too, some 64 bytes a fragment. The exit status is 1 when a count is off by
more than 1 %.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

from benchmarks.cluster.network import socket_bytes as payload
from horovod_sparse.collectives import COLLECTIVES, Collective
from horovod_sparse.rules import BucketContext
from horovod_sparse.transport.mpi import MPITransport
from horovod_sparse.vector import SparseVector

TOLERANCE = 0.01


@dataclass(frozen=True)
class Comparison:
    """Counts of one collective and of the sockets, in bytes; arrays of shape [ranks, 2]: sent, received."""

    counted: np.ndarray
    sockets: np.ndarray

    def ratios(self) -> np.ndarray:
        """Counted to sockets: sent and received, all ranks together."""
        ratios: np.ndarray = self.counted.sum(axis=0) / self.sockets.sum(axis=0)
        return ratios

    def worst(self) -> float:
        """Counted to sockets of the rank, sent or received, that is farthest from 1."""
        ratios = (self.counted / self.sockets).ravel()
        return float(ratios[np.argmax(np.abs(ratios - 1))])

    def agrees(self) -> bool:
        """Tells whether both sums are as close as promised."""
        return bool(np.all(np.abs(self.ratios() - 1) <= TOLERANCE))


def socket_bytes(network: str) -> tuple[int, int]:
    """Payload of this node's open connections on a network: bytes sent and acknowledged, and bytes received."""
    report = subprocess.run(["ss", "-tinH", "src", network], capture_output=True, text=True, check=True)
    return payload(report.stdout)


def compare(comm: MPI.Intracomm, name: str, vector: SparseVector, steps: int, network: str) -> Comparison:
    """Runs one collective some times between two looks at both counts; a collective call."""
    rule: Any = COLLECTIVES[name]
    context = BucketContext(vector.size, vector.values[:0], rank=comm.Get_rank(), ranks=comm.Get_size())
    collective: Collective = rule(context, MPITransport(comm), rule.Options())
    k = vector.values.size
    collective.allreduce(vector, k)  # opens the connections
    before = _counts(comm, collective, network)
    for _ in range(steps):
        collective.allreduce(vector, k)
    counted, sockets = _counts(comm, collective, network) - before
    everyones = np.empty((comm.Get_size(), 2, 2), np.int64)
    comm.Allgather(np.array([counted, sockets]), everyones)
    return Comparison(counted=everyones[:, 0], sockets=everyones[:, 1])


def _counts(comm: MPI.Intracomm, collective: Collective, network: str) -> np.ndarray:
    """Shape [2, 2]: counted and sockets, sent and received."""
    comm.Barrier()
    time.sleep(0.3)  # the last bytes are acknowledged late, up to 40 ms after they arrived
    traffic = collective.traffic
    counts = np.array([(traffic.bytes_sent, traffic.bytes_received), socket_bytes(network)], np.int64)
    comm.Barrier()  # no rank sends before all have looked
    return counts


def random_vector(size: int, k: int, rank: int, shared: bool) -> SparseVector:
    """A vector of k entries at random positions, the same ones on every rank where ``shared``."""
    positions = np.random.default_rng(0 if shared else rank + 1)
    indices = np.sort(positions.choice(size, k, replace=False)).astype(np.int32)
    values = np.random.default_rng([rank, 1]).standard_normal(k, dtype=np.float32)
    return SparseVector(indices, values, size, shared=shared)


def main() -> int:
    """Compares all collectives and prints a table; 1 where one does not agree."""
    parser = argparse.ArgumentParser(description="Compares counted bytes with the kernel's.")
    parser.add_argument("--network", required=True, help="of MPI's connections")
    parser.add_argument("--size", type=int, default=10_000_000, help="elements of a vector")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    comm = MPI.COMM_WORLD
    k = round(options.density * options.size)
    if comm.rank == 0:
        print(f"{comm.size} ranks, n = {options.size:,}, k = {k:,}, {options.steps} steps; MB of all ranks")
        print(f"{'':14}{'counted':>10}{'sockets':>10}{'sent':>10}{'received':>10}{'worst rank':>12}")
    agree = True
    for name in (name for name in COLLECTIVES if name != "auto"):  # auto runs one of the others
        vector = random_vector(options.size, k, comm.rank, shared=name == "shared")
        comparison = compare(comm, name, vector, options.steps, options.network)
        agree = agree and comparison.agrees()
        if comm.rank == 0:
            print(_line(name, comparison), flush=True)
    return 0 if agree else 1


def _line(name: str, comparison: Comparison) -> str:
    megabytes = [array[:, 0].sum() / 1e6 for array in (comparison.counted, comparison.sockets)]
    sent, received = comparison.ratios()
    verdict = "" if comparison.agrees() else f"  off by more than {TOLERANCE:.0%}"
    return (
        f"{name:14}{megabytes[0]:10.2f}{megabytes[1]:10.2f}{sent:10.4f}{received:10.4f}{comparison.worst():12.4f}"
        f"{verdict}"
    )


if __name__ == "__main__":
    sys.exit(main())
