"""Share of the exchange that the backward pass hides, from the spans of a trace."""

from __future__ import annotations

import pytest

from benchmarks.cluster.overlap import common_length, exchange_late, rank_times


def span(name: str, start: float, end: float, rank: int = 0) -> dict[str, object]:
    return {"ph": "X", "name": name, "pid": rank, "ts": 1e3 * start, "dur": 1e3 * (end - start)}


@pytest.mark.parametrize(
    ("other", "common"),
    [((0, 1), 0), ((0, 12), 2), ((12, 15), 3), ((18, 30), 2), ((0, 30), 10), ((20, 30), 0)],
)
def test_the_common_length_of_two_intervals(other, common):
    assert common_length([(10, 20)], [other]) == common_length([other], [(10, 20)]) == common


def test_every_exchange_is_compared_with_every_backward_pass():
    assert common_length([(0, 4), (5, 8), (10, 14)], [(2, 6), (11, 12)]) == 2 + 1 + 1


def test_times_are_those_of_one_step_of_one_rank():
    events = [{"ph": "M", "name": "process_name", "pid": 0, "args": {}}]
    for step in (0, 100, 200):
        events += [
            span("backward", step + 10, step + 40),
            span("exchange", step + 30, step + 35),
            span("exchange", step + 36, step + 60),
            span("synchronize", step + 40, step + 62),
            span("update", step + 62, step + 70),
            span("exchange", step, step + 99, rank=1),
        ]
    assert rank_times(events, 0) == pytest.approx(
        {"step": 100, "backward": 30, "exchange": 29, "hidden": 9, "lost": 22}
    )


def test_a_trace_of_a_single_step_is_refused():
    with pytest.raises(ValueError, match="1 steps of rank 0"):
        rank_times([span("update", 0, 1)], 0)


def test_the_optimizer_waits_for_a_backward_pass_that_never_comes():
    build = exchange_late(lambda optimizer, **settings: (optimizer, settings))
    assert build("sgd", op=1) == ("sgd", {"op": 1, "backward_passes_per_step": 2})
    assert build("sgd", backward_passes_per_step=3) == ("sgd", {"backward_passes_per_step": 4})
