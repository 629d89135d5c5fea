"""PNG images have a white background in every style."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from horovod_sparse.cli.image import write_png


@pytest.mark.parametrize("style", [{"savefig.transparent": True}, {"savefig.facecolor": "black"}])
def test_the_background_is_white_in_every_style(tmp_path, style):
    with mpl.rc_context(style):
        figure = Figure(figsize=(1, 1))
        figure.text(0.5, 0.5, "text")
        write_png(figure, tmp_path / "image.png")
    image = imread(tmp_path / "image.png")
    assert image.shape[:2] == (120, 120)
    assert (image[0] == 1).all()
    assert (image[..., 3] == 1).all()
    assert np.any(image[..., :3] < 0.5), "the text"
