"""Statistics as a text file for Prometheus, read by the textfile collector of its node exporter."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from horovod_sparse.metrics.counts import is_sum

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.registry import Collector


class TextFile:
    """Writer of this rank's latest numbers to a file; each rank of a node writes a separate file.

    Needs ``prometheus_client``, which is imported by the first call of ``write`` only.

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
        RuntimeError: ``prometheus_client`` is not installed.
    """

    def __init__(self, path: str | os.PathLike[str], **labels: object) -> None:
        self._path = Path(path)
        if self._path.suffix != ".prom":
            raise ValueError(f"the node exporter reads files that end in .prom, not {self._path}: rename it")
        if find_spec("prometheus_client") is None:
            raise RuntimeError(f"{self._path} requires prometheus_client: pip install 'horovod_sparse[watch]'")
        self._labels = {name: str(value) for name, value in labels.items()}
        self._values: dict[str, float] = {}

    def write(self, statistics: Mapping[str, float], **numbers: float) -> None:
        """Write the file under a temporary name and rename it, so that the collector never sees a partial file.

        Args:
            statistics: Result of ``optimizer.statistics()``: numbers since the previous call.
            **numbers: Further numbers, written as gauges.
        """
        from prometheus_client import write_to_textfile

        for key, value in statistics.items():
            self._values[key] = value + (self._values.get(key, 0.0) if _is_sum(key) else 0.0)
        self._values |= numbers
        write_to_textfile(str(self._path), cast("Collector", self))

    def collect(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
        """Return all numbers as metrics of ``prometheus_client``, which calls this method."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families: dict[Any, CounterMetricFamily | GaugeMetricFamily] = {}
        for key, value in self._values.items():
            scope, _, name = key.rpartition("/")
            bucket = {"bucket": scope.removeprefix("bucket")} if scope.startswith("bucket") else {}
            full = "_".join(["horovod_sparse", *bucket, re.sub(r"\W", "_", name, flags=re.ASCII)])
            labels = {**self._labels, **bucket}
            kind = CounterMetricFamily if _is_sum(key) else GaugeMetricFamily
            family = kind(full, "See docs/watch.md of horovod_sparse.", labels=list(labels))
            families.setdefault((kind, full), family).add_metric(list(labels.values()), value)
        return families.values()


def _is_sum(key: str) -> bool:
    scope, _, name = key.rpartition("/")
    return bool(scope) and is_sum(name)
