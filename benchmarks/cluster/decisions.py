"""What the recommended preset decides on links of any rate, beside what a user would choose instead.

For each model and rate, the contenders train in turns on an emulated cluster. A turn of the preset begins with its
trials, which are not timed: reported are the density that it has chosen, and the step in which it did. The other turns
begin with a few steps that are not timed either. A contender whose steps are long makes fewer of them.

With --change, one training of the preset runs at several rates in turn, for --change-steps steps each; reported are the
step of each new decision, and the step time at the end of each rate.

Results are appended to decisions.jsonl in the output folder, and an interrupted benchmark resumes. At the end they are
printed as tables, and drawn, step time over rate.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import last_line, markdown, print_on_rank_0, subcommand
from benchmarks.cluster.contenders import ALONE, FP16, HOROVOD, PEERS, POWERSGD
from benchmarks.cluster.emulated import Cluster
from horovod_sparse.cli.image import write_png
from horovod_sparse.cli.units import at_least, listed

PRESET = "recommended"
_FIXED = tuple(f"{PRESET}:density={density}" for density in ("0.1", "0.01", "0.001"))
_SHARED_MEMORY = "memory"  # instead of a rate: all ranks on one node
_SECONDS = 20.0  # of timed steps per turn, at most; and of those before them
_WARMUP, _TRIALS = 15, 130
_SETTLED = 50  # steps at the end of each rate, with --change, that are reported


def add_parser(commands: Any) -> None:
    """Add this subcommand."""
    about = "time training steps over the rate of the links, with what the recommended preset decides"
    add = subcommand(commands, "decisions", about, __doc__, run).add_argument
    add("--ranks", type=at_least(1), default=4, help="one on each node; all nodes share this machine's cores")
    add("--models", type=listed(str), default="cnn,transformer,wide", help="models of benchmarks.cluster.stepping")
    rates = f"{_SHARED_MEMORY},none,1gbit,300mbit,100mbit,30mbit,10mbit"
    add("--rates", type=listed(str), default=rates, help="rates of the links; memory: all ranks on one node")
    peers = ",".join((ALONE, HOROVOD, FP16, POWERSGD, PRESET, "dense", *_FIXED))
    add("--contenders", type=listed(str), default=peers, help="contenders")
    add("--steps", type=at_least(1), default=60, help="timed steps per turn, at most")
    add("--turns", type=at_least(1), default=2, help="turns of each contender")
    add("--change", type=listed(str), default=(), help="rates of one training, such as 1gbit,50mbit,1gbit")
    add("--change-steps", type=at_least(_SETTLED), default=400, help="steps at each of these rates")
    add("--output", type=Path, default=Path("runs/decisions"), help="folder for the results")


def run(options: argparse.Namespace) -> int:
    """Measure what has no record yet, print the tables and draw the figure."""
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "decisions.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if options.change:
        with Cluster(options.ranks, options.change[0]) as cluster:
            change(cluster, options)
        return 0
    for rate in options.rates:
        todo = [key for key in _keys(options, rate) if not any(key.items() <= record.items() for record in records)]
        if not todo:
            continue
        shared = rate == _SHARED_MEMORY
        with Cluster(1 if shared else options.ranks, "none" if shared else rate) as cluster:
            for key in todo:
                records.append({**key, **measure(cluster, options, key)})
                with path.open("a") as file:
                    file.write(json.dumps(records[-1]) + "\n")
                print(json.dumps(records[-1]), flush=True)
    for model in options.models:
        print(f"\n{model}\n\n{table(records, model)}")
    plot(records, options.output / "decisions.png")
    return 0


def _keys(options: argparse.Namespace, rate: str) -> list[dict[str, Any]]:
    """Return what identifies each turn at a rate; contenders take turns."""
    turns = itertools.product(options.models, range(options.turns), options.contenders)
    return [{"model": model, "rate": rate, "contender": name, "turn": turn} for model, turn, name in turns]


def measure(cluster: Cluster, options: argparse.Namespace, key: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result of one turn."""
    mapping = ["--mca", "btl", "vader,self", "--oversubscribe"] if key["rate"] == _SHARED_MEMORY else []
    hosts = ["-H", f"{cluster.nodes[0]}:{options.ranks}"] if mapping else []
    arguments = ["-m", "benchmarks.cluster.decisions", key["model"], key["contender"], str(options.steps)]
    found: dict[str, Any] = last_line(cluster.python(options.ranks, arguments, [*hosts, *mapping]))
    return found


def change(cluster: Cluster, options: argparse.Namespace) -> None:
    """Train the preset while the rate of the links changes, and print what it decides."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["-m", "benchmarks.cluster.decisions", options.models[0], PRESET, str(options.change_steps)]
        output: list[str] = []
        program = threading.Thread(
            target=lambda: output.append(cluster.python(options.ranks, [*arguments, folder, str(len(options.change))]))
        )
        program.start()
        for number, rate in enumerate(options.change):
            while program.is_alive() and not (Path(folder) / f"ready{number}").exists():
                time.sleep(0.02)
            cluster.set_rate(rate)
            (Path(folder) / f"go{number}").touch()
        program.join()
        if not output:
            raise RuntimeError("the training failed")
        print("| rate | decided after, steps | density | ms a step |\n| --- | ---: | ---: | ---: |")
        for rate, found in zip(options.change, last_line(output[0]), strict=True):
            decided = ", ".join(map(str, found["decided"])) or "-"
            print(f"| {rate} | {decided} | {found['density']:.3g} | {found['milliseconds']:.1f} |")


def _cells(records: Sequence[Mapping[str, Any]], model: str) -> dict[tuple[str, str], list[Mapping[str, Any]]]:
    """Return the turns of a model by contender and rate."""
    cells: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for record in records:
        if record["model"] == model:
            cells.setdefault((record["contender"], record["rate"]), []).append(record)
    return cells


def _milliseconds(turns: Sequence[Mapping[str, Any]]) -> float:
    return float(median(turn["milliseconds"] for turn in turns))


def table(records: Sequence[Mapping[str, Any]], model: str) -> str:
    """Return the milliseconds of a step as a Markdown table; for the preset, also what it has chosen, and when."""
    cells = _cells(records, model)
    rates = list(dict.fromkeys(rate for _, rate in cells))
    rows = []
    for name in dict.fromkeys(name for name, _ in cells):
        row = [f"{_milliseconds(cells[name, rate]):.1f}" if (name, rate) in cells else "" for rate in rates]
        rows.append([name if name in PEERS else f"`{name}`", *row])
    chosen = [", ".join(f"{turn['density']:.2g}" for turn in cells.get((PRESET, rate), ())) for rate in rates]
    decided = [", ".join(str(turn["decided"]) for turn in cells.get((PRESET, rate), ())) for rate in rates]
    rows += [["density that it chose, by turn", *chosen], ["in step", *decided]]
    return markdown(["ms a step", *rates], rows, left=1)


def plot(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw step time over rate, one panel per model, and below it the density that the preset has chosen."""
    from matplotlib.figure import Figure

    models = list(dict.fromkeys(record["model"] for record in records))
    figure = Figure(figsize=(5 * len(models), 6), layout="constrained")
    panels = figure.subplots(2, len(models), squeeze=False, sharex=True, height_ratios=(3, 1))
    for model, axes, below in zip(models, *panels, strict=True):
        others = itertools.cycle(f"C{number}" for number in range(10) if number != 3)  # C3 is the preset's
        cells = {key: turns for key, turns in _cells(records, model).items() if _megabits(key[1])}
        for name in dict.fromkeys(name for name, _ in cells):
            points = [(_megabits(rate), _milliseconds(turns)) for (one, rate), turns in cells.items() if one == name]
            colour, width, order = ("C3", 2.5, 3) if name == PRESET else (next(others), 1.2, 2)
            style = {"color": colour, "linewidth": width, "zorder": order, "marker": "o", "markersize": 3}
            axes.loglog(*zip(*sorted(points), strict=True), label=name, **style)
        for (name, rate), turns in cells.items():
            if name == PRESET:
                below.loglog([_megabits(rate)] * len(turns), [turn["density"] for turn in turns], "o", color="C3")
        axes.set(title=model, ylabel="ms per step")
        below.set(xlabel="rate of the links, Mbit/s", ylabel="density chosen", ylim=(1e-3, 2))
        for one in (axes, below):
            one.grid(which="both", alpha=0.25)
    panels[0][0].legend(fontsize=8)
    write_png(figure, path)


def _megabits(rate: str) -> float:
    """Return a rate in Mbit/s; 0 if there is no limit."""
    found = re.fullmatch(r"([\d.]+)([mg])bit", rate)
    return float(found[1]) * {"m": 1, "g": 1000}[found[2]] if found else 0.0


# --- under mpirun --------------------------------------------------------------------------------------------------


def turn(model: str, contender: str, steps: int) -> dict[str, Any]:
    """Return the median milliseconds of a step on the slowest rank, and what was decided."""
    from benchmarks.cluster.stepping import Training, slowest

    training = Training(model, contender)
    first = max(training.step() for _ in range(2))
    possible = max(3, int(_SECONDS / slowest(first)))
    decided, density = None, 1.0
    for number in range(2, _TRIALS if contender == PRESET else min(_WARMUP, possible)):
        training.step()
        if contender == PRESET and training.optimizer.statistics().get("total/decisions"):
            decided = number
    times = [training.step() for _ in range(min(steps, possible) if contender != PRESET else steps)]
    if contender not in PEERS:
        density = training.optimizer.statistics()["total/density"]
    return {"milliseconds": slowest(1e3 * median(times)), "density": density, "decided": decided}


def through_changes(model: str, contender: str, steps: int, folder: Path, rates: int) -> list[dict[str, Any]]:
    """Train at several rates in turn, and return for each when it was decided, and density and step time at its end."""
    import horovod.torch as hvd

    from benchmarks.cluster.stepping import Training, slowest

    training, found = Training(model, contender), []
    for number in range(rates):
        if hvd.rank() == 0:
            (folder / f"ready{number}").touch()
            while not (folder / f"go{number}").exists():
                time.sleep(0.02)
        slowest(0.0)  # waits for rank 0
        times, densities, decided = [], [], []
        for step in range(steps):
            times.append(training.step())
            counted = training.optimizer.statistics()
            densities.append(counted["total/density"])
            if counted.get("total/decisions"):
                decided.append(step)
        milliseconds = slowest(1e3 * median(times[-_SETTLED:]))
        found.append({"decided": decided, "density": median(densities[-_SETTLED:]), "milliseconds": milliseconds})
    return found


if __name__ == "__main__":
    _model, _contender, _steps, *_rest = sys.argv[1:]
    if _rest:
        print_on_rank_0(through_changes(_model, _contender, int(_steps), Path(_rest[0]), int(_rest[1])))
    else:
        print_on_rank_0(turn(_model, _contender, int(_steps)))
