"""Byte counts of our collectives, compared with the Linux kernel's counts on this node's connections.

    python -m benchmarks.cluster bytes

runs this file on every node of an emulated cluster, one rank on each. Open MPI must use TCP on the given network. The
kernel's counters are those that `ss -tin` shows as bytes_acked and bytes_received: payload without headers and
retransmissions. They include Open MPI's own headers, about 64 bytes per fragment. The exit status is 1 if a count is
off by more than 1 %.
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
from horovod_sparse.accumulator import Accumulator
from horovod_sparse.collectives import COLLECTIVES, Collective
from horovod_sparse.rules import BucketContext
from horovod_sparse.transport.mpi import MPITransport
from horovod_sparse.vector import SparseVector

TOLERANCE = 0.01


@dataclass(frozen=True)
class Comparison:
    """Byte counts of one collective and of the sockets; arrays of shape [ranks, 2]: sent, received."""

    counted: np.ndarray
    sockets: np.ndarray

    def ratios(self) -> np.ndarray:
        """Return counted bytes divided by socket bytes, sent and received, over all ranks together."""
        ratios: np.ndarray = self.counted.sum(axis=0) / self.sockets.sum(axis=0)
        return ratios

    def worst(self) -> float:
        """Return the ratio of a single rank, sent or received, that is farthest from 1."""
        ratios = (self.counted / self.sockets).ravel()
        return float(ratios[np.argmax(np.abs(ratios - 1))])

    def agrees(self) -> bool:
        """Return whether both ratios over all ranks are within the tolerance."""
        return bool(np.all(np.abs(self.ratios() - 1) <= TOLERANCE))


def socket_bytes(network: str) -> tuple[int, int]:
    """Return the payload of this node's open connections on a network: bytes acknowledged, and bytes received."""
    report = subprocess.run(["ss", "-tinH", "src", network], capture_output=True, text=True, check=True)
    return payload(report.stdout)


def compare(comm: MPI.Intracomm, name: str, vector: SparseVector, steps: int, network: str) -> Comparison:
    """Run a collective several times and return both byte counts; a collective call."""
    rule: Any = COLLECTIVES[name]
    context = BucketContext(vector.size, vector.values[:0], rank=comm.Get_rank(), ranks=comm.Get_size())
    collective: Collective = rule(context, MPITransport(comm), rule.Options())
    k, (buffer, gradient) = vector.values.size, np.zeros((2, vector.size), np.float32)

    def step() -> None:
        extended = collective.extend(Accumulator(buffer, [(0, gradient)]), vector, k)
        collective.allreduce(extended, k)

    step()  # opens the connections
    before = _counts(comm, collective, network)
    for _ in range(steps):
        step()
    counted, sockets = _counts(comm, collective, network) - before
    everyones = np.empty((comm.Get_size(), 2, 2), np.int64)
    comm.Allgather(np.array([counted, sockets]), everyones)
    return Comparison(counted=everyones[:, 0], sockets=everyones[:, 1])


def _counts(comm: MPI.Intracomm, collective: Collective, network: str) -> np.ndarray:
    """Return both byte counts, shape [2, 2]: counted and sockets, each sent and received."""
    comm.Barrier()
    time.sleep(0.3)  # the last bytes are acknowledged up to 40 ms after they arrived
    traffic = collective.traffic
    counts = np.array([(traffic.bytes_sent, traffic.bytes_received), socket_bytes(network)], np.int64)
    comm.Barrier()  # no rank sends before all ranks have read their counters
    return counts


def random_vector(size: int, k: int, rank: int, shared: bool) -> SparseVector:
    """Return a vector of k entries at random positions, the same positions on every rank if ``shared``."""
    positions = np.random.default_rng(0 if shared else rank + 1)
    indices = np.sort(positions.choice(size, k, replace=False)).astype(np.int32)
    values = np.random.default_rng([rank, 1]).standard_normal(k, dtype=np.float32)
    return SparseVector(indices, values, size, shared=shared)


def main() -> int:
    """Compare all collectives and print a table; return 1 if any disagrees."""
    parser = argparse.ArgumentParser(description="Compare counted bytes with the Linux kernel's.")
    parser.add_argument("--network", required=True, help="network of MPI's connections, such as 10.77.0.0/25")
    parser.add_argument("--size", type=int, default=10_000_000, help="elements of a vector")
    parser.add_argument("--density", type=float, default=0.01, help="density of a vector")
    parser.add_argument("--steps", type=int, default=5, help="calls of each collective")
    options = parser.parse_args()
    comm = MPI.COMM_WORLD
    k = round(options.density * options.size)
    if comm.rank == 0:
        print(f"{comm.size} ranks, n = {options.size:,}, k = {k:,}, {options.steps} steps; MB of all ranks")
        print(f"{'':14}{'counted':>10}{'sockets':>10}{'sent':>10}{'received':>10}{'worst rank':>12}")
    agree = True
    for name in (name for name in COLLECTIVES if name != "auto"):  # auto runs another collective
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
