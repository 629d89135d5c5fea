"""Problems with the output file are reported before anything is computed."""

from __future__ import annotations

from pathlib import Path

import pytest

from horovod_sparse.cli import plot


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


def test_another_process_may_try_to_write_at_the_same_time(tmp_path, monkeypatch):
    opened = Path.open

    def opened_and_removed(path, *mode):
        file = opened(path, *mode)
        path.unlink()  # as the other process does after its own attempt
        return file

    monkeypatch.setattr(Path, "open", opened_and_removed)
    assert plot.unwritable(tmp_path / "bench.json") == ""
