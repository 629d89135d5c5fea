"""Parts of the pictures: strips of positions, and patterns of messages between four ranks.

The unit is the width of one position; y grows downward. Vectors are dicts from position to value.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, Patch, Rectangle

Vector = Mapping[int, int]
Point = tuple[float, float]
Message = tuple[int, int, str]  # from rank, to rank, colour

IMAGES = Path(__file__).parent / "images"
FILLS = ("#cfe0f5", "#fbdcc3", "#d2ecd6", "#e6d9f3")  # of rank 0 .. 3, light enough for black text
EDGES = ("#2f62a7", "#b8531a", "#2f7d45", "#7546a0")
GREY = "#e4e4e4"
ROW = 1.35  # from one strip to the next
_INCHES = 0.25  # of a unit
_CORNERS = ((0.0, 0.0), (2.6, 0.0), (2.6, 2.2), (0.0, 2.2))  # of a pattern; ranks go round clockwise
_RADIUS = 0.55

# The same bytes from every run; text as shapes, so that no font has to be there.
mpl.rcParams.update({"svg.hashsalt": "horovod_sparse", "svg.fonttype": "path", "font.family": "DejaVu Sans"})


def save(figure: Figure, name: str) -> None:
    """Write ``images/<name>.svg``, on white for both themes of the documentation."""
    figure.savefig(IMAGES / f"{name}.svg", facecolor="white", metadata={"Date": None})


class Picture:
    """A drawing in units of positions.

    Args:
        width: In units.
        height: In units.
        size: Positions of every strip.
    """

    def __init__(self, width: float, height: float, size: int) -> None:
        self.figure = Figure(figsize=(width * _INCHES, height * _INCHES))
        self._size = size
        self._axes = self.figure.add_axes((0, 0, 1, 1))
        self._axes.set(xlim=(0, width), ylim=(height, 0))
        self._axes.axis("off")

    def title(self, x: float, y: float, text: str) -> None:
        """Write a heading on the line y."""
        self._axes.text(x, y, text, size=9, weight="bold")

    def note(self, x: float, y: float, text: str, align: str = "left", colour: str = "black", size: float = 9) -> None:
        """Write text whose vertical middle is y."""
        self._axes.text(x, y, text, size=size, ha=align, va="center", color=colour)

    def positions(self, x: float, y: float) -> None:
        """Numbers the positions of the strips below."""
        for position in range(self._size):
            self.note(x + position + 0.5, y, str(position), "center", "#666666", 7.5)

    def strip(
        self,
        x: float,
        y: float,
        label: str,
        vector: Vector,
        fill: str | Mapping[int, str],
        span: tuple[int, int] | None = None,
        faint: Container[int] = (),
    ) -> None:
        """Draws a vector with the label to the left; positions without an entry are white and empty.

        Args:
            x: Where position 0 lies, also where the span begins later.
            y: Top.
            label: Whose it is.
            vector: The entries.
            fill: Colour of all entries, or of each.
            span: Begin and end of the positions drawn.
            faint: Positions whose entries go no further.
        """
        self.note(x - 0.4, y + 0.5, label, "right")
        for position in range(*(span or (0, self._size))):
            here, left_out = position in vector, position in faint
            colour = "white" if not here or left_out else fill if isinstance(fill, str) else fill[position]
            self._add(Rectangle((x + position, y), 1, 1, facecolor=colour, edgecolor="#999999", lw=0.6))
            if here:
                value = f"{vector[position]}".replace("-", "\N{MINUS SIGN}")
                self.note(x + position + 0.5, y + 0.53, value, "center", "#888888" if left_out else "black")

    def frame(self, x: float, y: float, width: float, height: float, colour: str = "#444444") -> None:
        """Draws a box without filling."""
        self._add(Rectangle((x, y), width, height, fill=False, edgecolor=colour, lw=1.4))

    def arrow(self, begin: Point, end: Point, colour: str = "#444444", bend: float = 0) -> None:
        """Draws an arrow, bent to the side by a fraction of its length."""
        arrow = FancyArrowPatch(begin, end, connectionstyle=f"arc3,rad={bend}", shrinkA=0, shrinkB=0)
        arrow.set(arrowstyle="-|>", mutation_scale=9, linewidth=1.4, color=colour)
        self._add(arrow)

    def pattern(self, x: float, y: float, name: str, messages: Iterable[Message]) -> None:
        """Draws four ranks and who sends to whom; 4 wide and 4.5 high."""
        self.note(x + 2, y + 0.3, name, "center", size=8.5)
        nodes = [(x + 0.7 + right, y + 1.6 + down) for right, down in _CORNERS]
        for sender, receiver, colour in messages:
            (x0, y0), (x1, y1) = nodes[sender], nodes[receiver]
            part = (_RADIUS + 0.13) / ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5  # hidden below the circle
            dx, dy = (x1 - x0) * part, (y1 - y0) * part
            self.arrow((x0 + dx, y0 + dy), (x1 - dx, y1 - dy), colour, bend=0.25)
        for rank, node in enumerate(nodes):
            self._add(Circle(node, _RADIUS, facecolor=FILLS[rank], edgecolor=EDGES[rank], lw=1))
            self.note(node[0], node[1] + 0.03, str(rank), "center", size=8.5)

    def _add(self, patch: Patch) -> None:
        self._axes.add_patch(patch).set_clip_on(False)
