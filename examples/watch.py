"""Statistics of a run for people who watch it: a file for ``horovod-sparse report``, and TensorBoard."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from horovod_sparse import metrics


class Watch:
    """Writes numbers as they come; made on rank 0.

    Args:
        args: train.py's arguments; written down as they are.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        try:
            self._log = metrics.Log(args.output, **{key: plain(value) for key, value in vars(args).items()})
        except OSError as error:  # before the training rather than after it
            sys.exit(f"train.py: cannot write into --output {args.output}: {error.strerror}")
        self._board: Any = None
        if args.tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                sys.exit("train.py: --tensorboard needs TensorBoard: pip install 'horovod_sparse[watch]'")
            self._board = SummaryWriter(str(args.tensorboard))

    def write(self, step: int, statistics: Mapping[str, float], **numbers: float) -> None:
        """Writes the numbers of the steps since the last call.

        Args:
            step: Steps so far.
            statistics: Those of the exchange.
            **numbers: Those of the script.
        """
        self._log.write(step, statistics, **numbers)
        if self._board is not None:
            for name, value in (numbers | dict(statistics)).items():
                self._board.add_scalar(name, value, step)
            self._board.flush()


def plain(value: Any) -> Any:
    """An argument as JSON has it."""
    return str(value) if isinstance(value, Path) else value
