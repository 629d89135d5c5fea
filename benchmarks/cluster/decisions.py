"""What the recommended preset decides on links of any rate, next to what a user would choose instead.

For each model and rate, the contenders train in turns on an emulated cluster. A turn of the preset begins with its
trials, which are not timed: reported are the density that it has chosen, and the step in which it did. The other turns
begin with a few steps that are not timed either. A contender whose steps are long makes fewer of them. Tables and
figure show medians over the turns with the least and the most.

With --accuracy, each contender also trains the model on the data of benchmarks.convergence, with the turn as the seed;
reported is the metric after the last step. This is for the models that have data: cnn (Fashion-MNIST) and transformer
(stdlib).

With --change, one training of the preset per model and turn runs at several rates in turn, for --change-steps steps
each; reported are the step of each new decision, and the step time at the end of each rate.

Results are appended to decisions.jsonl in the output folder, and an interrupted benchmark resumes, also with other
models, rates and contenders. At the end, all results of the same number of ranks and steps are written to decisions.md
as tables, and drawn in decisions.png, step time over rate.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import last_line, subcommand
from benchmarks.cluster.contenders import ALONE, FP16, HOROVOD, POWERSGD
from benchmarks.cluster.decisions_report import PRESET, SHARED_MEMORY, plot, tables
from benchmarks.cluster.emulated import Cluster
from horovod_sparse.cli.units import at_least, listed

Record = dict[str, Any]

STEPS, ACCURACY, CHANGE = "steps", "accuracy", "change"  # what a record measures
_FIXED = tuple(f"{PRESET}:density={density}" for density in ("0.1", "0.01", "0.001"))
_WITH_DATA = ("cnn", "transformer")
_SETTLED = 50  # steps at the end of each rate, with --change, that are reported
_PROGRAM = ("-m", "benchmarks.cluster.decisions_ranks")


def add_parser(commands: Any) -> None:
    """Add this subcommand."""
    about = "time training steps over the rate of the links, with what the recommended preset decides"
    add = subcommand(commands, "decisions", about, __doc__, run).add_argument
    add("--ranks", type=at_least(1), default=4, help="one on each node; all nodes share this machine's cores")
    add("--models", type=listed(str), default="cnn,transformer,wide", help="models of benchmarks.cluster.stepping")
    rates = f"{SHARED_MEMORY},none,1gbit,300mbit,100mbit,30mbit,10mbit"
    add("--rates", type=listed(str), default=rates, help="rates of the links; memory: all ranks on one node")
    peers = ",".join((ALONE, HOROVOD, FP16, POWERSGD, PRESET, *_FIXED))
    add("--contenders", type=listed(str), default=peers, help="contenders")
    add("--steps", type=at_least(1), default=60, help="timed steps per turn, at most")
    add("--turns", type=at_least(1), default=3, help="turns of each contender")
    add("--accuracy", type=at_least(1), metavar="STEPS", help="steps of a training on data after which to evaluate")
    add("--fashion-mnist", default="/usr/share/datasets/fashion-mnist", metavar="DIR", help="folder of the IDX files")
    add("--change", type=listed(str), default=(), help="rates of one training, such as 1gbit,50mbit,1gbit")
    add("--change-steps", type=at_least(_SETTLED), default=400, help="steps at each of these rates")
    add("--output", type=Path, default=Path("runs/decisions"), help="folder for the results")


def run(options: argparse.Namespace) -> int:
    """Measure what has no record yet, and write the tables and the figure."""
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "decisions.jsonl"
    records = read(path)

    def keep(key: Record, found: Record) -> None:
        records.append({**key, **found})
        with path.open("a") as file:
            file.write(json.dumps(records[-1]) + "\n")
        print(json.dumps(records[-1]), flush=True)

    for rate, keys in itertools.groupby(waiting(options, records), lambda key: key["rate"]):
        if options.change:
            for key in keys:
                with Cluster(options.ranks, options.change[0]) as cluster:
                    keep(key, {"rates": change(cluster, options, key["model"])})
            continue
        shared = rate == SHARED_MEMORY
        with Cluster(1 if shared else options.ranks, "none" if shared else rate) as cluster:
            for key in keys:
                keep(key, measure(cluster, options, key))
    alike = [record for record in records if any(same.items() <= record.items() for same in _settings(options))]
    text = tables(alike)
    print(f"\n{text}")
    (options.output / "decisions.md").write_text(f"{text}\n")
    plot(alike, options.output / "decisions.png")
    return 0


def read(path: Path) -> list[Record]:
    """Return the records of a file, without a last line that an interruption has cut; none if it does not exist."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        path.write_text("".join(lines := lines[:-1]))
    return [json.loads(line) for line in lines]


def _settings(options: argparse.Namespace) -> list[Record]:
    """Return what records have in common that may be shown together, by kind."""
    steps = {STEPS: options.steps, ACCURACY: options.accuracy, CHANGE: options.change_steps}
    return [{"kind": kind, "ranks": options.ranks, "steps": count} for kind, count in steps.items()]


def _keys(options: argparse.Namespace) -> Iterator[Record]:
    """Yield what identifies each measurement, rate by rate; contenders take turns."""
    of_steps, of_accuracy, of_change = _settings(options)
    if options.change:
        for turn, model in itertools.product(range(options.turns), options.models):
            yield {**of_change, "model": model, "rate": ",".join(options.change), "contender": PRESET, "turn": turn}
        return
    for rate in options.rates:
        for model, turn, name in itertools.product(options.models, range(options.turns), options.contenders):
            yield {**of_steps, "model": model, "rate": rate, "contender": name, "turn": turn}
            if options.accuracy and name != ALONE and model in _WITH_DATA:
                yield {**of_accuracy, "model": model, "rate": rate, "contender": name, "turn": turn}


def waiting(options: argparse.Namespace, records: Sequence[Record]) -> list[Record]:
    """Return the keys that have no record yet."""
    return [key for key in _keys(options) if not any(key.items() <= record.items() for record in records)]


def measure(cluster: Cluster, options: argparse.Namespace, key: Mapping[str, Any]) -> Record:
    """Return the result of one turn, of steps or of a training on data."""
    mapping = ["--mca", "btl", "vader,self", "--oversubscribe"] if key["rate"] == SHARED_MEMORY else []
    hosts = ["-H", f"{cluster.nodes[0]}:{options.ranks}"] if mapping else []
    data = [str(key["turn"]), options.fashion_mnist] if key["kind"] == ACCURACY else []
    arguments = [*_PROGRAM, key["kind"], key["model"], key["contender"], str(key["steps"]), *data]
    found: Record = last_line(cluster.python(options.ranks, arguments, [*hosts, *mapping]))
    return found


def change(cluster: Cluster, options: argparse.Namespace, model: str) -> list[Record]:
    """Train the preset while the rate of the links changes, and return what it has decided at each rate."""
    with tempfile.TemporaryDirectory() as folder:
        given = [folder, str(options.change_steps), str(_SETTLED), str(len(options.change))]
        arguments = [*_PROGRAM, CHANGE, model, PRESET, *given]
        output: list[str] = []
        program = threading.Thread(target=lambda: output.append(cluster.python(options.ranks, arguments)))
        program.start()
        for number, rate in enumerate(options.change):
            while program.is_alive() and not (Path(folder) / f"ready{number}").exists():
                time.sleep(0.02)
            cluster.set_rate(rate)
            (Path(folder) / f"go{number}").touch()
        program.join()
        if not output:
            raise RuntimeError("the training failed")
        found: list[Record] = last_line(output[0])
        return [{"rate": rate, **one} for rate, one in zip(options.change, found, strict=True)]
