"""Comparison of dense, fp16 and sparse training, on four nodes with slow links and on this machine.

    python -m tools.demo

Emulates the nodes and links of benchmarks/cluster. If this machine cannot emulate them, only the comparison on this
machine runs. Each run writes a folder with its ``result.json`` to runs/demo, which also holds logs and a figure.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cluster.collectives import RING
from benchmarks.cluster.emulated import Cluster, obstacle
from benchmarks.cluster.network import bits_per_second, written
from examples.progress import progress_bar
from tools.demo_report import Run, meaning, plot, table
from tools.mpitest import mpi_environment

RANKS = 4
RUNS = {"dense": "none", "fp16": "fp16", "sparse": "recommended:density=0.01"}

_SHARE = 100  # units of the progress bar per run
_STATE = re.compile(r"(\d+)/(\d+) \[")  # as in the progress bar of train.py


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, print the comparison, and return the exit status."""
    options = build_parser().parse_args(arguments)
    try:
        bits_per_second(options.link)
        lacking = obstacle()
        if lacking:
            print(f"Skipping the slow network, which this machine cannot emulate: {lacking}\n", flush=True)
        runs = {}
        with progress_bar((1 if lacking else 2) * len(RUNS) * _SHARE, show=True) as bar:
            bar.bar_format = "{percentage:3.0f} %|{bar}| {elapsed}, {remaining} left{postfix}"
            if not lacking:
                runs[f"{RANKS} nodes, {written(options.link)}"] = train_slow(options, bar)
            runs["this machine"] = train_here(options, bar)
    except KeyboardInterrupt:
        return 130
    except (RuntimeError, ValueError, OSError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    print(f"\n{table(runs)}\n")
    print(
        f"sparse is --compression {RUNS['sparse']}: without a density, the preset would spend most of these short "
        "runs\non measuring one. On this machine, ranks communicate through shared memory."
    )
    if not lacking:
        place, slow = next(iter(runs.items()))
        print(meaning(slow["dense"], bits_per_second(options.link)))
        plot([*slow.values()], place, options.output / "demo.png")
        print(f"Figure: {options.output / 'demo.png'}")
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.demo", description=str(__doc__).partition("\n")[0])
    parser.add_argument("--link", default="100mbit", metavar="RATE", help="link rate of every node (default: 100mbit)")
    parser.add_argument("--epochs", type=int, default=16, help="epochs of every run (default: 16)")
    parser.add_argument("--output", type=Path, default=Path("runs/demo"), help="output folder (default: runs/demo)")
    return parser


def train_slow(options: argparse.Namespace, bar: Any) -> dict[str, Run]:
    """Train on nodes with slow links; return the runs by name."""
    place = options.output / "slow"
    with Cluster(RANKS, options.link) as cluster:
        # The algorithm that Open MPI chooses for the dense sums takes twice as long as a ring. The ring must not be
        # forced on the short messages of the sparse run.
        for names, choice in ((("dense", "fp16"), RING), (("sparse",), ())):
            command = cluster.command(RANKS, program(names, place, options), choice)
            watch(command, cluster.environment, place / f"{names[0]}.txt", len(names), bar)
    return {name: Run.read(place / name) for name in RUNS}


def train_here(options: argparse.Namespace, bar: Any) -> dict[str, Run]:
    """Train on this machine; return the runs by name."""
    place = options.output / "here"
    environment = mpi_environment()
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    launcher = ["horovodrun", "-np", str(RANKS), "--mpi-args=--oversubscribe"]
    watch([*launcher, *program(tuple(RUNS), place, options)], environment, place / "log.txt", len(RUNS), bar)
    return {name: Run.read(place / name) for name in RUNS}


def program(names: Sequence[str], place: Path, options: argparse.Namespace) -> list[str]:
    """Return the command line of a rank that makes these runs."""
    common = ["--data", "digits", "--model", "cnn", "--epochs", str(options.epochs)]
    runs = [["--compression", RUNS[name], "--output", str(place / name), *common] for name in names]
    return [sys.executable, "-m", "tools.demo_ranks", json.dumps(runs)]


def watch(command: Sequence[str], environment: Mapping[str, str], log: Path, runs: int, bar: Any) -> None:
    """Start runs, write their output to a file, and advance the progress bar.

    Raises:
        RuntimeError: The runs failed; the message holds the end of their output.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    bar.set_postfix_str(log.parent.name, refresh=False)
    begin, finished, last = bar.n, 0, 0.0
    with (
        log.open("w") as file,
        subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process,
    ):
        try:
            for line in process.stdout or ():
                file.write(line)
                if state := _STATE.search(line):
                    share = int(state[1]) / int(state[2])
                    finished, last = finished + (share < last), share
                    bar.update(begin + round(_SHARE * (finished + share)) - bar.n)
        except BaseException:  # such as Ctrl-C, which may reach only this process
            process.terminate()
            raise
    if process.returncode:
        end = "\n".join(log.read_text().splitlines()[-30:])
        raise RuntimeError(f"`{' '.join(command)}` failed with status {process.returncode}:\n{end}")
    bar.update(begin + runs * _SHARE - bar.n)


if __name__ == "__main__":
    sys.exit(main())
