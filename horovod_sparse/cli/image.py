"""Images of figures; matplotlib is imported by those who draw."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_png(figure: Figure, file: Path | BinaryIO, dpi: int = 120) -> None:
    """Write a figure as PNG, on white whatever the user's style is: black text is invisible on a dark page."""
    figure.savefig(file, format="png", dpi=dpi, facecolor="white", transparent=False)
