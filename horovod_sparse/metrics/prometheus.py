"""Statistics as a text file for Prometheus, read by the textfile collector of its node exporter."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from horovod_sparse.metrics.counts import is_sum

_PREFIX = "horovod_sparse"


class TextFile:
    """Writer of this rank's latest numbers to a file; each rank of a node writes a separate file.

    ::

        file = metrics.TextFile(f"/var/lib/node_exporter/horovod_sparse_{hvd.local_rank()}.prom", rank=hvd.rank())
        file.write(optimizer.statistics(), loss=loss.item())

    Sums, such as ``horovod_sparse_bytes_sent_total``, are counters, which grow from call to call. All other numbers,
    such as ``horovod_sparse_density``, are gauges. Names of numbers of a bucket begin with ``horovod_sparse_bucket_``,
    and have a label ``bucket``.

    Args:
        path: Path of the file; must end in ``.prom``, as the collector requires.
        **labels: Labels of all numbers.

    Raises:
        ValueError: The path does not end in ``.prom``.
    """

    def __init__(self, path: str | os.PathLike[str], **labels: object) -> None:
        self._path = Path(path)
        if self._path.suffix != ".prom":
            raise ValueError(f"the node exporter reads files that end in .prom, not {self._path}: rename it")
        self._labels = labels
        self._values: dict[str, float] = {}

    def write(self, statistics: Mapping[str, float], **numbers: float) -> None:
        """Write the file under a temporary name and rename it, so that the collector never sees a partial file.

        Args:
            statistics: Result of ``optimizer.statistics()``: numbers since the previous call.
            **numbers: Further numbers, written as gauges.
        """
        for key, value in statistics.items():
            self._values[key] = value + (self._values.get(key, 0.0) if _is_sum(key) else 0.0)
        self._values |= numbers
        metrics: dict[str, list[str]] = {}
        for key, value in self._values.items():
            scope, _, name = key.rpartition("/")
            bucket = {"bucket": scope.removeprefix("bucket")} if scope.startswith("bucket") else {}
            full = "_".join([_PREFIX, *(["bucket"] if bucket else []), re.sub(r"\W", "_", name, flags=re.ASCII)])
            full += "_total" if _is_sum(key) else ""
            kind = f"# TYPE {full} {'counter' if _is_sum(key) else 'gauge'}"
            metrics.setdefault(kind, []).append(f"{full}{_braces({**self._labels, **bucket})} {float(value)!r}")
        text = "\n".join(line for kind, samples in metrics.items() for line in (kind, *samples))
        temporary = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        temporary.write_text(text + "\n")
        temporary.replace(self._path)


def _is_sum(key: str) -> bool:
    scope, _, name = key.rpartition("/")
    return bool(scope) and is_sum(name)


def _braces(labels: Mapping[str, object]) -> str:
    escaped = {name: re.sub(r'([\\"])', r"\\\1", str(value)).replace("\n", r"\n") for name, value in labels.items()}
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped.items()) + "}" if escaped else ""
