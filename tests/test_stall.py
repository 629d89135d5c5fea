"""A rank that stalls is named by those that wait for it, and ends the job where that is asked for."""

from __future__ import annotations

import re
from pathlib import Path

import launch
import pytest

from horovod_sparse.stall import Limits, Progress, limits, report

PROGRAM = Path(__file__).parent / "programs" / "stall.py"
VARIABLES = ("CHECK_TIME_SECONDS", "SHUTDOWN_TIME_SECONDS", "CHECK_DISABLE")


def configure(monkeypatch, *values):
    for name, value in zip(VARIABLES, values, strict=True):
        if value is None:
            monkeypatch.delenv(f"HOROVOD_STALL_{name}", raising=False)
        else:
            monkeypatch.setenv(f"HOROVOD_STALL_{name}", value)


@pytest.mark.parametrize(
    ("variables", "given", "expected"),
    [
        ((None, None, None), (None, None), (60, 0)),
        (("30", "90", None), (None, None), (30, 90)),
        (("30", "90", "0"), (None, None), (30, 90)),
        (("30", "90", "1"), (None, None), (0, 0)),
        (("30", "90", "1"), (5, 0.5), (5, 0.5)),
        (("30", "90", None), (0, 0), (0, 0)),
        (("", "", ""), (None, None), (60, 0)),
    ],
)
def test_the_limits_are_those_given_or_horovods(monkeypatch, variables, given, expected):
    configure(monkeypatch, *variables)
    assert limits(*given) == Limits(*expected)


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "soon"])
def test_a_limit_that_is_no_time_is_refused(monkeypatch, value):
    configure(monkeypatch, None, None, None)
    with pytest.raises(ValueError, match=rf"stall_timeout must be a number of seconds.*not {value!r}"):
        limits(value, None)
    with pytest.raises(ValueError, match="stall_abort must be"):
        limits(None, value)
    configure(monkeypatch, str(value), None, None)
    with pytest.raises(ValueError, match="HOROVOD_STALL_CHECK_TIME_SECONDS must be"):
        limits(None, None)


def test_a_wait_is_reported_again_and_again_and_ended_once():
    assert [Limits(60, 90).after(waited) for waited in (0, 61, 90, 125)] == [60, 90, 120, 180]
    assert Limits(0, 90).after(0) == 90
    assert Limits(0, 0).after(0) == float("inf")


def test_a_report_says_where_it_waits_and_where_every_other_rank_is():
    mine = Progress(17, 2, "exchange")
    answers = {
        0: mine,
        1: Progress(17, 2, ""),
        2: Progress(17, 2, ""),
        3: Progress(16, 2, ""),
        4: None,
        6: None,
        7: Progress(17, 2, "agree"),
        8: Progress(18, 0, ""),
        9: mine,
    }
    text = report(mine, ["a", "b", "c", "d"], answers)
    where, others = text.split(": ", 1)
    assert where == "stage exchange of bucket 2 (a, b, c, ...) in step 17"
    assert set(others.split("; ")) == {
        "ranks 0, 9: waits there too",
        "ranks 1-2: missing, its program has not come to bucket 2 of step 17",
        "rank 3: missing, its program has not come to bucket 2 of step 16",
        "ranks 4, 6: missing, gives no answer (stopped, or cut off from here)",
        "rank 7: is in bucket 2 of step 17, stage agree",
        "rank 8: has gone on, to before bucket 0 of step 18",
    }


@pytest.mark.slow
def test_a_rank_that_sleeps_is_named_and_waited_for_and_one_that_stays_away_ends_the_job():
    """Rank 1 sleeps in step 2, rank 2 is stopped for good in step 4; the limits are 5 and 9 seconds."""
    result = launch.python(str(PROGRAM), ranks=3)
    assert result.returncode != 0
    assert result.stdout.count("has made step 3") == 3, result.stderr  # the one that slept was waited for
    assert "has made step 4" not in result.stdout
    where = r"s in stage agree of bucket 0 \(2\.weight\) in step"
    asleep, stopped = r"rank 1: missing, its program has not come to", r"rank 2: missing, gives no answer"
    for rank, other, step, missing in [(0, 2, 2, asleep), (2, 0, 2, asleep), (0, 1, 4, stopped), (1, 0, 4, stopped)]:
        (line,) = re.findall(rf"^rank {rank}: has waited [5-8] {where} {step}: .*$", result.stderr, re.MULTILINE)
        assert re.search(missing, line)
        assert f"rank {other}: waits there too" in line
    assert re.search(
        rf"rank [01]: has waited (9|1[0-3]) {where} 4: .*ends all ranks after stall_abort=9 s", result.stderr
    )
    assert not re.search(r"in step [0135]", result.stderr), "a report of a stall that is over"
