"""Runs a training script with the exchange after the backward pass instead of beside it.

    python -m benchmarks.late_exchange examples/train.py --compression topka:density=0.01

The optimizer is told of one backward pass a step more than the script makes. No gradient is due then before
synchronize() or step(), which exchange whatever is not yet on its way. Buckets, messages and results stay the same.
"""

from __future__ import annotations

import functools
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod_sparse as hvs


def exchange_late(build: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``hvs.DistributedOptimizer``; takes ``backward_passes_per_step`` as a keyword only."""

    @functools.wraps(build)
    def build_late(*args: Any, backward_passes_per_step: int = 1, **settings: Any) -> Any:
        return build(*args, backward_passes_per_step=backward_passes_per_step + 1, **settings)

    return build_late


def main() -> None:
    """Becomes the script that the command line names."""
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(script).resolve().parent))
    hvs.DistributedOptimizer = exchange_late(hvs.DistributedOptimizer)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
