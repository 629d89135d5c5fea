"""A stalled rank is named by the ranks that wait for it, and ends the job after the limit."""

from __future__ import annotations

import re
from pathlib import Path

import launch
import pytest

from horovod_sparse.control.report import Limits, Progress, Snapshot, Wait, limits

PROGRAM = Path(__file__).resolve().parents[1] / "programs" / "stall.py"
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
        ((None, None, None), (None, None), (60, 600)),
        ((None, None, None), (1800, None), (1800, 3600)),
        ((None, None, None), (0, None), (0, 0)),
        (("1800", None, None), (None, None), (1800, 3600)),
        ((None, "0", None), (None, None), (60, 0)),
        (("30", "90", None), (None, None), (30, 90)),
        (("30", "90", "0"), (None, None), (30, 90)),
        (("30", "90", "1"), (None, None), (0, 0)),
        (("30", "90", "1"), (5, 0.5), (5, 0.5)),
        (("30", "90", None), (0, 0), (0, 0)),
        (("", "", ""), (None, None), (60, 600)),
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


def snapshot(*calls, **exchanges):
    """Return the snapshot of a process: its calls, and exchanges by number, ``e1=(step, bucket, stage)``."""
    return Snapshot(calls, {int(name[1:]): Progress(*place) for name, place in exchanges.items()})


def reported(wait, answers, left=()):
    """Return where the rank waits, and its descriptions of the others."""
    where, others = wait.report(answers, left).split(": ", 1)
    return where, set(others.split("; "))


def test_a_report_says_where_it_waits_and_where_every_other_rank_is():
    mine = snapshot(e1=(17, 2, "exchange"))
    answers = {
        0: mine,
        1: snapshot(e1=(17, 2)),
        2: snapshot(e1=(17, 2)),
        3: snapshot(e1=(16, 2)),
        4: None,
        5: snapshot("preempted()", e1=(17, 0)),
        6: None,
        7: snapshot(e1=(17, 2, "agree")),
        8: snapshot(e1=(18, 0)),
        9: mine,
        10: snapshot(),
        11: snapshot(e1=(17, 1)),
    }
    where, others = reported(Wait(mine, 1, parameters=["a", "b", "c", "d"]), answers, left={11})
    assert where == "stage exchange of bucket 2 (a, b, c, ...) in step 17"
    assert others == {
        "ranks 0, 9: waits there too",
        "ranks 1-2: missing, has not reached bucket 2 of step 17",
        "rank 3: missing, has not reached bucket 2 of step 16",
        "ranks 4, 6: missing, gives no answer (stopped or unreachable)",
        "rank 5: missing, waits in preempted()",
        "rank 7: is in stage agree of bucket 2 of step 17",
        "rank 8: is ahead, next is bucket 0 of step 18",
        "rank 10: missing, has no such optimizer (not yet created or already deleted)",
        "rank 11: has left",
    }


def test_a_rank_has_left_if_any_rank_that_answers_has_heard_its_farewell():
    mine = snapshot(e1=(17, 2, "exchange"))
    _, others = reported(
        Wait(mine, 1), {1: None, 2: Snapshot(mine.calls, mine.exchanges, left=(1,)), 3: None}, left={3}
    )
    assert others == {"ranks 1, 3: has left", "rank 2: waits there too"}


def test_a_report_says_in_which_call_ranks_wait_between_two_steps():
    mine = snapshot("preempted()", e1=(18, 0))
    answers = {
        0: mine,
        1: snapshot(e1=(18, 0)),
        2: snapshot(e1=(17, 1)),
        3: snapshot(e1=(18, 0, "agree")),
        4: snapshot(e1=(19, 0)),
        5: snapshot("Checkpoints.save() or load()", e1=(18, 0)),
    }
    where, others = reported(Wait(mine, 1, "preempted()"), answers)
    assert where == "preempted(), before bucket 0 of step 18"
    assert others == {
        "rank 0: waits there too",
        "rank 1: missing, has not reached this call",
        "rank 2: missing, has not reached bucket 1 of step 17",
        "rank 3: is in stage agree of bucket 0 of step 18",
        "rank 4: is ahead, next is bucket 0 of step 19",
        "rank 5: missing, waits in Checkpoints.save() or load()",
    }


def test_two_ranks_that_wait_in_different_optimizers_do_not_contradict_each_other():
    first, second = snapshot(e1=(3, 0, "agree"), e2=(3, 0)), snapshot(e1=(3, 0), e2=(3, 0, "exchange"))
    where, others = reported(Wait(first, 1, parameters=["a"]), {1: second})
    assert where == "stage agree of bucket 0 (a) in step 3"
    assert others == {"rank 1: missing, waits in stage exchange of bucket 0 of step 3 of optimizer 2"}
    where, others = reported(Wait(second, 2, parameters=["b"]), {0: first})
    assert where == "stage exchange of bucket 0 (b) in step 3 of optimizer 2"
    assert others == {"rank 0: missing, waits in stage agree of bucket 0 of step 3"}


def test_ranks_that_cannot_be_queried_yet_are_reported_as_missing():
    where, others = reported(Wait(snapshot("DistributedOptimizer()"), None, "DistributedOptimizer()"), {})
    assert where == "DistributedOptimizer()"
    assert others == {"some ranks are missing (which ones is unknown until all ranks have completed a call together)"}


@pytest.mark.full
@pytest.mark.parametrize(
    ("arguments", "where", "who"),
    [
        (["save", "known"], "Checkpoints.save() or load()", "rank 1: missing, has not reached this call"),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (
                (["DistributedOptimizer"], "creation of a communicator|DistributedOptimizer()", "some ranks are"),
                (["preempted"], "creation of a communicator", "some ranks are missing"),
                (["Checkpoints"], "creation of a communicator", "some ranks are missing"),
                (["DistributedOptimizer", "known"], "DistributedOptimizer()", "rank 1: missing, has not reached"),
                (["preempted", "known"], "preempted()", "rank 1: missing, has not reached"),
            )
        ),
        (["leaves", "known"], "DistributedOptimizer()", ""),
    ],
    ids=" ".join,
)
def test_a_rank_absent_from_a_call_before_the_first_step_is_reported_and_ends_the_job(arguments, where, who):
    """The limits are 4 and 8 seconds."""
    limits = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "4", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "8"}
    result = launch.python(str(PROGRAM.with_name("absent.py")), *arguments, ranks=3, limit=60, **limits)
    assert result.returncode != 0
    if not who:
        left = "rank 1 of 3 has left the program or ended communication, but DistributedOptimizer() waits for it"
        assert left in result.stderr or "Horovod has been shut down" in result.stderr
        return
    place = f"({'|'.join(map(re.escape, where.split('|')))}): .*{re.escape(who)}"
    warned = rf"^rank [02]: has waited [4-7] s in {place}.*; ends all ranks after 8 s"
    assert re.search(warned, result.stderr, re.MULTILINE), result.stderr
    ended = rf"^rank [02]: has waited ([89]|1[0-3]) s in {place}.*; ends all ranks after stall_abort=8 s"
    assert re.search(ended, result.stderr, re.MULTILINE), result.stderr


@pytest.mark.full
def test_a_rank_that_sleeps_is_named_and_waited_for_and_one_that_stays_away_ends_the_job():
    """Rank 1 sleeps after step 2, rank 2 is stopped for good in step 4; the limits are 3 and 6 seconds."""
    result = launch.python(str(PROGRAM), ranks=3)
    assert result.returncode != 0
    assert result.stdout.count("has made step 3") == 3, result.stderr  # the one that slept was waited for
    assert "has made step 4" not in result.stdout
    between, within = "preempted(), before bucket 0 of step 3", "stage exchange of bucket 0 (2.weight) in step 4"
    asleep, stopped = "rank 1: missing, has not reached this call", "rank 2: missing, gives no answer"
    for rank, other, where, missing in [
        (0, 2, between, asleep),
        (2, 0, between, asleep),
        (0, 1, within, stopped),  # rank 1 leaves the report to rank 0
    ]:
        pattern = rf"^rank {rank}: has waited [3-5] s in {re.escape(where)}: .*$"
        (line,) = re.findall(pattern, result.stderr, re.MULTILINE)
        assert missing in line
        assert f"rank {other}: waits there too" in line
    ended = rf"rank [01]: has waited ([6-9]|1[0-3]) s in {re.escape(within)}: .*ends all ranks after stall_abort=6 s"
    assert re.search(ended, result.stderr)
    assert len(re.findall("has waited", result.stderr)) <= 6, "a report of a stall that is over"
