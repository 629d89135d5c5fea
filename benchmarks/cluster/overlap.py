"""Shows on an emulated cluster how much of the exchange the backward pass hides, and what that saves.

examples/train.py runs as it is, with the exchange put off until the backward pass is over (see ``exchange_late``), and
with Horovod's dense exchange, a ring. Its Chrome traces tell when each rank was in its backward pass and when it
exchanged. The first two must train the same model, to the last bit. That takes dense_below=0: how Horovod rounds its
own sums depends on which tensors happen to travel together.
"""

from __future__ import annotations

import argparse
import itertools
import json
import runpy
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import horovod_sparse as hvs
from benchmarks.cluster.collectives import RING
from benchmarks.cluster.emulated import Cluster
from horovod_sparse.cli.units import at_least

Interval = tuple[float, float]

LATE = ("-m", "benchmarks.cluster.overlap")  # this file as a program; the script's folder must be on the path
SCRIPT = str(Path(__file__).resolve().parents[2] / "examples" / "train.py")


@dataclass(frozen=True)
class Row:
    """One run: milliseconds of a step, averaged over the ranks.

    Attributes:
        run: What ran.
        step: Median over the steps.
        backward: Backward pass.
        exchange: Exchange of all buckets.
        hidden: The part of it that happened during the backward pass.
        lost: What the script waited for in synchronize().
        loss: Mean loss over the last epoch's training images.
    """

    run: str
    step: float
    backward: float
    exchange: float
    hidden: float
    lost: float
    loss: float


def add_parser(commands: Any) -> None:
    """Adds this subcommand."""
    parser = commands.add_parser(
        "overlap",
        help="show how much of the exchange the backward pass hides",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--nodes", type=at_least(2), default=4, help="one rank on each")
    add("--rate", default="100mbit", help="of every link")
    add("--compression", default="oktopk:density=0.01,bucket_bytes=4194304,dense_below=0", help="as for train.py")
    add("--model", default="vgg16", help="as for train.py")
    add("--batch-size", type=at_least(1), default=8, help="images of a rank and step")
    add("--epochs", type=at_least(1), default=1, help="the last one counts")
    add("--output", type=Path, default=Path("runs/overlap"), help="folder for the runs and overlap.json")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the trainings and compares them; 1 where putting the exchange off changed the result."""
    rows = []
    with Cluster(options.nodes, options.rate) as cluster:
        for name, program, compression, mpirun_options in (
            ("overlapped", (SCRIPT,), options.compression, ()),
            ("after backward", (*LATE, SCRIPT), options.compression, ("-x", f"PYTHONPATH={Path(SCRIPT).parent}")),
            ("Horovod dense", (SCRIPT,), "none", RING),
        ):
            folder = options.output / name.replace(" ", "-")
            words = [*program, "--compression", compression, *_settings(options), "--output", str(folder), "--trace"]
            cluster.python(options.nodes, words, mpirun_options)
            rows.append(_row(name, folder))
            print(f"{name}: {rows[-1].step:.0f} ms a step", file=sys.stderr, flush=True)
    show(rows, options)
    result = {"command": sys.argv, "rows": [asdict(row) for row in rows]}
    (options.output / "overlap.json").write_text(json.dumps(result, indent=2) + "\n")
    return 0 if rows[0].loss == rows[1].loss else 1


def _settings(options: argparse.Namespace) -> list[str]:
    """Arguments that all trainings have in common."""
    names = ("model", "batch_size", "epochs")
    return [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in names]


def _row(name: str, folder: Path) -> Row:
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    epochs = json.loads((folder / "result.json").read_text())["epochs"]
    ranks = sorted({event["pid"] for event in events})
    times = [rank_times(events, rank) for rank in ranks]
    averages = {key: mean(one[key] for one in times) for key in times[0]}
    return Row(name, loss=epochs[-1]["train_loss"], **averages)


def rank_times(events: Sequence[dict[str, Any]], rank: int) -> dict[str, float]:
    """One rank's milliseconds a step, from the events of a Chrome trace."""
    spans = {
        name: [
            (event["ts"], event["ts"] + event["dur"])
            for event in events
            if event["ph"] == "X" and event["pid"] == rank and event["name"] == name
        ]
        for name in ("backward", "exchange", "synchronize", "update")
    }
    ends = [end for _, end in spans["update"]]
    if len(ends) < 2:
        raise ValueError(f"the trace holds {len(ends)} steps of rank {rank}: lower --batch-size")
    per_step = 1e-3 / len(ends)
    return {
        "step": 1e-3 * median(after - before for before, after in itertools.pairwise(ends)),
        "backward": per_step * length(spans["backward"]),
        "exchange": per_step * length(spans["exchange"]),
        "hidden": per_step * common_length(spans["exchange"], spans["backward"]),
        "lost": per_step * length(spans["synchronize"]),
    }


def length(intervals: Sequence[Interval]) -> float:
    """Total length of intervals."""
    return sum(end - start for start, end in intervals)


def common_length(some: Sequence[Interval], others: Sequence[Interval]) -> float:
    """Length of what lies in both of two lists of intervals; within a list they do not overlap."""
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a, b in itertools.product(some, others))


def show(rows: Sequence[Row], options: argparse.Namespace) -> None:
    """Prints the table."""
    print(
        f"{options.model}, batch {options.batch_size}, {options.nodes} nodes at {options.rate}, {options.compression}"
    )
    print(f"{'ms a step':16}{'step':>9}{'backward':>10}{'exchange':>10}{'hidden':>16}{'lost':>9}{'loss':>12}")
    for row in rows:
        share = f"{row.hidden:.0f} ({row.hidden / row.exchange:.0%})" if row.exchange else "-"
        exchange = f"{row.exchange:.0f}" if row.exchange else "-"
        print(
            f"{row.run:16}{row.step:9.0f}{row.backward:10.0f}{exchange:>10}{share:>16}{row.lost:9.0f}{row.loss:12.6f}"
        )
    overlapped, late = rows[:2]
    print(f"overlap saves {late.step - overlapped.step:.0f} ms a step ({1 - overlapped.step / late.step:.0%})")
    if overlapped.loss != late.loss:
        print("the losses differ with and without overlap: the runs did not compute the same")


def exchange_late(build: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``hvs.DistributedOptimizer``; takes ``backward_passes_per_step`` as a keyword only.

    The optimizer is told of one backward pass a step more than the script makes. No gradient is due then before
    synchronize() or step(), which exchange whatever is not yet on its way. Buckets, messages and results stay the same.
    """

    def build_late(*args: Any, backward_passes_per_step: int = 1, **settings: Any) -> Any:
        return build(*args, backward_passes_per_step=backward_passes_per_step + 1, **settings)

    return build_late


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    hvs.DistributedOptimizer = exchange_late(hvs.DistributedOptimizer)
    runpy.run_path(sys.argv[0], run_name="__main__")
