"""The example in the page on custom rules runs unchanged, in an exchange and in the law tests."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import horovod_sparse as hvs
from horovod_sparse.sparsifiers import SPARSIFIERS

PAGE = Path(__file__).parents[2] / "docs" / "own-rule.md"

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("own_rules")]


@pytest.fixture
def page(tmp_path):
    """The names that the page's code defines."""
    path = tmp_path / "page.py"
    path.write_text("\n\n".join(re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)))
    return SimpleNamespace(**runpy.run_path(str(path)))


def test_the_example_works_like_a_built_in_rule(page, comm):
    assert SPARSIFIERS["strided"] is page.Strided
    page.test_strided(3)
    average, gradient = hvs.SparseAllreduce(100, page.compression, comm), np.full(100, comm.Get_rank(), np.float32)
    totals = [average(gradient) for _ in range(500)]
    assert all(np.count_nonzero(total) == (comm.Get_size() > 1) for total in totals)
    # Every position had its turn each hundred steps, and lost nothing in between.
    np.testing.assert_allclose(sum(totals[400:]), 100 * (comm.Get_size() - 1) / 2, rtol=1e-5)
