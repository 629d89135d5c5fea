#!/usr/bin/env python3
"""Elastic training under torchrun: ranks and agents are killed, and agents are added, at random.

    python tests/elastic.py --kills 200 --seed 0

Starts agents of torchrun on this machine, with one rank each, which find each other at one address as the nodes of a
cluster do. ``programs/struck.py`` kills ranks at chosen phases: construction, reading and writing of a checkpoint, the
first step, a later step. Agents are killed together with their ranks, like a node, and started again.

Requirements: after each disturbance, training goes on within ``--limit`` seconds, from a complete checkpoint; at the
end, the sum of all gradients given is in the parameters and the residuals; no process is left. If one is violated, the
exit status is 1 and the folder with the output of all agents is kept.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tools")]

import torch.distributed.run as distributed_run  # noqa: E402
from forkserver import ForkServer  # noqa: E402
from processes import Mark, environments  # noqa: E402

from horovod_sparse.checkpoint.folder import Folder  # noqa: E402
from horovod_sparse.cli.checkpoint import list_folder  # noqa: E402
from mpitest import mpi_environment, quick_start  # noqa: E402

PHASES = ("construct", "restore", "save", "first", "step")
COMPRESSION = "oktopk:density=0.05,dense_below=0,bucket_bytes=1200,tau_threshold=2"
MODULES = (
    *("torch", "torch.distributed", "torch.distributed.run", "torch.distributed.tensor"),
    *("horovod_sparse.frontends.ddp.state", "horovod_sparse.checkpoint.training"),
)
# torch's default waits 30 s for further nodes after the smallest number has come.
RENDEZVOUS = "last_call_timeout=5,join_timeout=600"
PERIOD = 0.05  # seconds between polls
NODE = "HOROVOD_SPARSE_TEST_NODE"  # variable with the number of the agent
RUN = distributed_run.__file__


@dataclass
class Event:
    """Line of the trace: a start or a step, its number, the number of ranks, times of the process and of the line."""

    kind: str
    step: int
    ranks: int
    born: float
    time: float


@dataclass
class Cluster:
    """Agents of torchrun with one rank each, which run ``struck.py``.

    Attributes:
        folder: Folder of checkpoints, trace and outputs.
        nodes: torchrun's ``--nnodes``.
        arguments: Arguments of struck.py after its files.
        agents: Agents that were started and not killed.
    """

    folder: Path
    nodes: str
    arguments: Sequence[str]
    server: ForkServer | None = None
    restarts: int = 1000
    agents: list[subprocess.Popen[bytes]] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    started: int = 0

    def __post_init__(self) -> None:
        self.mark, self.strike, self.trace = Mark(), self.folder / "strike", self.folder / "trace"
        self.folder.mkdir(parents=True, exist_ok=True)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self.trace.touch()

    def add(self) -> None:
        """Start an agent; the first one serves the rendezvous."""
        environment = quick_start(mpi_environment()) | self.mark.variables
        environment |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", NODE: str(self.started)}
        interpreter = self.server.stub if self.server else [sys.executable]
        host = "1" if self.started == 0 else "0"
        command = [
            *(*interpreter, RUN, "--no-python", "--nproc-per-node", "1"),
            *("--nnodes", self.nodes, "--max-restarts", str(self.restarts), "--rdzv-backend", "c10d"),
            *("--rdzv-endpoint", f"127.0.0.1:{self._port}", "--rdzv-id", "elastic", "--local-addr", "127.0.0.1"),
            *("--rdzv-conf", f"is_host={host},{RENDEZVOUS}"),
            *interpreter,
            *(str(ROOT / "tests" / "programs" / "struck.py"), str(self.strike), str(self.trace), *self.arguments),
        ]
        with (self.folder / f"agent-{self.started}.txt").open("wb") as output:
            self.agents.append(
                subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            )
        self.numbers.append(self.started)
        self.started += 1

    def lose(self, number: int) -> None:
        """Kill an agent and its ranks at once, as if the power of a node failed."""
        agent = self.agents.pop(number)
        node = str(self.numbers.pop(number)).encode()
        for pid, environment in environments():  # the server ends those that it has forked for these
            if environment.get(NODE.encode()) == node and pid in self.mark.processes():
                with_kill(pid)
        agent.wait()

    def order(self, phase: str, rank: int) -> None:
        """Let a rank be killed when it comes to a phase."""
        partial = self.folder / "order"
        partial.write_text(f"{phase} {rank}")
        partial.rename(self.strike)

    @property
    def events(self) -> list[Event]:
        """Starts and steps so far."""
        lines = [line.split() for line in self.trace.read_text().splitlines()]
        return [
            Event(kind, int(step), int(ranks), float(born), float(at))
            for kind, step, ranks, born, at in (line for line in lines if len(line) == 5)
        ]

    @property
    def sums(self) -> tuple[float, float, float] | None:
        """What the parameters have moved, what residuals hold, and what was given; None before the end."""
        last = self.trace.read_text().splitlines()[-1:]
        values = last[0].split() if last and last[0].startswith("done") else []
        return (float(values[3]), float(values[4]), float(values[5])) if values else None

    def wait(self, limit: float) -> list[int | None]:
        """Wait for the agents to end; return their statuses, None for those that did not end in time."""
        end = time.monotonic() + limit
        for agent in self.agents:
            with suppress(subprocess.TimeoutExpired):
                agent.wait(max(end - time.monotonic(), 0.01))
        return [agent.poll() for agent in self.agents]

    def close(self) -> None:
        """End everything that is left."""
        for agent in self.agents:
            agent.terminate()
        self.wait(35)
        for pid in self.mark.processes():
            with_kill(pid)


def with_kill(pid: int) -> None:
    """Kill a process that may have ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@dataclass
class Interruption:
    """One disturbance: seconds until the ranks that continue were started, until they trained, and the steps lost."""

    kind: str
    restart: float
    resume: float
    lost: int


def disturb(cluster: Cluster, kind: str, generator: random.Random, limit: float) -> Interruption | str:
    """Disturb the training once and wait until it goes on; return the times, or what went wrong."""
    before, ranks = cluster.events, len(cluster.agents)
    if kind == "add":
        cluster.add()
    elif kind == "lose":
        cluster.lose(generator.randrange(1, ranks))  # the first serves the rendezvous
    else:
        phase = kind
        if phase in ("construct", "restore", "first"):  # comes with a restart only
            cluster.order("step", generator.randrange(ranks))
            if not _until(lambda: not cluster.strike.exists(), limit):
                return "no rank came to a step"
        cluster.order(phase, generator.randrange(ranks))
        if not _until(lambda: not cluster.strike.exists(), limit):
            return f"no rank came to the phase {phase}"
    struck = time.time()
    highest = max((event.step for event in before if event.kind == "step"), default=0)

    def resumed() -> list[Event]:
        """Return the last start and the first step of processes that were started since, with all agents."""
        every = len(cluster.agents)
        new = [event for event in cluster.events if event.born > struck - 0.05 and event.ranks == every]
        starts, steps = ([event for event in new if event.kind == kind] for kind in ("start", "step"))
        return [starts[-1], steps[0]] if starts and steps else []

    if not _until(lambda: bool(resumed()) or cluster.sums is not None, limit):
        return f"training has not gone on within {limit:.0f} s after {kind}"
    if cluster.sums is not None and not resumed():
        return "the training ended too soon"
    start, step = resumed()
    reached = max([highest, *(event.step for event in cluster.events if event.time < struck and event.kind == "step")])
    return Interruption(kind, start.born - struck, step.time - struck, max(reached - start.step, 0))


def _until(condition: Callable[[], bool], limit: float) -> bool:
    end = time.monotonic() + limit
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(PERIOD)
    return True


def kinds(generator: random.Random, agents: int, least: int, most: int) -> str:
    """Return what happens next: the number of agents stays between two limits."""
    choices = [*PHASES, *(["lose"] if agents > least else []), *(["add"] * 2 if agents < most else [])]
    return generator.choice(choices)


def soak(cluster: Cluster, kills: int, limits: tuple[int, int, float], seed: int) -> tuple[list[Interruption], str]:
    """Disturb a training until ``kills`` disturbances have happened; return them, and what went wrong, if anything."""
    least, most, limit = limits
    generator, done = random.Random(seed), list[Interruption]()
    for _ in range(least):
        cluster.add()
    if not _until(lambda: any(event.kind == "step" for event in cluster.events), 2 * limit):
        return done, "the training has not started"
    while len(done) < kills:
        kind = kinds(generator, len(cluster.agents), least, most)
        outcome = disturb(cluster, kind, generator, limit)
        if isinstance(outcome, str):
            return done, outcome
        done.append(outcome)
        print(
            f"{len(done):4} {kind:10} {len(cluster.agents)} agents: restarted after {outcome.restart:.1f} s, "
            f"trained after {outcome.resume:.1f} s, {outcome.lost} steps lost",
            flush=True,
        )
        damage = [state for *_, state in list_folder(Folder(cluster.folder / "checkpoints"), verify=True)]
        if set(damage) - {"verified"}:
            return done, f"checkpoints: {damage}"
        time.sleep(generator.uniform(0, 1))
    return done, ""


def main() -> int:
    """Run, and print the times; return the exit status."""
    args = parse_arguments()
    folder = Path(tempfile.mkdtemp(prefix="elastic-"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # runs all cleanup
    steps = str(args.steps)
    with ForkServer(folder, MODULES, quick_start(mpi_environment())) as server:
        arguments = ("given", str(folder / "checkpoints"), steps, "5", COMPRESSION)
        cluster = Cluster(folder, f"{args.least}:{args.most}", arguments, None if args.no_server else server)
        try:
            done, broken = soak(cluster, args.kills, (args.least, args.most, args.limit), args.seed)
            if not broken:
                (folder / "stop").touch()  # struck.py ends the training
                statuses = cluster.wait(2 * args.limit)
                broken = _broken(cluster, statuses)
        finally:
            cluster.close()
    _report(done)
    print(broken or f"sum of all updates: {cluster.sums}")
    if broken:
        print(f"output in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


def _broken(cluster: Cluster, statuses: Sequence[int | None]) -> str:
    if set(statuses) != {0}:
        return f"the agents ended with {statuses}"
    assert cluster.sums is not None
    moved, left, given = cluster.sums
    if abs(moved + left - given) > 1e-3 * max(1, abs(given)):
        return f"{given} was given, but {moved} has arrived and {left} is in residuals"
    return ""


def _report(done: Sequence[Interruption]) -> None:
    print(f"{len(done)} disturbances: {dict(Counter(one.kind for one in done))}")
    for name in ("restart", "resume", "lost"):
        values = sorted(getattr(one, name) for one in done)
        if values:
            print(f"{name}: median {median(values):.1f}, from {values[0]:.1f} to {values[-1]:.1f}")


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="number of disturbances (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--least", type=int, default=2, help="smallest number of agents (default %(default)s)")
    parser.add_argument("--most", type=int, default=4, help="largest number of agents (default %(default)s)")
    parser.add_argument("--limit", type=float, default=60, help="seconds within which it goes on (default %(default)s)")
    parser.add_argument("--steps", type=int, default=10**6, help="length of the training")
    parser.add_argument("--no-server", action="store_true", help="start Python for each rank, as users do")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
