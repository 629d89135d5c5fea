"""Decisions of the schedule ``measured``: their file, and their repetition in another training."""

from __future__ import annotations

import json
import logging
import zlib
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from horovod_sparse.rules import BucketContext
from horovod_sparse.rules.states import checked_integer

_LOG = logging.getLogger("horovod_sparse")


class Candidate(NamedTuple):
    """Content of the messages of a step.

    Attributes:
        density: Fraction of the entries.
        wire: Format to which values are rounded at density 1; None: not rounded there.
    """

    density: float
    wire: str | None = None

    def __str__(self) -> str:
        """Return the density, or "dense" and the format."""
        return f"{self.density:g}" if self.density < 1 else "_".join(["dense", *([self.wire] if self.wire else [])])


class Replay:
    """Decisions of an earlier training, from the file that it recorded.

    Args:
        path: The file.
        candidates: What the schedule may use.

    Raises:
        ValueError: The file cannot be read, or does not fit the candidates.
    """

    def __init__(self, path: str, candidates: list[Candidate]) -> None:
        self._path, self._checked = path, False
        try:
            content = Path(path).read_text()
            entries = [json.loads(line) for line in content.splitlines()]
            self._steps = [checked_integer(entry["step"], "step") for entry in entries]
            self._used = [candidates.index(Candidate(entry["density"], entry["wire"])) for entry in entries]
            if not entries or self._steps[0] != 0 or self._steps != sorted(set(self._steps)):
                raise ValueError("the steps must start at 0 and ascend")
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"decisions={path!r} cannot be repeated: pass a file that a training with the same densities and "
                f"rounded wrote with record=..., readable on every rank: {error!r}"
            ) from error
        self._digest = float(zlib.crc32(content.encode()) % (1 << 20))

    def at(self, step: int, context: BucketContext) -> int:
        """Return the candidate of a step. A collective call the first time: the ranks compare their files."""
        if not self._checked:
            mean, mean_square = context.mean([self._digest, self._digest**2])
            if mean_square != mean**2:
                raise ValueError(
                    f"rank {context.rank}: the ranks have different files decisions={self._path!r}: pass every rank "
                    "the file that rank 0 has recorded"
                )
            self._checked = True
        return self._used[bisect_right(self._steps, step) - 1]


def write(path: Path, history: Sequence[tuple[int, Candidate]]) -> None:
    """Write the decisions so far into a file, which is never incomplete; a failure is reported once per decision."""
    lines = [json.dumps({"step": step, "density": one.density, "wire": one.wire}) for step, one in history]
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        temporary.write_text("\n".join(lines) + "\n")
        temporary.replace(path)
    except OSError as error:
        _LOG.warning("decisions cannot be recorded in %s: %s", path, error)
