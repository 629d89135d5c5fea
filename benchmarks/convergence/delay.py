"""Delay and direction of the updates when momentum comes before or after the selection.

    python -m benchmarks.convergence.delay --task fashion-mnist --steps 150

Four workers in one process, each with separate memory and batches, train a model of the convergence benchmark with
exact top-k. Dense momentum is computed from the same gradients at the same parameters for comparison. The variants are

- after: a residual, and the optimizer's momentum after the exchange;
- before: momentum before the selection;
- masked: momentum before the selection, cleared at the positions that were sent;
- fresh=0.1, 0.4 and 1: momentum before the selection, with this share of each gradient bypassing the velocity; 0.1 is
  Nesterov's form.

The table shows means over the steps of three equal parts of the run, without the first tenth:

- delay: steps until a gradient's position is sent, over all positions, weighted by magnitude;
- age: age of the gradients in an update, with the weights that momentum gives them; dense momentum: m / (1 - m);
- held: norm of what a worker has not sent, relative to its gradient's norm; multiplied by 1 / (1 - m) where momentum
  comes later;
- length, cosine: length of the update relative to that of dense momentum, and cosine between them;
- path: cosine of the sums of these updates over the part.

The learning rate rises over the first tenth and is constant afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the name everyone uses
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from benchmarks import command_line, markdown
from benchmarks.convergence.tasks import TASKS, Samples, Task
from horovod_sparse.config import Sparse
from horovod_sparse.memories import MEMORIES
from horovod_sparse.rules import BucketContext, Momentum, Step
from horovod_sparse.sparsifiers import TopK
from horovod_sparse.vector import SparseVector

Array = NDArray[Any]

WORKERS, MOMENTUM, WARMUP = 4, 0.9, 0.1
_PARTS = 3
VARIANTS: dict[str, dict[str, Any]] = {
    "after": {"memory": "residual"},
    "before": {"memory": "momentum"},
    "masked": {"memory": "momentum", "masking": True},
    **{f"fresh={fresh:g}": {"memory": "momentum", "fresh": fresh} for fresh in (0.1, 0.4, 1)},
}
COLUMNS = ("delay", "age", "held", "length", "cosine", "path")


class Ages:
    """Weights and ages of the gradients in one worker's memory, by position; weights are in units of updates.

    Args:
        size: Number of positions.
        before: Whether momentum comes before the selection.
        masking: Whether sending a position clears its momentum.
        fresh: Share of a gradient that bypasses the velocity.
    """

    def __init__(self, size: int, before: bool, masking: bool, fresh: float) -> None:
        self._before, self._masking, self._fresh = before, masking, fresh
        # Gradients that were never sent, velocity, and residual. Rows: weight, and weight times age.
        self._new, self._velocity, self._held = (np.zeros((2, size)) for _ in range(3))

    def step(self, gradient: Array, sent: Array, rate: float) -> tuple[Array, Array]:
        """Advance by one step.

        Args:
            gradient: Gradient of the worker, float [size].
            sent: Positions that the worker sends, int [k].
            rate: Learning rate.

        Returns:
            Weight, and weight times age, of the gradients sent for the first time, and the same of all that is sent.
        """
        for array in (self._new, self._velocity, self._held):
            array[1] += array[0]
        magnitudes = np.abs(gradient)
        self._new[0] += rate * magnitudes
        self._velocity *= MOMENTUM
        self._velocity[0] += magnitudes
        if self._before:
            self._held += rate * (1 - self._fresh) * self._velocity
            self._held[0] += rate * self._fresh / (1 - MOMENTUM) * magnitudes
        else:
            self._held[0] += rate * magnitudes
        new, all_ = self._new[:, sent].sum(1), self._held[:, sent].sum(1)
        for array in (self._new, self._held, *([self._velocity] if self._masking else [])):
            array[:, sent] = 0
        return new, all_


@dataclass
class Notes:
    """Sums over one part of a training run."""

    # Weight, and weight times age: of the gradients sent for the first time, and of all that were sent.
    new: Array = field(default_factory=lambda: np.zeros(2))
    all: Array = field(default_factory=lambda: np.zeros(2))
    held: list[float] = field(default_factory=list)  # values of the column, one per worker and step
    updates: list[tuple[float, float]] = field(default_factory=list)  # length and cosine of each step's update
    paths: Any = 0.0  # sum of the updates, and sum of those of dense momentum

    def add(self, applied: Array, dense: Array) -> None:
        """Add a step's update and that of dense momentum."""
        self.updates.append((float(np.linalg.norm(applied) / np.linalg.norm(dense)), _cosine(applied, dense)))
        self.paths = self.paths + np.stack([applied, dense])

    def numbers(self, before: bool) -> list[float]:
        """Return the values of ``COLUMNS``."""
        later = 0.0 if before else MOMENTUM / (1 - MOMENTUM)
        ages = [self.new[1] / self.new[0], self.all[1] / self.all[0] + later]
        return [*ages, float(np.mean(self.held)), *np.mean(self.updates, 0).tolist(), _cosine(*self.paths)]


class Worker:
    """One worker of a training run, which draws batches from ``count`` samples."""

    def __init__(self, context: BucketContext, variant: str, count: int, batch: int) -> None:
        settings = VARIANTS[variant]
        self._before = settings["memory"] == "momentum"
        options = Sparse.of(1.0, **settings).memory
        self._memory: Any = MEMORIES[settings["memory"]](context, options)
        self._sparsifier = TopK(context, TopK.Options())
        self._ages = Ages(context.size, self._before, "masking" in settings, settings.get("fresh", 0.0))
        self._random, self._count, self._batch = np.random.default_rng([0, context.rank]), count, batch

    def draw(self) -> list[int]:
        """Return the sample numbers of the next batch."""
        batch: list[int] = self._random.integers(0, self._count, self._batch).tolist()
        return batch

    def send(self, gradient: Array, k: int, step: Step, scale: float, notes: Notes) -> SparseVector:
        """Return the entries sent for a gradient, and record their delay and the norm of what is not sent."""
        accumulator = self._memory.open(step, scale)
        vector = self._sparsifier.take(accumulator, k, step)
        self._memory.close(accumulator, vector, vector.nothing())
        new, all_ = self._ages.step(gradient, vector.entries[0], step.learning_rate)
        notes.new += new
        notes.all += all_
        left = np.linalg.norm(self._memory.state_dict()["residual"]) / (1 if self._before else 1 - MOMENTUM)
        notes.held.append(float(left / np.linalg.norm(gradient)))
        return vector


def measure(task: Task, samples: Samples, variant: str, steps: int, density: float) -> list[list[float]]:
    """Train, and return the values of ``COLUMNS`` for each part of the run."""
    torch.manual_seed(0)
    model, before = task.build(), VARIANTS[variant]["memory"] == "momentum"
    size = sum(p.numel() for p in model.parameters())
    contexts = [BucketContext(size, np.empty(0, np.float32), rank=rank, ranks=WORKERS) for rank in range(WORKERS)]
    workers = [Worker(context, variant, len(samples), task.batch) for context in contexts]
    dense, applied, last_rate = np.zeros(size), np.zeros(size), 0.0
    warmup, notes = max(1, round(WARMUP * steps)), [Notes() for _ in range(_PARTS)]
    for number in range(steps):
        rate = task.lr * min(1.0, (number + 1) / warmup)
        note = notes[_PARTS * (number - warmup) // (steps - warmup)] if number >= warmup else Notes()
        dense *= MOMENTUM
        applied *= 0.0 if before else MOMENTUM
        for worker in workers:
            gradient = gradient_of(model, samples, worker.draw())
            step = Step(rate, number=number, gradients=[(0, gradient)], momentum=Momentum(MOMENTUM))
            indices, values = worker.send(gradient, round(density * size), step, last_rate / rate, note).entries
            dense += gradient / WORKERS
            applied[indices] += values / WORKERS
        note.add(applied, dense)
        move(model, -rate * applied)
        last_rate = rate
    return [note.numbers(before) for note in notes]


def _cosine(a: Array, b: Array) -> float:
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def gradient_of(model: nn.Module, samples: Samples, batch: list[int]) -> Array:
    """Return the gradient of a batch's mean loss, float32 [parameters]."""
    inputs, labels = samples[batch]
    model.zero_grad()
    F.cross_entropy(model(inputs).flatten(0, -2), labels.flatten()).backward()  # type: ignore[no-untyped-call]
    gradient: Array = torch.cat([p.grad.view(-1) for p in model.parameters() if p.grad is not None]).numpy()
    return gradient


@torch.no_grad()
def move(model: nn.Module, update: Array) -> None:
    """Add an update, float [parameters], to a model's parameters."""
    moved = parameters_to_vector(model.parameters()) + torch.from_numpy(update)
    vector_to_parameters(moved.float(), model.parameters())


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every variant and print the table."""
    parser = command_line("convergence.delay", __doc__)
    parser.add_argument("--task", choices=TASKS, default="fashion-mnist", help="task of benchmarks.convergence")
    parser.add_argument("--steps", type=int, default=150, help="steps per run")
    parser.add_argument("--density", type=float, default=0.01, help="density of the selection")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="rows of the table")
    parser.add_argument("--fashion-mnist", type=Path, default=Path("/usr/share/datasets/fashion-mnist"), metavar="DIR")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    task = TASKS[options.task]
    samples, _ = task.load(options.fashion_mnist)
    rows = []
    for variant in options.variants:
        parts = measure(task, samples, variant, options.steps, options.density)
        cells = (" / ".join(f"{number:.3g}" for number in numbers) for numbers in zip(*parts, strict=True))
        rows.append([variant, *cells])
    print(markdown([f"{options.task}, {options.density:.3g}", *COLUMNS], rows))


if __name__ == "__main__":
    main()
