"""The text file of the node exporter: counters, gauges, and Prometheus' format."""

from __future__ import annotations

import re

import pytest

from horovod_sparse import metrics

SAMPLE = re.compile(r'([a-z_][a-z0-9_]*)(\{(?:[a-z_]+="(?:[^"\\\n]|\\.)*",?)*\})? (-?[0-9.e+-]+|nan|-?inf)')


def samples(path):
    """Return values by name and labels; assert that every line has the exposition format, and follows its type."""
    found, kinds = {}, {}
    for line in path.read_text().splitlines():
        if line.startswith("#"):
            _, word, name, kind = line.split(" ")
            assert word == "TYPE"
            assert name not in kinds, "lines of one name must stand together"
            kinds[name] = kind
        else:
            name, labels, value = SAMPLE.fullmatch(line).groups()
            assert name == list(kinds)[-1]
            assert (kinds[name] == "counter") == name.endswith("_total")
            found[name + (labels or "")] = float(value)
    return found


def test_sums_accumulate_and_ratios_are_replaced(tmp_path):
    path = tmp_path / "a.prom"
    file = metrics.TextFile(path, rank=3)
    file.write({"total/bytes_sent": 5, "total/density": 0.5, "bucket0/bytes_sent": 5, "bucket1/density": 0.1}, loss=2)
    file.write({"total/bytes_sent": 7, "total/density": 0.25, "bucket0/bytes_sent": 1}, loss=1)
    assert samples(path) == {
        'horovod_sparse_bytes_sent_total{rank="3"}': 12,
        'horovod_sparse_density{rank="3"}': 0.25,
        'horovod_sparse_bucket_bytes_sent_total{rank="3",bucket="0"}': 6,
        'horovod_sparse_bucket_density{rank="3",bucket="1"}': 0.1,
        'horovod_sparse_loss{rank="3"}': 1,
    }
    assert [one.name for one in tmp_path.iterdir()] == ["a.prom"]


def test_labels_and_names_are_escaped_and_without_labels_there_are_no_braces(tmp_path):
    file = metrics.TextFile(tmp_path / "a.prom", job='a "b"\\\n')
    file.write({"total/my-own": 1}, **{"test loss": float("nan")})
    assert list(samples(tmp_path / "a.prom")) == [
        r'horovod_sparse_my_own_total{job="a \"b\"\\\n"}',
        r'horovod_sparse_test_loss{job="a \"b\"\\\n"}',
    ]
    metrics.TextFile(tmp_path / "a.prom").write({"total/steps": 1})
    assert list(samples(tmp_path / "a.prom")) == ["horovod_sparse_steps_total"]


def test_another_suffix_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"end in \.prom"):
        metrics.TextFile(tmp_path / "a.txt")
