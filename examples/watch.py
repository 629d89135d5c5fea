"""Statistics for monitoring a run with ``horovod-sparse report`` or TensorBoard."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from horovod_sparse import metrics


class Watch:
    """Writer of statistics during a run; created on rank 0 only.

    Args:
        args: Arguments of train.py; written to the log.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        try:
            self._log = metrics.Log(args.output, **{key: plain(value) for key, value in vars(args).items()})
        except OSError as error:  # fail before training starts, not after it ends
            sys.exit(f"train.py: cannot write into --output {args.output}: {error.strerror}")
        self._board: Any = None
        if args.tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                sys.exit("train.py: --tensorboard needs TensorBoard: pip install 'horovod_sparse[watch]'")
            self._board = SummaryWriter(str(args.tensorboard))

    def write(self, step: int, statistics: Mapping[str, float], **numbers: float) -> None:
        """Write the statistics of the steps since the previous call.

        Args:
            step: Number of steps so far.
            statistics: Statistics of the exchange.
            **numbers: Further values from the script, such as the loss.
        """
        self._log.write(step, statistics, **numbers)
        if self._board is not None:
            for name, value in (numbers | dict(statistics)).items():
                self._board.add_scalar(name, value, step)
            self._board.flush()


def plain(value: Any) -> Any:
    """Return an argument as a value that JSON can represent."""
    return str(value) if isinstance(value, Path) else value
