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
- length, cosine: of the update against that of dense momentum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
from examples.schedule import learning_rate_factor
from horovod_sparse.compression import Sparse
from horovod_sparse.memories import MEMORIES
from horovod_sparse.rules import Momentum, Place, Step
from horovod_sparse.sparsifiers import TopK

Array = NDArray[Any]

WORKERS, MOMENTUM, WARMUP = 4, 0.9, 0.1
VARIANTS: dict[str, dict[str, Any]] = {
    "after": {"memory": "residual"},
    "before": {"memory": "momentum"},
    "masked": {"memory": "momentum", "masking": True},
}
COLUMNS = ("delay", "age", "held", "length", "cosine")


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
class Worker:
    """One worker's part of a training.

    Attributes:
        batches: Its samples.
        memory: Keeps what it does not send.
        ages: Of that.
    """

    batches: Iterator[list[int]]
    memory: Any
    ages: Ages


@dataclass
class Notes:
    """Sums of one part of a training.

    Attributes:
        new: Weight, and weight times age, of what was sent for the first time.
        all: The same of all that was sent.
        rows: Held, length and cosine of each step.
    """

    new: Array = field(default_factory=lambda: np.zeros(2))
    all: Array = field(default_factory=lambda: np.zeros(2))
    rows: list[tuple[float, float, float]] = field(default_factory=list)

    def numbers(self, before: bool) -> list[float]:
        """The numbers of ``COLUMNS``."""
        later = 0.0 if before else MOMENTUM / (1 - MOMENTUM)
        return [self.new[1] / self.new[0], self.all[1] / self.all[0] + later, *np.mean(self.rows, 0).tolist()]


def measure(
    task: Task, samples: Samples, variant: str, steps: int, density: float, parts: int = 3
) -> list[list[float]]:
    """Trains, and gives the numbers of ``COLUMNS`` for each part of the training."""
    torch.manual_seed(0)
    model, settings = task.build(), VARIANTS[variant]
    size = sum(p.numel() for p in model.parameters())
    before, options = settings["memory"] == "momentum", Sparse.of(density, **settings).memory
    place, momentum = Place(size, np.empty(0, np.float32)), Momentum(MOMENTUM)
    sparsifier, rule = TopK(place, TopK.Options()), MEMORIES[settings["memory"]]
    workers = [
        Worker(
            _batches(len(samples), task.batch, rank), rule(place, options), Ages(size, before, "masking" in settings)
        )
        for rank in range(WORKERS)
    ]
    dense, applied = np.zeros(size), np.zeros(size)
    warmup, notes, last_rate = round(WARMUP * steps), [Notes() for _ in range(parts)], 0.0
    for number in range(steps):
        rate = task.lr * learning_rate_factor("step", number, warmup, steps)
        scale = last_rate / rate if last_rate and rate else 1.0
        note = notes[parts * (number - warmup) // (steps - warmup)] if number >= warmup else Notes()
        mean, total, held = np.zeros(size), np.zeros(size), []
        for worker in workers:
            gradient = _gradient(model, samples, next(worker.batches))
            now = Step(rate, number=number, gradients=[(0, gradient)], momentum=momentum)
            accumulator = worker.memory.open(now, scale)
            vector = sparsifier.take(accumulator, round(density * size), now)
            worker.memory.close(accumulator, vector, vector.nothing())
            indices, values = vector.entries
            mean += gradient / WORKERS
            total[indices] += values / WORKERS
            new, all_ = worker.ages.step(gradient, indices, rate)
            note.new += new
            note.all += all_
            left = np.linalg.norm(worker.memory.state_dict()["residual"]) / (1 if before else 1 - MOMENTUM)
            held.append(left / np.linalg.norm(gradient))
        dense = MOMENTUM * dense + mean
        applied = total if before else MOMENTUM * applied + total
        lengths = np.linalg.norm(applied), np.linalg.norm(dense)
        note.rows.append((float(np.mean(held)), lengths[0] / lengths[1], float(applied @ dense / np.prod(lengths))))
        _update(model, rate * applied)
        last_rate = rate or last_rate
    return [note.numbers(before) for note in notes]


def _batches(count: int, batch: int, rank: int) -> Iterator[list[int]]:
    random = np.random.default_rng([0, rank])
    while True:
        yield random.integers(0, count, batch).tolist()


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
        p -= torch.from_numpy(step[start : start + p.numel()]).view_as(p)
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
