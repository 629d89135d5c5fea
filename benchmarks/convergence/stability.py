"""Stability of the largest blocks of a gradient, compared with single positions, in real training.

    python -m benchmarks.convergence.stability --task lstm --output docs/images/stability.png

One worker trains a model of the convergence benchmark with exact top-k and error feedback. In every step, the best
blocks by squared norm are recorded, both of the gradient and of residual + gradient, the input of the selection. The
figure shows the share of them that are again among the best after a number of steps: the part of a reused mask that is
still valid.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks import command_line
from benchmarks.convergence.delay import gradient_of, move
from benchmarks.convergence.runs import SMALL
from benchmarks.convergence.tasks import TASKS
from horovod_sparse.cli.image import write_png
from horovod_sparse.memories import Residual
from horovod_sparse.rules import BucketContext, Step
from horovod_sparse.sparsifiers import TopK

Array = NDArray[Any]

BLOCKS = (1, 4, 16, 64, 256, 1024)
LAGS = (1, 2, 5, 10, 20, 50, 100)
DENSITY = 0.1  # share of the blocks that are recorded
_WARMUP = 20  # steps that are not recorded


class Recorder:
    """Recorder of the best blocks of each step's vector of ``size`` elements."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._best: dict[int, list[Array]] = {block: [] for block in BLOCKS}

    def note(self, vector: Array) -> None:
        """Record a step's vector, float32 [size]."""
        for block, steps in self._best.items():
            starts = np.arange(0, self._size, block)
            scores = np.add.reduceat(np.square(vector, dtype=np.float64), starts)
            count = max(1, round(DENSITY * scores.size))
            chosen = np.zeros(scores.size, bool)
            chosen[np.argpartition(scores, -count)[-count:]] = True
            steps.append(chosen)

    def overlap(self, block: int, lag: int) -> float:
        """Return the mean share of the best blocks that are again among the best ``lag`` steps later."""
        steps = np.array(self._best[block])
        return float((steps[lag:] & steps[:-lag]).sum() / steps[:-lag].sum())


def record(task_name: str, steps: int, density: float) -> tuple[Recorder, Recorder]:
    """Train, and record gradients and accumulated gradients."""
    task = TASKS[task_name]
    torch.manual_seed(0)
    model, (samples, _) = task.build(), task.load(Path())
    size = sum(p.numel() for p in model.parameters())
    context = BucketContext(size, np.empty(0, np.float32))
    memory, sparsifier = Residual(context, Residual.Options()), TopK(context, TopK.Options())
    recorders = Recorder(size), Recorder(size)
    order = np.random.default_rng(0).permutation(len(samples))
    for step in range(steps):
        batch = np.take(order, range(step * task.batch, (step + 1) * task.batch), mode="wrap").tolist()
        gradient = gradient_of(model, samples, batch)
        now = Step(gradients=[(0, gradient)])
        accumulator = memory.open(now, 1.0)
        if step >= _WARMUP:
            recorders[0].note(gradient)
            recorders[1].note(accumulator.settle())
        vector = sparsifier.take(accumulator, round(density * size), now)
        memory.close(accumulator, vector, vector.nothing())
        update = np.zeros(size, np.float32)
        indices, values = vector.entries
        update[indices] = -task.lr * values
        move(model, update)
    return recorders


def plot(task_name: str, recorders: tuple[Recorder, Recorder], path: Path) -> None:
    """Draw the overlap over the lag, one line per block size."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.ticker import FormatStrFormatter, PercentFormatter

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    both = figure.subplots(1, 2, sharey=True)
    titles = ("the gradient", "residual + gradient")
    for axes, recorder, title in zip(both, recorders, titles, strict=True):
        for number, block in enumerate(BLOCKS):
            label = f"blocks of {block}" if block > 1 else "single positions"
            shares = [recorder.overlap(block, lag) for lag in LAGS]
            axes.plot(LAGS, shares, "o-", color=colormaps["viridis"](number / len(BLOCKS)), label=label)
        axes.axhline(DENSITY, color="gray", linestyle=":", label="by chance")
        axes.set(title=f"Largest tenth of {title} ({task_name})", xlabel="steps later", xscale="log", ylim=(0, 1))
        axes.xaxis.set_major_formatter(FormatStrFormatter("%d"))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.grid(alpha=0.3)
    both[0].set_ylabel("still in the largest tenth")
    figure.legend(*both[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    write_png(figure, path)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, print the overlaps and draw the figure."""
    parser = command_line("convergence.stability", __doc__)
    parser.add_argument("--task", choices=SMALL, default="lstm", help="task of benchmarks.convergence")
    parser.add_argument("--steps", type=int, default=320, help="steps to train")
    parser.add_argument("--density", type=float, default=0.01, help="density of the selection")
    parser.add_argument("--output", type=Path, default=Path("runs/stability.png"), help="file of the figure")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    recorders = record(options.task, options.steps, options.density)
    print(f"{'block':>8}" + "".join(f"{f'+{lag}':>8}" for lag in LAGS) + "   (gradient; residual + gradient)")
    for block in BLOCKS:
        for recorder in recorders:
            print(f"{block:8}" + "".join(f"{recorder.overlap(block, lag):8.0%}" for lag in LAGS))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    plot(options.task, recorders, options.output)


if __name__ == "__main__":
    main()
