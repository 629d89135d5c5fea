"""The configurations that the convergence benchmark trains; a new one takes one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

DENSE = "dense"
# Names of the tasks; tasks.py has the rest, and takes torch.
TASKS = ("digits", "lstm", "transformer")


@dataclass(frozen=True)
class Run:
    """One configuration.

    Attributes:
        name: Its name, for the command line and the report.
        group: Runs of one group stand together in the report.
        spec: As ``hvs.parse`` reads it; ``none`` is Horovod's own exchange. Buckets are the task's, and no parameter is
            too small to be compressed.
        momentum: Of SGD; 0 where the memory has the momentum.
        baseline: Name of the dense run that it is compared with: that of the same momentum, be it the memory's.
        quick: Whether it is one of the few of --quick.
        tasks: Names of the tasks that it is trained on.
    """

    name: str
    group: str
    spec: str
    momentum: float = 0.9
    baseline: str = DENSE
    quick: bool = False
    tasks: Sequence[str] = TASKS


# An entry of a random selection waits for some ten steps, then its whole sum is sent. Momentum would go on in that
# direction for ten steps more, which diverges at learning rates that suit all others.
_PLAIN: dict[str, Any] = {"momentum": 0.0, "baseline": "dense-plain"}

_ALL = (
    Run(DENSE, "dense", "none", quick=True),
    Run("topka", "top-k", "topka:density=0.01", quick=True),
    Run("topka-nofeedback", "top-k", "topka:density=0.01,memory=none", quick=True),
    Run("topka-bfloat16", "top-k", "topka:density=0.01,wire=bfloat16"),
    Run("gtopk", "top-k", "gtopk:density=0.01", quick=True),
    Run("oktopk", "top-k", "oktopk:density=0.01", quick=True),
    Run("gaussiank", "thresholds", "gaussiank:density=0.01", quick=True),
    Run("redsync", "thresholds", "redsync:density=0.01"),
    Run("dgc", "thresholds", "dgc:density=0.01", momentum=0.0, quick=True),
    Run("dgc-warmup", "thresholds", "dgc:density=0.01,schedule=warmup,warmup=4,steps_per_epoch=20", momentum=0.0),
    Run("stable-b1", "blocks", "stable:density=0.1,block=1,refresh=20"),
    Run("stable-b16", "blocks", "stable:density=0.1,block=16,refresh=20", quick=True),
    Run("stable-b64", "blocks", "stable:density=0.1,block=64,refresh=20"),
    Run("stable-b512", "blocks", "stable:density=0.1,block=512,refresh=20"),
    Run("stable-b16-r5", "blocks", "stable:density=0.1,block=16,refresh=5"),
    Run("stable-b16-r100", "blocks", "stable:density=0.1,block=16,refresh=100"),
    Run("gravac", "adaptive", "gravac:cf_min=10,cf_max=1000,cf_step=3,window=20,eps=0.3", quick=True),
    Run("fixed-10", "adaptive", "topka:density=0.1"),
    Run("fixed-1000", "adaptive", "topka:density=0.001"),
    Run("accordion", "adaptive", "accordion:density=0.001,high_density=0.1,interval=1,steps_per_epoch=20"),
    Run("dense-plain", "random", "none", quick=True, **_PLAIN),
    Run("randomk", "random", "randomk:density=0.1", **_PLAIN),
    Run("randomk-nofeedback", "random", "randomk:density=0.1,memory=none", **_PLAIN),
    Run("randomblock", "random", "randomblock:density=0.1", quick=True, **_PLAIN),
    Run("randomblock-nofeedback", "random", "randomblock:density=0.1,memory=none", quick=True, **_PLAIN),
    Run("conef-60", "random", "conef:density=0.1,saving=0.6", quick=True, **_PLAIN),
    Run("conef-90", "random", "conef:density=0.1,saving=0.9", quick=True, **_PLAIN),
    Run("conef-4bit", "random", "conef:density=0.1,compressor=quantize,bits=4", **_PLAIN),
)

# How small a sketch may be, for each part of the error that is not fed back.
PARTIAL = "partial"  # the group; it has a table of its own
BETAS, SIZES = (0.0, 0.1, 0.5, 0.9), (0.4, 0.1, 0.03, 0.01)


def _partial(beta: float, size: float) -> Run:
    memory = f"partial,beta={beta:g}" if beta else "conef"
    spec = f"conef:density=0.1,saving={1 - size:g},memory={memory}"
    return Run(partial_name(beta, size), PARTIAL, spec, tasks=("digits",), **_PLAIN)


def partial_name(beta: float, size: float) -> str:
    """Name of the run with partial feedback and a sketch of so much of a residual's size."""
    return f"partial-{beta:g}-{size:g}"


RUNS = {run.name: run for run in (*_ALL, *(_partial(beta, size) for beta in BETAS for size in SIZES))}


@dataclass(frozen=True)
class Job:
    """One training: a configuration on a task.

    Attributes:
        task: Name of the task.
        run: The configuration.
        seed: Of the parameters and of the order of the data, the same for all configurations.
        steps: Optimizer steps.
    """

    task: str
    run: Run
    seed: int
    steps: int

    def settings(self) -> dict[str, Any]:
        """Settings of this training, as its record holds them."""
        run = self.run
        return {
            "task": self.task,
            "run": run.name,
            "seed": self.seed,
            "group": run.group,
            "spec": run.spec,
            "momentum": run.momentum,
            "baseline": run.baseline,
            "steps": self.steps,
        }

    def made(self, record: Mapping[str, Any]) -> bool:
        """Tells whether a record is of just this training."""
        return self.settings().items() <= record.items()
