#!/usr/bin/env python3
"""Soak test: training while ranks are killed, stopped and preempted at random, compared with an undisturbed training.

    python tests/soak.py --kills 1000 --ranks 3 --seed 0

Runs examples/train.py with frequent background checkpoints: first undisturbed, then repeatedly, with a disturbance of a
random rank at a random time, until ``--kills`` disturbances have happened. SIGKILL ends a run, SIGUSR1 ends it after a
checkpoint, and SIGSTOP stops a rank for up to two seconds. The next run resumes from the last checkpoint. Ranks are
forked from a process that has already loaded torch (`forkserver.py`).

Requirements: every training ends with the bits of the undisturbed one; after each run, all checkpoints are intact and
their number is within the limit; no run hangs or fails without a disturbance; no process is left. If one is violated,
the exit status is 1 and the folder with the output of all runs is kept.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tools")]

from forkserver import TRAINING_MODULES, ForkServer  # noqa: E402
from processes import terminate  # noqa: E402

from horovod_sparse.checkpoint.folder import Folder  # noqa: E402
from horovod_sparse.cli.checkpoint import list_folder  # noqa: E402
from mpitest import mpi_environment, quick_start  # noqa: E402

KEEP = 2
TRAINING = (
    *("--compression", "oktopk:density=0.05,bucket_bytes=100000,dense_below=0"),
    *("--schedule", "constant", "--warmup-epochs", "0", "--checkpoint-every", "2", "--keep", str(KEEP)),
)
KINDS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "preempt": signal.SIGUSR1}
CHANCES = (0.6, 0.2, 0.2)
LONGEST_STOP = 2.0  # seconds
PERIOD = 0.01  # seconds between polls
PATIENCE = 120.0  # seconds within which every run must end


@dataclass
class Training:
    """Training with checkpoints, results and output in a folder, started and resumed."""

    folder: Path
    arguments: tuple[str, ...]
    ranks: int
    server: ForkServer
    runs: int = 0
    broken: list[str] = field(default_factory=list)  # descriptions of violated requirements

    @property
    def parameters(self) -> str | None:
        """Digest of the final parameters; None before the end."""
        path = self.folder / "result.json"
        return str(json.loads(path.read_text())["parameters"]) if path.exists() else None

    def run(self, strike: Strike | None = None) -> str:
        """Start or resume the training, up to its end or a disturbance; return the outcome."""
        self.folder.mkdir(parents=True, exist_ok=True)
        output = self.folder / f"run-{self.runs}.txt"
        self.runs += 1
        status = self._attend(output, strike)
        outcome = self._outcome(status, output.read_text(errors="replace"), strike)
        if left := self.server.forget():
            self.broken.append(f"processes {left} of {output} are left")
        self.broken += [f"after {output}: {damage}" for damage in self._damage()]
        return outcome

    def _attend(self, output: Path, strike: Strike | None) -> int | None:
        """Start a run and apply the strike; return the exit status, or None if the run hangs."""
        train = [*self.server.stub, str(ROOT / "examples" / "train.py"), *TRAINING, *self.arguments]
        places = ["--checkpoint", str(self.folder / "checkpoints"), "--output", str(self.folder)]
        command = ["mpirun", "-n", str(self.ranks), *train, *places]
        environment, start = quick_start(mpi_environment()), time.monotonic()
        with output.open("wb") as sink:
            process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink)
            try:
                while process.poll() is None:
                    seconds = time.monotonic() - start
                    if strike is not None:
                        strike.attend(seconds, self.server.ranks)
                    if seconds > PATIENCE:
                        return None
                    time.sleep(PERIOD)
            finally:
                terminate(process)  # mpirun ends its ranks
        return process.returncode

    def _outcome(self, status: int | None, output: str, strike: Strike | None) -> str:
        struck = strike.struck if strike else None
        if status == 0 and self.parameters is not None:
            return "done"
        if status == 0 and "preempted at step" in output and struck == "preempt":
            return "preempted"
        # SIGUSR1 also kills a rank that has not installed its handler yet.
        if status not in (0, None) and (struck == "kill" or (struck == "preempt" and "on signal 10" in output)):
            return "killed"
        self.broken.append(
            f"run {self.runs - 1} in {self.folder} ended with status {status} after {struck or 'nothing'}"
        )
        return "failed"

    def _damage(self) -> Iterator[str]:
        rows = list_folder(Folder(self.folder / "checkpoints"), verify=True)
        if len(rows) > KEEP + 1:  # one more if killed before deleting the oldest
            yield f"checkpoints of steps {[step for step, *_ in rows]}"
        yield from (state for *_, state in rows if state != "verified")


class Strike:
    """Disturbance of one rank of one run, at most ``longest`` seconds after its start.

    Attributes:
        struck: Kind of the disturbance; None before it has happened.
    """

    def __init__(self, generator: random.Random, longest: float) -> None:
        (self._kind,) = generator.choices(list(KINDS), CHANCES)
        self._at, self._lot = generator.uniform(0, longest), generator.random()
        self._until = self._at + generator.uniform(0, LONGEST_STOP)
        self._stopped = 0
        self.struck: str | None = None

    def __str__(self) -> str:
        return f"{self._kind} after {self._at:.2f} s" if self.struck else "nothing"

    def attend(self, seconds: float, ranks: dict[int, int]) -> None:
        """Strike when it is due and there is a rank; resume a stopped rank when its time is over."""
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            if self.struck is None and seconds >= self._at and ranks:
                process = ranks[sorted(ranks)[int(self._lot * len(ranks))]]
                os.kill(process, KINDS[self._kind])
                self.struck = self._kind
                self._stopped = process if self._kind == "stop" else 0
            if self._stopped and seconds >= self._until:
                os.kill(self._stopped, signal.SIGCONT)
                self._stopped = 0


def main() -> int:
    """Run the trainings and print the outcomes; return the exit status."""
    args = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # runs all cleanup
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    arguments = ("--epochs", str(args.epochs), "--seed", str(args.seed))
    with ForkServer(folder, TRAINING_MODULES, quick_start(mpi_environment())) as server:
        undisturbed = Training(folder / "undisturbed", arguments, args.ranks, server)
        start = time.monotonic()
        outcome = undisturbed.run()
        seconds = time.monotonic() - start
        print(f"{args.ranks} ranks, seed {args.seed}, output in {folder}; undisturbed: {outcome} after {seconds:.1f} s")
        broken, counts = undisturbed.broken, Counter[str]()
        generator = random.Random(args.seed)
        while not broken and counts["strikes"] < args.kills:
            training = Training(folder / f"disturbed-{counts['trainings']}", arguments, args.ranks, server)
            disturb(training, generator, seconds, args.kills, counts)
            broken = training.broken
            if not broken and training.parameters != undisturbed.parameters:
                broken = [f"{training.folder}: the final parameters differ"]
            if not broken:
                shutil.rmtree(training.folder)
    print(
        f"{counts['strikes']} disturbances ({counts['kill']} kills, {counts['stop']} stops, {counts['preempt']} "
        f"preemptions) of {counts['trainings']} trainings in {counts['runs']} runs, "
        f"{time.monotonic() - start:.0f} s: final parameters {'differ or are missing' if broken else 'equal'}"
    )
    if broken:
        print("\n".join(broken))
        return 1
    shutil.rmtree(folder)
    return 0


def disturb(training: Training, generator: random.Random, longest: float, most: int, counts: Counter[str]) -> None:
    """Run a training until it is done, with a disturbance in each run until there have been ``most``."""
    counts["trainings"] += 1
    outcome = ""
    while outcome != "done" and not training.broken:
        strike = Strike(generator, longest) if counts["strikes"] < most else None
        outcome = training.run(strike)
        counts["runs"] += 1
        if strike is not None and strike.struck is not None:
            counts.update(("strikes", strike.struck))
        print(f"{counts['strikes']:5} training {counts['trainings']}: {strike or 'nothing'}; {outcome}", flush=True)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="number of kills, stops and preemptions (default 100)")
    parser.add_argument("--ranks", type=int, default=3, help="world size (default 3)")
    parser.add_argument("--epochs", type=int, default=1, help="epochs of each training (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the trainings and the disturbances (default 0)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
