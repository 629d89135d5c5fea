"""Share of the exchange that the backward pass hides, and the time that this saves, on an emulated cluster.

examples/train.py runs unchanged, with the exchange delayed until the backward pass is over (see ``exchange_late``), and
with Horovod's dense exchange as a ring. Its Chrome traces show when each rank ran its backward pass and when it
exchanged. The first two runs must train bit-identical models. This needs dense_below=0, because the rounding of
Horovod's own sums depends on which tensors it fuses.
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
from benchmarks import subcommand
from benchmarks.cluster.collectives import RING
from benchmarks.cluster.emulated import Cluster
from horovod_sparse.cli.units import at_least

Interval = tuple[float, float]

LATE = ("-m", "benchmarks.cluster.overlap")  # this file as a program; PYTHONPATH must contain the script's folder
SCRIPT = str(Path(__file__).resolve().parents[2] / "examples" / "train.py")


@dataclass(frozen=True)
class Row:
    """One run; times in milliseconds per step, averaged over the ranks."""

    run: str
    step: float  # median over the steps
    backward: float
    exchange: float  # over all buckets
    hidden: float  # part of the exchange during the backward pass
    lost: float  # the script waited in synchronize()
    loss: float  # mean over the last epoch's training images


def add_parser(commands: Any) -> None:
    """Add this subcommand."""
    about = "show how much of the exchange the backward pass hides"
    add = subcommand(commands, "overlap", about, __doc__, run).add_argument
    add("--nodes", type=at_least(2), default=4, help="number of nodes, one rank on each")
    add("--rate", default="100mbit", help="rate of every link")
    compression = "oktopk:density=0.01,bucket_bytes=4194304,dense_below=0"
    add("--compression", default=compression, help="compression, as for train.py")
    add("--model", default="vgg16", help="model, as for train.py")
    add("--batch-size", type=at_least(1), default=8, help="images per rank and step")
    add("--epochs", type=at_least(1), default=1, help="epochs; the loss is that of the last one")
    add("--output", type=Path, default=Path("runs/overlap"), help="folder for the runs and overlap.json")


def run(options: argparse.Namespace) -> int:
    """Train three times and compare the runs; return 1 if delaying the exchange changed the result."""
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
            print(f"{name}: {rows[-1].step:.0f} ms per step", file=sys.stderr, flush=True)
    show(rows, options)
    result = {"command": sys.argv, "rows": [asdict(row) for row in rows]}
    (options.output / "overlap.json").write_text(json.dumps(result, indent=2) + "\n")
    return 0 if rows[0].loss == rows[1].loss else 1


def _settings(options: argparse.Namespace) -> list[str]:
    """Return the arguments that all runs share."""
    names = ("model", "batch_size", "epochs")
    return [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in names]


def _row(name: str, folder: Path) -> Row:
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    epochs = json.loads((folder / "result.json").read_text())["epochs"]
    ranks = sorted({event["pid"] for event in events})
    times = [rank_times(events, rank) for rank in ranks]
    averages = {key: mean(rank[key] for rank in times) for key in times[0]}
    return Row(name, loss=epochs[-1]["train_loss"], **averages)


def rank_times(events: Sequence[dict[str, Any]], rank: int) -> dict[str, float]:
    """Return one rank's milliseconds per step, from the events of a Chrome trace."""
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
        raise ValueError(f"the trace contains {len(ends)} steps of rank {rank}, but 2 are needed: lower --batch-size")
    per_step = 1e-3 / len(ends)
    return {
        "step": 1e-3 * median(after - before for before, after in itertools.pairwise(ends)),
        "backward": per_step * length(spans["backward"]),
        "exchange": per_step * length(spans["exchange"]),
        "hidden": per_step * common_length(spans["exchange"], spans["backward"]),
        "lost": per_step * length(spans["synchronize"]),
    }


def length(intervals: Sequence[Interval]) -> float:
    """Return the total length of intervals."""
    return sum(end - start for start, end in intervals)


def common_length(some: Sequence[Interval], others: Sequence[Interval]) -> float:
    """Return the total overlap of two lists of intervals; within a list, intervals do not overlap."""
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a, b in itertools.product(some, others))


def show(rows: Sequence[Row], options: argparse.Namespace) -> None:
    """Print the table."""
    print(
        f"{options.model}, batch {options.batch_size}, {options.nodes} nodes at {options.rate}, {options.compression}"
    )
    print(f"{'ms per step':16}{'step':>9}{'backward':>10}{'exchange':>10}{'hidden':>16}{'lost':>9}{'loss':>12}")
    for row in rows:
        share = f"{row.hidden:.0f} ({row.hidden / row.exchange:.0%})" if row.exchange else "-"
        exchange = f"{row.exchange:.0f}" if row.exchange else "-"
        print(
            f"{row.run:16}{row.step:9.0f}{row.backward:10.0f}{exchange:>10}{share:>16}{row.lost:9.0f}{row.loss:12.6f}"
        )
    overlapped, late = rows[:2]
    print(f"overlap saves {late.step - overlapped.step:.0f} ms per step ({1 - overlapped.step / late.step:.0%})")
    if overlapped.loss != late.loss:
        print("the losses differ with and without overlap: the runs computed different results")


def exchange_late(build: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``hvs.DistributedOptimizer`` so that the exchange starts after the backward pass.

    The optimizer expects one more backward pass per step than the script makes. No gradient is then complete before
    synchronize() or step(), which exchange everything that is not yet in flight. Buckets, messages and results stay the
    same. The wrapper takes ``backward_passes_per_step`` as a keyword only.
    """

    def build_late(*args: Any, backward_passes_per_step: int = 1, **settings: Any) -> Any:
        return build(*args, backward_passes_per_step=backward_passes_per_step + 1, **settings)

    return build_late


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    hvs.DistributedOptimizer = exchange_late(hvs.DistributedOptimizer)
    runpy.run_path(sys.argv[0], run_name="__main__")
