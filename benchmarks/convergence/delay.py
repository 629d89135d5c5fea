"""Shows how late gradients arrive, and in which direction, where momentum comes before or after the selection.

    python -m benchmarks.convergence.delay --task fashion-mnist --steps 150

Four workers in one process train a model of the convergence benchmark by exact top-k, each with a memory and batches of
its own. Beside it, dense momentum is computed of the same gradients, at the same parameters, for each variant:

- after: the residual, and the optimizer's momentum after the exchange;
- before: momentum before the selection;
- masked: the same, and cleared where it was sent.

Printed are means over the steps of three equal parts of the training, but for the first tenth:

- delay: steps that a gradient waits until its position is sent, over all positions, weighted by magnitude;
- age: that of the gradients in an update, by the weight which momentum gives them; for dense momentum, m / (1 - m);
- held: norm of what a worker has not sent, against its gradient's, as an update: times 1 / (1 - m) where momentum is
  still to come;
- length, cosine: of the update against that of dense momentum;
- path: cosine of the sums of these updates over the whole part.

The learning rate rises over the first tenth and stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the name everyone uses

from benchmarks import command_line
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
}
COLUMNS = ("delay", "age", "held", "length", "cosine", "path")


class Ages:
    """Weights, as updates, and ages of what one worker holds, position by position.

    Args:
        size: Positions.
        before: Whether momentum comes before the selection.
        masking: Whether a position that is sent loses its momentum.
    """

    def __init__(self, size: int, before: bool, masking: bool) -> None:
        self._before, self._masking = before, masking
        # Gradients that were not sent once; and velocity and residual: weight, and weight times age.
        self._new, self._velocity, self._held = (np.zeros((2, size)) for _ in range(3))

    def step(self, gradient: Array, sent: Array, rate: float) -> tuple[Array, Array]:
        """A step.

        Args:
            gradient: The worker's, float [size].
            sent: The positions that it sends, int [k].
            rate: Learning rate.

        Returns:
            Weight, and weight times age, of what is sent for the first time; and of all that is sent.
        """
        for one in (self._new, self._velocity, self._held):
            one[1] += one[0]
        magnitudes = np.abs(gradient)
        self._new[0] += rate * magnitudes
        self._velocity *= MOMENTUM
        self._velocity[0] += magnitudes
        if self._before:
            self._held += rate * self._velocity
        else:
            self._held[0] += rate * magnitudes
        new, all_ = self._new[:, sent].sum(1), self._held[:, sent].sum(1)
        for one in (self._new, self._held, *([self._velocity] if self._masking else [])):
            one[:, sent] = 0
        return new, all_


@dataclass
class Notes:
    """Sums of one part of a training.

    Attributes:
        new: Weight, and weight times age, of what was sent for the first time.
        all: The same of all that was sent.
        held: Of each worker and step.
        updates: Length and cosine of each step's update.
        paths: Sums of the updates, and of those of dense momentum.
    """

    new: Array = field(default_factory=lambda: np.zeros(2))
    all: Array = field(default_factory=lambda: np.zeros(2))
    held: list[float] = field(default_factory=list)
    updates: list[tuple[float, float]] = field(default_factory=list)
    paths: Any = 0.0

    def add(self, applied: Array, dense: Array) -> None:
        """Adds a step's update, and that of dense momentum."""
        self.updates.append((float(np.linalg.norm(applied) / np.linalg.norm(dense)), _cosine(applied, dense)))
        self.paths = self.paths + np.stack([applied, dense])

    def numbers(self, before: bool) -> list[float]:
        """The numbers of ``COLUMNS``."""
        later = 0.0 if before else MOMENTUM / (1 - MOMENTUM)
        ages = [self.new[1] / self.new[0], self.all[1] / self.all[0] + later]
        return [*ages, float(np.mean(self.held)), *np.mean(self.updates, 0).tolist(), _cosine(*self.paths)]


class Worker:
    """One worker of a training.

    Args:
        context: Its bucket.
        variant: Key of ``VARIANTS``.
        count: Samples to draw from.
        batch: Samples of a step.
    """

    def __init__(self, context: BucketContext, variant: str, count: int, batch: int) -> None:
        settings = VARIANTS[variant]
        self._before = settings["memory"] == "momentum"
        options = Sparse.of(1.0, **settings).memory
        self._memory: Any = MEMORIES[settings["memory"]](context, options)
        self._sparsifier = TopK(context, TopK.Options())
        self._ages = Ages(context.size, self._before, masking="masking" in settings)
        self._random, self._count, self._batch = np.random.default_rng([0, context.rank]), count, batch

    def draw(self) -> list[int]:
        """Numbers of the next batch's samples."""
        batch: list[int] = self._random.integers(0, self._count, self._batch).tolist()
        return batch

    def send(self, gradient: Array, k: int, step: Step, scale: float, notes: Notes) -> SparseVector:
        """Gives what it sends of a gradient, and notes how late that is and what it holds."""
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
    """Trains, and gives the numbers of ``COLUMNS`` for each part of the training."""
    torch.manual_seed(0)
    model, before = task.build(), VARIANTS[variant]["memory"] == "momentum"
    size = sum(p.numel() for p in model.parameters())
    places = [BucketContext(size, np.empty(0, np.float32), rank=rank, ranks=WORKERS) for rank in range(WORKERS)]
    workers = [Worker(context, variant, len(samples), task.batch) for context in places]
    dense, applied, last_rate = np.zeros(size), np.zeros(size), 0.0
    warmup, notes = max(1, round(WARMUP * steps)), [Notes() for _ in range(_PARTS)]
    for number in range(steps):
        rate = task.lr * min(1.0, (number + 1) / warmup)
        note = notes[_PARTS * (number - warmup) // (steps - warmup)] if number >= warmup else Notes()
        dense *= MOMENTUM
        applied *= 0.0 if before else MOMENTUM
        for worker in workers:
            gradient = _gradient(model, samples, worker.draw())
            step = Step(rate, number=number, gradients=[(0, gradient)], momentum=Momentum(MOMENTUM))
            indices, values = worker.send(gradient, round(density * size), step, last_rate / rate, note).entries
            dense += gradient / WORKERS
            applied[indices] += values / WORKERS
        note.add(applied, dense)
        _update(model, rate * applied)
        last_rate = rate
    return [note.numbers(before) for note in notes]


def _cosine(one: Array, other: Array) -> float:
    return float(one @ other / (np.linalg.norm(one) * np.linalg.norm(other)))


def _gradient(model: nn.Module, samples: Samples, batch: list[int]) -> Array:
    inputs, labels = samples[batch]
    model.zero_grad()
    F.cross_entropy(model(inputs).flatten(0, -2), labels.flatten()).backward()  # type: ignore[no-untyped-call]
    gradient: Array = torch.cat([p.grad.view(-1) for p in model.parameters() if p.grad is not None]).numpy()
    return gradient


@torch.no_grad()
def _update(model: nn.Module, step: Array) -> None:
    start = 0
    for p in model.parameters():
        p.sub_(torch.from_numpy(step[start : start + p.numel()]).view_as(p))
        start += p.numel()


def main(arguments: Sequence[str] | None = None, show: Callable[[str], None] = print) -> None:
    """The command line."""
    parser = command_line("convergence.delay", __doc__)
    parser.add_argument("--task", choices=TASKS, default="fashion-mnist")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--density", type=float, default=0.01, help="that is sent")
    parser.add_argument("--fashion-mnist", type=Path, default=Path("/usr/share/datasets/fashion-mnist"), metavar="DIR")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    task = TASKS[options.task]
    samples, _ = task.load(options.fashion_mnist)
    show(f"| {options.task}, {options.density:.3g} | {' | '.join(COLUMNS)} |")
    show(f"| --- |{' ---: |' * len(COLUMNS)}")
    for variant in VARIANTS:
        rows = measure(task, samples, variant, options.steps, options.density)
        cells = [" / ".join(f"{number:.3g}" for number in numbers) for numbers in zip(*rows, strict=True)]
        show(f"| {variant} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
