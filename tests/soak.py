#!/usr/bin/env python3
"""Trains for a long time while ranks are killed and preempted at random, and compares with an undisturbed training.

    python tests/soak.py --minutes 30 --ranks 4 --every 60 --seed 0

Runs examples/train.py twice: first undisturbed, for about half of the time, then with a ``kill -9`` of a random rank,
or a SIGUSR1 to one, every so often, started again until it is done. What must hold is in the table at the end; where
it does not, the exit status is 1 and the folder with the output of all runs is kept.
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
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tools")]

from processes import Mark, open_files, resident_bytes  # noqa: E402

from mpitest import mpi_environment, quick_start  # noqa: E402

KEEP = 3
TRAINING = (
    *("--compression", "oktopk:density=0.02,bucket_bytes=100000"),
    *("--schedule", "constant", "--warmup-epochs", "1", "--keep", str(KEEP)),
)
PERIOD = 1.0  # seconds between two samples
PATIENCE = 120.0  # seconds within which a run must end after a disturbance, or begin to train
GROWTH_BYTES = 16 << 20  # of a rank's resident set, from its warm-up to its end
GROWTH_FILES = 2.0  # open files, by the fitted line
SAMPLES = 10  # of a rank, below which a slope means nothing
EARLY = 0.2  # of the disturbances come before a new checkpoint is there, perhaps while the ranks start


@dataclass
class Training:
    """One training: its folder, and what was seen of its ranks.

    Attributes:
        folder: For checkpoints, results and output.
        arguments: Of train.py.
        ranks: How many.
        samples: Time, resident bytes and open files, by process.
        broken: Laws that did not hold, in words.
        runs: Begun so far.
        began: When the last one had its first checkpoint, and of which step.
    """

    folder: Path
    arguments: tuple[str, ...]
    ranks: int
    samples: dict[int, list[tuple[float, int, int]]] = field(default_factory=lambda: defaultdict(list))
    broken: list[str] = field(default_factory=list)
    runs: int = 0
    began: tuple[float, int] = (0.0, 0)

    @property
    def checkpoints(self) -> list[int]:
        """Steps of the whole checkpoints."""
        names = (path.name for path in self.folder.glob("checkpoints/step-????????"))
        return sorted(int(name.removeprefix("step-")) for name in names)

    @property
    def reached(self) -> int:
        """The newest checkpoint's step."""
        return max(self.checkpoints, default=0)

    @property
    def parameters(self) -> str | None:
        """Digest of the parameters at the end; None before it."""
        path = self.folder / "result.json"
        return str(json.loads(path.read_text())["parameters"]) if path.exists() else None

    def run(self, disturbance: Disturbance | None = None) -> str:
        """Begins or continues the training, up to its end or a disturbance; gives what became of it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        mark, output = Mark(), self.folder / f"run-{self.runs}.txt"
        self.runs += 1
        train = [sys.executable, str(ROOT / "examples" / "train.py"), *TRAINING, *self.arguments]
        places = ["--checkpoint", str(self.folder / "checkpoints"), "--output", str(self.folder)]
        with (
            output.open("wb") as sink,
            subprocess.Popen(
                ["mpirun", "-n", str(self.ranks), *train, *places],
                env={**quick_start(mpi_environment()), **mark.variables},
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
            ) as process,
        ):
            self._attend(process, mark, disturbance)
        if not mark.gone():
            self.broken.append(f"processes of run {self.runs - 1} are left: {mark.processes()}")
        if len(self.checkpoints) > KEEP:
            self.broken.append(f"{len(self.checkpoints)} checkpoints after run {self.runs - 1}")
        return self._outcome(process.returncode, output.read_text(errors="replace"), disturbance)

    def _attend(self, process: subprocess.Popen[bytes], mark: Mark, disturbance: Disturbance | None) -> None:
        """Takes samples, and disturbs, until the run ends; ends one that hangs."""
        started, last_step, last_change = time.monotonic(), self.reached, time.monotonic()
        trains = False
        while process.poll() is None:
            time.sleep(PERIOD)
            now = time.monotonic()
            ranks = mark.ranks()
            if self.reached != last_step:
                last_step, last_change = self.reached, now
                if not trains:
                    trains, self.began = True, (now, last_step)
            if trains:
                self._sample(ranks, now)
            if disturbance and disturbance.due(now - started, trains) and len(ranks) == self.ranks:
                disturbance.strike(ranks)
                last_change = now
            if now - last_change > PATIENCE:
                self.broken.append(f"run {self.runs - 1} hung at step {last_step}")
                process.terminate()  # mpirun ends its ranks
                process.wait(30)

    def _sample(self, ranks: dict[int, int], now: float) -> None:
        for pid in ranks.values():
            with contextlib.suppress(OSError):  # it has ended
                self.samples[pid].append((now, resident_bytes(pid), open_files(pid)))

    def _outcome(self, status: int, output: str, disturbance: Disturbance | None) -> str:
        struck = disturbance.struck if disturbance else None
        if status == 0 and self.parameters is not None:
            return "done"
        if status == 0 and "preempted at step" in output and struck == signal.SIGUSR1:
            return "preempted"
        if status != 0 and struck is not None:
            return "killed"
        self.broken.append(f"run {self.runs - 1} ended by itself with status {status}")
        return "failed"

    def growth(self) -> tuple[float, float, float] | None:
        """Of the process that grew most after its warm-up: bytes, bytes a minute; and of open files, likewise.

        None when no process ran for long enough.
        """
        found = []
        for samples in self.samples.values():
            times, resident, files = np.array(samples[len(samples) // 3 :], float).T
            if times.size < SAMPLES:
                continue
            span = times[-1] - times[0]
            slope, more_files = np.polyfit(times, resident, 1)[0], np.polyfit(times, files, 1)[0] * span
            found.append((slope * span, 60 * slope, more_files))
        if not found:
            return None
        return max(one[0] for one in found), max(one[1] for one in found), max(one[2] for one in found)


class Disturbance:
    """Strikes one rank of one run, at a random time.

    Args:
        generator: Decides what, whom and when.
        every: Seconds from the start to the strike, in the mean.
    """

    def __init__(self, generator: random.Random, every: float) -> None:
        self._early = generator.random() < EARLY
        self._at = generator.uniform(0, 10) if self._early else every * generator.uniform(0.5, 1.5)
        self._signal = signal.SIGKILL if generator.random() < 0.7 else signal.SIGUSR1
        self._lot = generator.random()
        self.struck: signal.Signals | None = None
        self.text = "nothing"

    def due(self, seconds: float, progress: bool) -> bool:
        """Whether to strike now: where nothing new is saved, only an early one may."""
        return self.struck is None and seconds >= self._at and (progress or self._early)

    def strike(self, ranks: dict[int, int]) -> None:
        """Sends the signal."""
        rank = sorted(ranks)[int(self._lot * len(ranks))]
        self.struck, self.text = self._signal, f"{self._signal.name} to rank {rank}"
        try:
            os.kill(ranks[rank], self._signal)
        except ProcessLookupError:  # it has just ended
            self.struck, self.text = None, "nothing"


def main() -> int:
    """Runs both trainings and prints the table; returns the exit status."""
    args = parse_arguments()
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    epochs = args.epochs or epochs_within(args, folder / "calibration")
    arguments = ("--epochs", str(epochs), "--checkpoint-every", str(args.checkpoint_every), "--seed", str(args.seed))
    print(f"{args.ranks} ranks, {epochs} epochs, seed {args.seed}; output in {folder}", flush=True)
    undisturbed = Training(folder / "undisturbed", arguments, args.ranks)
    start = time.monotonic()
    outcome = undisturbed.run()
    print(f"undisturbed: {outcome} at step {undisturbed.reached} after {time.monotonic() - start:.0f} s", flush=True)
    disturbed = Training(folder / "disturbed", arguments, args.ranks)
    counts = disturb(disturbed, random.Random(args.seed), args)
    broken = show(undisturbed, disturbed, counts)
    if broken:
        print("\n" + "\n".join(broken) + f"\nThe output of all runs is in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


def disturb(training: Training, generator: random.Random, args: argparse.Namespace) -> dict[str, int]:
    """Runs the training again and again until it is done; counts what became of the runs."""
    counts: defaultdict[str, int] = defaultdict(int)
    start, outcome = time.monotonic(), ""
    while outcome != "done" and not training.broken:
        quiet = args.strikes is not None and counts["killed"] + counts["preempted"] >= args.strikes
        disturbance = None if quiet else Disturbance(generator, args.every)
        before = training.reached
        outcome = training.run(disturbance)
        counts[outcome] += 1
        what = disturbance.text if disturbance else "nothing"
        print(
            f"{time.monotonic() - start:6.0f} s  run {training.runs - 1}: {what}; {outcome}, "
            f"steps {before} to {training.reached}",
            flush=True,
        )
    return counts


def epochs_within(args: argparse.Namespace, folder: Path) -> int:
    """As many epochs as an undisturbed training completes in half of the time."""
    few = 10
    arguments = ("--epochs", str(few), "--checkpoint-every", str(args.checkpoint_every))
    training = Training(folder, arguments, args.ranks)
    if training.run() != "done":
        sys.exit(f"soak.py: an undisturbed training fails: see {folder}")
    (start, first), end = training.began, time.monotonic()
    seconds_per_step = (end - start) / (training.reached - first)
    return max(1, round(args.minutes * 30 / seconds_per_step / (training.reached / few)))


def show(undisturbed: Training, disturbed: Training, counts: dict[str, int]) -> list[str]:
    """Prints the table of laws; returns those that do not hold."""
    rows: list[tuple[str, str, str, bool]] = []
    same = undisturbed.parameters is not None and undisturbed.parameters == disturbed.parameters
    rows.append(("final parameters", "equal" if same else "differ", "equal", same))
    rows.append(("runs killed, preempted", f"{counts['killed']}, {counts['preempted']}", "", True))
    for name, training in (("undisturbed", undisturbed), ("disturbed", disturbed)):
        growth = training.growth()
        if growth is None:
            rows.append((f"growth, {name}", "too short to tell", "", True))
            continue
        size, slope, files = growth
        measured = f"{size / 2**20:.1f} MiB ({slope / 2**20:.2f} MiB/min)"
        rows.append((f"resident set, {name}", measured, f"{GROWTH_BYTES / 2**20:.0f} MiB", size <= GROWTH_BYTES))
        rows.append((f"open files, {name}", f"{files:+.1f}", f"{GROWTH_FILES:+.1f}", files <= GROWTH_FILES))
    kept = max(len(undisturbed.checkpoints), len(disturbed.checkpoints))
    rows.append(("checkpoints kept", str(kept), str(KEEP), kept <= KEEP))
    others = undisturbed.broken + disturbed.broken
    rows.append(("hangs, processes left, failures", str(len(others)), "0", not others))
    print(f"\n{'law':34}{'measured':34}{'at most':12}")
    for law, measured, limit, holds in rows:
        print(f"{law:34}{measured:34}{limit:12}{'' if holds else 'BROKEN'}")
    return others + [f"{law}: {measured}" for law, measured, _, holds in rows if not holds]


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--minutes", type=float, default=30, help="about how long all of it takes (default 30)")
    add("--epochs", type=int, help="of each training, instead of as many as fit into the time")
    add("--ranks", type=int, default=4, help="default 4")
    add("--every", type=float, default=60, help="seconds between disturbances, in the mean (default 60)")
    add("--strikes", type=int, help="let the training end undisturbed after so many disturbances")
    add("--checkpoint-every", type=int, default=20, help="steps (default 20)")
    add("--seed", type=int, default=0, help="of the training and of the disturbances (default 0)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
