"""The page on rules of one's own: its example runs as it stands there, in a training's exchange and its laws."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest

import horovod_sparse as hvs
from horovod_sparse.sparsifiers import SPARSIFIERS

PAGE = Path(__file__).parents[2] / "docs" / "own-rule.md"

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("own_rules")]


@pytest.fixture
def page(tmp_path):
    """The page's code as one module."""
    path = tmp_path / "page.py"
    path.write_text("\n\n".join(re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)))
    spec = importlib.util.spec_from_file_location("page", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_is_a_rule_like_any_other(page, comm):
    assert SPARSIFIERS["strided"] is page.Strided
    page.test_strided(3)
    average, gradient = hvs.SparseAllreduce(100, page.compression, comm), np.full(100, comm.Get_rank(), np.float32)
    totals = [average(gradient) for _ in range(500)]
    assert all(np.count_nonzero(total) == (comm.Get_size() > 1) for total in totals)
    # Every position had its turn each hundred steps, and lost nothing in between.
    np.testing.assert_allclose(sum(totals[400:]), 100 * (comm.Get_size() - 1) / 2, rtol=1e-5)


def test_a_state_of_it_goes_on(page, comm):
    one, other = (hvs.SparseAllreduce(100, page.compression, comm) for _ in range(2))
    gradients = np.random.default_rng(comm.Get_rank()).standard_normal((20, 100)).astype(np.float32)
    for gradient in gradients[:10]:
        one(gradient)
    other.load_state_dict(one.state_dict())
    for gradient in gradients[10:]:
        assert np.array_equal(one(gradient), other(gradient))
