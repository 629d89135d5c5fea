"""The text file of the node exporter: counters, gauges, names and labels that Prometheus reads."""

from __future__ import annotations

import sys

import pytest
from prometheus_client.parser import text_string_to_metric_families

from horovod_sparse import metrics


def samples(path):
    """Return values by type, name and labels."""
    return {
        (family.type, sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(path.read_text())
        for sample in family.samples
    }


def test_sums_accumulate_and_ratios_are_replaced(tmp_path):
    path = tmp_path / "a.prom"
    file = metrics.TextFile(path, rank=3)
    file.write({"total/bytes_sent": 5, "total/density": 0.5, "bucket0/bytes_sent": 5, "bucket1/density": 0.1}, loss=2)
    file.write({"total/bytes_sent": 7, "total/density": 0.25, "bucket0/bytes_sent": 1}, loss=1)
    assert samples(path) == {
        ("counter", "horovod_sparse_bytes_sent_total", ("rank", "3")): 12,
        ("gauge", "horovod_sparse_density", ("rank", "3")): 0.25,
        ("counter", "horovod_sparse_bucket_bytes_sent_total", ("bucket", "0"), ("rank", "3")): 6,
        ("gauge", "horovod_sparse_bucket_density", ("bucket", "1"), ("rank", "3")): 0.1,
        ("gauge", "horovod_sparse_loss", ("rank", "3")): 1,
    }
    assert [one.name for one in tmp_path.iterdir()] == ["a.prom"]


def test_any_label_and_name_can_be_read(tmp_path):
    path, job = tmp_path / "a.prom", 'a "b"\\\n'
    metrics.TextFile(path, job=job).write({"total/my-own": 1}, **{"test loss": float("inf")})
    assert samples(path) == {
        ("counter", "horovod_sparse_my_own_total", ("job", job)): 1,
        ("gauge", "horovod_sparse_test_loss", ("job", job)): float("inf"),
    }


def test_another_suffix_and_a_missing_package_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"end in \.prom"):
        metrics.TextFile(tmp_path / "a.txt")
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(RuntimeError, match=r"pip install 'horovod_sparse\[watch\]'"):
        metrics.TextFile(tmp_path / "a.prom")
