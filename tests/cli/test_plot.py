"""Plots are written as PNG, and what would keep them from being written is said before anything is computed."""

from __future__ import annotations

from horovod_sparse.cli import plot


def test_a_plot_is_a_png(tmp_path):
    path = tmp_path / "curves.png"
    plot.save(path, "title", "x", "y", {"one": ([1, 10], [2, 3]), "other": ([1], [4])}, {"here": 5.0})
    assert path.read_bytes().startswith(b"\x89PNG")


def test_missing_matplotlib_is_answered_with_the_pip_command(monkeypatch, tmp_path):
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    assert "pip install 'horovod_sparse[watch]'" in plot.unwritable(plot=tmp_path / "curves.png")
    assert plot.unwritable(tmp_path / "rows.json") == ""


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    assert "nowhere does not exist" in plot.unwritable(tmp_path / "nowhere" / "rows.json")
    assert "nowhere does not exist" in plot.unwritable(None, plot=tmp_path / "nowhere" / "curves.png")
    assert "is a folder" in plot.unwritable(tmp_path)


def test_nothing_to_write_is_no_problem():
    assert plot.unwritable(None, plot=None) == ""
