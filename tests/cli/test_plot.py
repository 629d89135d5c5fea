"""Problems with the output file are reported before anything is computed."""

from __future__ import annotations

import pytest

from horovod_sparse.cli import plot


def test_missing_matplotlib_is_reported_with_the_pip_command(monkeypatch, tmp_path):
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    assert "pip install 'horovod_sparse[watch]'" in plot.unwritable(plot=tmp_path / "curves.png")
    assert plot.unwritable(tmp_path / "rows.json") == ""


@pytest.mark.parametrize(
    ("files", "plotted", "reason"),
    [
        (["nowhere/rows.json"], None, "nowhere does not exist"),
        ([None], "nowhere/curves.png", "nowhere does not exist"),
        (["."], None, "is a folder"),
        ([None, "rows.json"], "curves.png", ""),
    ],
)
def test_a_file_that_cannot_be_written_is_named(tmp_path, files, plotted, reason):
    paths = [name and tmp_path / name for name in (*files, plotted)]
    found = plot.unwritable(*paths[:-1], plot=paths[-1])
    assert reason in found
    assert bool(found) == bool(reason)
    assert not list(tmp_path.iterdir())
