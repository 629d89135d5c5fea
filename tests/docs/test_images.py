"""Images of the documentation are legible on dark pages: black text needs a light background."""

from __future__ import annotations

import re

import pytest
from matplotlib.image import imread
from pages import ROOT

IMAGES = sorted(
    path for kind in ("png", "svg") for path in (ROOT / "docs").rglob(f"*.{kind}") if "_build" not in path.parts
)


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_background_is_white_and_opaque(path):
    if path.suffix == ".svg":
        first = re.search(r"<path d=\"M 0 [^\"]*\"\s+style=\"(.*?)\"", path.read_text(), re.DOTALL)
        assert first is not None
        assert "fill: #ffffff" in first[1]
    else:
        image = imread(path)
        assert image.shape[2] == 3 or (image[..., 3] == 1).all()
        assert all((image[row, column, :3] == 1).all() for row in (0, -1) for column in (0, -1))
