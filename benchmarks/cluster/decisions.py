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

Results are appended to --output, and an interrupted benchmark resumes, also with other models, rates and contenders.
At the end, all results of the same number of ranks and steps are written next to it as tables (.md), and drawn (.png),
step time over rate.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import subcommand
from benchmarks.cluster.contenders import ALONE, FP16, HOROVOD, POWERSGD
from benchmarks.cluster.decisions_report import PRESET, SHARED_MEMORY, plot, tables
from benchmarks.cluster.emulated import Cluster
from benchmarks.runner import Record, Records, add_arguments
from horovod_sparse.cli.units import at_least, listed

STEPS, ACCURACY, CHANGE = "steps", "accuracy", "change"  # what a record measures
_FIXED = tuple(f"{PRESET}:density={density}" for density in ("0.1", "0.01", "0.001"))
_WITH_DATA = ("cnn", "transformer")
_SETTLED = 50  # steps at the end of each rate, with --change, that are reported


def add_parser(commands: Any) -> None:
    """Add this subcommand."""
    about = "time training steps over the rate of the links, with what the recommended preset decides"
    parser = subcommand(commands, "decisions", about, __doc__, run)
    add_arguments(parser, (ALONE, HOROVOD, FP16, POWERSGD, PRESET, *_FIXED), turns=3)
    parser.set_defaults(output=Path("runs/decisions.jsonl"))
    add = parser.add_argument
    add("--nodes", type=at_least(1), default=4, help="one rank on each; all nodes share this machine's cores")
    add("--models", type=listed(str), default="cnn,transformer,wide", help="models of benchmarks.cluster.stepping")
    rates = f"{SHARED_MEMORY},none,1gbit,300mbit,100mbit,30mbit,10mbit"
    add("--rates", type=listed(str), default=rates, help="rates of the links; memory: all ranks on one node")
    add("--steps", type=at_least(1), default=60, help="timed steps per turn, at most")
    add("--accuracy", type=at_least(1), metavar="STEPS", help="steps of a training on data after which to evaluate")
    add("--fashion-mnist", default="/usr/share/datasets/fashion-mnist", metavar="DIR", help="folder of the IDX files")
    add("--change", type=listed(str), default=(), help="rates of one training, such as 1gbit,50mbit,1gbit")
    add("--change-steps", type=at_least(_SETTLED), default=400, help="steps at each of these rates")


def run(options: argparse.Namespace) -> int:
    """Measure what has no record yet, and write the tables and the figure."""
    records = Records(options.output)
    missing = records.missing(keys(options))
    for (rate, *_), group in itertools.groupby(missing, lambda key: str(key["rate"]).split(",")):
        shared = rate == SHARED_MEMORY
        with Cluster(1 if shared else options.nodes, "none" if shared else rate) as cluster:
            for key in group:
                records.add(key, measure(cluster, options, key))
                print(records.lines[-1], flush=True)
    alike = [record for record in records.lines if any(same.items() <= record.items() for same in _settings(options))]
    text = tables(alike)
    print(f"\n{text}")
    options.output.with_suffix(".md").write_text(f"{text}\n")
    plot(alike, options.output.with_suffix(".png"))
    return 0


def _settings(options: argparse.Namespace) -> list[Record]:
    """Return what records have in common that may be shown together, by kind."""
    steps = {STEPS: options.steps, ACCURACY: options.accuracy, CHANGE: options.change_steps}
    return [{"kind": kind, "ranks": options.nodes, "steps": count} for kind, count in steps.items()]


def keys(options: argparse.Namespace) -> Iterator[Record]:
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


def measure(cluster: Cluster, options: argparse.Namespace, key: Record) -> Any:
    """Return the result of one turn: of steps, of a training on data, or of one while the links change."""
    kind, model, name, steps = (key[part] for part in ("kind", "model", "contender", "steps"))
    if kind == CHANGE:
        return {"rates": change(cluster, options, model)}
    mapping: list[str] = []
    if key["rate"] == SHARED_MEMORY:
        mapping = ["-H", f"{cluster.nodes[0]}:{options.nodes}", "--mca", "btl", "vader,self", "--oversubscribe"]
    if kind == STEPS:
        return cluster.call(options.nodes, "benchmarks.cluster.stepping:timed", model, name, steps, options=mapping)
    given = [model, name, steps, key["turn"], options.fashion_mnist]
    return cluster.call(options.nodes, "benchmarks.cluster.decisions_ranks:accuracy", *given, options=mapping)


def change(cluster: Cluster, options: argparse.Namespace, model: str) -> list[Record]:
    """Train the preset while the rate of the links changes, and return what it has decided at each rate."""
    with tempfile.TemporaryDirectory() as folder:
        given = [model, PRESET, folder, options.change_steps, _SETTLED, len(options.change)]
        found: list[list[Record]] = []
        train = "benchmarks.cluster.decisions_ranks:change"
        cluster.set_rate(options.change[0])
        program = threading.Thread(target=lambda: found.append(cluster.call(options.nodes, train, *given)))
        program.start()
        for number, rate in enumerate(options.change):
            while program.is_alive() and not (Path(folder) / f"ready{number}").exists():
                time.sleep(0.02)
            cluster.set_rate(rate)
            (Path(folder) / f"go{number}").touch()
        program.join()
        if not found:
            raise RuntimeError("the training failed")
        return [{"rate": rate, **one} for rate, one in zip(options.change, found[0], strict=True)]
