"""The file of a run's statistics, also after a kill or a resumed run."""

from __future__ import annotations

import math

import numpy as np
import pytest

from horovod_sparse import metrics
from horovod_sparse.metrics.log import NAME, read


def test_records_are_read_as_written(tmp_path):
    log = metrics.Log(tmp_path / "runs" / "a", compression="topka", ranks=4)
    log.write(10, {"total/bytes_sent": 7}, loss=0.5)
    log.write(15, {}, loss=np.float32(0.25))
    log.write(20, {"total/bytes_sent": 9}, loss=math.nan, accuracy=math.inf)
    about, records = read(tmp_path / "runs" / "a")
    assert about == {"compression": "topka", "ranks": 4}
    assert {"step": 10, "loss": 0.5, "total/bytes_sent": 7}.items() <= records[0].items()
    assert records[1]["loss"] == 0.25
    assert (records[2]["loss"], records[2]["accuracy"]) == (None, None)
    assert records[0]["time"] <= records[1]["time"]
    assert "NaN" not in (tmp_path / "runs" / "a" / NAME).read_text()  # which is not JSON


def test_repeated_steps_replace_earlier_ones_and_a_truncated_line_is_ignored(tmp_path):
    log = metrics.Log(tmp_path)
    for step in (10, 20, 30):
        log.write(step, {})
    again = metrics.Log(tmp_path, resumed=True)
    again.write(20, {"new": 1})
    with (tmp_path / NAME).open("a") as file:
        file.write('{"step": 2')
    about, records = read(tmp_path)
    assert [record["step"] for record in records] == [10, 20]
    assert (about, records[-1]["new"]) == ({"resumed": True}, 1)


@pytest.mark.parametrize("content", [None, "", "[1]\n", "nonsense\n", '{"loss": 1}\n', '{"about": {}}\n'])
def test_a_file_without_records_is_refused_by_name(tmp_path, content):
    if content is not None:
        (tmp_path / NAME).write_text(content)
    with pytest.raises(ValueError, match=r"statistics\.jsonl .*(Log writes it|adds one)"):
        read(tmp_path)
