"""Plots of curves as PNG; matplotlib is imported only in ``save``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from horovod_sparse.cli.image import write_png

Curve = tuple[Sequence[float], Sequence[float]]


def unwritable(*paths: Path | None, plot: Path | None = None) -> str:
    """Return why results cannot be written to these files, or ""; to be called before the results are computed."""
    if plot is not None and find_spec("matplotlib") is None:
        return "plots require matplotlib: pip install 'horovod_sparse[watch]'"
    for path in filter(None, (*paths, plot)):
        if not path.parent.is_dir():
            return f"cannot write {path}: the folder {path.parent} does not exist"
        if path.is_dir():
            return f"cannot write {path}: it is a folder"
        try:
            new = not path.exists()
            path.open("ab").close()
            if new:
                path.unlink(missing_ok=True)  # another process may try the same
        except OSError as error:
            return f"cannot write {path}: {error.strerror}"
    return ""


def save(
    path: Path, title: str, x_label: str, y_label: str, curves: Mapping[str, Curve], marked: Mapping[str, float]
) -> None:
    """Plot curves on logarithmic axes in a PNG, with a vertical line at each of the ``marked`` x values, by name."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5), layout="constrained")
    axes = figure.subplots()
    for name, (x, y) in curves.items():
        axes.loglog(x, y, marker="o" if len(x) < 20 else "", label=name)
    for number, (name, at) in enumerate(marked.items()):  # labels at different heights, as lines may be close
        axes.axvline(at, color="grey", linestyle="--")
        height = 0.02 + number / len(marked)
        axes.text(at, height, f" {name}", transform=axes.get_xaxis_transform(), rotation=90, ha="right")
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    axes.grid(which="both", alpha=0.3)
    figure.legend(loc="outside right upper")
    write_png(figure, path)
