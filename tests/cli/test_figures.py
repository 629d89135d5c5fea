"""The report's figure: stacked bars, and axes that show every point."""

from __future__ import annotations

import pytest

from horovod_sparse.cli.figures import draw
from horovod_sparse.cli.runs import Run


def record(step, **numbers):
    return {"step": step, "total/steps": 10, "total/bytes_sent": 100, **numbers}


def test_each_run_has_a_stacked_bar():
    seconds = {"seconds_forward": 0.1, "seconds_backward": 0.2, "seconds_synchronize": 0.3}
    exchange = {"total/seconds_select": 0.05, "total/seconds_exchange": 0.15}
    figure = draw([Run("dense", {}, [record(10, **seconds)]), Run("topka", {}, [record(10, **seconds, **exchange)])])
    _, _, stages, *_ = figure.axes
    bars = {container.get_label(): container for container in stages.containers}
    of_topka = {name: (bars[name][1].get_y(), bars[name][1].get_height()) for name in bars}
    assert of_topka["forward"] == pytest.approx((0, 10))
    assert of_topka["backward"] == pytest.approx((10, 20))
    assert of_topka["wait"] == pytest.approx((30, 30))
    assert of_topka["select"] == pytest.approx((0, 5))
    assert of_topka["exchange"] == pytest.approx((5, 15))
    assert bars["select"][0].get_height() == 0


@pytest.mark.parametrize(("losses", "scale"), [([2.0, 1.0], "log"), ([1.0, 0.0], "linear"), ([None, None], "linear")])
def test_axes_are_logarithmic_only_if_every_point_can_be_shown(losses, scale):
    figure = draw([Run("a", {}, [record(10 * i, loss=loss) for i, loss in enumerate(losses, 1)])])
    loss_of_bytes, _, _, loss, *_ = figure.axes
    assert (loss_of_bytes.get_yscale(), loss.get_yscale()) == (scale, scale)


def test_runs_of_different_length_are_drawn_completely():
    figure = draw([Run(str(length), {}, [record(i + 1, loss=1.0) for i in range(length)]) for length in (1, 7)])
    assert [len(line.get_xdata()) for line in figure.axes[0].lines] == [1, 7]
